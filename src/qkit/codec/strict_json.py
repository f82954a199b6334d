"""Dumping in which a warning of pydantic's is an error, without asking for it at each call.

A model whose field was set to something else behind its back is dumped all the same, and pydantic
only warns. It can be told to refuse, with ``warnings="error"``, but reading that word again for
each message costs it twice as much as the message. Python refuses a warning when the registry of
the module it is raised in is no dict, whatever the filters say; hence the one here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pydantic_core import SchemaSerializer, core_schema

__all__ = ["dump_json_strict"]

__warningregistry__ = ()


def _works() -> bool:
    try:
        SchemaSerializer(core_schema.int_schema()).to_json("not an int")
    except TypeError:
        return True
    return False


_WARNINGS_RAISE: Final = _works()


def dump_json_strict(to_json: Callable[..., bytes], value: object) -> bytes:
    """What a serializer's ``to_json`` makes of a value; raises something where it would warn."""
    if _WARNINGS_RAISE:
        return to_json(value, by_alias=True, round_trip=True)
    return to_json(value, by_alias=True, round_trip=True, warnings="error")
