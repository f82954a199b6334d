"""Which columns of a DataFrame are a message's body, and which say how it travels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, Literal, cast

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
)

from qkit.errors import ConfigError
from qkit.sending.envelope_builder import SendOptions
from qkit.spark.options import METADATA

__all__ = ["VALUE", "Columns", "columns_of"]

VALUE: Final = "value"
_WHOLE: Final = (ByteType, ShortType, IntegerType, LongType)
_NUMBER: Final = (*_WHOLE, FloatType, DoubleType, DecimalType)
_WANTED: Final[dict[str, tuple[tuple[type[DataType], ...], str]]] = {
    "key": ((StringType,), "string"),
    "priority": (_WHOLE, "int"),
    "delay": (_NUMBER, "double"),
    "ttl": (_NUMBER, "double"),
    "headers": ((MapType,), "map<string,string>"),
}

Kind = Literal["row", "struct", "text", "bytes"]
NONE: Final = SendOptions()


@dataclass(frozen=True, slots=True)
class Columns:
    """How the rows of one schema become messages.

    ``kind`` says what the body is: the whole row or a struct, as JSON; a text that is JSON
    already; or bytes as they are.
    """

    kind: Kind
    metadata: tuple[tuple[str, str], ...]  # what of a message, and the column's name

    def rows(self, batch: pa.RecordBatch) -> Iterator[tuple[Any, SendOptions]]:
        """Each row's body as Python has it, and its options; those that are null are left out."""
        bodies: list[Any]
        if self.kind == "row":
            bodies = batch.to_pylist(maps_as_pydicts="strict")
        else:
            bodies = _values(batch, VALUE)
        return zip(bodies, self._options(batch), strict=False)

    def _options(self, batch: pa.RecordBatch) -> Iterator[SendOptions]:
        if not self.metadata:
            return repeat(NONE)
        names = [name for name, _ in self.metadata]
        columns = [_values(batch, column) for _, column in self.metadata]
        return (
            cast(
                "SendOptions",
                {
                    name: value
                    for name, value in zip(names, values, strict=True)
                    if value is not None
                },
            )
            for values in zip(*columns, strict=True)
        )


def columns_of(schema: StructType, chosen: Mapping[str, str]) -> Columns:
    """Decide by the schema, on the driver.

    With a ``value`` column that is the body, and columns named key, priority, delay, ttl and
    headers are the message's own; any other has no place. Without one every column is in the body,
    and ``chosen`` says which of them are the key and so on as well.

    Raises ``ConfigError``.
    """
    names = schema.fieldNames()
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ConfigError(f"two columns are called {doubled[0]!r}: rename one")
    if not names:
        raise ConfigError("there are no columns: a message needs a body")
    found = dict(chosen)
    kind: Kind = "row"
    if VALUE in names:
        kind = _kind(schema[VALUE].dataType)
        found = {name: name for name in METADATA if name in names} | found
        stray = [name for name in names if name != VALUE and name not in found.values()]
        if stray:
            raise ConfigError(
                f"beside 'value' there is no place for the column {stray[0]!r}: drop it, or put "
                "all into the body by leaving 'value' out, or by struct(…) as 'value'"
            )
    for name, column in found.items():
        if column not in names:
            raise ConfigError(f"option {name!r} names the column {column!r}, which is not there")
        _check(name, column, schema[column].dataType)
    return Columns(kind, tuple(found.items()))


def _kind(type_: DataType) -> Kind:
    if isinstance(type_, StructType):
        return "struct"
    if isinstance(type_, StringType):
        return "text"
    if isinstance(type_, BinaryType):
        return "bytes"
    raise ConfigError(
        f"the column 'value' is of type {type_.simpleString()}: make it a struct (sent as JSON), "
        "a string (JSON already) or binary (sent as it is)"
    )


def _check(name: str, column: str, type_: DataType) -> None:
    allowed, word = _WANTED[name]
    fits = isinstance(type_, allowed)
    if isinstance(type_, MapType):
        fits = isinstance(type_.keyType, StringType) and isinstance(type_.valueType, StringType)
    if not fits:
        raise ConfigError(
            f"the column {column!r} is the message's {name} and of type {type_.simpleString()}: "
            f"cast it to {word}"
        )


def _values(batch: pa.RecordBatch, column: str) -> list[Any]:
    values = batch.column(column)
    if pa.types.is_decimal(values.type):  # seconds: 1.5 may come as a decimal too
        values = values.cast(pa.float64())
    return list(values.to_pylist(maps_as_pydicts="strict"))
