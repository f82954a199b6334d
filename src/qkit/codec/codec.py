"""``Codec``: encodes bodies as JSON through pydantic, ``bytes`` unchanged, with optional gzip.

A codec belongs to one declared type. A message cannot choose which type is loaded: there is no
pickle, no YAML and no class path, only JSON that is validated against the declared type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    overload,
)

from pydantic import BaseModel, ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import SchemaSerializer
from pydantic_core import from_json as parse_json
from pydantic_core import to_json as dump_any_json

from qkit.codec.compression import check_size, compress, decompress
from qkit.codec.strict_json import dump_json_strict
from qkit.errors import ConfigError, DecodeError, InvalidBody
from qkit.message import CONTENT_ENCODING, CONTENT_TYPE

__all__ = ["Codec", "decompress", "type_name"]

T = TypeVar("T")

_BYTES = "application/octet-stream"
_RAW = (bytes, bytearray, memoryview)
_MAX_DETAIL = 200
_MAX_ERRORS = 1_000  # listing more errors would cost more than decoding the message
_UTF8_BOM = b"\xef\xbb\xbf"
_NO_FLOAT = frozenset({str, int, bool, NoneType})
_MAY_BE_FLOAT = frozenset({"float", "any", "function-plain", "is-instance"})
_CHARSETS = {"utf-8": "utf-8", "utf8": "utf-8", "us-ascii": "ascii", "iso-8859-1": "latin-1"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")


class Codec(Generic[T]):
    """Encoder and decoder for the bodies of one channel.

    Models, dataclasses, TypedDicts and builtin types are encoded as JSON, with aliases and without
    computed fields, so that a body decodes to an equal value. Without a type, a value is encoded by
    its own type and decoded to plain JSON types.

    Args:
        type_: Type of the bodies; ``None`` for any JSON value.
        compression: ``"gzip"`` compresses encoded bodies. Default: no compression.
        max_bytes: Maximum size of a body in bytes, before and after compression. Default: 1 MiB.

    Raises:
        ConfigError: pydantic cannot create a schema for the type.

    Example:
        >>> codec = Codec(dict[str, int])
        >>> codec.encode({"apples": 3})
        (b'{"apples":3}', {})
        >>> codec.decode(b'{"apples":3}', {})
        {'apples': 3}
    """

    __slots__ = (
        "_class",
        "_compress",
        "_dump",
        "_exact",
        "_max_bytes",
        "_may_hold_nan",
        "_plain",
        "_raw",
        "_serializer",
        "_takes_bytes",
        "_takes_text",
        "_untyped",
        "_validate",
        "_validate_json",
        "_writes_nan_literal",
        "type_name",
    )

    @overload
    def __init__(
        self: Codec[object],
        type_: None,
        *,
        compression: Literal["gzip"] | None = None,
        max_bytes: int = 1 << 20,
    ) -> None: ...

    @overload
    def __init__(
        self,
        type_: type[T],
        *,
        compression: Literal["gzip"] | None = None,
        max_bytes: int = 1 << 20,
    ) -> None: ...

    def __init__(
        self,
        type_: type[T] | None,
        *,
        compression: Literal["gzip"] | None = None,
        max_bytes: int = 1 << 20,
    ) -> None:
        untyped = type_ in (None, Any, object)
        self._untyped = untyped
        self.type_name: str = "any JSON value" if untyped else type_name(type_)
        self._compress = compression == "gzip"
        self._max_bytes = max_bytes
        self._raw = type_ if type_ in _RAW else None
        self._takes_bytes = untyped or self._raw is not None
        self._takes_text = untyped or type_ is str
        adapter = _adapter(Any if untyped else bytes if self._raw else type_)
        self._validate_json = cast("Callable[[bytes], T]", adapter.validator.validate_json)
        self._validate = _identity if untyped else adapter.validator.validate_python
        # round_trip: the output must be valid input. warnings="error": by default pydantic only
        # warns about a field that was set to a value of another type without validation.
        self._serializer = adapter.serializer
        self._dump = (
            _dump_any
            if untyped
            else partial(self._serializer.to_json, by_alias=True, round_trip=True, warnings="error")
        )
        # An instance of exactly this model was validated when it was created, so it is only dumped.
        # A plain dataclass was not, so its fields are validated before it is dumped.
        self._exact = type_ if hasattr(type_, "__pydantic_serializer__") else None
        self._class = type_ if is_dataclass(type_) else self._exact
        floats, modes = _float_modes(adapter.core_schema)
        self._may_hold_nan = untyped or (floats and modes != {"strings"})
        self._writes_nan_literal = "constants" in modes
        self._plain = (
            _plain_any if untyped else partial(adapter.serializer.to_python, warnings=False)
        )

    @classmethod
    def any(
        cls, *, compression: Literal["gzip"] | None = None, max_bytes: int = 1 << 20
    ) -> Codec[object]:
        """Return a codec without a declared type.

        >>> Codec.any().decode(b"[1, 2]", {})
        [1, 2]
        """
        return Codec(None, compression=compression, max_bytes=max_bytes)

    def encode(self, value: T) -> tuple[bytes, dict[str, str]]:
        """Encode a value as a message body.

        Returns:
            The body, and the headers that are needed to decode it; none for uncompressed JSON.

        Raises:
            InvalidBody: The value does not have the declared type, or JSON cannot represent it.
            PayloadTooLarge: The body is larger than ``max_bytes``.
        """
        body: bytes | None = None
        checked: object = value
        serializer: SchemaSerializer | None = None
        writes_nan_literal = self._writes_nan_literal
        if type(value) is self._exact:
            serializer = self._serializer
        elif self._untyped and isinstance(value, BaseModel):
            serializer = value.__pydantic_serializer__
        elif self._takes_bytes and isinstance(value, _RAW):
            return self._finish(bytes(cast("bytes", value)), {CONTENT_TYPE: _BYTES})
        if serializer is not None:
            try:
                body = dump_json_strict(serializer.to_json, value)
                if self._untyped:
                    writes_nan_literal = _writes_nan_literal(cast("type[BaseModel]", type(value)))
            except Exception:
                body = None  # reported by _encode_checked, without this error as its context
        if body is None:
            body, checked = self._encode_checked(value)
        # pydantic writes null for nan and infinity. (find is twice as fast as in.)
        if self._may_hold_nan and (body.find(b"null") >= 0 or writes_nan_literal):
            self._reject_nan(checked)
        if self._compress or len(body) > self._max_bytes:
            return self._finish(body, {})
        return body, {}

    def _finish(self, body: bytes, headers: dict[str, str]) -> tuple[bytes, dict[str, str]]:
        """Check the size, and compress the body if compression is on."""
        check_size(body, self._max_bytes, "the body")
        if self._compress:
            body = compress(body)
            headers[CONTENT_ENCODING] = "gzip"
            check_size(body, self._max_bytes, "the compressed body")
        return body, headers

    def decode(self, body: bytes, headers: Mapping[str, str]) -> T:
        """Decode a body, which may come from another program.

        Raises:
            DecodeError: The body cannot be decoded to the declared type. The error text is one
                line and never contains the whole body.
            PayloadTooLarge: The body is larger than ``max_bytes``.
        """
        if CONTENT_ENCODING in headers or len(body) > self._max_bytes:
            body = decompress(body, headers, self._max_bytes)
        if self._raw is not None:
            return cast("T", body if self._raw is bytes else self._raw(body))
        if CONTENT_TYPE in headers:
            kind, charset = _classify(headers[CONTENT_TYPE][:200])
            if kind == "text" and self._takes_text:
                return cast("T", _text(body, charset))
            if kind == "bytes" and self._takes_bytes:
                return cast("T", body)
            if kind == "other":
                shown = _one_line(headers[CONTENT_TYPE], 80)
                raise DecodeError(
                    f"expected {self.type_name} as JSON, got the content type {shown!r}: "
                    "send JSON, or declare the body as bytes"
                )
        try:
            value = self._validate_json(body)
            # pydantic accepts NaN and Infinity, which are not JSON. They may be part of a text, so
            # parse the body again. (find is faster than in or a regular expression.)
            if body.find(b"NaN") >= 0 or body.find(b"Infinity") >= 0:
                parse_json(body, allow_inf_nan=False)
            return value
        except MemoryError:
            raise
        except Exception as exc:
            # Some programs on Windows write a byte order mark before their JSON.
            if body.startswith(_UTF8_BOM) and not body.startswith(_UTF8_BOM * 2):
                return self.decode(body[len(_UTF8_BOM) :], {})
            text = _details(exc)
        raise DecodeError(f"expected {self.type_name} as JSON: {text}")

    def _encode_checked(self, value: object) -> tuple[bytes, object]:
        """Validate a value and encode it; return the body and the validated value."""
        if self._raw is not None:
            raise InvalidBody(
                f"expected {self.type_name}, got {type_name(type(value))}: encode it first"
            )
        try:
            checked = self._validate(_fields_of(value) if type(value) is self._class else value)
            return self._dump(checked), checked
        except MemoryError:
            raise
        except Exception as exc:
            text = _details(exc)
        # Not raised in the except block: its context would be pydantic's error, which contains the
        # input.
        raise InvalidBody(f"expected {self.type_name}, got {type_name(type(value))}: {text}")

    def _reject_nan(self, value: object) -> None:
        """Raise ``InvalidBody`` for nan or infinity in a value, which JSON cannot represent."""
        if _find_nan(value) is None:
            return
        # A custom serializer may write the number in another form, so check its output too.
        where = _find_nan(self._plain(value))
        if where is not None:
            place = f" at {_one_line('.'.join(where), 80)}" if where else ""
            raise InvalidBody(
                f"expected {self.type_name}, got a number that is not finite{place}: "
                "JSON has no nan or infinity; send None or a str"
            )


@lru_cache(maxsize=256)
def _classify(content_type: str) -> tuple[Literal["json", "text", "bytes", "other"], str]:
    main, _, parameters = content_type.lower().partition(";")
    main = main.strip()
    charset = re.search(r"charset\s*=\s*[\"']?([\w.-]+)", parameters)
    if not main or main.endswith(("/json", "+json")):
        return "json", ""
    if main.startswith("text/"):
        return "text", charset[1] if charset else "utf-8"
    return ("bytes" if main.endswith("/octet-stream") else "other"), ""


def _text(body: bytes, charset: str) -> str:
    # Only these charsets are accepted, because some of Python's codecs take quadratic time.
    codec = _CHARSETS.get(charset)
    if codec is None:
        raise DecodeError(f"unknown charset {charset[:40]!r}: send UTF-8")
    try:
        return body.decode(codec)
    except UnicodeDecodeError as exc:
        raise DecodeError(
            f"expected text in {codec}, got an invalid byte at offset {exc.start}"
        ) from None


def type_name(type_: object) -> str:
    """Return a type as it is written in source code.

    >>> type_name(dict[str, list[int] | None])
    'dict[str, list[int] | None]'
    """
    if type_ in (None, NoneType):
        return "None"
    if type_ is ...:
        return "..."
    origin, args = get_origin(type_), get_args(type_)
    if origin is Annotated:
        return type_name(args[0])
    if origin in (Union, UnionType):
        return " | ".join(type_name(arg) for arg in args)
    if origin is Literal:
        return f"Literal[{', '.join(repr(arg) for arg in args)}]"
    if origin is not None and args:
        return f"{type_name(origin)}[{', '.join(type_name(arg) for arg in args)}]"
    return str(getattr(type_, "__name__", type_))


def _adapter(type_: object) -> TypeAdapter[Any]:
    try:
        return _cached_adapter(type_)
    except Exception as exc:
        raise ConfigError(
            f"{_one_line(type_name(type_), 80)} cannot be the type of a body: use a pydantic "
            "model, a dataclass, a TypedDict, a builtin type or bytes "
            f"({type(exc).__name__}: {_one_line(str(exc).partition(chr(10))[0], _MAX_DETAIL)})",
            cause=exc,
        ) from exc


@lru_cache(maxsize=256)
def _cached_adapter(type_: Any) -> TypeAdapter[Any]:
    # Also validate instances of plain dataclasses, which do not check their own fields.
    config = ConfigDict(revalidate_instances="always")
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(type_, config=config)
    except PydanticUserError as exc:
        if exc.code != "type-adapter-config-unused":
            raise
        adapter = TypeAdapter(type_)
    # Access the validator now, because only this access raises an error for an unresolved forward
    # reference.
    _ = adapter.validator.validate_json
    if adapter.core_schema["type"] in {"call", "callable"}:
        raise TypeError("a function cannot be encoded")
    return adapter


def _identity(value: object) -> object:
    return value


def _plain_any(value: object) -> object:
    if isinstance(value, BaseModel):
        return cast("object", value.__pydantic_serializer__.to_python(value, warnings=False))
    return value


@lru_cache(maxsize=1_024)
def _writes_nan_literal(model: type[BaseModel]) -> bool:
    """Return whether a model, or a model in it, writes ``NaN``, which is not valid JSON."""
    return "constants" in _float_modes(model.__pydantic_core_schema__)[1]


def _dump_any(value: object) -> bytes:
    """Encode a value by its own type; encode a model with its own serializer."""
    if isinstance(value, BaseModel):
        serializer = value.__pydantic_serializer__
        return serializer.to_json(value, by_alias=True, round_trip=True, warnings="error")
    return dump_any_json(value, by_alias=True, round_trip=True, inf_nan_mode="null")


def _fields_of(value: object) -> object:
    """Return the fields of a model or dataclass, so that pydantic validates them again."""
    try:
        if isinstance(value, BaseModel):
            return value.model_dump(by_alias=True, round_trip=True, warnings=False)
        items = fields(cast("Any", value))
        return {item.name: getattr(value, item.name) for item in items if item.init}
    except Exception:
        return value  # cannot be dumped; validation or encoding in the caller reports why


def _float_modes(schema: object) -> tuple[bool, set[object]]:
    """Return whether a type may contain a float, and the ways in which its models write nan."""
    floats = False
    modes: set[object] = set()
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, Mapping):
            entries = cast("Mapping[object, object]", node)
            kind = entries.get("type")
            floats = floats or (isinstance(kind, str) and kind in _MAY_BE_FLOAT)
            if "ser_json_inf_nan" in entries:
                modes.add(entries["ser_json_inf_nan"])
            stack += [item for key, item in entries.items() if key not in {"cls", "metadata"}]
        elif isinstance(node, (list, tuple)):
            stack += cast("Sequence[object]", node)
    return floats, modes


def _find_nan(value: object) -> list[str] | None:
    """Return the path to the first float that is not finite; ``None`` if there is none."""
    if isinstance(value, float):
        return None if math.isfinite(value) else []
    items: Iterable[tuple[object, object]]
    if isinstance(value, dict):
        items = cast("dict[object, object]", value).items()
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = enumerate(cast("Iterable[object]", value))
    elif hasattr(value, "__pydantic_fields_set__"):  # a model; isinstance would take 1 µs
        model = cast("BaseModel", value)
        if model.model_config.get("ser_json_inf_nan") == "strings":
            return None
        items = (model.__dict__ | (model.__pydantic_extra__ or {})).items()
    elif is_dataclass(value):
        items = [(item.name, getattr(value, item.name, None)) for item in fields(value)]
    else:
        return None
    for key, item in items:
        # Check the exact type first, which saves a call for most values.
        if type(item) not in _NO_FLOAT and (where := _find_nan(item)) is not None:
            return [str(key), *where]
    return None


def _details(exc: Exception) -> str:
    """Describe an error of pydantic or of a custom validator in one short line, without values."""
    if not isinstance(exc, ValidationError):
        # Serializers append the value in brackets.
        text = str(exc).partition("[")[0].strip()
        return _one_line(f"{type(exc).__name__}: {text}" if text else type(exc).__name__)
    count = exc.error_count()
    if count > _MAX_ERRORS:
        return f"{count} errors"
    found: list[str] = []
    for item in exc.errors(include_url=False, include_context=False, include_input=False)[:3]:
        where = _one_line(".".join(str(part)[:80] for part in item["loc"]), 80)
        text = _one_line(item["msg"])
        found.append(f"{where}: {text}" if where else text)
    more = f"; and {count - len(found)} more" if count > len(found) else ""
    return "; ".join(found) + more


def _one_line(text: str, limit: int = _MAX_DETAIL) -> str:
    text = _CONTROL.sub(" ", text[: 4 * limit])
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
