"""AsyncAPI document: it conforms to the official schema, is complete and has no secrets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypedDict

import jsonschema
import pytest
from pydantic import BaseModel

from qkit import Channel, Header, Message, QueueService, Settings, channel, consume
from qkit.asyncapi import document

SCHEMA = Path(__file__).parent / "data" / "asyncapi-3.0.0.json"
CANARY = "c4n4ry"


@cache
def validator() -> jsonschema.Draft7Validator:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


class Line(BaseModel):
    sku: str
    count: int


class Order(BaseModel):
    id: int
    total: float
    lines: list[Line] = []
    parent: Order | None = None


class Tick(TypedDict):
    symbol: str
    price: float


@dataclass
class Entry:
    who: str


def other_order() -> type[BaseModel]:
    class Order(BaseModel):  # another model with the same name
        number: str

    return Order


@channel("orders", dead_letter=True)
class Orders:
    @consume()
    async def place(
        self, order: Order, message: Message, tenant: Annotated[str, Header("tenant")] = "none"
    ) -> None:
        """Book one order.

        It also requests the payment.
        """


@consume("prices", broadcast=True, group="mail")
async def mail(tick: Tick) -> None: ...


@consume("prices", broadcast=True, group="raw")
async def raw(tick: bytes) -> None: ...


@consume("batches", batch_size=10)
async def together(entries: list[Entry]) -> None: ...


class Color(Enum):
    RED = "red"


@consume("paint")
async def paint(body: Tick, color: Annotated[Color, Header("color")] = Color.RED) -> None: ...


@consume("anything")
async def anything(message: Message) -> None: ...


def made(settings: Settings | None = None) -> dict[str, Any]:
    service = QueueService(settings or Settings(type="native", prefix="shop."))
    for handler in (Orders(), mail, raw, together, paint, anything):
        service.register(handler)
    service.declare(Channel("archive", other_order()))
    service.declare(Channel("plain.name-1_x"))
    return document(service, title="Shop", version="1.2.3")


def test_the_document_conforms_to_the_official_schema() -> None:
    errors = [f"{list(error.path)}: {error.message}" for error in validator().iter_errors(made())]
    assert errors == []


def test_the_schema_rejects_an_invalid_document() -> None:
    wrong = made()
    wrong["operations"]["receive.orders.Orders.place"]["action"] = "invalid"
    assert not validator().is_valid(wrong)


def test_the_document_of_an_empty_service_is_valid() -> None:
    validator().validate(document(QueueService(Settings(type="native"))))


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def test_every_reference_can_be_resolved() -> None:
    whole = made()
    found = list(references(whole))
    assert "#/components/schemas/Color" in found  # the type of a header
    for reference in found:
        place: Any = whole
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]


def test_the_document_describes_the_registry() -> None:
    whole = made()
    assert whole["info"] == {"title": "Shop", "version": "1.2.3"}
    assert whole["channels"]["orders"]["address"] == "shop.orders"
    assert set(whole["channels"]) == {
        "orders", "prices", "batches", "paint", "anything", "archive", "plain.name-1_x",
    }  # fmt: skip
    operation = whole["operations"]["receive.orders.Orders.place"]
    assert (operation["action"], operation["summary"]) == ("receive", "Book one order.")
    assert whole["operations"]["send.archive"]["action"] == "send"
    message = whole["components"]["messages"]["orders"]
    assert message["headers"]["properties"] == {"tenant": {"type": "string"}}
    assert set(whole["channels"]["prices"]["messages"]) == {"prices", "prices.2"}
    kinds = [item["contentType"] for item in whole["components"]["messages"].values()]
    assert "application/octet-stream" in kinds


def test_two_models_with_the_same_name_have_two_schemas() -> None:
    schemas = made()["components"]["schemas"]
    fields = [set(schema.get("properties", {})) for schema in schemas.values()]
    assert {"id", "total", "lines", "parent"} in fields
    assert {"number"} in fields


def test_the_description_says_that_a_type_has_no_json_schema(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qkit.asyncapi._describable", lambda kind: False)
    whole = made()
    validator().validate(whole)
    assert "no JSON schema" in whole["components"]["messages"]["orders"]["payload"]["description"]


@pytest.mark.parametrize(
    ("settings", "server"),
    [
        (
            {"type": "rabbitmq", "url": f"amqps://user:{CANARY}@broker.example:5671/shop"},
            {"host": "broker.example:5671", "protocol": "amqps"},
        ),
        (
            {"type": "redis", "mode": "list", "url": f"redis://:{CANARY}@[::1]:6379/0"},
            {"host": "[::1]:6379", "protocol": "redis"},
        ),
        (
            {
                "type": "kafka", "url": "one:9092,two:9092", "sasl_mechanism": "PLAIN",
                "sasl_username": "user", "sasl_password": CANARY,
            },
            {"host": "one:9092", "protocol": "kafka"},
        ),
    ],
    ids=["rabbitmq", "redis", "kafka"],
)  # fmt: skip
def test_the_server_has_no_secrets(
    settings: dict[str, Any], server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.faulty import FaultyBackend

    service = QueueService(Settings(**settings), backend=FaultyBackend())
    service.register(Orders())
    whole = document(service)
    validator().validate(whole)
    assert whole["servers"]["broker"] == server
    assert CANARY not in json.dumps(whole)
