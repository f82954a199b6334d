"""Headers that AMQP has no room for, compressed into one.

AMQP sends all properties of a message in one frame, and RabbitMQ closes the connection of a client
that sends a larger one. Headers of another program may fill a frame, and then a copy with further
headers, or with text instead of binary values, has no room. A header's name has at most 128 bytes;
the driver cuts longer ones.
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

__all__ = ["LONGEST_NAME", "PACKED", "fit", "unpack"]

PACKED: Final = "qkit-packed-headers"  # zlib of a JSON object; null: qkit-raw tells the text
DROPPED: Final = "qkit-dropped-headers"  # how many did not fit even packed
LONGEST_NAME: Final = 128  # bytes
OVERHEAD: Final = 64  # bytes of a frame around the properties, rounded up
MAX_UNPACKED: Final = 16 * 2**20  # bytes


@dataclass(frozen=True, slots=True)
class _Item:
    """A header with its bytes that ``qkit-raw`` keeps, or bytes that belong to no header."""

    headers: dict[str, str | None]  # without text where the bytes tell it
    raw: dict[str, bytes]

    @property
    def size(self) -> int:
        texts = sum(len(name) + len(text or "") for name, text in self.headers.items())
        return texts + sum(len(value) for value in self.raw.values())


def fit(
    properties: Basic.Properties,
    frame: int,
    headers: Mapping[str, str],
    is_fact: Callable[[str], bool],
) -> None:
    """Pack ``headers`` as far as ``properties`` have no room for them.

    Headers with long names are always packed, the others if the frame of ``frame`` bytes is too
    small, except those for which ``is_fact`` holds. If that is not enough the largest are dropped,
    as few as possible, with a warning.
    """
    room = frame - OVERHEAD
    table = cast("dict[str, Any]", properties.headers or {})
    long = {name for name in table if _is_long(name)}
    if not long and len(properties.marshal()) <= room:
        return
    if long:
        rest = {name: value for name, value in table.items() if name not in long}
        packed = {name: text for name, text in headers.items() if _is_long(name)}
        properties.headers = rest | {PACKED: _compress(packed)}
        if len(properties.marshal()) <= room:
            return
    facts = {name: value for name, value in table.items() if is_fact(name)}
    items = _items({name: text for name, text in headers.items() if not is_fact(name)})

    def fits(count: int) -> bool:
        properties.headers = facts | {PACKED: _pack(items[:count])}
        if count < len(items):
            properties.headers[DROPPED] = len(items) - count
        return len(properties.marshal()) <= room

    if fits(len(items)):
        return
    items.sort(key=lambda item: item.size)
    fitting, too_many = 0, len(items)
    while too_many - fitting > 1:  # few steps, because each compresses
        count = (fitting + too_many) // 2
        if fits(count):
            fitting = count
        else:
            too_many = count
    fits(fitting)
    logger.warning(
        "message %s: %d of %d headers do not fit into a frame of %d bytes and are dropped",
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
        found: object = json.loads(zlib.decompressobj().decompress(value, MAX_UNPACKED))
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
    again: dict[str, str] = {}
    keep(again, raw)
    if again[RAW] != headers.get(RAW):  # none, or of another program
        return [_Item({name: text}, {}) for name, text in headers.items()]
    items: list[_Item] = []
    for name, text in headers.items():
        if name == RAW:
            continue
        entries = [f"header:{name}", f"name:{name}"]
        own = {entry: raw.pop(entry) for entry in entries if entry in raw}
        value = own.get(f"header:{name}")
        told = value is not None and text_of(value) == text
        items.append(_Item({name: None if told else text}, own))
    return items + [_Item({}, {entry: value}) for entry, value in raw.items()]


def _pack(items: Iterable[_Item]) -> bytearray:
    headers: dict[str, str | None] = {}
    raw: dict[str, bytes] = {}
    for item in items:
        headers |= item.headers
        raw |= item.raw
    if raw:
        again: dict[str, str] = {}
        keep(again, raw)
        headers |= again
    return _compress(headers)


def _compress(headers: Mapping[str, str | None]) -> bytearray:
    return bytearray(zlib.compress(json.dumps(headers).encode()))


def _is_long(name: str) -> bool:
    return len(name) * 4 > LONGEST_NAME and len(name.encode()) > LONGEST_NAME
