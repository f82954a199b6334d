"""Bodies: round trips, rejected values and short error messages."""

from __future__ import annotations

import gzip
import json
import math
import tracemalloc
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, computed_field, field_serializer
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import TypedDict

from qkit.codec import codec, compression, strict_json
from qkit.codec.codec import Codec, decompress, type_name
from qkit.errors import ConfigError, DecodeError, InvalidBody, PayloadTooLarge, QueueError

GZIP = {"content-encoding": "gzip"}
ORDER = b'{"id":1,"total":9.5}'


class Order(BaseModel):
    id: int
    total: float


class Rush(Order):
    fast: bool = True


class Other(BaseModel):
    id: int
    total: float


class Aliased(BaseModel):
    order_id: int = Field(alias="orderId")


class Computed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    price: int

    @computed_field  # type: ignore[prop-decorator]
    @property
    def double(self) -> int:
        return self.price * 2


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)
    id: int
    note: float | None = None


class Node(BaseModel):
    next: Node | None = None


class Words(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="strings")
    value: float
    other: float | None = None


class Constants(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="constants")
    value: float


class Softened(BaseModel):
    value: float

    @field_serializer("value")
    def soften(self, value: float) -> float | None:
        return value if math.isfinite(value) else None


@dataclass
class Plain:
    id: int
    total: Annotated[float, Field(ge=0)] = 0.0
    seen: int = field(default=0, init=False)


@pydantic_dataclass
class Checked:
    id: int


class Typed(TypedDict):
    id: int


class Color(Enum):
    RED = "red"


# Round trips


@pytest.mark.proves("002-testing-1")
@pytest.mark.parametrize(
    ("kind", "value", "body"),
    [
        (Order, Order(id=1, total=9.5), ORDER),
        (Order, {"id": 1, "total": 9.5}, ORDER),
        (Order, Rush(id=1, total=9.5), ORDER),
        (Aliased, Aliased(orderId=3), b'{"orderId":3}'),
        (Computed, Computed(price=3), b'{"price":3}'),
        (Frozen, Frozen(id=1), b'{"id":1,"note":null}'),
        (Node, Node(next=Node()), b'{"next":{"next":null}}'),
        (Checked, Checked(id=1), b'{"id":1}'),
        (Typed, {"id": 1}, b'{"id":1}'),
        (dict, {"a": [1, None]}, b'{"a":[1,null]}'),
        (list[Order], [Order(id=1, total=9.5)], b"[" + ORDER + b"]"),
        (str, "grüß", '"grüß"'.encode()),
        (int, 5, b"5"),
        (Literal["a", "b"], "a", b'"a"'),
        (int | None, None, b"null"),
        (Color, Color.RED, b'"red"'),
        (datetime, datetime(2024, 1, 2, tzinfo=UTC), b'"2024-01-02T00:00:00Z"'),
        (Words, Words(value=math.inf), b'{"value":"Infinity","other":null}'),
    ],
)
def test_a_typed_body_is_json(kind: Any, value: Any, body: bytes) -> None:
    typed: Codec[Any] = Codec(kind)
    assert typed.encode(value) == (body, {})
    decoded = typed.decode(body, {})
    assert typed.encode(decoded) == (body, {})


def test_a_plain_dataclass_decodes_to_an_equal_value() -> None:
    body, headers = Codec(Plain).encode(Plain(1, 2.0))
    assert Codec(Plain).decode(b'{"id":1,"total":2.0}', headers) == Plain(1, 2.0)
    assert json.loads(body)["id"] == 1


@pytest.mark.parametrize("value", [b"\x00\xff", bytearray(b"\x00\xff"), memoryview(b"\x00\xff")])
def test_bytes_are_sent_unchanged(value: Any) -> None:
    for raw in (Codec(bytes), Codec.any()):
        body, headers = raw.encode(value)
        assert (body, headers) == (b"\x00\xff", {"content-type": "application/octet-stream"})
        assert raw.decode(body, headers) == b"\x00\xff"
    assert Codec(bytes).decode(b"\xff", {"content-type": "image/png"}) == b"\xff"
    assert Codec(bytearray).decode(b"\xff", {}) == bytearray(b"\xff")


@pytest.mark.proves("003-compat-9")
@pytest.mark.parametrize(
    ("value", "body"),
    [
        (Order(id=1, total=9.5), ORDER),
        (Aliased(orderId=3), b'{"orderId":3}'),
        (Checked(id=1), b'{"id":1}'),
        ({"at": date(2024, 1, 2)}, b'{"at":"2024-01-02"}'),
        (UUID(int=1), b'"00000000-0000-0000-0000-000000000001"'),
        (Decimal("1.50"), b'"1.50"'),
        (timedelta(days=1), b'"P1D"'),
        ([Order(id=1, total=9.5), None], b"[" + ORDER + b",null]"),
        (None, b"null"),
    ],
)
def test_without_a_type_a_value_is_encoded_by_its_own_type(value: object, body: bytes) -> None:
    assert Codec.any().encode(value) == (body, {})


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text()
values = st.recursive(
    scalars | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.proves("002-testing-1")
@given(value=values, compressed=st.booleans())
def test_any_json_value_decodes_to_an_equal_value(value: object, compressed: bool) -> None:
    untyped = Codec.any(compression="gzip" if compressed else None)
    assert untyped.decode(*untyped.encode(value)) == value


@given(body=st.binary(max_size=200), headers=st.sampled_from([{}, GZIP, {"content-type": "a/b"}]))
def test_invalid_bytes_raise_only_decode_errors(body: bytes, headers: dict[str, str]) -> None:
    with pytest.raises((DecodeError, PayloadTooLarge)) as caught:
        Codec(Order).decode(body, headers)
    assert len(str(caught.value)) < 800
    assert "\n" not in str(caught.value)


# Values that cannot be encoded


def circular() -> object:
    value: list[object] = []
    value.append(value)
    return value


def deep() -> object:
    value: object = 1
    for _ in range(100_000):
        value = [value]
    return value


class Unfinished(BaseModel):
    later: NotYetDefined  # type: ignore[name-defined]  # noqa: F821  # undefined on purpose


def changed(**values: Any) -> Order:
    order = Order(id=1, total=1)
    order.__dict__.update(values)
    return order


@pytest.mark.parametrize("action", ["ignore", "default", "error"])
def test_a_field_changed_without_validation_is_rejected_with_any_warning_filter(
    action: Any,
) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter(action)
        for _ in range(2):  # Python shows a repeated warning only once
            with pytest.raises(InvalidBody, match="expected Order, got Order: id: "):
                Codec(Order).encode(changed(id="x"))
            with pytest.raises(InvalidBody, match="expected any JSON value, got Order: "):
                Codec.any().encode(changed(id="x"))
    assert not warned


def test_warnings_are_errors_even_without_the_warning_registry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strict_json, "_WARNINGS_RAISE", False)
    assert Codec(Order).encode(Order(id=1, total=1))[0] == b'{"id":1,"total":1.0}'
    for encoder in (Codec(Order), Codec.any()):
        with pytest.raises(InvalidBody):
            encoder.encode(changed(id="x"))


BAD_BODIES: list[tuple[Any, Any, type[QueueError], list[str]]] = [
    (Order, Other(id=1, total=2), InvalidBody, ["expected Order", "got Other"]),
    (Order, "order", InvalidBody, ["expected Order", "got str"]),
    (Order, None, InvalidBody, ["expected Order", "got None"]),
    (Order, ORDER, InvalidBody, ["expected Order", "got bytes"]),
    (Order, {"id": "x"}, InvalidBody, ["got dict", "id: ", "integer", "total: Field required"]),
    (Order, changed(id="x"), InvalidBody, ["expected Order", "id: ", "integer"]),
    (Order, Order(id=1, total=math.nan), InvalidBody, ["not finite at total"]),
    (Order, {"id": 1, "total": math.inf}, InvalidBody, ["not finite at total"]),
    (Constants, Constants(value=math.nan), InvalidBody, ["not finite at value"]),
    (None, Constants(value=math.nan), InvalidBody, ["not finite at value"]),
    (list[Order], [1], InvalidBody, ["expected list[Order]", "got list", "0: "]),
    (Plain, Plain("x"), InvalidBody, ["expected Plain", "id: "]),  # type: ignore[arg-type]
    (Plain, Plain(1, -1), InvalidBody, ["expected Plain", "total: "]),
    (list[Plain], [Plain(1, -1)], InvalidBody, ["expected list[Plain]", "0.total: "]),
    (int, "five", InvalidBody, ["expected int", "got str"]),
    (str, "\ud800", InvalidBody, ["expected str"]),
    (bytes, "text", InvalidBody, ["expected bytes", "got str", "encode it first"]),
    (None, math.nan, InvalidBody, ["not finite"]),
    (None, Unfinished.model_construct(), InvalidBody, ["got Unfinished", "not fully defined"]),
    (None, {"a": [1, math.inf]}, InvalidBody, ["not finite at a.1"]),
    (None, Plain(1, math.nan), InvalidBody, ["not finite at total"]),
    (None, [Order(id=1, total=math.nan)], InvalidBody, ["not finite at 0.total"]),
    (None, object(), InvalidBody, ["got object"]),
    (None, lambda: 0, InvalidBody, ["got function"]),
    (None, {"a": b"\xff"}, InvalidBody, ["utf-8"]),
    (None, "\ud800", InvalidBody, ["surrogates"]),
    (None, circular(), InvalidBody, ["Circular"]),
    (None, deep(), InvalidBody, ["depth"]),
    (str, "x" * 2_000_000, PayloadTooLarge, ["2000002 bytes", "at most 1048576"]),
    (bytes, b"x" * 2_000_000, PayloadTooLarge, ["2000000 bytes", "max_message_bytes"]),
]


@pytest.mark.parametrize(
    ("kind", "value", "error", "expected"), BAD_BODIES, ids=range(len(BAD_BODIES))
)
def test_an_invalid_body_is_rejected(
    kind: Any, value: Any, error: type[QueueError], expected: list[str]
) -> None:
    typed: Codec[Any] = Codec(kind)
    with pytest.raises(error) as caught:
        typed.encode(value)
    for word in expected:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 800
    assert caught.value.__context__ is None


def test_an_error_does_not_contain_the_rejected_value() -> None:
    with pytest.raises(InvalidBody) as caught:
        Codec(Order).encode(changed(id="s3cr3t" * 100, total="s3cr3t"))
    assert "s3cr3t" not in str(caught.value)


def test_a_field_changed_to_a_convertible_value_is_converted() -> None:
    assert Codec(Order).encode(changed(total="2")) == (b'{"id":1,"total":2.0}', {})


def test_a_custom_serializer_may_replace_nan() -> None:
    for encoder in (Codec(Softened), Codec.any()):
        assert encoder.encode(Softened(value=math.nan)) == (b'{"value":null}', {})
    assert Codec.any().encode(Constants(value=1.5)) == (b'{"value":1.5}', {})


@pytest.mark.parametrize(
    "kind", [type("Thing", (), {}), "Nowhere", lambda: 0, Callable[[int], int]]
)
def test_a_type_without_a_schema_raises_a_config_error(kind: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be the type of a body: use a pydantic"):
        Codec(kind)


# Bodies that cannot be decoded


LENIENT = [
    "application/json",
    "text/json",
    "application/vnd.shop+json; charset=utf-8",
    "text/plain",
]


@pytest.mark.parametrize("content_type", [*LENIENT, "application/octet-stream", "", None])
def test_json_is_decoded_under_several_content_types(content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    assert Codec(Order).decode(ORDER, headers) == Order(id=1, total=9.5)


def test_a_byte_order_mark_is_ignored() -> None:
    assert Codec(Order).decode(b"\xef\xbb\xbf" + ORDER, {}) == Order(id=1, total=9.5)


@pytest.mark.parametrize("encoding", ["utf-8", "identity", "binary", "UTF-8"])
def test_a_charset_as_content_encoding_is_ignored(encoding: str) -> None:
    assert Codec(Order).decode(ORDER, {"content-encoding": encoding}) == Order(id=1, total=9.5)


@pytest.mark.parametrize(
    ("body", "content_type", "text"),
    [
        ("grüß".encode(), "text/plain", "grüß"),
        ("grüß".encode("latin-1"), 'text/plain; charset="ISO-8859-1"', "grüß"),
        (b'"quoted"', "application/json", "quoted"),
        (b'"quoted"', None, "quoted"),
    ],
)
def test_the_content_type_selects_text_or_json(
    body: bytes, content_type: str | None, text: str
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    assert Codec(str).decode(body, headers) == text


def member(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


UNDECODABLE: list[tuple[Any, bytes, Mapping[str, str], type[QueueError], list[str]]] = [
    (Order, b"", {}, DecodeError, ["expected Order", "Invalid JSON"]),
    (Order, b'{"id":', {}, DecodeError, ["Invalid JSON"]),
    (Order, b"\xff\xfe\x00", {}, DecodeError, ["Invalid JSON"]),
    (Order, b'{"id":1}', {}, DecodeError, ["total: Field required"]),
    (Order, b"null", {}, DecodeError, ["expected Order"]),
    (Order, b"[" * 100_000, {}, DecodeError, ["recursion limit"]),
    (dict, b'{"a":' * 100_000, {}, DecodeError, ["recursion limit"]),
    (None, b"[" * 100_000, {}, DecodeError, ["recursion limit"]),
    (Order, b'{"id":' + b"1" * 9_999 + b"}", {}, DecodeError, ["expected Order"]),
    (Order, b"\xef\xbb\xbf" * 9_999, {}, DecodeError, ["Invalid JSON"]),
    (list[int], b'["x",' * 1 + b'"x",' * 5_000 + b"1]", {}, DecodeError, ["5001 errors"]),
    (list[int], b'["x","x","x","x","x"]', {}, DecodeError, ["and 2 more"]),
    (Order, ORDER, {"content-type": "application/xml"}, DecodeError, ["application/xml", "JSON"]),
    (Order, ORDER, {"content-type": "a/b\r\nx"}, DecodeError, ["a/b"]),
    (dict, b"cos\nsystem\n(S'id'\ntR.", {}, DecodeError, ["Invalid JSON"]),
    (dict, b"!!python/object/apply:os.system [id]", {}, DecodeError, ["Invalid JSON"]),
    (str, b"\xff", {"content-type": "text/plain"}, DecodeError, ["text in utf-8"]),
    (str, b"x", {"content-type": "text/plain; charset=idna"}, DecodeError, ["charset 'idna'"]),
    (Order, ORDER, {"content-encoding": "br"}, DecodeError, ["'br'", "gzip"]),
    (Order, ORDER, GZIP, DecodeError, ["damaged gzip"]),
    (Order, b"", GZIP, DecodeError, ["truncated gzip"]),
    (Order, member(ORDER)[:-5], GZIP, DecodeError, ["truncated gzip"]),
    (Order, member(ORDER) + b"more", GZIP, DecodeError, ["other data follows"]),
    (Order, member(ORDER)[:-8] + b"\0" * 8, GZIP, DecodeError, ["damaged gzip"]),
    (Order, b"x" * 2_000_000, {}, PayloadTooLarge, ["2000000 bytes"]),
    (bytes, member(b"x" * 2_000_000), GZIP, PayloadTooLarge, ["decompresses to more", "1048576"]),
]


@pytest.mark.parametrize(
    ("kind", "body", "headers", "error", "expected"), UNDECODABLE, ids=range(len(UNDECODABLE))
)
def test_an_undecodable_body_raises_a_short_error(
    kind: Any, body: bytes, headers: Mapping[str, str], error: type[QueueError], expected: list[str]
) -> None:
    typed: Codec[Any] = Codec(kind)
    with pytest.raises(error) as caught:
        typed.decode(body, headers)
    for word in expected:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 800
    assert "\n" not in str(caught.value)
    assert "\r" not in str(caught.value)


def test_a_validator_that_fails_raises_a_decode_error() -> None:
    class Fragile(BaseModel):
        id: int

        def __init__(self, **values: Any) -> None:
            raise RuntimeError("broken")

    with pytest.raises(DecodeError, match="RuntimeError: broken"):
        Codec(Fragile).decode(b'{"id":1}', {})


# Compression


@pytest.mark.proves("003-speed-8", "003-speed-10")
def test_gzip_is_optional_and_marked_in_the_headers() -> None:
    compressing = Codec(Order, compression="gzip")
    body, headers = compressing.encode(Order(id=1, total=9.5))
    assert headers == GZIP
    assert gzip.decompress(body) == ORDER
    assert compressing.encode(Order(id=1, total=9.5))[0] == body
    assert Codec(Order).decode(body, headers) == Order(id=1, total=9.5)


def test_compressed_bytes_keep_their_content_type() -> None:
    body, headers = Codec(bytes, compression="gzip").encode(b"\xff" * 1000)
    assert headers == {"content-type": "application/octet-stream", "content-encoding": "gzip"}
    assert len(body) < 100
    assert Codec(bytes).decode(body, headers) == b"\xff" * 1000


def test_the_limit_applies_to_the_compressed_body() -> None:
    noise = bytes(range(256))
    compressing = Codec(bytes, compression="gzip", max_bytes=len(noise))
    with pytest.raises(PayloadTooLarge, match="compressed body"):
        compressing.encode(noise)


def test_gzip_members_and_padding_are_one_body() -> None:
    body = member(b'{"id":1,') + member(b"") + member(b'"total":9.5}') + b"\0" * 7
    assert decompress(body, GZIP, 1024) == ORDER
    assert decompress(member(b"x" * 1024), {"content-encoding": " X-GZIP "}, 1024) == b"x" * 1024
    assert decompress(ORDER, {}, 1024) == ORDER


def test_many_gzip_members_are_decompressed_quickly() -> None:
    assert decompress(member(b"") * 20_000, GZIP, 1 << 20) == b""


def test_a_gzip_bomb_is_rejected_with_little_memory() -> None:
    compressor = zlib.compressobj(9, wbits=31)
    zeros = bytes(1_000_000)
    bomb = b"".join(compressor.compress(zeros) for _ in range(200)) + compressor.flush()
    assert len(bomb) < 250_000
    tracemalloc.start()
    try:
        with pytest.raises(PayloadTooLarge):
            Codec(Order).decode(bomb, GZIP)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


# Type names and imports


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Order, "Order"),
        (list[Order], "list[Order]"),
        (dict[str, tuple[int, ...]], "dict[str, tuple[int, ...]]"),
        (Order | None, "Order | None"),
        (Annotated[int, Field(ge=1)], "int"),
        (Literal["a", 1], "Literal['a', 1]"),
        (Any, "Any"),
    ],
)
def test_types_are_named_as_in_source_code(kind: Any, name: str) -> None:
    assert type_name(kind) == name


def test_no_module_imports_a_loader_that_can_run_code() -> None:
    for module in (codec, compression):
        source = Path(str(module.__file__)).read_text()
        imports = [line for line in source.splitlines() if line.startswith(("import", "from"))]
        for loader in ("pickle", "marshal", "shelve", "yaml", "importlib", "dill"):
            assert not any(loader in line for line in imports)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize(
    ("kind", "template"),
    [(float, "%s"), (Any, "%s"), (None, "[%s]"), (dict, '{"a": %s}'), (list, '[["NaN"], %s]')],
)
def test_nan_and_infinity_in_a_body_from_another_program_are_undecodable(
    kind: Any, template: str, number: str
) -> None:
    with pytest.raises(DecodeError, match=r"expected value|invalid number"):
        Codec(kind).decode((template % number).encode(), {})


def test_nan_and_infinity_in_a_text_are_decoded() -> None:
    body = b'{"NaN": "Infinity", "note": "-Infinity \\" NaN"}'
    assert Codec(dict).decode(body, {})["note"] == '-Infinity " NaN'
