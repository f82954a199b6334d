"""Headers that AMQP has no room for, compressed into one.

AMQP sends all properties of a message in one frame, and RabbitMQ closes the connection of a client
that sends a larger one. Headers of another program may fill a frame, and then a copy with further
headers, or with text instead of binary values, has no room. A header's name has at most 128 bytes;
the driver cuts longer ones.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from pamqp.commands import Basic

from qkit.logs import logger
from qkit.message import encodable

__all__ = ["LONGEST_NAME", "PACKED", "fit", "unpack"]

PACKED: Final = "qkit-packed-headers"  # zlib of a JSON object
DROPPED: Final = "qkit-dropped-headers"  # how many did not even fit packed
LONGEST_NAME: Final = 128  # bytes
OVERHEAD: Final = 64  # bytes of a frame around the properties, rounded up
MAX_UNPACKED: Final = 16 * 2**20  # bytes


def fit(
    properties: Basic.Properties,
    frame: int,
    headers: Mapping[str, str],
    is_fact: Callable[[str], bool],
) -> None:
    """Pack ``headers`` as far as ``properties`` have no room for them.

    Headers with long names are always packed, the others if the frame of ``frame`` bytes is too
    small, except those for which ``is_fact`` holds. If that is not enough the largest are dropped,
    with a warning.
    """
    room = frame - OVERHEAD
    table = cast("dict[str, Any]", properties.headers or {})
    long = {name for name in table if _is_long(name)}
    if not long and len(properties.marshal()) <= room:
        return
    if long:
        rest = {name: value for name, value in table.items() if name not in long}
        packed = {name: text for name, text in headers.items() if _is_long(name)}
        properties.headers = rest | {PACKED: _pack(packed)}
        if len(properties.marshal()) <= room:
            return
    facts = {name: value for name, value in table.items() if is_fact(name)}
    items = [(name, text) for name, text in headers.items() if not is_fact(name)]
    items.sort(key=lambda item: len(item[0]) + len(item[1]))
    count = len(items)
    while True:
        properties.headers = facts | {PACKED: _pack(dict(items))}
        if len(items) < count:
            properties.headers[DROPPED] = count - len(items)
        if not items or len(properties.marshal()) <= room:
            break
        del items[len(items) // 2 :]
    if len(items) < count:
        logger.warning(
            "message %s: %d of %d headers do not fit into a frame of %d bytes and are dropped",
            properties.message_id,
            count - len(items),
            count,
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
    headers = cast("dict[str, object]", found)
    return {encodable(name): encodable(str(text)) for name, text in headers.items()}


def _pack(headers: dict[str, str]) -> bytearray:
    return bytearray(zlib.compress(json.dumps(headers).encode()))


def _is_long(name: str) -> bool:
    return len(name) * 4 > LONGEST_NAME and len(name.encode()) > LONGEST_NAME
