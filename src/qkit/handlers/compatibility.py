"""Comparison of the type of a channel with the type that a handler takes."""

from __future__ import annotations

from typing import Any, cast

from pydantic import TypeAdapter

__all__ = ["never_matches"]

Schema = dict[str, Any]

_RAW: tuple[object, ...] = (bytes, bytearray, memoryview)
_UNTYPED: tuple[object, ...] = (None, Any, object)
# What pydantic converts, by the JSON type of the parameter. A string with a format, such as a
# date, also accepts numbers.
_ACCEPTED = {
    "integer": {"integer", "number", "boolean", "string"},
    "number": {"integer", "number", "boolean", "string"},
    "boolean": {"integer", "number", "boolean", "string"},
    "string": {"string"},
}
# Parts of a pydantic schema that may convert any input.
_CONVERTERS = (
    "'function-before'", "'function-wrap'", "'function-plain'", "coerce_numbers_to_str",
    "validation_alias", "validate_by_name", "populate_by_name", "'call'", "'named-tuple'",
    "'complex'",
)  # fmt: skip
_MAX_DEPTH = 8


def never_matches(sent: object, taken: object) -> bool:
    """Return whether no value of one type can be decoded as the other.

    Types are compared by their JSON: a ``dict`` parameter accepts a model, and a model accepts
    another model with the fields that it requires. When in doubt, the result is false.

    Args:
        sent: The type of the channel.
        taken: The type of one body that the handler takes.

    Example:
        >>> never_matches(int, dict), never_matches(dict[str, int], dict), never_matches(str, int)
        (True, False, False)
    """
    if sent == taken or any(item in _UNTYPED or item in _RAW for item in (sent, taken)):
        return False
    try:
        taking: TypeAdapter[object] = TypeAdapter(cast("type[object]", taken))
        if any(word in repr(taking.core_schema) for word in _CONVERTERS):
            return False
        giving: TypeAdapter[object] = TypeAdapter(cast("type[object]", sent))
        output = giving.json_schema(mode="serialization")
        accepted = taking.json_schema(mode="validation")
    except Exception:  # a type without a JSON schema; the codec reports types that it cannot use
        return False
    return _Comparison(output, accepted).disjoint(output, accepted, _MAX_DEPTH)


class _Comparison:
    def __init__(self, output: Schema, accepted: Schema) -> None:
        self._output: Schema = output.get("$defs", {})
        self._accepted: Schema = accepted.get("$defs", {})

    def disjoint(self, output: Schema, accepted: Schema, depth: int) -> bool:
        """Return whether no value of ``output`` is valid for ``accepted``."""
        outputs, inputs = _members(output, self._output), _members(accepted, self._accepted)
        if depth == 0 or not outputs or not inputs:
            return False
        return all(self._pair(one, other, depth - 1) for one in outputs for other in inputs)

    def _pair(self, output: Schema, accepted: Schema, depth: int) -> bool:
        sent, taken = output.get("type"), accepted.get("type")
        if not isinstance(sent, str) or not isinstance(taken, str):
            return False  # any value, or a value such as a const that pydantic may convert
        if taken == "string" and "format" in accepted:
            return sent in ("array", "object", "null")
        if sent not in _ACCEPTED.get(taken, {taken}):
            return True
        if sent == "array":
            return self._disjoint_at("items", output, accepted, depth)
        return sent == "object" and self._objects(output, accepted, depth)

    def _objects(self, output: Schema, accepted: Schema, depth: int) -> bool:
        given = cast("Schema | None", output.get("properties"))
        wanted = cast("Schema", accepted.get("properties", {}))
        if given is None or output.get("additionalProperties"):
            return False
        return any(
            name not in given or self.disjoint(given[name], wanted.get(name, {}), depth)
            for name in accepted.get("required", ())
        )

    def _disjoint_at(self, name: str, output: Schema, accepted: Schema, depth: int) -> bool:
        one, other = output.get(name), accepted.get(name)
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        return self.disjoint(cast("Schema", one), cast("Schema", other), depth)


def _members(schema: Schema, definitions: Schema) -> list[Schema]:
    """Return the alternatives of a schema; an empty list if they are not known."""
    while (reference := schema.get("$ref")) is not None:
        schema = definitions.get(str(reference).rpartition("/")[2], {})
    alternatives = cast("list[Schema] | None", schema.get("anyOf") or schema.get("oneOf"))
    if alternatives is None:
        return [schema]
    return [member for item in alternatives for member in _members(item, definitions)]
