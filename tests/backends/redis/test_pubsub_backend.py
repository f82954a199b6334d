"""Redis pub/sub backend, beyond the conformance suite: foreign messages, outages, slow handlers."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio

from qkit import Channel, QueueService, Settings, consume
from qkit._internal.clock import SystemClock
from qkit.backend import (
    Admin,
    DeadLetterSource,
    Delivery,
    DroppedLetterSource,
    QueueSpec,
    SubscriptionSpec,
)
from qkit.backends.factory import open_backend
from qkit.backends.redis import codec, pubsub_publisher, pubsub_subscription
from qkit.backends.redis.pubsub_backend import RedisPubSubBackend
from qkit.backends.redis.pubsub_subscription import PubSubSubscription
from qkit.errors import (
    BackendUnavailable,
    MessageNotFound,
    QueueError,
    QueueNotFound,
    SubscriptionLost,
)
from qkit.message import GROUP, Envelope
from tests.support.private_brokers import PrivateBroker, private_broker
from tests.support.proxy import Proxy
from tests.support.waiting import eventually


@pytest.fixture
def name() -> str:
    return f"p-{uuid.uuid4().hex[:10]}"


@pytest_asyncio.fixture
async def raw(redis_url: str) -> AsyncIterator[Any]:
    """Yield a redis-py client that acts as another program."""
    async with redis.asyncio.from_url(redis_url) as client:
        yield client


@pytest_asyncio.fixture
async def backend(redis_url: str) -> AsyncIterator[RedisPubSubBackend]:
    backend = RedisPubSubBackend(redis_url)
    await backend.start()
    yield backend
    await backend.aclose()


@pytest.fixture(scope="module")
def private_redis() -> Iterator[PrivateBroker]:
    with private_broker("redis", settings=["client-output-buffer-limit pubsub 1mb 0 0"]) as broker:
        yield broker


def service_on(url: str, *handlers: Any, **settings: Any) -> QueueService:
    service = QueueService(Settings(type="redis", mode="pubsub", url=url, **settings))
    for handler in handlers:
        service.register(handler)
    return service


def spec(name: str, **options: Any) -> SubscriptionSpec:
    values: dict[str, Any] = {"group": "g", "consumer": "c", "prefetch": 10, **options}
    return SubscriptionSpec(queue=name, broadcast=True, **values)


async def take(subscription: Any, count: int = 1) -> list[Delivery]:
    found: list[Delivery] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += await subscription.receive(count - len(found))
    return found


# Other programs


@pytest.mark.proves("003-redis-6")
async def test_a_foreign_message_reaches_a_typed_handler(
    redis_url: str, raw: Any, name: str
) -> None:
    got: list[tuple[dict[str, int], str]] = []

    @consume(name)
    async def handle(body: dict[str, int]) -> None:
        got.append((body, name))

    async with service_on(redis_url, handle):
        assert await raw.publish(name, b'{"id": 1}') == 1
        await raw.publish(name, b'{"id": 2}')
        await eventually(lambda: len(got) == 2)
    assert [body for body, _ in got] == [{"id": 1}, {"id": 2}]


async def test_each_foreign_message_gets_a_distinct_id(
    backend: RedisPubSubBackend, raw: Any, name: str
) -> None:
    odd = [b"", bytes(range(256)), b"qk1 x", b"qk1 a b 0 0 0 -\n\nz"]
    async with backend.subscribe(spec(name)) as subscription:
        for body in odd:
            await raw.publish(name, body)
        found = await take(subscription, len(odd))
    assert [delivery.envelope.body for delivery in found] == odd
    assert len({delivery.envelope.id for delivery in found}) == len(odd)
    assert {delivery.envelope.attempt for delivery in found} == {1}


@pytest.mark.proves("003-redis-5")
async def test_a_published_message_is_readable_with_redis_cli(
    redis_url: str, raw: Any, name: str
) -> None:
    async with raw.pubsub() as listener, service_on(redis_url) as service:
        await listener.subscribe(name)
        sent = await service.send(name, {"id": 1}, headers={"tenant": "acme"}, key="k")
        async with asyncio.timeout(60):
            received = [message async for message in _messages(listener, 1)]
    head, headers, body = received[0].decode().split("\n")
    assert head == f"qk1 {sent.message_id} - 0 0 0 =k"
    assert headers == '{"tenant":"acme"}'
    assert body == '{"id":1}'


async def _messages(listener: Any, count: int) -> AsyncIterator[bytes]:
    async for message in listener.listen():
        if message["type"] == "message":
            yield message["data"]
            count -= 1
            if not count:
                return


# Every channel is a topic


@pytest.mark.proves("003-redis-1", "003-redis-7")
async def test_send_and_publish_reach_every_subscriber(redis_url: str, name: str) -> None:
    got: dict[str, list[int]] = {"one": [], "two": [], "elsewhere": []}

    @consume(name, group="one")
    async def one(body: int) -> None:
        got["one"].append(body)

    @consume(name, group="two")
    async def two(body: int) -> None:
        got["two"].append(body)

    @consume(name, group="one")
    async def elsewhere(body: int) -> None:
        got["elsewhere"].append(body)

    async with service_on(redis_url, one, two) as service, service_on(redis_url, elsewhere):
        await service.send(name, 1)
        await service.publish(name, 2)
        await service.send_many(name, [3, 4])
        await service.publish(Channel(name, int, broadcast=True), 5)
        await eventually(lambda: all(len(received) == 5 for received in got.values()))
    assert set(map(tuple, got.values())) == {(1, 2, 3, 4, 5)}


async def test_a_message_without_a_subscriber_is_lost_without_an_error(
    redis_url: str, name: str
) -> None:
    got: list[int] = []

    @consume(name)
    async def handle(body: int) -> None:
        got.append(body)

    async with service_on(redis_url) as service:
        assert (await service.send(name, 1)).position is None
        async with service_on(redis_url, handle):
            await service.send(name, 2)
            await eventually(lambda: got)
    assert got == [2]


async def test_messages_without_a_subscriber_are_counted_and_logged_at_intervals(
    backend: RedisPubSubBackend,
    name: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with caplog.at_level(logging.WARNING, logger="qkit"):
        await backend.publish(name, [Envelope(str(at), b"1") for at in range(700)])
        await backend.publish(name, [Envelope("700", b"1")])
    assert backend.unheard == 701
    [warned] = [record.getMessage() for record in caplog.records]
    assert warned.startswith(f"{name}: ")
    assert "the channel has no subscriber" in warned
    async with backend.subscribe(spec(name)):
        await backend.publish(name, [Envelope("701", b"1")])
    assert backend.unheard == 701
    monkeypatch.setattr(pubsub_publisher, "LOG_INTERVAL_SECONDS", 0.0)
    other = f"{name}-other"
    with caplog.at_level(logging.WARNING, logger="qkit"):
        for _ in range(2):
            await backend.publish(other, [Envelope("a", b"1")])
    assert len([record for record in caplog.records if other in record.getMessage()]) == 2


async def test_a_replay_without_a_subscriber_keeps_the_dead_letters(
    redis_url: str, name: str
) -> None:
    def service(*handlers: object) -> QueueService:
        made = QueueService(
            Settings(type="redis", mode="pubsub", url=redis_url, retry={"enabled": False})
        )
        for handler in handlers:
            made.register(handler)
        return made

    broken, got = True, list[str]()

    @consume(name)
    async def handle(body: str) -> None:
        if broken:
            raise RuntimeError("planted")
        got.append(body)

    async with service(handle), service() as other:
        await other.send(name, "a")
        await other.send(name, "b")
        await eventually(lambda: has_letters(other, name, 2))
    async with service() as tool:
        with pytest.raises(QueueError, match="no subscriber received the message"):
            await tool.dead_letters(name).replay()
        assert len(await tool.dead_letters(name).list()) == 2
        broken = False
        async with service(handle):
            assert await tool.dead_letters(name).replay() == 2
            await eventually(lambda: len(got) == 2)
        assert await tool.dead_letters(name).list() == []


async def has_letters(service: QueueService, name: str, count: int) -> bool:
    """Return whether the channel has exactly ``count`` dead letters."""
    return len(await service.dead_letters(name).list()) == count


async def test_a_replay_reaches_only_its_group(backend: RedisPubSubBackend, name: str) -> None:
    async with (
        backend.subscribe(spec(name, group="one")) as one,
        backend.subscribe(spec(name, group="two")) as two,
    ):
        await backend.publish(name, [Envelope("a", b"x", {GROUP: "two", "tenant": "acme"})])
        await backend.publish(name, [Envelope("b", b"y")])
        (delivery,) = await take(one)
        assert delivery.envelope.id == "b"
        found = await take(two, 2)
    assert [delivery.envelope.id for delivery in found] == ["a", "b"]
    assert found[0].envelope.headers == {"tenant": "acme"}


@pytest.mark.proves("003-redis-5")
async def test_concurrent_publishes_share_a_round_trip(
    redis_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with service_on(redis_url) as service:
        await service.send(name, 0)
        backend: Any = service._backend
        sizes: list[int] = []
        commands = backend._connection.commands

        async def counted(some: Any) -> Any:
            sizes.append(len(some))
            return await commands(some)

        monkeypatch.setattr(backend._connection, "commands", counted)
        await asyncio.gather(*(service.send(name, number) for number in range(100)))
    assert sum(sizes) == 100
    assert len(sizes) <= 3


# Dead letters


async def test_a_dead_letter_is_stored_in_a_list_and_outlives_the_service(
    redis_url: str, raw: Any, name: str
) -> None:
    calls: list[int] = []

    @consume(name)
    async def fail(body: int) -> None:
        calls.append(body)
        raise ValueError("no")

    retry = {"max_attempts": 3, "initial_delay": 0.01}
    async with service_on(redis_url, fail, retry=retry) as service:
        await service.send(name, 7)
        await eventually(lambda: service.metrics().messages_dead_lettered == 1)
    assert calls == [7, 7, 7], "expected three attempts, with inline retries"
    assert await raw.llen(f"{name}.dlq") == 1
    async with service_on(redis_url) as later:
        (letter,) = await later.dead_letters(name).list()
        assert (letter.error, letter.attempts, letter.body) == ("no", 3, b"7")
        assert await later.dead_letters(name).purge() == 1
        assert f"{name}.dlq" in await later.queues()
        await later._backend.delete(f"{name}.dlq")  # type: ignore[attr-defined]  # an Admin


async def test_a_queue_of_the_pubsub_backend_is_stored_as_a_list(
    backend: RedisPubSubBackend, name: str
) -> None:
    with pytest.raises(QueueNotFound):
        await backend.declare(QueueSpec(name=name, passive=True))
    await backend.declare(QueueSpec(name=name, max_depth=2, drop_oldest=True))
    dropped: list[str] = []
    backend.on_dropped_letter(lambda letter: dropped.append(letter.message_id))
    await backend.publish(name, [Envelope(id, b"x") for id in "abc"])
    assert dropped == ["a"]
    assert [envelope.id for envelope in await backend.peek(name, 10)] == ["b", "c"]
    assert (await backend.stats(name)).depth == 2
    assert await backend.remove(name, ["b"]) == 1
    await backend.delete(name)


# Settling


async def test_a_released_message_is_redelivered_before_later_messages(
    backend: RedisPubSubBackend, name: str
) -> None:
    async with backend.subscribe(spec(name)) as subscription:
        await backend.publish(name, [Envelope(id, b"x") for id in "ab"])
        (first,) = await take(subscription)
        await subscription.release(first, 0.0)
        again, other = await take(subscription, 2)
        assert (again.envelope.id, again.envelope.attempt) == ("a", 2)
        assert (other.envelope.id, other.envelope.attempt) == ("b", 1)
        await subscription.release(other, 0.0, count_attempt=False)
        (uncharged,) = await take(subscription)
        assert uncharged.envelope.attempt == 1
        for settle in (subscription.ack(again), subscription.ack(uncharged)):
            await settle
        with pytest.raises(MessageNotFound):
            await subscription.ack(again)


async def test_released_messages_keep_the_delivery_order(
    backend: RedisPubSubBackend, name: str
) -> None:
    async with backend.subscribe(spec(name)) as subscription:
        await backend.publish(name, [Envelope(id, b"x") for id in "abcd"])
        first, second, third = await take(subscription, 3)
        for delivery in (second, first, third):
            await subscription.release(delivery, 0.0)
        found = await take(subscription, 4)
    assert [delivery.envelope.id for delivery in found] == list("abcd")


async def test_a_delivery_can_be_settled_only_by_its_subscription(
    backend: RedisPubSubBackend, name: str
) -> None:
    async with backend.subscribe(spec(name)) as one, backend.subscribe(spec(name)) as two:
        await backend.publish(name, [Envelope("a", b"x")])
        (delivery,) = await take(one)
        with pytest.raises(MessageNotFound):
            await two.ack(delivery)
        await one.ack(delivery)


async def test_a_paused_channel_buffers_messages(redis_url: str, name: str) -> None:
    got: list[int] = []

    @consume(name)
    async def handle(body: int) -> None:
        got.append(body)

    async with service_on(redis_url, handle) as service:
        service.pause(name)
        for number in range(50):
            await service.send(name, number)
        await asyncio.sleep(0.2)
        assert got == []
        service.resume(name)
        await eventually(lambda: len(got) == 50)
    assert got == list(range(50))


async def test_the_number_of_unhandled_messages_of_a_stopped_subscription_is_logged(
    backend: RedisPubSubBackend, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with backend.subscribe(spec(name)) as subscription:
        await backend.publish(name, [Envelope(id, b"x") for id in "abcd"])
        held, done = await take(subscription, 2)
        await subscription.stop()
        await subscription.ack(done)
        await subscription.release(held, 0.0)
    assert "3 unhandled messages" in caplog.text


# Lost connections


@pytest.mark.proves("003-redis-6", "003-redis-9", "003-redis-10")
async def test_subscriptions_are_restored_after_a_killed_connection(
    private_redis: PrivateBroker, name: str
) -> None:
    got: list[int] = []
    states: list[str] = []
    reconnected: list[object] = []

    @consume(name)
    async def handle(body: int) -> None:
        got.append(body)

    async with (
        redis.asyncio.from_url(private_redis.url) as raw,
        service_on(private_redis.url, handle) as service,
    ):
        service.on("state_change", lambda change: states.append(str(change.new)))
        service.on("reconnected", reconnected.append)
        await service.send(name, 1)
        await eventually(lambda: got == [1])
        assert await raw.client_kill_filter(_type="pubsub") == 1
        await eventually(lambda: reconnected)

        async def subscribed() -> bool:
            return bool((await raw.pubsub_numsub(name))[0][1] == 1)

        await eventually(subscribed)
        await service.send(name, 2)
        await eventually(lambda: got == [1, 2])
        assert states == ["disconnected", "connected"]


@pytest.mark.proves("003-redis-8")
async def test_a_service_recovers_from_a_server_outage(
    private_redis: PrivateBroker, name: str
) -> None:
    got: list[int] = []

    @consume(name)
    async def handle(body: int) -> None:
        got.append(body)

    async with service_on(private_redis.url, handle, send_timeout=10.0) as service:
        await service.send(name, 1)
        await eventually(lambda: got == [1])
        with private_redis.killed():
            await eventually(lambda: service.health_check().status != "healthy")
        number = 1

        async def received_again() -> bool:
            nonlocal number
            number += 1
            await service.send(name, number)
            await asyncio.sleep(0.05)
            return len(got) > 1

        await eventually(received_again)
        assert set(got) <= set(range(1, number + 1))


async def test_a_subscription_is_lost_if_the_server_stops_responding(
    redis_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pubsub_subscription, "PING_INTERVAL_SECONDS", 0.2)
    monkeypatch.setattr(pubsub_subscription, "ANSWER_TIMEOUT_SECONDS", 0.5)
    port = int(redis_url.split(":")[2].split("/")[0])
    with Proxy(port) as proxy:
        backend = RedisPubSubBackend(f"redis://127.0.0.1:{proxy.port}/0")
        await backend.start()
        async with backend.subscribe(spec(name)) as subscription:
            await asyncio.sleep(1.5)  # the server replies to PINGs, so the idle connection stays
            await backend.publish(name, [Envelope("a", b"x")])
            await take(subscription)
            proxy.black_hole()
            with pytest.raises(SubscriptionLost) as caught:
                await take(subscription)
            assert isinstance(caught.value, BackendUnavailable)
            assert caught.value.cause is not None
            proxy.heal(forget=True)
        await backend.aclose()


@pytest.mark.proves("003-shutdown-13", "003-shutdown-14", "003-shutdown-15")
async def test_shutdown_closes_all_connections_and_is_the_last_event(
    private_redis: PrivateBroker, name: str
) -> None:
    events: list[str] = []

    @consume(name)
    async def handle(body: int) -> None:
        events.append(f"handled {body}")

    async with redis.asyncio.from_url(private_redis.url) as raw:

        async def clients() -> set[str]:
            return {client["id"] for client in await raw.client_list()}

        before = await clients()
        service = service_on(private_redis.url, handle)
        service.on("state_change", lambda change: events.append(str(change.new)))
        service.on("shutdown", lambda _: events.append("shutdown"))
        async with service:
            await service.send(name, 1)
            await eventually(lambda: "handled 1" in events)
            assert (await raw.pubsub_numsub(name))[0][1] == 1
            assert len(await clients()) > len(before)
        assert events[-1] == "shutdown"

        async def disconnected() -> bool:
            unsubscribed = (await raw.pubsub_numsub(name))[0][1] == 0
            return unsubscribed and await clients() == before

        await eventually(disconnected)


# Slow handlers


async def test_the_buffer_of_a_slow_handler_is_bounded_and_no_message_is_lost(
    backend: RedisPubSubBackend, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "qkit")
    count, body = 4_000, b"x" * 1_000
    async with backend.subscribe(spec(name)) as subscription:
        assert isinstance(subscription, PubSubSubscription)
        for start in range(0, count, 500):
            await backend.publish(
                name, [Envelope(str(number), body) for number in range(start, start + 500)]
            )
        await asyncio.sleep(0.3)
        # One read of 256 KiB may exceed the limit.
        assert (
            pubsub_subscription.MAX_BUFFERED_MESSAGES
            <= len(subscription._arrivals)
            <= pubsub_subscription.MAX_BUFFERED_MESSAGES + 300
        )
        assert "paused reading" in caplog.text
        found = await take(subscription, count)
    assert [int(delivery.envelope.id) for delivery in found] == list(range(count))


async def test_a_subscription_that_is_too_slow_is_lost_after_its_buffered_messages(
    private_redis: PrivateBroker, name: str
) -> None:
    backend = RedisPubSubBackend(private_redis.url)
    await backend.start()
    async with backend.subscribe(spec(name)) as subscription:
        body = b"x" * 20_000
        for start in range(0, 4_000, 100):
            await backend.publish(
                name, [Envelope(str(number), body) for number in range(start, start + 100)]
            )
        found: list[Delivery] = []

        async def receive_all() -> None:
            while True:
                found.extend(await take(subscription))

        with pytest.raises(SubscriptionLost):
            await receive_all()
    received = [int(delivery.envelope.id) for delivery in found]
    assert 0 < len(received) < 4_000
    assert received == list(range(len(received))), "a message is missing or out of order"
    await backend.aclose()


# Protocols and settings


def test_the_pubsub_backend_implements_the_optional_protocols() -> None:
    backend = RedisPubSubBackend("redis://localhost/")
    assert isinstance(backend, Admin)
    assert isinstance(backend, DroppedLetterSource)
    assert not isinstance(backend, DeadLetterSource), "the service must write the dead letters"
    assert codec.decode(b"x").id == codec.FOREIGN


def test_settings_select_the_pubsub_backend_with_and_without_a_mode() -> None:
    settings = Settings(type="redis", mode="pubsub", url="redis://localhost/")
    assert isinstance(open_backend(settings, SystemClock()), RedisPubSubBackend)
    with pytest.warns(DeprecationWarning, match="mode"):
        settings = Settings(type="redis", url="redis://localhost/")
    assert isinstance(open_backend(settings, SystemClock()), RedisPubSubBackend)
