"""Decoding of what other programs write into a message and the driver's decoder refuses.

Such a property would cost the connection: the driver closes it, opens another, and receives the
same message again. Here it is read as far as possible. The change applies to the whole process: the
driver has no other hook. A table is read by offset, without the copies of the driver's decoder, so
that a wide table does not block the event loop.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from pamqp import decode

__all__ = ["UNREADABLE", "Unreadable", "enable_lenient_decoding", "read_value"]

#: Tables and arrays inside each other. JSON and the driver's encoder recurse for each level.
MAX_DEPTH: Final = 32
#: The name of a whole table that cannot be read.
UNREADABLE: Final = "qkit-unreadable-headers"

_decode: Any = decode  # its tables promise a value where AMQP has none

_TEXT, _TABLE, _ARRAY = ord("S"), ord("F"), ord("A")
_length: Final = struct.Struct(">I").unpack_from
_WITH_LENGTH: Final = frozenset(b"SAFx")  # four bytes of length come first
_SIZES: Final = {
    **dict.fromkeys(b"V\x00", 0),
    **dict.fromkeys(b"tbB", 1),
    **dict.fromkeys(b"su", 2),
    **dict.fromkeys(b"Iif", 4),
    ord("D"): 5,
    **dict.fromkeys(b"lLdT", 8),
}
_ERRORS: Final = (ValueError, OverflowError, OSError, KeyError, IndexError, struct.error)


class Unreadable(bytes):
    """A header value in AMQP's encoding that is not read: nested too deep, or with odd names."""


def enable_lenient_decoding() -> None:
    """Make pamqp pass on what it cannot decode, in the whole process; idempotent."""
    _decode.METHODS.update(shortstr=_short_text, timestamp=_timestamp, table=_table)
    _decode.TABLE_MAPPING[b"T"] = _timestamp


def read_value(value: bytes) -> object:
    """Return a header value from its AMQP encoding; raise ``ValueError`` if it cannot be read."""
    return _value(value, 0, _end(value, 0, len(value)), 0)


def _short_text(value: bytes) -> tuple[int, str]:
    """Decode a short string; bytes that are not UTF-8 become lone surrogates.

    ``codec`` replaces them, so none of them leaves this backend.
    """
    end = 1 + value[0]
    return end, value[1:end].decode(errors="surrogateescape")


def _timestamp(value: bytes) -> tuple[int, object]:
    """Decode a time; one beyond the calendar, such as one in microseconds, is ``None``."""
    try:
        return decode.timestamp(value)
    except (ValueError, OverflowError, OSError):
        return 8, None


def _table(value: bytes) -> tuple[int, dict[str, object]]:
    """Decode a message's headers; a value that cannot be read is ``Unreadable``."""
    end = 4 + int.from_bytes(value[:4], "big")
    found: dict[str, object] = {}
    try:
        at = 4
        while at < end:
            start = at + 1
            at = start + value[at]
            try:
                name = value[start:at].decode()
            except UnicodeDecodeError:
                name = value[start:at].decode(errors="surrogateescape")
            if value[at] == _TEXT:  # nearly all
                start = at + 5
                at = start + _length(value, at + 1)[0]
                content = value[start:at]
                try:
                    found[name] = content.decode()
                except UnicodeDecodeError:
                    found[name] = content
                continue
            stop = _end(value, at, end)
            try:
                found[name] = _value(value, at, stop, 0)
            except _ERRORS:
                found[name] = Unreadable(value[at:stop])
            at = stop
        if at != end:
            raise ValueError("a value is longer than its table")
    except _ERRORS:  # a length that is wrong: the driver has no way to say so but to hang up
        return end, {UNREADABLE: Unreadable(value[4:end])}
    return end, found


def _name(data: bytes, at: int) -> tuple[int, bytes]:
    stop = at + 1 + data[at]
    return stop, data[at + 1 : stop]


def _end(data: bytes, at: int, limit: int) -> int:
    """Return where the value at ``at`` ends."""
    kind = data[at]
    if kind in _WITH_LENGTH:
        length: int = _length(data, at + 1)[0]
        end = at + 5 + length
    else:
        end = at + 1 + _SIZES[kind]
    if end > limit:
        raise ValueError("a value is longer than its table")
    return end


def _value(data: bytes, at: int, stop: int, depth: int) -> object:
    kind = data[at]
    if kind != _TABLE and kind != _ARRAY:
        return _decode.TABLE_MAPPING[data[at : at + 1]](data[at + 1 : stop])[1]
    if depth >= MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    at += 5
    if kind == _ARRAY:
        items: list[object] = []
        while at < stop:
            end = _end(data, at, stop)
            items.append(_value(data, at, end, depth + 1))
            at = end
        return items
    table: dict[str, object] = {}
    while at < stop:
        at, name = _name(data, at)
        end = _end(data, at, stop)
        table[name.decode()] = _value(data, at, end, depth + 1)
        at = end
    return table
