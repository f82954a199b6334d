"""Conformance scenarios for sends: body types, confirmation, position, batches, concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict  # pydantic requires this TypedDict before Python 3.12

from qkit.backend import Backend
from qkit.conformance.fault_injection import FaultInjectingBackend
from qkit.conformance.harness import Harness, NewBackend, Serve, case, requires
from qkit.errors import ConfigError, InvalidBody, InvalidPriority
from qkit.handlers.channel import Channel
from qkit.handlers.decorators import consume
from qkit.message import Envelope, Message, Sent

__all__ = ["RecordingBackend", "Sending", "collecting"]


class Order(BaseModel):
    """Pydantic model used as a body."""

    id: int
    total: float = 0.0


class Invoice(BaseModel):
    """Model that does not match the body type of the channel under test."""

    number: str


@dataclass
class Point:
    """Dataclass used as a body."""

    x: int
    y: float


class Address(TypedDict):
    """TypedDict used as a body."""

    street: str
    number: int


class Basket(BaseModel):
    """Pydantic model with nested types, used as a body."""

    orders: list[Order]
    places: dict[str, Point]
    sent_to: Address
    placed_at: datetime
    takes: timedelta
    note: str | None


NOON = datetime(2024, 2, 29, 12, 0, 0, 123_456, tzinfo=UTC)
BODIES = [
    pytest.param(Order, Order(id=1, total=9.5), id="model"),
    pytest.param(Point, Point(1, -2.5), id="dataclass"),
    pytest.param(Address, {"street": "Süd", "number": 7}, id="typed-dict"),
    pytest.param(dict, {"a": [1, None, {"b": "ü"}]}, id="dict"),
    pytest.param(list, [1, "two", 3.5, None, True], id="list"),
    pytest.param(list[Point], [Point(1, 2.0), Point(3, 4.0)], id="list-of-dataclasses"),
    pytest.param(str, "Grüße, 世界 🌍 \x00 \r\n", id="str"),
    pytest.param(str, "", id="empty-str"),
    pytest.param(int, -(2**63), id="int"),
    pytest.param(float, 0.1 + 0.2, id="float"),
    pytest.param(bool, False, id="bool"),
    pytest.param(type(None), None, id="none"),
    pytest.param(bytes, bytes(range(256)), id="bytes"),
    pytest.param(bytes, b"", id="empty-bytes"),
    pytest.param(datetime, NOON, id="datetime"),
    pytest.param(
        Basket,
        Basket(
            orders=[Order(id=1), Order(id=2, total=0.5)],
            places={"home": Point(1, 2.0)},
            sent_to={"street": "Süd", "number": 7},
            placed_at=NOON,
            takes=timedelta(days=1, microseconds=1),
            note=None,
        ),
        id="nested",
    ),
]
WRONG_BODIES: dict[str, object] = {
    "other-model": Invoice(number="1"),
    "wrong-field": {"id": "one"},
    "no-fields": {},
    "none": None,
    "str": "text",
    "list": [Order(id=1)],
    "bytes": b'{"id": 1}',
}


def collecting(
    channel: Channel[str] | str, kind: object
) -> tuple[Callable[..., object], list[object]]:
    """Return a handler for bodies of type ``kind``, and the list of bodies it received."""
    got: list[object] = []

    async def collect(body: object) -> None:
        got.append(body)

    collect.__annotations__["body"] = kind
    return consume(channel)(collect), got


class RecordingBackend(FaultInjectingBackend):
    """Backend that records every published envelope."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.published: list[Envelope] = []

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        self.published += envelopes
        return await super().publish(queue, envelopes)


class Sending(Harness):
    """Scenarios for what a send guarantees."""

    # -- bodies ------------------------------------------------------------------------------

    @pytest.mark.parametrize(("kind", "body"), BODIES)
    async def test_a_body_arrives_as_it_was_sent(
        self, serve: Serve, name: str, kind: object, body: object
    ) -> None:
        handler, got = collecting(name, kind)
        service = await serve(handler)
        await service.send(name, body)
        await self.until(lambda: got)
        assert got == [body]
        assert type(got[0]) is type(body)

    async def test_a_dict_that_fits_the_model_is_accepted(self, serve: Serve, name: str) -> None:
        handler, got = collecting(name, Order)
        service = await serve(handler)
        await service.send(name, {"id": 1, "total": 2.5})
        await self.until(lambda: got)
        assert got == [Order(id=1, total=2.5)]

    async def test_a_body_of_the_wrong_type_is_rejected_before_anything_is_sent(
        self, serve: Serve, new_backend: NewBackend, name: str
    ) -> None:
        handler, _ = collecting(name, Order)
        recording = RecordingBackend(new_backend())
        service = await serve(handler, backend=recording)
        for which, body in WRONG_BODIES.items():
            with case(which):
                with pytest.raises(InvalidBody, match="Order"):
                    await service.send(name, body)
                assert recording.published == []
                assert service.metrics().messages_sent == 0

    async def test_the_type_of_a_channel_applies_to_every_send(
        self, serve: Serve, name: str
    ) -> None:
        """The type also applies to sends by channel name and in services without a handler."""
        handler, got = collecting(name, Order)
        service, sender = await serve(handler), await serve()
        orders = Channel(name, Order)
        await service.send(orders, Order(id=1))
        await sender.send(orders, Order(id=2))
        await self.until(lambda: len(got) == 2)
        with pytest.raises(InvalidBody):
            await sender.send(orders, Invoice(number="1"))  # type: ignore[misc]  # wrong type on purpose
        with pytest.raises(InvalidBody):
            await sender.send(name, {"id": "x"})
        with pytest.raises(ConfigError, match="Invoice"):
            await sender.send(Channel(name, Invoice), Invoice(number="1"))
        assert sorted(order.id for order in got if isinstance(order, Order)) == [1, 2]

    # -- confirmation ------------------------------------------------------------------------

    @requires("depth")
    async def test_a_message_is_on_the_broker_when_send_returns(
        self, serve: Serve, backend: Backend, name: str
    ) -> None:
        service = await serve()
        sent = await service.send(name, "a")
        assert (await service.stats(name)).depth == 1
        async with self.subscribe(backend, name) as subscription:
            (delivery,) = await self.take(subscription)
            assert delivery.envelope.id == sent.message_id
            assert delivery.envelope.body == b'"a"'
            await subscription.ack(delivery)

    @requires("depth")
    async def test_a_send_to_an_unknown_channel_declares_it(self, serve: Serve, name: str) -> None:
        await (await serve()).send(name, "early")
        handler, got = collecting(name, str)
        await serve(handler)
        await self.until(lambda: got)
        assert got == ["early"]

    async def test_message_ids_sort_in_send_order_and_reach_the_handler(
        self, serve: Serve, name: str
    ) -> None:
        seen: dict[int, str] = {}

        @consume(name)
        async def handle(number: int, message: Message) -> None:
            seen[number] = message.id

        service = await serve(handle)
        ids = [(await service.send(name, number)).message_id for number in range(50)]
        assert ids == sorted(set(ids))
        await self.until(lambda: len(seen) == 50)
        assert [seen[number] for number in range(50)] == ids

    @requires("position")
    async def test_the_position_counts_the_messages_ahead(self, serve: Serve, name: str) -> None:
        service = await serve()
        assert [(await service.send(name, n)).position for n in range(3)] == [0, 1, 2]
        assert [sent.position for sent in await service.send_many(name, [3, 4])] == [3, 4]

    @requires("position", "priority")
    async def test_the_position_ignores_lower_priorities(self, serve: Serve, name: str) -> None:
        service = await serve()
        for priority in (2, 5, 8):
            await service.send(name, "a", priority=priority)
        assert (await service.send(name, "b", priority=9)).position == 0
        assert (await service.send(name, "b", priority=5)).position == 3
        assert (await service.send(name, "b", priority=0)).position == 5

    @requires("position", "delay")
    async def test_a_delayed_message_has_no_position(self, serve: Serve, name: str) -> None:
        service = await serve()
        assert (await service.send(name, "a", delay=60)).position is None

    @requires("priority")
    async def test_a_priority_out_of_range_is_rejected_before_anything_is_sent(
        self, serve: Serve, new_backend: NewBackend, name: str
    ) -> None:
        recording = RecordingBackend(new_backend())
        service = await serve(backend=recording)
        for priority in (-1, 10):
            with case(str(priority)):
                with pytest.raises(InvalidPriority):
                    await service.send(name, "a", priority=priority)
                assert recording.published == []

    # -- batches and concurrency -------------------------------------------------------------

    async def test_send_many_keeps_the_order(self, serve: Serve, name: str) -> None:
        seen: list[tuple[int, str]] = []

        @consume(name)
        async def handle(number: int, message: Message) -> None:
            seen.append((number, message.id))

        service = await serve(handle)
        sent = await service.send_many(name, range(100), key="one")
        await self.until(lambda: len(seen) == 100)
        assert seen == [(number, item.message_id) for number, item in enumerate(sent)]

    async def test_send_many_with_no_bodies_sends_nothing(
        self, serve: Serve, new_backend: NewBackend, name: str
    ) -> None:
        recording = RecordingBackend(new_backend())
        service = await serve(backend=recording)
        assert await service.send_many(name, []) == []
        assert recording.published == []

    async def test_send_many_checks_every_body_before_it_sends_any(
        self, serve: Serve, new_backend: NewBackend, name: str
    ) -> None:
        handler, _ = collecting(name, Order)
        recording = RecordingBackend(new_backend())
        service = await serve(handler, backend=recording)
        orders: list[object] = [Order(id=number) for number in range(1_000)]
        with pytest.raises(InvalidBody):
            await service.send_many(name, [*orders, Invoice(number="1")])
        assert recording.published == []
        assert service.metrics().messages_sent == 0

    async def test_a_large_batch_arrives_completely(self, serve: Serve, name: str) -> None:
        handler, got = collecting(name, int)
        service = await serve(handler)
        sent = await service.send_many(name, range(2_500))
        assert len({item.message_id for item in sent}) == 2_500
        assert service.metrics().messages_sent == 2_500
        await self.until(lambda: len(got) >= 2_500, within=60)
        assert sorted(got, key=repr) == sorted(range(2_500), key=repr)

    async def test_concurrent_sends_all_arrive_exactly_once(self, serve: Serve, name: str) -> None:
        handler, got = collecting(name, int)
        service = await serve(handler)
        sent = await asyncio.gather(*(service.send(name, number) for number in range(300)))
        assert len({item.message_id for item in sent}) == 300
        await self.until(lambda: len(got) >= 300)
        await self.elapse(0.2)
        assert sorted(got, key=repr) == sorted(range(300), key=repr)

    async def test_handlers_and_other_tasks_send_while_messages_are_consumed(
        self, serve: Serve, name: str
    ) -> None:
        got: list[int] = []

        @consume(f"{name}.first", concurrency=4)
        async def forward(number: int) -> None:
            await service.send(f"{name}.second", number)

        @consume(f"{name}.second")
        async def handle(number: int) -> None:
            got.append(number)

        async def many(start: int) -> None:
            for number in range(start, start + 10):
                await service.send(f"{name}.first", number)

        service = await serve(forward, handle)
        await asyncio.gather(*(many(start) for start in range(0, 200, 10)))
        await self.until(lambda: len(got) >= 200)
        assert sorted(got) == list(range(200))
