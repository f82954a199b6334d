"""``TestService``: running handlers on the native engine in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated

import pytest
from pydantic import BaseModel

from qkit import (
    Channel,
    Header,
    InvalidBody,
    LifecycleError,
    Message,
    QueueNotFound,
    QueueService,
    Reject,
    RetrySettings,
    Settings,
    Unsupported,
    channel,
    consume,
)
from qkit.backends.native.backend import NativeBackend
from qkit.testing import TestService, VirtualClock

WEEK = 7 * 24 * 3600.0


class Order(BaseModel):
    id: int
    total: float = 1.0


@channel("orders", retry=RetrySettings(initial_delay=WEEK, max_delay=WEEK, jitter=0))
class Orders:
    def __init__(self, service: QueueService | None = None) -> None:
        self.service = service

    @consume
    async def place(self, order: Order, message: Message) -> None:
        if order.total < 0:
            raise Reject("negative")
        if order.total == 0 and message.attempt < 3:
            raise ConnectionError("closed for a week")
        if self.service is not None:
            await self.service.send("receipts", {"order": order.id})


@consume("receipts")
def print_receipt(receipt: dict[str, int]) -> None: ...


def shop() -> tuple[QueueService, Orders]:
    service = QueueService(Settings(type="native"))
    orders = Orders(service)
    service.register(orders)
    service.register(print_receipt)
    return service, orders


@pytest.mark.proves("002-usage-1")
async def test_handlers_run_and_their_calls_are_recorded() -> None:
    service, orders = shop()
    async with TestService(service) as t:
        await t.send("orders", Order(id=1))
        await t.drain()
        (call,) = t.handled(Orders.place)
        assert call.body == Order(id=1)
        assert isinstance(call.message, Message)
        assert call.error is None
        assert t.handled(orders.place) == [call]
        assert [call.body for call in t.handled(print_receipt)] == [{"order": 1}]


async def test_a_backoff_of_seven_days_takes_no_real_time() -> None:
    service, _ = shop()
    started = time.monotonic()
    async with TestService(service) as t:
        before = t.clock.monotonic()
        await t.send("orders", Order(id=1, total=0))
        await t.drain()
        assert t.clock.monotonic() - before == 2 * WEEK
        assert [type(call.error) for call in t.handled(Orders.place)] == [
            ConnectionError,
            ConnectionError,
            type(None),
        ]
        assert t.metrics.messages_retried == 2
    assert time.monotonic() - started < 60


async def test_dead_letters_can_be_inspected() -> None:
    service, _ = shop()
    async with TestService(service) as t:
        assert t.dead_letters("orders") == []
        await t.send("orders", Order(id=1, total=-1))
        await t.drain()
        (letter,) = t.dead_letters("orders")
        assert letter.reason == "ExplicitNack"
        assert letter.error == "negative"
        assert letter.channel == "orders"


async def test_time_passes_only_in_advance_and_drain() -> None:
    service, _ = shop()
    async with TestService(service) as t:
        await t.send("orders", Order(id=1), delay=60)
        await t.settle()
        assert t.handled(Orders.place) == []
        await t.advance(59)
        assert t.handled(Orders.place) == []
        await t.advance(1)
        assert len(t.handled(Orders.place)) == 1


async def test_drain_raises_if_messages_remain_in_a_paused_channel() -> None:
    service, _ = shop()
    async with TestService(service) as t:
        service.pause("orders")
        await t.send("orders", Order(id=1))
        with pytest.raises(AssertionError, match=r"orders: 1.*paused"):
            await t.drain()


async def test_handled_rejects_a_function_that_is_not_a_handler() -> None:
    service, _ = shop()
    async with TestService(service) as t:
        with pytest.raises(AssertionError, match="not a handler"):
            t.handled(print)


async def test_batches_topics_and_synchronous_handlers_are_recorded() -> None:
    prices: Channel[float] = Channel("prices", float, broadcast=True)

    @consume("rows", batch_size=2, batch_wait=5)
    async def store(rows: list[dict[str, int]], messages: list[Message]) -> None: ...

    @consume(prices, group="a")
    def show(price: float, tenant: Annotated[str, Header()] = "none") -> None:
        if price < 0:
            raise Reject

    service = QueueService(Settings(type="native"))
    service.register(store)
    service.register(show)
    async with TestService(service) as t:
        await t.send_many("rows", [{"n": 1}, {"n": 2}, {"n": 3}])
        await t.publish(prices, 1.5)
        await t.publish(prices, -1.5)
        await t.drain()
        assert [call.body for call in t.handled(store)] == [[{"n": 1}, {"n": 2}], [{"n": 3}]]
        assert [call.body for call in t.handled(show)] == [1.5, -1.5]
        assert isinstance(t.handled(show)[1].error, Reject)
        assert t.dead_letters("prices")[0].group == "a"


async def test_features_that_the_configured_backend_lacks_are_rejected() -> None:
    settings = Settings(type="native")
    object.__setattr__(settings, "type", "kafka")  # configured for Kafka without its client library
    service = QueueService(settings, backend=NativeBackend())
    service.declare(Channel("orders", max_priority=9))
    with pytest.raises(Unsupported, match="max_priority"):
        async with TestService(service):
            pass


async def test_with_pubsub_settings_every_channel_is_a_topic() -> None:
    got: list[str] = []

    @consume("prices")
    async def mail(body: int) -> None:
        got.append(f"mail {body}")

    @consume("prices")
    async def audit(body: int) -> None:
        got.append(f"audit {body}")

    service = QueueService(Settings(type="redis", mode="pubsub", url="redis://localhost/"))
    service.register(mail)
    service.register(audit)
    async with TestService(service) as t:
        await t.send("prices", 1)
        await t.publish("prices", 2)
        await t.settle()
    assert sorted(got) == ["audit 1", "audit 2", "mail 1", "mail 2"]


async def test_a_failed_start_restores_the_loop() -> None:
    before = asyncio.get_running_loop().time
    service = QueueService(Settings(type="native", prefetch=1))

    @consume("q", concurrency=5)
    async def handler(body: object) -> None: ...

    service.register(handler)
    with pytest.raises(ValueError, match="prefetch"):
        async with TestService(service):
            pass
    assert asyncio.get_running_loop().time == before


async def test_the_fixture_accepts_handlers(
    qkit_service: Callable[..., Awaitable[TestService]], virtual_clock: VirtualClock
) -> None:
    t = await qkit_service(print_receipt, Orders())
    await t.send("receipts", {"order": 7}, delay=WEEK)
    await t.drain()
    assert t.handled(print_receipt)[0].body == {"order": 7}
    assert t.clock is virtual_clock


async def test_the_fixture_accepts_a_service(
    qkit_service: Callable[..., Awaitable[TestService]],
) -> None:
    service, _ = shop()
    t = await qkit_service(service)
    assert t.service is service


async def test_drain_raises_if_a_handler_never_returns() -> None:
    @consume("hang")
    async def hang(body: int) -> None:
        await asyncio.Event().wait()

    service = QueueService(Settings(type="native", shutdown={"timeout": 1}))
    service.register(hang)
    async with TestService(service) as t:
        await t.send("hang", 1)
        with pytest.raises(AssertionError, match="hang: 1"):
            await t.drain()


async def test_a_handler_may_sleep_for_a_week() -> None:
    @consume("slow")
    async def slow(*, body: int) -> None:
        await asyncio.sleep(WEEK)

    service = QueueService(Settings(type="native"))
    service.register(slow)
    async with TestService(service) as t:
        await t.send("slow", 1)
        await t.drain()
        assert [call.body for call in t.handled(slow)] == [1]


async def test_time_does_not_jump_while_a_synchronous_handler_sends() -> None:
    """The second handler's backoff must not elapse while the first handler sends."""
    times: list[float] = []

    @consume("orders")
    def place(number: int) -> None:
        before = t.clock.monotonic()
        for _ in range(20):
            service.sync.send("receipts", {"order": number})
            time.sleep(0.001)
        times.append(t.clock.monotonic() - before)

    receipts: list[int] = []

    @consume("receipts", retry=RetrySettings(initial_delay=WEEK, max_delay=WEEK, jitter=0))
    async def keep(receipt: dict[str, int], message: Message) -> None:
        if message.attempt == 1:
            raise ConnectionError("closed for a week")
        receipts.append(receipt["order"])

    service = QueueService(Settings(type="native"))
    service.register(place)
    service.register(keep)
    async with TestService(service) as t:
        await t.send("orders", 1)
        await t.drain()
        assert receipts == [1] * 20
        assert len(t.handled(place)) == 1
    assert times[0] < 60  # only real time passed, not the backoff of a week


async def test_an_asynchronous_send_in_a_synchronous_handler_fails() -> None:
    @consume("orders")
    def place(number: int) -> None:
        _ = service.send("receipts", number)

    service = QueueService(Settings(type="native"))
    service.register(place)
    async with TestService(service) as t:
        await t.send("orders", 1)
        await t.drain()
        assert [letter.error_type for letter in t.dead_letters("orders")] == ["LifecycleError"]


@pytest.mark.parametrize("name", ["send", "publish", "send_many"])
async def test_a_send_from_another_thread_raises_at_the_call(name: str) -> None:
    service, _ = shop()
    async with TestService(service) as t:
        with pytest.raises(LifecycleError, match=f"service.sync.{name}"):
            await asyncio.to_thread(getattr(t, name), "orders", [1])


async def test_send_many_takes_options_and_checks_every_body() -> None:
    numbers: Channel[int] = Channel("numbers", int)
    service = QueueService(Settings(type="native"))
    async with TestService(service) as t:
        assert len(await t.send_many(numbers, [1, 2], priority=7)) == 2
        assert [message.priority for message in await service.peek("numbers")] == [7, 7]
        with pytest.raises(InvalidBody):
            await t.send_many(numbers, ["one"])  # type: ignore[misc]


async def test_inject_puts_foreign_and_broken_messages_in() -> None:
    seen: list[tuple[object, dict[str, str]]] = []

    @consume("orders")
    async def place(order: dict[str, int], message: Message) -> None:
        seen.append((order, dict(message.headers)))

    service = QueueService(Settings(type="native", prefix="test."))
    service.register(place)
    async with TestService(service) as t:
        foreign = await t.inject("orders", b'{"id": 1}', headers={"x-sender": "cobol"})
        broken = await t.inject(Channel("orders", dict), b"\xff\x00")
        await t.drain()
        assert seen == [({"id": 1}, {"x-sender": "cobol"})]
        (letter,) = t.dead_letters("orders")
        assert (letter.message_id, letter.reason) == (broken, "Undecodable")
        assert foreign != broken
        with pytest.raises(QueueNotFound):
            await t.inject("unknown", b"")
