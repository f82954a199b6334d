"""Types that mypy and pyright must infer, and errors that they must report; never executed.

A line that must be an error has an ignore comment for each checker. Unused ignores are reported, so
the test fails when an expected error disappears and when a new error appears.
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict, TypeVar, Unpack, assert_type, overload

from pydantic import BaseModel

from qkit import (
    Channel,
    DeadLetter,
    DeadLettered,
    Header,
    Health,
    Message,
    Metrics,
    QueueService,
    QueueStats,
    Retried,
    RetrySettings,
    SendOptions,
    Sent,
    Settings,
    SyncQueueService,
    SyncSender,
    channel,
    consume,
)
from qkit.testing import TestService

T = TypeVar("T")


class Order(BaseModel):
    id: int


class Invoice(BaseModel):
    number: str


@dataclass
class Tick:
    price: float


class Row(TypedDict):
    n: int


service = QueueService(Settings(type="native"))
orders: Channel[Order] = Channel("orders", Order)
rows = Channel("rows", Row)
numbers = Channel("numbers", list[int])
anything = Channel("anything")

# -- a channel has the type of its bodies ----------------------------------------------------------

assert_type(Channel("orders", Order), Channel[Order])
assert_type(numbers, Channel[list[int]])
assert_type(anything, Channel[object])
wrong: Channel[Invoice] = orders  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
wider: Channel[BaseModel] = orders  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
Channel("q", Order, prefetch="many")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
Channel("q", Order, balance="least_busy")
Channel("q", Order, balance="fair")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
Channel("q", Order, prefetsch=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]

# -- a sent body must match the type of its channel ------------------------------------------------


async def sends() -> None:
    assert_type(await service.send(orders, Order(id=1), priority=8, delay=2.5, ttl=60), Sent)
    assert_type(await service.send("orders", {"any": "thing"}), Sent)
    assert_type(await service.send_many(orders, [Order(id=1)]), list[Sent])
    await service.send(rows, Row(n=1))
    await service.send(numbers, [1, 2])
    await service.send(anything, object())
    await service.publish(Channel("ticks", Tick, broadcast=True), Tick(price=1.0))
    await service.send(orders, Invoice(number="1"))  # type: ignore[misc]  # pyright: ignore[reportCallIssue, reportArgumentType]
    await service.send(orders, {"id": 1})  # type: ignore[misc]  # pyright: ignore[reportCallIssue, reportArgumentType]
    await service.send(rows, {"n": "one"})  # type: ignore[misc]  # pyright: ignore[reportCallIssue, reportArgumentType]
    await service.send_many(orders, [Invoice(number="1")])  # type: ignore[misc]  # pyright: ignore[reportCallIssue, reportArgumentType]
    await service.publish(orders, 5)  # type: ignore[misc]  # pyright: ignore[reportCallIssue, reportArgumentType]
    await service.send("orders", 1, priority="high")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    await service.send("orders", 1, headers={"a": 1})  # type: ignore[dict-item]  # pyright: ignore[reportCallIssue, reportArgumentType]
    await service.send("orders", 1, urgency=5)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    await service.send(5, 1)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]


async def sends_without_await() -> None:
    _ = assert_type(service.send(orders, Order(id=1)), Coroutine[Any, Any, Sent])
    _ = assert_type(service.publish("prices", 1.5), Coroutine[Any, Any, Sent])
    _ = assert_type(service.send_many(orders, [Order(id=1)]), Coroutine[Any, Any, list[Sent]])
    service.send(orders, Order(id=1))  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    service.send_many("orders", [1])  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]


def sends_from_a_thread() -> None:
    assert_type(service.sync, SyncSender)
    assert_type(service.sync.send(orders, Order(id=1), priority=8, delay=2.5, ttl=60), Sent)
    assert_type(service.sync.send("orders", {"any": "thing"}), Sent)
    assert_type(service.sync.send_many(orders, [Order(id=1)]), list[Sent])
    assert_type(service.sync.publish(Channel("ticks", Tick, broadcast=True), Tick(price=1)), Sent)
    service.sync.send(orders, Invoice(number="1"))  # type: ignore[misc]  # pyright: ignore[reportCallIssue, reportArgumentType]
    service.sync.send_many(orders, [Invoice(number="1")])  # type: ignore[misc]  # pyright: ignore[reportCallIssue, reportArgumentType]
    service.sync.publish(orders, 5)  # type: ignore[misc]  # pyright: ignore[reportCallIssue, reportArgumentType]
    service.sync.send("orders", 1, urgency=5)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


class Stamped(QueueService):
    async def send(
        self, channel: Channel[T] | str, body: object, **options: Unpack[SendOptions]
    ) -> Sent:
        assert_type(await super().send("orders", body, **options), Sent)
        return await super().send("orders", body, **options)


class Overloaded(QueueService):
    @overload
    async def send(self, channel: Channel[T], body: T, **options: Unpack[SendOptions]) -> Sent: ...
    @overload
    async def send(self, channel: str, body: object, **options: Unpack[SendOptions]) -> Sent: ...
    async def send(
        self, channel: Channel[T] | str, body: object, **options: Unpack[SendOptions]
    ) -> Sent:
        return await super().send("orders", body, **options)


async def sends_of_subclasses() -> None:
    assert_type(await Stamped().send(orders, Order(id=1)), Sent)
    assert_type(await Overloaded().send(orders, Order(id=1)), Sent)
    await Overloaded().send(orders, Invoice(number="1"))  # type: ignore[misc]  # pyright: ignore[reportCallIssue, reportArgumentType]


def sends_without_a_loop(plain: SyncQueueService) -> None:
    assert_type(plain.send(orders, Order(id=1)), Sent)
    plain.send(orders, Invoice(number="1"))  # type: ignore[misc]  # pyright: ignore[reportCallIssue, reportArgumentType]


async def sends_in_tests(t: TestService) -> None:
    assert_type(await t.send(orders, Order(id=1)), Sent)
    assert_type(await t.send_many(orders, [Order(id=1)], key="k"), list[Sent])
    await t.send_many(orders, [Invoice(number="1")])  # type: ignore[misc]  # pyright: ignore[reportCallIssue, reportArgumentType]
    await t.send(orders, Invoice(number="1"))  # type: ignore[misc]  # pyright: ignore[reportCallIssue, reportArgumentType]


# -- decorators keep signatures --------------------------------------------------------------------


@consume
async def bare(order: Order) -> None: ...


@consume()
async def called(order: Order) -> None: ...


@consume("audit", concurrency=4, dead_letter=False, retry=RetrySettings(max_attempts=5))
def named(entry: dict[str, int], tenant: Annotated[str, Header("tenant")] = "none") -> None: ...


@consume(orders, group="g", batch_size=10)
async def typed(batch: list[Order], messages: list[Message]) -> None: ...


assert_type(bare, Callable[[Order], Coroutine[object, object, None]])  # type: ignore[assert-type]  # pyright: ignore[reportAssertTypeFailure]
bare(Invoice(number="1"))  # type: ignore[arg-type, unused-coroutine]  # pyright: ignore[reportArgumentType, reportUnusedCoroutine]
called()  # type: ignore[call-arg, unused-coroutine]  # pyright: ignore[reportCallIssue]
named({"a": 1}, tenant="acme")
named({"a": 1}, tenant=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
consume("audit", concurrency="four")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
consume("audit", prefetsch=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


@channel(orders)
class Orders:
    def __init__(self, ledger: str) -> None:
        self.ledger = ledger

    @consume(concurrency=8)
    async def place(self, order: Order) -> None: ...

    @consume
    def audit(self, order: Order, message: Message) -> None: ...


assert_type(Orders("ledger").ledger, str)
Orders(5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Orders("ledger").audit(Order(id=1))  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]

# -- listeners, results and settings ---------------------------------------------------------------


def on_retry(event: Retried) -> None:
    assert_type(event.attempt, int)


def on_dead_letter(event: DeadLettered) -> None:
    assert_type(event.letter, DeadLetter)


service.on("retry", on_retry)
service.on("dead_letter", on_dead_letter)
service.on("retry", on_dead_letter)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
service.on("no-such-event", on_retry)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]


async def answers() -> None:
    assert_type(service.health_check(), Health)
    assert_type(service.metrics(), Metrics)
    assert_type(await service.stats("orders"), QueueStats)
    assert_type(await service.peek("orders"), list[Message])
    assert_type(await service.dead_letters("orders").list(reason="TTLExpired"), list[DeadLetter])
    assert_type(await service.dead_letters("orders").replay(), int)


Settings(type="native", retry={"max_attempts": 5})
Settings(type="native", retry=RetrySettings(max_attempts=5))
Settings(type="native", prefetsch=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
Settings(type="native", fsync="sometimes")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
