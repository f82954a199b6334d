"""Invalid input: each row raises a typed error with advice, and nothing is lost or sent.

Rows are (description, call, error class, words that the error must contain).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from qkit import (
    Channel,
    ConfigError,
    Envelope,
    HandlerError,
    Header,
    InvalidBody,
    InvalidHeader,
    InvalidName,
    InvalidPriority,
    LifecycleError,
    Message,
    PayloadTooLarge,
    QueueError,
    QueueNotFound,
    QueueService,
    Reason,
    Retry,
    RetrySettings,
    Settings,
    Unavailable,
    Unsupported,
    channel,
    consume,
)


class Order(BaseModel):
    id: int
    total: float


class Invoice(BaseModel):
    number: str


@dataclass
class Loop:
    again: object


def circle() -> dict[str, Any]:
    made: dict[str, Any] = {}
    made["self"] = made
    return made


def service(*handlers: Any, **settings: Any) -> QueueService:
    made = QueueService(Settings(type="native", **settings))
    for handler in handlers:
        made.register(handler)
    return made


# -- settings: rejected at construction, before any connection ----------------------------------

SETTINGS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("unsupported type", {"type": "zeromq"}, ["zeromq", "native", "rabbitmq", "kafka", "redis"]),
    ("url without scheme", {"type": "rabbitmq", "url": "host:5672"}, ["amqp://", "5672"]),
    ("http for amqp", {"type": "rabbitmq", "url": "http://h/"}, ["url", "amqps://"]),
    ("no url", {"type": "rabbitmq"}, ["url", "amqp://"]),
    ("empty brokers", {"type": "kafka", "url": ""}, ["url", "host1:9092,host2:9092"]),
    ("semicolons", {"type": "kafka", "url": "a:1;b:2"}, ["url", "host1:9092,host2:9092"]),
    ("wrong redis url", {"type": "redis", "url": "amqp://h", "mode": "list"}, ["redis://"]),
    ("unknown field", {"prefech": 3}, ["prefech", "prefetch"]),
    ("unknown nested field", {"retry": {"max_attemps": 3}}, ["max_attemps", "max_attempts"]),
    ("another backend's field", {"partitions": 3}, ["partitions", "kafka"]),
    ("prefetch too large", {"prefetch": 1001}, ["prefetch", "1000"]),
    ("prefetch zero", {"prefetch": 0}, ["prefetch", "1"]),
    ("text for a number", {"send_timeout": "soon"}, ["send_timeout", "10.0"]),
    ("negative delay", {"retry": {"initial_delay": -1}}, ["retry.initial_delay", "0"]),
    ("unknown compression", {"compression": "zstd"}, ["compression", "gzip"]),
    ("native with replicas", {"replicas": 3}, ["replicas", "native"]),
    ("priorities beyond a byte", {"max_priority": 256}, ["max_priority", "255"]),
]


@pytest.mark.proves("003-config-5", "003-config-7")
@pytest.mark.parametrize(
    ("values", "words"), [row[1:] for row in SETTINGS], ids=[r[0] for r in SETTINGS]
)
def test_invalid_settings_are_rejected_with_advice(
    values: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**values)
    for word in words:
        assert word in str(caught.value)


# -- declarations: rejected where they are written -----------------------------------------------


def two_bodies(order: Order, other: Order) -> None: ...
def many(*orders: Order) -> None: ...
def anything(order: Order, **rest: object) -> None: ...
def with_default(order: Order, tenant: str = "none") -> None: ...
def one_of_a_batch(order: Order) -> None: ...
def batch_message(orders: list[Order], message: Message) -> None: ...
def batch_header(orders: list[Order], tenant: Annotated[str, Header()]) -> None: ...
def generator(order: Order) -> Iterator[int]:
    yield 1


def unknown_type(order: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def messages_alone(messages: list[Message]) -> None: ...


def handler_of(function: Any, **options: Any) -> Any:
    """Decorate a copy of a function, because a function can have only one decorator."""
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    copy.__annotations__ = function.__annotations__
    return consume("q", **options)(copy)


def registered_twice() -> None:
    handler = handler_of(one_of_a_batch)
    service(handler, handler)


def registering(function: Any, **options: Any) -> Callable[[], None]:
    return lambda: service().register(handler_of(function, **options))


def declared_twice() -> None:
    made = service()
    made.declare(Channel("q", prefetch=10))
    made.declare(Channel("q", prefetch=20))


@channel("q")
class TwoHandlers:
    @consume
    async def one(self, order: Order) -> None: ...
    @consume
    async def two(self, order: Order) -> None: ...


class NoHandlers: ...


DECLARATIONS: list[tuple[str, Callable[[], object], type[Exception], list[str]]] = [
    ("two bodies", registering(two_bodies), HandlerError, ["'order'", "'other'", "Header()"]),
    ("star arguments", registering(many), HandlerError, ["*orders", "variadic"]),
    ("double star", registering(anything), HandlerError, ["**rest"]),
    ("default without Header", registering(with_default), HandlerError, ["'tenant'", "Annotated"]),
    ("batch of one", registering(one_of_a_batch, batch_size=5), HandlerError, ["'order'", "list["]),
    ("batch message", registering(batch_message, batch_size=5), HandlerError, ["list[Message]"]),
    ("batch header", registering(batch_header, batch_size=5), HandlerError, ["'tenant'", "batch"]),
    ("generator", registering(generator), HandlerError, ["generator", "yield"]),
    ("unknown type", registering(unknown_type), HandlerError, ["Missing", "import"]),
    ("no concurrency", lambda: consume("q", concurrency=0), ConfigError, ["concurrency", "1"]),
    ("fractional concurrency", lambda: consume("q", concurrency=1.5), ConfigError, ["integer"]),  # type: ignore[call-overload]
    ("negative timeout", lambda: consume("q", timeout=-1), ConfigError, ["timeout"]),
    ("huge batch", lambda: consume("q", batch_size=5000), ConfigError, ["batch_size", "1000"]),
    ("options without a channel", lambda: consume(prefetch=3), ConfigError, ["prefetch", "name"]),
    ("unknown option", lambda: Channel("q", prefetsch=3), ConfigError, ["prefetsch", "prefetch"]),  # type: ignore[call-overload]
    ("not an exception", lambda: Channel("q", dead_on=[int]), ConfigError, ["int", "exception"]),  # type: ignore[list-item]
    ("flag as text", lambda: Channel("q", broadcast="yes"), ConfigError, ["True or False"]),  # type: ignore[call-overload]
    ("declared twice", declared_twice, ConfigError, ["prefetch", "10", "20", "test_bad_input.py"]),
    ("two handlers", lambda: service().register(TwoHandlers()), ConfigError, ["one", "two"]),
    ("a class", lambda: service().register(TwoHandlers), ConfigError, ["instance"]),
    ("no handlers", lambda: service().register(NoHandlers()), ConfigError, ["@consume"]),
    ("@channel on a function", lambda: channel("q")(two_bodies), ConfigError, ["class"]),  # type: ignore[arg-type]
    (
        "ordered, retried in the broker",
        lambda: Channel("q", ordered=True, retry=RetrySettings(mode="release")),
        ConfigError,
        ["ordered", "overtake"],
    ),
    ("negative retry delay", lambda: Retry(delay=-1), ValueError, ["zero or more"]),
    ("nan", lambda: Unavailable(retry_after=float("nan")), ValueError, ["zero or more"]),
    ("bare @channel", lambda: channel(NoHandlers), ConfigError, ["@channel(", "name"]),  # type: ignore[arg-type]
    ("a dict for settings", lambda: QueueService({"type": "native"}), ConfigError, ["Settings("]),  # type: ignore[arg-type]
    (
        "middleware that cannot be called",
        lambda: QueueService(Settings(type="native"), middleware=[1]),  # type: ignore[list-item]
        ConfigError,
        ["call_next"],
    ),
    ("mistyped concurrency", lambda: consume("q", concurency=2), ConfigError, ["'concurrency'"]),  # type: ignore[call-overload]
    ("messages without a batch", registering(messages_alone), HandlerError, ["batch_size"]),
    (
        "a list of handlers",
        lambda: service().register([two_bodies]),
        ConfigError,
        ["one at a time"],
    ),
    ("registered twice", registered_twice, ConfigError, ["registered twice"]),
    ("no such event", lambda: service().on("exploded", print), ValueError, ["retry", "shutdown"]),  # type: ignore[call-overload]
]


@pytest.mark.parametrize(
    ("attempt", "error", "words"),
    [row[1:] for row in DECLARATIONS],
    ids=[r[0] for r in DECLARATIONS],
)
def test_invalid_declarations_are_rejected_with_advice(
    attempt: Callable[[], object], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        attempt()
    for word in words:
        assert word in str(caught.value)


# -- sends: rejected before anything is sent -----------------------------------------------------

NAMES = ["", "../x", "/etc/passwd", "a b", "a\x00b", "a\r\nb", "ordеrs", "x" * 300, ".", ".."]

Send = Callable[[QueueService], Awaitable[object]]
ORDER = Order(id=1, total=2.0)
SENDS: list[tuple[str, Send, type[Exception], list[str]]] = [
    *(
        (f"name {name[:12]!r}", lambda s, name=name: s.send(name, 1), InvalidName, ["1–200", "A-Z"])
        for name in NAMES
    ),
    ("no name", lambda s: s.send(None, 1), InvalidName, ["None"]),  # type: ignore[call-overload]
    ("mistyped option", lambda s: s.send("q", 1, prioirty=5), TypeError, ["'priority'"]),  # type: ignore[call-overload]
    ("peek limit zero", lambda s: s.peek("orders", 0), ValueError, ["at least 1"]),
    ("wrong model", lambda s: s.send("orders", Invoice(number="1")), InvalidBody, ["Order"]),
    ("wrong fields", lambda s: s.send("orders", {"id": "x"}), InvalidBody, ["Order", "id"]),
    ("not a number", lambda s: s.send("free", float("nan")), InvalidBody, ["nan"]),
    ("circular reference", lambda s: s.send("free", circle()), InvalidBody, []),
    ("unsupported type", lambda s: s.send("free", object()), InvalidBody, ["object"]),
    ("too large", lambda s: s.send("free", "x" * 20_000), PayloadTooLarge, ["max_message_bytes"]),
    ("priority 10", lambda s: s.send("orders", ORDER, priority=10), InvalidPriority, ["0", "9"]),
    ("priority -1", lambda s: s.send("orders", ORDER, priority=-1), InvalidPriority, ["0", "9"]),
    (
        "boolean priority",
        lambda s: s.send("orders", ORDER, priority=True),
        InvalidPriority,
        ["integer"],
    ),
    (
        "negative delay",
        lambda s: s.send("orders", ORDER, delay=-1),
        ValueError,
        ["delay", "0 or more"],
    ),
    ("infinite delay", lambda s: s.send("orders", ORDER, delay=1e999), ValueError, ["delay"]),
    ("ttl zero", lambda s: s.send("orders", ORDER, ttl=0), ValueError, ["ttl", "more than"]),
    (
        "delay not below ttl",
        lambda s: s.send("orders", ORDER, delay=5, ttl=5),
        ValueError,
        ["expire"],
    ),
    ("empty key", lambda s: s.send("orders", ORDER, key=""), ValueError, ["key", "1024"]),
    ("CRLF", lambda s: s.send("orders", ORDER, headers={"a": "b\r\nc"}), InvalidHeader, ["'a'"]),
    (
        "header name",
        lambda s: s.send("orders", ORDER, headers={"a b": "c"}),
        InvalidHeader,
        ["a b"],
    ),
    (
        "reserved header",
        lambda s: s.send("orders", ORDER, headers={"QKIT-x": "c"}),
        InvalidHeader,
        ["qkit-"],
    ),
    (
        "header value",
        lambda s: s.send("orders", ORDER, headers={"a": 1}),  # type: ignore[dict-item]
        InvalidHeader,
        ["int", "str"],
    ),
    (
        "another content type",
        lambda s: s.send("orders", ORDER, headers={"Content-Type": "text/plain"}),
        InvalidHeader,
        ["JSON", "bytes"],
    ),
    (
        "another encoding",
        lambda s: s.send("free", b"x", headers={"content-encoding": "br"}),
        InvalidHeader,
        ["compression"],
    ),
    (
        "many headers",
        lambda s: s.send("orders", ORDER, headers={f"h{n}": "v" for n in range(200)}),
        InvalidHeader,
        ["128", "body"],
    ),
    (
        "large headers",
        lambda s: s.send("orders", ORDER, headers={"h": "v" * 40_000}),
        InvalidHeader,
        ["bytes"],
    ),
    ("publish to a queue", lambda s: s.publish("orders", ORDER), Unsupported, ["queue", "send"]),
    ("send to a topic", lambda s: s.send("news", "x"), Unsupported, ["topic", "publish"]),
    ("one invalid body", lambda s: s.send_many("orders", [ORDER, 1]), InvalidBody, ["Order"]),
    ("stats, unknown queue", lambda s: s.stats("nowhere"), QueueNotFound, ["nowhere"]),
    ("purge, unknown queue", lambda s: s.purge("nowhere"), QueueNotFound, ["nowhere"]),
]


@pytest.mark.proves("003-errors-2")
@pytest.mark.parametrize(
    ("attempt", "error", "words"), [row[1:] for row in SENDS], ids=[r[0] for r in SENDS]
)
async def test_invalid_sends_are_rejected_with_advice_and_send_nothing(
    attempt: Send, error: type[Exception], words: list[str]
) -> None:
    @consume("orders")
    async def place(order: Order) -> None: ...

    @consume("news", broadcast=True)
    async def read(news: str) -> None: ...

    made = service(place, read, max_message_bytes=10_000)
    async with made:
        made.pause("orders")
        with pytest.raises(error) as caught:
            await attempt(made)
        for word in words:
            assert word in str(caught.value)
        assert "\r" not in str(caught.value)
        assert "\n" not in str(caught.value)
        assert made.metrics().messages_sent == 0
        for queue in await made.queues():
            assert (await made.stats(queue)).depth == 0
        if isinstance(caught.value, QueueError):
            assert caught.value.operation is None or caught.value.backend in (None, "native")


# -- lifecycle: calls in the wrong state ---------------------------------------------------------


async def test_calls_in_the_wrong_state_raise_with_advice() -> None:
    @consume("q")
    async def handler(body: object) -> None: ...

    made = service()
    with pytest.raises(LifecycleError, match="start it first"):
        await made.send("q", 1)
    await made.start()
    with pytest.raises(LifecycleError, match="before start"):
        made.register(handler)
    await made.shutdown()
    with pytest.raises(LifecycleError, match="create a new QueueService"):
        await made.start()
    with pytest.raises(LifecycleError, match="create a new QueueService"):
        await made.send("q", 1)


# -- foreign messages: undecodable ones are dead-lettered ----------------------------------------

ARRIVALS: list[tuple[str, bytes, dict[str, str], list[str]]] = [
    ("not JSON", b"\xff\xfe", {}, []),
    ("truncated", b'{"id": 1', {}, []),
    ("wrong fields", b'{"id": "x"}', {}, ["id"]),
    ("nested 100,000 deep", b"[" * 100_000, {}, []),
    ("unknown encoding", b"{}", {"content-encoding": "br"}, ["br"]),
    ("not gzip", b"{}", {"content-encoding": "gzip"}, ["gzip"]),
    ("bad header", b'{"id": 1, "total": 2}', {"shard": "x"}, ["shard"]),
]


@pytest.mark.parametrize(
    ("body", "headers", "words"), [row[1:] for row in ARRIVALS], ids=[r[0] for r in ARRIVALS]
)
async def test_an_undecodable_message_is_dead_lettered_with_its_reason(
    body: bytes, headers: dict[str, str], words: list[str]
) -> None:
    handled: list[Order] = []

    @consume("orders")
    async def place(order: Order, shard: Annotated[int, Header("shard")] = 0) -> None:
        handled.append(order)
        served.set()

    made = service(place)
    dead_lettered, served = asyncio.Event(), asyncio.Event()
    made.on("dead_letter", lambda event: dead_lettered.set())
    async with made:
        await made._backend.publish("orders", [Envelope("foreign-1", body, dict(headers))])
        await made.send("orders", ORDER)
        await asyncio.wait_for(dead_lettered.wait(), 60)
        (letter,) = await made.dead_letters("orders").list()
        await asyncio.wait_for(served.wait(), 60)
    assert letter.reason == Reason.UNDECODABLE
    assert letter.body == body
    assert letter.message_id == "foreign-1"
    assert letter.attempts == 1
    for word in words:
        assert word in (letter.error or "")
    assert handled == [ORDER]  # the worker continues
