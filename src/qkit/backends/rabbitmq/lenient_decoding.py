"""Decoders for properties and headers of foreign messages that the driver's decoders reject.

The driver closes the connection when it cannot decode a message, and the broker then delivers the
same message again. The decoders here read as much as possible instead. They replace the decoders of
pamqp in the whole process, because pamqp has no other hook. They read a table by offset, without
the copies that pamqp makes, so that a large table does not block the event loop.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from pamqp import decode

__all__ = ["UNREADABLE", "Unreadable", "enable_lenient_decoding", "read_value"]

#: Nesting limit for tables and arrays. JSON and the driver's encoder recurse at each level.
MAX_DEPTH: Final = 32
#: Name of the header that contains a whole header table that cannot be read.
UNREADABLE: Final = "qkit-unreadable-headers"

_decode: Any = decode  # untyped, because its type does not allow ``None`` as a value

_TEXT, _TABLE, _ARRAY = ord("S"), ord("F"), ord("A")
_length: Final = struct.Struct(">I").unpack_from
_WITH_LENGTH: Final = frozenset(b"SAFx")  # types whose value starts with a four-byte length
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
    """AMQP encoding of a header value that cannot be read.

    For example, the value is nested too deeply, or a name inside it is not UTF-8.
    """


def enable_lenient_decoding() -> None:
    """Replace pamqp's decoders in the whole process; idempotent."""
    _decode.METHODS.update(shortstr=_short_text, timestamp=_timestamp, table=_table)
    _decode.TABLE_MAPPING[b"T"] = _timestamp


def read_value(value: bytes) -> object:
    """Decode a header value from its AMQP encoding.

    Raises:
        ValueError: The value is nested too deeply, or a length is wrong.
    """
    return _value(value, 0, _end(value, 0, len(value)), 0)


def _short_text(value: bytes) -> tuple[int, str]:
    """Decode a short string; bytes that are not UTF-8 become lone surrogates.

    The codec replaces the surrogates before the backend returns the message.
    """
    end = 1 + value[0]
    return end, value[1:end].decode(errors="surrogateescape")


def _timestamp(value: bytes) -> tuple[int, object]:
    """Decode a timestamp; return ``None`` if it is out of range, such as one in microseconds."""
    try:
        return decode.timestamp(value)
    except (ValueError, OverflowError, OSError):
        return 8, None


def _table(value: bytes) -> tuple[int, dict[str, object]]:
    """Decode a header table; a value that cannot be read becomes ``Unreadable``."""
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
            if value[at] == _TEXT:  # fast path for the most common type
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
    except _ERRORS:  # a length is wrong; raising would close the connection
        return end, {UNREADABLE: Unreadable(value[4:end])}
    return end, found


def _name(data: bytes, at: int) -> tuple[int, bytes]:
    stop = at + 1 + data[at]
    return stop, data[at + 1 : stop]


def _end(data: bytes, at: int, limit: int) -> int:
    """Return the end of the value at ``at``; raise ``ValueError`` if it exceeds ``limit``."""
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
