"""Compression of headers that do not fit into an AMQP frame.

All properties of a message are sent in one frame, and RabbitMQ closes the connection of a client
that sends a frame that is too large. The headers of a foreign message may already fill a frame. A
copy with additional headers, or with text instead of binary values, would then be too large. AMQP
limits a header name to 128 bytes, and the driver truncates longer names.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from pamqp.commands import Basic

from qkit._internal.logging import logger
from qkit._internal.text import encodable
from qkit.backends.common.raw_text import RAW, keep, kept, text_of

__all__ = ["MAX_NAME_BYTES", "PACKED", "fit", "unpack"]

PACKED: Final = "qkit-packed-headers"  # zlib-compressed JSON object; null: the value is in qkit-raw
DROPPED: Final = "qkit-dropped-headers"  # number of headers that were dropped
MAX_NAME_BYTES: Final = 128
FRAME_OVERHEAD_BYTES: Final = 64  # frame size in addition to the properties, rounded up
MAX_UNPACKED_BYTES: Final = 16 * 2**20


@dataclass(frozen=True, slots=True)
class _Item:
    """Header with its entries in ``qkit-raw``, or an entry that belongs to no header."""

    headers: dict[str, str | None]  # ``None`` if the text can be restored from ``raw``
    raw: dict[str, bytes]

    @property
    def size(self) -> int:
        texts = sum(len(name) + len(text or "") for name, text in self.headers.items())
        return texts + sum(len(value) for value in self.raw.values())


def fit(
    properties: Basic.Properties,
    frame: int,
    headers: Mapping[str, str],
    is_kept_readable: Callable[[str], bool],
) -> None:
    """Pack the headers of ``properties`` so that they fit into a frame.

    Headers with long names are always packed. The others are packed only if they do not fit, except
    those that are kept readable. If packing is not enough, the largest headers are dropped, as few
    as possible, and a warning is logged.

    Args:
        properties: AMQP properties, whose headers are replaced.
        frame: Largest frame in bytes.
        headers: All headers as text.
        is_kept_readable: Returns whether a header must not be packed.
    """
    limit = frame - FRAME_OVERHEAD_BYTES
    table = cast("dict[str, Any]", properties.headers or {})
    long = {name for name in table if _is_long(name)}
    if not long and len(properties.marshal()) <= limit:
        return
    if long:
        others = {name: value for name, value in table.items() if name not in long}
        packed = {name: text for name, text in headers.items() if _is_long(name)}
        properties.headers = others | {PACKED: _compress(packed)}
        if len(properties.marshal()) <= limit:
            return
    readable = {name: value for name, value in table.items() if is_kept_readable(name)}
    items = _items({name: text for name, text in headers.items() if not is_kept_readable(name)})

    def fits(count: int) -> bool:
        properties.headers = readable | {PACKED: _pack(items[:count])}
        if count < len(items):
            properties.headers[DROPPED] = len(items) - count
        return len(properties.marshal()) <= limit

    if fits(len(items)):
        return
    items.sort(key=lambda item: item.size)
    fitting, too_many = 0, len(items)
    while too_many - fitting > 1:  # binary search, because each step compresses the headers
        count = (fitting + too_many) // 2
        if fits(count):
            fitting = count
        else:
            too_many = count
    fits(fitting)
    logger.warning(
        "message %s: %d of %d headers do not fit into a frame of %d bytes and were dropped",
        properties.message_id,
        len(items) - fitting,
        len(items),
        frame,
    )


def unpack(value: object) -> dict[str, str] | None:
    """Return the headers that ``fit`` packed, or ``None`` if another program wrote ``value``."""
    if not isinstance(value, bytes | bytearray):
        return None
    try:
        found: object = json.loads(zlib.decompressobj().decompress(value, MAX_UNPACKED_BYTES))
    except (zlib.error, ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    headers: dict[str, str] = {}
    without_text: list[str] = []
    for name, text in cast("dict[str, object]", found).items():
        headers[encodable(name)] = "" if text is None else encodable(str(text))
        if text is None:
            without_text.append(encodable(name))
    if without_text:
        raw = kept(headers)
        for name in without_text:
            headers[name] = text_of(raw.get(f"header:{name}", b""))
    return headers


def _items(headers: Mapping[str, str]) -> list[_Item]:
    raw = kept(headers)
    encoded: dict[str, str] = {}
    keep(encoded, raw)
    if encoded[RAW] != headers.get(RAW):  # absent, or written by another program
        return [_Item({name: text}, {}) for name, text in headers.items()]
    items: list[_Item] = []
    for name, text in headers.items():
        if name == RAW:
            continue
        entries = [f"header:{name}", f"name:{name}"]
        own = {entry: raw.pop(entry) for entry in entries if entry in raw}
        value = own.get(f"header:{name}")
        restorable = value is not None and text_of(value) == text
        items.append(_Item({name: None if restorable else text}, own))
    return items + [_Item({}, {entry: value}) for entry, value in raw.items()]


def _pack(items: Iterable[_Item]) -> bytearray:
    headers: dict[str, str | None] = {}
    raw: dict[str, bytes] = {}
    for item in items:
        headers |= item.headers
        raw |= item.raw
    if raw:
        encoded: dict[str, str] = {}
        keep(encoded, raw)
        headers |= encoded
    return _compress(headers)


def _compress(headers: Mapping[str, str | None]) -> bytearray:
    return bytearray(zlib.compress(json.dumps(headers).encode()))


def _is_long(name: str) -> bool:
    return len(name) * 4 > MAX_NAME_BYTES and len(name.encode()) > MAX_NAME_BYTES
