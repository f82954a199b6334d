"""JSON encoding that raises an error where pydantic would only warn, at no extra cost.

Pydantic dumps a model even if a field was set to a value of another type without validation, and
only warns. The option ``warnings="error"`` raises an error instead, but parsing this option on each
call takes twice as long as encoding the message. This module relies on a detail of Python:
regardless of the warning filters, a warning raises an error if the ``__warningregistry__`` of the
module that issues it is not a dict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pydantic_core import SchemaSerializer, core_schema

__all__ = ["dump_json_strict"]

__warningregistry__: tuple[()] = ()


def _warnings_raise() -> bool:
    try:
        SchemaSerializer(core_schema.int_schema()).to_json("not an int")
    except TypeError:
        return True
    return False


_WARNINGS_RAISE: Final = _warnings_raise()


def dump_json_strict(to_json: Callable[..., bytes], value: object) -> bytes:
    """Encode a value with a serializer's ``to_json``; raise an exception where it would warn."""
    if _WARNINGS_RAISE:
        return to_json(value, by_alias=True, round_trip=True)
    return to_json(value, by_alias=True, round_trip=True, warnings="error")
