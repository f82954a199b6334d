"""Mapping of a DataFrame's columns to the body and the metadata of messages."""

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
_INTEGER_TYPES: Final = (ByteType, ShortType, IntegerType, LongType)
_NUMBER_TYPES: Final = (*_INTEGER_TYPES, FloatType, DoubleType, DecimalType)
_METADATA_TYPES: Final[dict[str, tuple[tuple[type[DataType], ...], str]]] = {
    "key": ((StringType,), "string"),
    "priority": (_INTEGER_TYPES, "int"),
    "delay": (_NUMBER_TYPES, "double"),
    "ttl": (_NUMBER_TYPES, "double"),
    "headers": ((MapType,), "map<string,string>"),
}

Kind = Literal["row", "struct", "text", "bytes"]
_NO_OPTIONS: Final = SendOptions()


@dataclass(frozen=True, slots=True)
class Columns:
    """Mapping of the columns of one schema to messages.

    ``kind`` is the kind of body: ``row`` (the whole row as JSON), ``struct`` (one struct as
    JSON), ``text`` (a string, sent unchanged) or ``bytes`` (sent unchanged).
    """

    kind: Kind
    metadata: tuple[tuple[str, str], ...]  # pairs of a metadata field and its column

    def rows(self, batch: pa.RecordBatch) -> Iterator[tuple[Any, SendOptions]]:
        """Iterate over the rows as pairs of a body and its send options, without null options."""
        bodies: list[Any]
        if self.kind == "row":
            bodies = batch.to_pylist(maps_as_pydicts="strict")
        else:
            bodies = _values(batch, VALUE)
        return zip(bodies, self._options(batch), strict=False)

    def _options(self, batch: pa.RecordBatch) -> Iterator[SendOptions]:
        if not self.metadata:
            return repeat(_NO_OPTIONS)
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
    """Derive the mapping from the schema of a DataFrame.

    If there is a column ``value``, it is the body, and the columns ``key``, ``priority``,
    ``delay``, ``ttl`` and ``headers`` are metadata; other columns are rejected. If there is none,
    every column is part of the body, and ``chosen`` names the columns that are metadata as well.

    Raises:
        ConfigError: A column is missing, duplicated, unexpected or of the wrong type.
    """
    names = schema.fieldNames()
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ConfigError(f"two columns are named {duplicates[0]!r}: rename one")
    if not names:
        raise ConfigError("the DataFrame has no columns: a message needs a body")
    metadata = dict(chosen)
    kind: Kind = "row"
    if VALUE in names:
        kind = _kind_of(schema[VALUE].dataType)
        metadata = {name: name for name in METADATA if name in names} | metadata
        unexpected = [name for name in names if name != VALUE and name not in metadata.values()]
        if unexpected:
            raise ConfigError(
                f"unexpected column {unexpected[0]!r} next to 'value': drop it, or add it to the "
                "body with struct(…) as 'value', or rename 'value' so that all columns form "
                "the body"
            )
    for name, column in metadata.items():
        if column not in names:
            raise ConfigError(f"option {name!r} names the column {column!r}, which does not exist")
        _check_type(name, column, schema[column].dataType)
    return Columns(kind, tuple(metadata.items()))


def _kind_of(type_: DataType) -> Kind:
    if isinstance(type_, StructType):
        return "struct"
    if isinstance(type_, StringType):
        return "text"
    if isinstance(type_, BinaryType):
        return "bytes"
    raise ConfigError(
        f"the column 'value' has the type {type_.simpleString()}: expected a struct (sent as "
        "JSON), a string (already JSON) or binary (sent unchanged)"
    )


def _check_type(name: str, column: str, type_: DataType) -> None:
    allowed, expected = _METADATA_TYPES[name]
    fits = isinstance(type_, allowed)
    if isinstance(type_, MapType):
        fits = isinstance(type_.keyType, StringType) and isinstance(type_.valueType, StringType)
    if not fits:
        raise ConfigError(
            f"the column {column!r} is the {name} of the message, but has the type "
            f"{type_.simpleString()}: cast it to {expected}"
        )


def _values(batch: pa.RecordBatch, column: str) -> list[Any]:
    values = batch.column(column)
    if pa.types.is_decimal(values.type):  # Spark reads the literal 1.5 as a decimal
        values = values.cast(pa.float64())
    return list(values.to_pylist(maps_as_pydicts="strict"))
