"""What other programs write into a message and the driver's decoder refuses.

Such a property would cost the connection: the driver ends it, opens another, and is given the same
message again. Here it is read as well as can be, for the whole process, since the decoder has no
other way to be told.
"""

from __future__ import annotations

from typing import Any

from pamqp import decode

__all__ = ["read_leniently"]

_decode: Any = decode  # its tables promise a value where AMQP has none


def read_leniently() -> None:
    """Let the decoder pass on what it cannot read: it does so from then on."""
    _decode.METHODS.update(shortstr=_short_text, timestamp=_timestamp, table=_table)
    _decode.TABLE_MAPPING.update({b"T": _timestamp, b"F": _table})


def _short_text(value: bytes) -> tuple[int, str]:
    """Text that is no UTF-8 keeps its bytes."""
    end = 1 + value[0]
    return end, value[1:end].decode(errors="surrogateescape")


def _timestamp(value: bytes) -> tuple[int, object]:
    """A time beyond all calendars, such as one in microseconds, is none."""
    try:
        return decode.timestamp(value)
    except (ValueError, OverflowError, OSError):
        return 8, None


def _table(value: bytes) -> tuple[int, object]:
    """A table that cannot be read is empty; its length is known."""
    try:
        return decode.field_table(value)
    except (ValueError, OverflowError, OSError):
        return 4 + int.from_bytes(value[:4], "big"), {}
