"""Redis list backend, beyond the conformance suite: foreign messages, lost connections, errors."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import random
import sys
import uuid
import warnings
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio
from redis import exceptions

from qkit import ConfigError, QueueService, Settings, consume
from qkit._internal.clock import SystemClock
from qkit._internal.ids import new_id
from qkit.backend import (
    Admin,
    DeadLetterSource,
    Delivery,
    DroppedLetterSource,
    ExtendMany,
    QueueSpec,
    SubscriptionSpec,
)
from qkit.backends.factory import open_backend
from qkit.backends.redis import codec, list_subscription
from qkit.backends.redis.connection import ConnectionParameters
from qkit.backends.redis.driver import PipelinedConnection
from qkit.backends.redis.errors import to_queue_error, translate_errors
from qkit.backends.redis.list_backend import RedisListBackend
from qkit.backends.redis.list_subscription import ListSubscription
from qkit.backends.redis.scripts import lifecycle
from qkit.errors import (
    AckDeadlineExceeded,
    BackendUnavailable,
    LifecycleError,
    MessageNotFound,
    QueueError,
    QueueFull,
    QueueNotFound,
    SendTimeout,
    SubscriptionLost,
    Unsupported,
)
from qkit.message import DeadLetter, Envelope, Reason
from qkit.observability import settlement_failures
from tests.support.waiting import eventually


@pytest.fixture
def name() -> str:
    return f"r-{uuid.uuid4().hex[:10]}"


@pytest_asyncio.fixture
async def raw(redis_url: str, name: str) -> AsyncIterator[Any]:
    """Yield a redis-py client that acts as another program; delete the test's keys afterwards."""
    async with redis.asyncio.from_url(redis_url) as client:
        yield client
        for pattern in (f"{name}*", f"{{{name}*"):
            keys = [key async for key in client.scan_iter(pattern, count=1000)]
            if keys:
                await client.delete(*keys)
        names = [item for item in await client.smembers("qkit:queues") if name.encode() in item]
        if names:
            await client.srem("qkit:queues", *names)


@pytest_asyncio.fixture
async def backend(redis_url: str, raw: Any) -> AsyncIterator[RedisListBackend]:
    backend = RedisListBackend(redis_url)
    await backend.start()
    yield backend
    await backend.aclose()


def spec(name: str, **options: Any) -> SubscriptionSpec:
    values: dict[str, Any] = {"group": "g", "consumer": "c", "prefetch": 10, **options}
    return SubscriptionSpec(queue=name, **values)


async def take(subscription: ListSubscription, count: int = 1) -> list[Delivery]:
    found: list[Delivery] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += await subscription.receive(count - len(found))
    return found


# Other programs


@pytest.mark.proves("003-redis-2")
async def test_foreign_messages_are_consumed(
    backend: RedisListBackend, raw: Any, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    blob = bytes(range(256))
    odd = [b'{"id": 1}', b"", blob, b"qk1 x", b"qk1 a b 0 0 0 -\n\nz", b"qk1 a -5 0 0 0 -\n\nz"]
    await raw.rpush(name, *odd)
    async with backend.subscribe(spec(name)) as subscription:
        found = await take(subscription, len(odd))
        assert [delivery.envelope.body for delivery in found] == odd
        assert len({delivery.envelope.id for delivery in found}) == len(odd)
        assert {delivery.envelope.attempt for delivery in found} == {1}
        assert await subscription.ack_many(found) == [None] * len(found)


async def test_a_foreign_message_wakes_a_waiting_consumer_and_keeps_its_id(
    backend: RedisListBackend, raw: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough that only the push can wake the consumer.
    monkeypatch.setattr(list_subscription, "MAX_BLOCK_SECONDS", 120.0)
    await backend.declare(QueueSpec(name=name))
    async with backend.subscribe(spec(name)) as subscription:
        receiving = asyncio.ensure_future(subscription.receive(1))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(60):
            await raw.rpush(name, b"{}")
            (first,) = await receiving
        await subscription.release(first, 0.0)
        (second,) = await take(subscription)
        assert (second.envelope.id, second.envelope.attempt) == (first.envelope.id, 2)


async def test_the_deliveries_of_a_foreign_message_count_as_attempts(
    backend: RedisListBackend, redis_url: str, raw: Any, name: str
) -> None:
    async def handle(body: int) -> None:
        raise AssertionError("the handler was called after the last attempt")

    await backend.declare(QueueSpec(name=name))
    await raw.rpush(name, b"1")
    async with backend.subscribe(spec(name, ack_deadline=0.1)) as subscription:
        for attempt in (1, 2, 3):
            assert (await take(subscription))[0].envelope.attempt == attempt
        async with service_of(redis_url, consume(name)(handle), max_attempts=3) as service:
            (letter,) = await letters_of(service, name)
    assert (letter.channel, letter.reason, letter.attempts) == (
        name,
        Reason.MAX_RETRIES_EXCEEDED,
        3,
    )
    assert letter.error_type == "LeaseExpired"


def service_of(url: str, *handlers: Any, max_attempts: int = 3, **values: Any) -> QueueService:
    service = QueueService(
        Settings(type="redis", mode="list", url=url, retry={"max_attempts": max_attempts}, **values)
    )
    for handler in handlers:
        service.register(handler)
    return service


async def letters_of(service: QueueService, name: str, count: int = 1) -> list[DeadLetter]:
    found: list[DeadLetter] = []

    async def enough() -> bool:
        found[:] = await service.dead_letters(name).list()
        return len(found) >= count

    await eventually(enough)
    return found


async def test_expired_and_repeatedly_delivered_messages_are_delivered_unchanged(
    backend: RedisListBackend, raw: Any, name: str
) -> None:
    """The service, not the backend, writes the dead letters."""
    letters = f"{name}.dlq"
    await backend.declare(QueueSpec(name=letters, max_depth=10, drop_oldest=True))
    await backend.declare(
        QueueSpec(name=name, max_deliveries=1, dead_letter=letters, consumed=True)
    )
    await raw.hset(f"{{{name}}}:meta", "max_deliveries", 1)  # as earlier versions stored it
    await backend.publish(name, [Envelope("old", b"x", expires_at=1.0), Envelope("new", b"x")])
    async with backend.subscribe(spec(name, ack_deadline=0.1)) as subscription:
        for attempt in (1, 2, 3):
            old, new = await take(subscription, 2)
            assert (old.envelope.id, old.envelope.expires_at) == ("old", 1.0)
            assert new.envelope.id == "new"
            assert (old.envelope.attempt, new.envelope.attempt) == (attempt, attempt)
    assert await backend.peek(letters, 10) == []


async def test_an_expired_message_whose_dead_letter_cannot_be_written_is_held_and_reported(
    redis_url: str, raw: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settlement_failures, "UNHEALTHY_AFTER_SECONDS", 0.2)
    handled: list[int] = []

    @consume(name, concurrency=2)
    async def handle(number: int) -> None:
        handled.append(number)

    letters, kept = f"{{{name}.dlq}}:meta", f"{name}-kept"
    async with service_of(redis_url, handle, ack_deadline=1.0) as service:
        await raw.rename(letters, kept)
        await raw.set(letters, "not a hash")  # makes every write fail
        await raw.rpush(name, b"qk1 a - 0 1 0 -\n\n1")
        await eventually(lambda: service.health_check().consumers[0].failing)
        assert "dead letters cannot be written" in str(service.health_check().consumers[0].failing)
        assert not service.ready
        await service.send(name, 2)
        await eventually(lambda: handled == [2])
        assert not service.ready, "ready with an unsettled message"
        await raw.rename(kept, letters)
        await eventually(lambda: service.ready)
        (letter,) = await letters_of(service, name)
        assert (letter.message_id, letter.attempts) == ("a", 0)
        assert letter.reason == Reason.TTL_EXPIRED
        await eventually(lambda: _is(depths(service, name), (0, 0)))


async def depths(service: QueueService, name: str) -> tuple[int, int | None]:
    stats = await service.stats(name)
    return stats.depth, stats.in_flight


async def test_a_message_pushed_to_a_topic_reaches_each_group(
    backend: RedisListBackend, raw: Any, name: str
) -> None:
    await backend.declare(QueueSpec(name=name, broadcast=True))
    await raw.rpush(name, b"before any group")
    one, two = spec(name, group="one", broadcast=True), spec(name, group="two", broadcast=True)
    async with backend.subscribe(one) as first:
        waiting = asyncio.ensure_future(take(first, 2))  # blocked, and the push does not wake it
        await asyncio.sleep(0.1)
        await raw.rpush(name, b"for one", b"for one too")
        assert [item.envelope.body for item in await waiting] == [b"for one", b"for one too"]
        async with backend.subscribe(two) as second:
            await raw.rpush(name, b"for both")
            found = [*await take(first), *await take(second)]
            assert [item.envelope.body for item in found] == [b"for both"] * 2
            assert len({item.envelope.id for item in found}) == 1
            await raw.rpush(name, b"peeked")
            assert [item.body for item in await backend.peek(name, 10)] == [b"peeked"] * 2
    assert await raw.llen(name) == 0


async def test_a_foreign_message_with_another_priority_wakes_the_next_consumer(
    backend: RedisListBackend, raw: Any, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    frames = [codec.encode(Envelope(id, b"x", priority=p)) for id, p in (("a", None), ("b", 9))]
    await raw.rpush(name, *frames)  # a send would add "b" to the list of its priority
    async with backend.subscribe(spec(name)) as one, backend.subscribe(spec(name)) as two:
        (first,) = await one.receive(2)
        assert first.envelope.id == "a"
        assert await raw.llen(name) == 1, "no element is left to wake a waiting consumer"
        (second,) = await take(two)
        assert second.envelope.id == "b"


async def test_a_list_that_another_program_created_is_consumed(
    backend: RedisListBackend, raw: Any, name: str
) -> None:
    await raw.rpush(name, b"theirs")
    await backend.declare(QueueSpec(name=name, passive=True))
    async with backend.subscribe(spec(name)) as subscription:
        (delivery,) = await take(subscription)
        assert delivery.envelope.body == b"theirs"
        await subscription.ack(delivery)
    await backend.declare(QueueSpec(name=name, passive=True))  # an empty queue stays declared
    with pytest.raises(ConfigError, match="as a queue"):
        await backend.declare(QueueSpec(name=name, broadcast=True, passive=True))


async def test_stats_count_the_consumers(backend: RedisListBackend, raw: Any, name: str) -> None:
    await backend.declare(QueueSpec(name=name))
    await backend.declare(QueueSpec(name=f"{name}-topic", broadcast=True))

    async def consumers(queue: str) -> int | None:
        return (await backend.stats(queue)).consumers

    assert await consumers(name) == 0
    topic = f"{name}-topic"
    async with (
        backend.subscribe(spec(name)),
        backend.subscribe(spec(topic, group="one", broadcast=True)),
        backend.subscribe(spec(topic, group="two", broadcast=True)),
    ):
        assert (await consumers(name), await consumers(topic)) == (1, 2)
        async with backend.subscribe(spec(name)):
            assert await consumers(name) == 2
    await eventually(lambda: _is(consumers(name), 0))


async def _is(actual: Awaitable[object], expected: object) -> bool:
    return await actual == expected


async def test_positions_do_not_count_delayed_messages(
    backend: RedisListBackend, raw: Any, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    later = SystemClock().time() + 60

    async def positions(*messages: Envelope) -> list[int | None]:
        return [sent.position for sent in await backend.publish(name, messages)]

    assert await positions(Envelope("late", b"x", not_before=later)) == [None]
    assert await positions(Envelope("a", b"x")) == [0]
    assert await positions(Envelope("b", b"x", priority=9)) == [0]
    await backend.purge(name)
    assert await positions(Envelope("late", b"x", not_before=later), Envelope("c", b"x")) == [
        None,
        0,
    ]
    await backend.purge(name)
    await positions(Envelope("late", b"x", not_before=later))
    assert await raw.lpop(name) is not None  # another program takes the delayed message
    assert await positions(Envelope("d", b"x")) == [0]
    assert (await backend.stats(name)).depth == 1


@pytest.mark.proves("003-redis-2")
async def test_a_sent_message_is_readable_with_redis_cli(
    backend: RedisListBackend, raw: Any, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, [Envelope("0190", b'{"id":1}', {"tenant": "acme"})])
    assert await raw.lrange(name, 0, -1) == [b'qk1 0190 - 0 0 0 -\n{"tenant":"acme"}\n{"id":1}']


@pytest.mark.parametrize(
    "envelope",
    [
        Envelope("0190", b""),
        Envelope("a b\n", bytes(range(256)), {"ü": "ü\u2028", "x": ""}, key="k 1\n", priority=0),
        Envelope("", b"qk1 ", {}, key="", priority=9, not_before=1.5, expires_at=1.7e9),
        Envelope("%", b"\n\n", {"odd": "\uffff"}, key="-"),
    ],
)
def test_a_frame_decodes_to_the_original_envelope(envelope: Envelope) -> None:
    assert codec.decode(codec.encode(envelope, 1)) == envelope


@pytest.mark.parametrize("line", [b"[]", b"{", b"[" * 100_000, b"null"])
def test_invalid_headers_are_kept_as_raw_bytes(line: bytes) -> None:
    found = codec.decode(b"qk1 a - 0 0 0 -\n" + line + b"\nbody")
    kept = {"headers": base64.b64encode(line).decode()}
    assert found.headers == {"qkit-raw": json.dumps(kept)}
    assert found.body == b"body"


def test_invalid_utf_8_is_replaced_and_the_bytes_are_kept() -> None:
    found = codec.decode(b'qk1 %FF%FE - 0 0 0 =k%FF\n{"lone":"\\ud800"}\nbody')
    assert (found.id, found.key) == (r"\xff\xfe", r"k\xff")
    assert found.headers["lone"] == r"\ud800"
    raw = json.loads(found.headers["qkit-raw"])
    assert raw == {"id": "//4=", "key": "a/8="}
    again = codec.decode(codec.encode(found))
    assert (again.id, again.key, again.headers) == (found.id, found.key, found.headers)


# No message is lost


@pytest.mark.proves("003-redis-3")
async def test_cancelled_receives_lose_no_message(backend: RedisListBackend, name: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    await backend.declare(QueueSpec(name=name))
    got: list[str] = []
    sent: list[str] = []
    async with (
        backend.subscribe(spec(name, prefetch=100)) as one,
        backend.subscribe(spec(name, prefetch=100)) as two,
    ):

        async def settle(subscription: ListSubscription, found: list[Delivery]) -> None:
            for delivery in found:
                assert delivery.envelope.attempt == 1
                got.append(delivery.envelope.id)
                await subscription.ack(delivery)

        for _ in range(50):
            subscription = dice.choice([one, two])
            receiving = asyncio.ensure_future(subscription.receive(5))
            await asyncio.sleep(dice.choice([0, 0.0005, 0.002, 0.005]))
            envelope = Envelope(new_id(), b"x", priority=dice.choice([None, 1, 9]))
            sending = asyncio.ensure_future(backend.publish(name, [envelope]))
            await asyncio.sleep(dice.choice([0, 0.0003, 0.0006, 0.001, 0.002]))
            receiving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await settle(subscription, await receiving)
            await sending
            sent.append(envelope.id)
        async with asyncio.timeout(60):
            while len(got) < 50:
                await settle(one, await one.receive(50))
    assert sorted(got) == sorted(sent)
    stats = await backend.stats(name)
    assert (stats.depth, stats.in_flight, stats.scheduled) == (0, 0, 0)


async def test_a_cancelled_send_does_not_mix_up_replies(
    backend: RedisListBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    for number in range(50):
        sending = asyncio.ensure_future(backend.publish(name, [Envelope(f"c{number}", b"x")]))
        for _ in range(number % 10):
            await asyncio.sleep(0)
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        assert name in await backend.queues()
    (sent,) = await backend.publish(name, [Envelope("last", b"x")])
    stats = await backend.stats(name)
    assert (sent.message_id, sent.position) == ("last", stats.depth - 1)


async def test_expired_leases_free_prefetch_capacity(backend: RedisListBackend, name: str) -> None:
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, [Envelope("a", b"x")])
    async with backend.subscribe(spec(name, prefetch=1, ack_deadline=0.2)) as subscription:
        for attempt in (1, 2, 3):
            assert (await take(subscription))[0].envelope.attempt == attempt


async def test_settling_a_delivery_immediately_frees_prefetch_capacity(
    backend: RedisListBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, [Envelope(id, b"x") for id in "abc"])
    async with backend.subscribe(spec(name, prefetch=1, ack_deadline=120)) as subscription:
        (first,) = await take(subscription)
        for settle in (subscription.ack, lambda item: subscription.release(item, 60.0)):
            receiving = asyncio.ensure_future(subscription.receive(5))
            await asyncio.sleep(0.05)
            assert not receiving.done()
            await settle(first)
            async with asyncio.timeout(10):
                (first,) = await receiving
        assert first.envelope.id == "c"


async def test_a_cancelled_receive_releases_its_messages_in_order_without_counting_attempts(
    backend: RedisListBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, [Envelope(id, b"x") for id in "abcd"])
    async with backend.subscribe(spec(name)) as subscription:
        receiving = asyncio.ensure_future(subscription.receive(3))
        await asyncio.sleep(0)
        assert subscription._fetching is not None
        receiving.cancel()
        await eventually(lambda: subscription._fetching is None and not subscription._tasks)
        assert subscription.held == {}
        found = await take(subscription, 4)
    assert [delivery.envelope.id for delivery in found] == list("abcd")
    assert {delivery.envelope.attempt for delivery in found} == {1}


async def test_a_batch_wakes_every_waiting_consumer(
    backend: RedisListBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first message wakes one consumer, and each woken consumer wakes the next."""
    # Long enough that only the publish can wake the consumers.
    monkeypatch.setattr(list_subscription, "MAX_BLOCK_SECONDS", 120.0)
    await backend.declare(QueueSpec(name=name))
    async with contextlib.AsyncExitStack() as stack:
        consumers = [
            await stack.enter_async_context(backend.subscribe(spec(name, prefetch=1)))
            for _ in range(4)
        ]
        waiting = [asyncio.ensure_future(each.receive(1)) for each in consumers]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(60):
            await backend.publish(name, [Envelope(str(number), b"x") for number in range(4)])
            found = [(await receiving)[0].envelope.id for receiving in waiting]
        assert sorted(found) == ["0", "1", "2", "3"]


async def test_a_message_left_in_the_arrivals_list_by_a_dead_consumer_is_delivered(
    backend: RedisListBackend, raw: Any, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, [Envelope("a", b"x")])
    await raw.blmove(name, f"{{{name}}}:in", 1, "LEFT", "RIGHT")
    async with backend.subscribe(spec(name)) as subscription:
        (delivery,) = await take(subscription)
        assert delivery.envelope.id == "a"


async def test_identical_messages_are_all_delivered(backend: RedisListBackend, name: str) -> None:
    await backend.declare(QueueSpec(name=name))
    for delay in (0.0, 0.3):
        due = SystemClock().time() + delay if delay else None
        await backend.publish(name, [Envelope("same", b"x", not_before=due)] * 3)
    async with backend.subscribe(spec(name)) as subscription:
        assert len(await take(subscription, 6)) == 6


async def test_scripts_are_sent_again_after_a_script_flush(
    backend: RedisListBackend, raw: Any, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    await raw.script_flush()
    await backend.publish(name, [Envelope("a", b"x")])
    assert (await backend.stats(name)).depth == 1


# Without leases


@pytest_asyncio.fixture
async def unreliable(redis_url: str, raw: Any) -> AsyncIterator[RedisListBackend]:
    backend = RedisListBackend(redis_url, reliable=False)
    await backend.start()
    yield backend
    await backend.aclose()


@pytest.mark.proves("003-redis-3")
async def test_without_leases_a_delivery_removes_the_message(
    unreliable: RedisListBackend, raw: Any, name: str
) -> None:
    await unreliable.declare(QueueSpec(name=name))
    await raw.rpush(name, b"foreign")
    async with unreliable.subscribe(spec(name)) as subscription:
        (delivery,) = await take(subscription)
        assert (delivery.envelope.body, delivery.lease) == (b"foreign", None)
        stats = await unreliable.stats(name)
        assert (stats.depth, stats.in_flight) == (0, 0)
        with pytest.raises(Unsupported):
            await subscription.extend(delivery, 1.0)
    assert (await unreliable.stats(name)).depth == 0


async def test_without_leases_a_cancelled_receive_loses_no_message(
    unreliable: RedisListBackend, name: str
) -> None:
    await unreliable.declare(QueueSpec(name=name))
    sent = [str(number) for number in range(30)]
    got: list[str] = []
    async with unreliable.subscribe(spec(name, prefetch=100)) as subscription:
        for id in sent:
            receiving = asyncio.ensure_future(subscription.receive(5))
            await unreliable.publish(name, [Envelope(id, b"x")])
            receiving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                got += [delivery.envelope.id for delivery in await receiving]
        async with asyncio.timeout(60):
            while len(got) < len(sent):
                got += [delivery.envelope.id for delivery in await subscription.receive(30)]
    assert sorted(got) == sorted(sent)


async def test_without_leases_a_released_message_is_redelivered(
    unreliable: RedisListBackend, name: str
) -> None:
    await unreliable.declare(QueueSpec(name=name))
    await unreliable.publish(name, [Envelope("a", b"x")])
    async with unreliable.subscribe(spec(name)) as subscription:
        (first,) = await take(subscription)
        await subscription.release(first, 5.0)
        (second,) = await take(subscription)
        assert second.envelope.attempt == 2
        await subscription.ack(second)
        with pytest.raises(MessageNotFound):
            await subscription.ack(second)


# Lost connections


async def kill_blocked(raw: Any, subscription: ListSubscription) -> None:
    await raw.execute_command("CLIENT", "KILL", "ID", subscription._blocking_connection_id)


async def test_a_killed_blocking_connection_raises_subscription_lost(
    backend: RedisListBackend, raw: Any, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    async with backend.subscribe(spec(name)) as subscription:
        receiving = asyncio.ensure_future(subscription.receive(1))
        await asyncio.sleep(0.1)
        await kill_blocked(raw, subscription)
        with pytest.raises(SubscriptionLost) as caught:
            await receiving
        assert caught.value.queue == name
        assert isinstance(caught.value.cause, exceptions.ConnectionError)
    await backend.publish(name, [Envelope("a", b"x")])
    async with backend.subscribe(spec(name)) as again:
        assert len(await take(again)) == 1


@pytest.mark.proves("003-redis-9")
async def test_a_service_reconnects_after_its_connection_is_killed(
    raw: Any, redis_url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[ListSubscription] = []
    got: asyncio.Queue[int] = asyncio.Queue()
    opening = ListSubscription.open

    async def note(subscription: ListSubscription) -> None:
        await opening(subscription)
        opened.append(subscription)

    @consume(name)
    async def handle(number: int) -> None:
        got.put_nowait(number)

    monkeypatch.setattr(ListSubscription, "open", note)
    service = QueueService(Settings(type="redis", mode="list", url=redis_url))
    service.register(handle)
    async with service, asyncio.timeout(60):
        await service.send(name, 1)
        assert await got.get() == 1
        await kill_blocked(raw, opened[0])
        await service.send(name, 2)
        assert await got.get() == 2
    assert len(opened) == 2


async def test_a_closed_port_raises_backend_unavailable() -> None:
    backend = RedisListBackend("redis://127.0.0.1:1/0")
    with pytest.raises(BackendUnavailable) as caught:
        await backend.start()
    assert isinstance(caught.value.cause, exceptions.ConnectionError)
    with pytest.raises(BackendUnavailable, match="start the backend"):
        await backend.ping()
    await backend.aclose()


async def test_a_silent_server_raises_backend_unavailable() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    backend = RedisListBackend(ConnectionParameters(f"redis://127.0.0.1:{port}/0", timeout=0.2))
    with pytest.raises(BackendUnavailable) as caught:
        await backend.start()
    assert caught.value.cause is not None
    server.close()


# Errors


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (exceptions.ConnectionError("reset"), BackendUnavailable),
        (exceptions.TimeoutError("slow"), BackendUnavailable),
        (exceptions.AuthenticationError("WRONGPASS"), BackendUnavailable),
        (exceptions.BusyLoadingError("LOADING"), BackendUnavailable),
        (exceptions.ReadOnlyError("READONLY You can't write"), BackendUnavailable),
        (exceptions.ResponseError("MISCONF Redis is configured to save"), BackendUnavailable),
        (exceptions.ResponseError("UNBLOCKED force unblock"), BackendUnavailable),
        (exceptions.OutOfMemoryError("command not allowed"), QueueFull),
        (exceptions.ResponseError("OOM command not allowed"), QueueFull),
        (exceptions.ResponseError("WRONGTYPE Operation against"), ConfigError),
        (exceptions.NoPermissionError("this user has no permissions"), ConfigError),
        (exceptions.ResponseError("ERR unknown command 'BLMOVE'"), ConfigError),
        (exceptions.DataError("no"), QueueError),
        (ConnectionResetError("reset"), BackendUnavailable),
    ],
)
async def test_driver_errors_are_translated_with_their_cause(
    error: Exception, kind: type[QueueError]
) -> None:
    with pytest.raises(QueueError) as caught:
        with translate_errors("publish", "orders"):
            raise error
    assert type(caught.value) is kind
    assert caught.value.cause is error
    assert (caught.value.backend, caught.value.operation) == ("redis", "publish")
    assert caught.value.queue == "orders"
    assert type(to_queue_error(error, "ack")) is kind


async def test_a_key_of_another_type_raises_config_error(
    backend: RedisListBackend, raw: Any, name: str
) -> None:
    await raw.set(name, "a string")
    await backend.declare(QueueSpec(name=name))
    with pytest.raises(ConfigError, match="not a list"):
        await backend.publish(name, [Envelope("a", b"x")])


async def test_an_undeclared_queue_raises_queue_not_found(
    backend: RedisListBackend, name: str
) -> None:
    for call in (
        backend.publish(name, [Envelope("a", b"x")]),
        backend.declare(QueueSpec(name=name, passive=True)),
        backend.stats(name),
        backend.peek(name, 1),
        backend.purge(name),
        backend.remove(name, ["a"]),
        backend.delete(name),
    ):
        with pytest.raises(QueueNotFound):
            await call
    with pytest.raises(QueueNotFound):
        async with backend.subscribe(spec(name)):
            pass


async def test_declaring_a_queue_as_a_topic_raises_config_error(
    backend: RedisListBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    await backend.declare(QueueSpec(name=name, passive=True))
    with pytest.raises(ConfigError, match="topic"):
        await backend.declare(QueueSpec(name=name, broadcast=True))


async def test_deleting_a_queue_removes_all_keys_and_ends_its_subscriptions(
    backend: RedisListBackend, raw: Any, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    async with backend.subscribe(spec(name)) as subscription:
        await backend.publish(name, [Envelope("a", b"x"), Envelope("b", b"x")])
        await take(subscription)
        await backend.delete(name)
        with pytest.raises(SubscriptionLost, match="deleted"):
            await take(subscription)
    assert [key async for key in raw.scan_iter(f"*{name}*", count=1000)] == []
    assert name not in await backend.queues()


async def test_a_settled_delivery_cannot_be_extended(backend: RedisListBackend, name: str) -> None:
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, [Envelope("a", b"x")])
    async with backend.subscribe(spec(name)) as subscription:
        (delivery,) = await take(subscription)
        await subscription.ack(delivery)
        with pytest.raises(MessageNotFound):
            await subscription.extend(delivery, 1.0)


async def test_several_leases_are_extended_in_one_call(
    backend: RedisListBackend, raw: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, [Envelope(id, b"x") for id in "abc"])
    async with backend.subscribe(spec(name, ack_deadline=120)) as subscription:
        assert isinstance(subscription, ExtendMany)
        held, settled, lost = await take(subscription, 3)
        lease = f"{{{name}}}:lease"
        await subscription.ack(settled)
        await raw.zrem(lease, lost.receipt)
        before = await raw.zscore(lease, held.receipt)
        calls: list[Any] = []
        run = backend.connection.run

        async def counted(*arguments: Any) -> Any:
            calls.append(arguments)
            return await run(*arguments)

        monkeypatch.setattr(backend.connection, "run", counted)
        good, twice, late = await subscription.extend_many([held, settled, lost], 600)
        assert len(calls) == 1
        assert good is None
        assert isinstance(twice, MessageNotFound)
        assert isinstance(late, AckDeadlineExceeded)
        assert await raw.zscore(lease, held.receipt) >= before + 400_000
        assert set(subscription.held) == {held.receipt}


async def test_a_service_renews_all_its_leases_in_one_call(
    backend: RedisListBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[int] = []
    run = backend.connection.run

    async def counted(script: Any, keys: Any, *arguments: Any) -> Any:
        if script is lifecycle.EXTEND:
            tokens.append(len(arguments) // 2)
        return await run(script, keys, *arguments)

    monkeypatch.setattr(backend.connection, "run", counted)
    done = asyncio.Event()

    @consume(name, concurrency=20)
    async def handle(number: int) -> None:
        await done.wait()

    settings = Settings(type="redis", mode="list", url="redis://localhost/", ack_deadline=3.0)
    service = QueueService(settings, backend=backend)
    service.register(handle)
    async with service:
        await service.send_many(name, list(range(20)))
        await eventually(lambda: sum(tokens) >= 40)
        done.set()
    assert len(tokens) <= 4


# Limits


async def test_dropped_letters_are_reported(backend: RedisListBackend, name: str) -> None:
    dropped: list[DeadLetter] = []
    backend.on_dropped_letter(dropped.append)
    await backend.declare(QueueSpec(name=name, max_depth=2, drop_oldest=True))
    await backend.publish(name, [Envelope(id, b"x") for id in "abcd"])
    assert [letter.message_id for letter in dropped] == ["a", "b"]
    assert [envelope.id for envelope in await backend.peek(name, 10)] == ["c", "d"]


async def test_remove_deletes_the_oldest_messages_with_an_id(
    backend: RedisListBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    later = SystemClock().time() + 60
    messages = [
        Envelope("a", b"1"),
        Envelope("b c", b"2"),
        Envelope("a", b"3"),
        Envelope("a", b"4"),
    ]
    await backend.publish(name, [*messages, Envelope("late", b"5", not_before=later)])
    assert await backend.remove(name, ["a", "a", "b c", "late", "unknown"]) == 4
    assert [envelope.body for envelope in await backend.peek(name, 10)] == [b"4"]


def test_batches_are_limited_by_count_and_size() -> None:
    small = [Envelope(str(number), b"x") for number in range(1_201)]
    assert [len(batch) for batch in codec.batches(small)] == [500, 500, 201]
    large = [Envelope(str(number), bytes(3 * 2**20)) for number in range(5)]
    assert [len(batch) for batch in codec.batches(large)] == [2, 2, 1]
    huge = [Envelope("a", b"x"), Envelope("b", bytes(9 * 2**20)), Envelope("c", b"x")]
    assert [len(batch) for batch in codec.batches(huge)] == [1, 1, 1]
    assert list(codec.batches([])) == []


async def test_the_start_fails_without_enough_replicas(redis_url: str) -> None:
    backend = RedisListBackend(redis_url, replicas=2)
    with pytest.raises(ConfigError, match="replicas=2"):
        await backend.start()


async def test_a_send_that_no_replica_confirms_raises_send_timeout(
    backend: RedisListBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    backend._publisher.replicas = 2
    backend.connection.parameters.timeout = 0.2
    with pytest.raises(SendTimeout, match="0 of 1 replicas"):
        await backend.publish(name, [Envelope("a", b"x")])
    assert (await backend.stats(name)).depth == 1


async def test_a_long_ingress_list_is_processed_in_chunks(
    backend: RedisListBackend, raw: Any, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    await raw.rpush(name, *(b"%d" % number for number in range(2_500)))
    assert (await backend.stats(name)).depth == 2_500
    got: list[int] = []
    async with backend.subscribe(spec(name, prefetch=1_000)) as subscription:
        while len(got) < 2_500:
            found = await take(subscription, 1)
            found += await subscription.receive(999) if len(got) < 2_499 else []
            assert await subscription.ack_many(found) == [None] * len(found)
            got += [int(delivery.envelope.body) for delivery in found]
    assert got == list(range(2_500))


# Protocols and settings


def test_the_list_backend_implements_the_optional_protocols() -> None:
    backend = RedisListBackend("redis://localhost/")
    for protocol in (Admin, DroppedLetterSource):
        assert isinstance(backend, protocol)
    assert not isinstance(backend, DeadLetterSource), "the service must write the dead letters"
    assert len(lifecycle.SEND.sha) == 40


def test_settings_select_the_list_backend() -> None:
    settings = Settings(type="redis", mode="list", url="redis://localhost/")
    assert isinstance(open_backend(settings, SystemClock()), RedisListBackend)


def test_reliable_false_selects_a_backend_without_leases() -> None:
    settings = Settings(type="redis", mode="list", reliable=False, url="redis://localhost/")
    assert not open_backend(settings, SystemClock()).capabilities.lease


@pytest.mark.parametrize("missing", ["redis", "hiredis"])
def test_the_error_for_a_missing_client_library_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for module in [item for item in sys.modules if item.startswith("qkit.backends.redis")]:
        monkeypatch.delitem(sys.modules, module)
    for module in [item for item in sys.modules if item.partition(".")[0] == missing]:
        monkeypatch.setitem(sys.modules, module, None)
    settings = Settings(type="redis", mode="list", url="redis://localhost/")
    with pytest.raises(ConfigError, match="install the extra 'redis'"):
        open_backend(settings, SystemClock())


@pytest.mark.parametrize(
    "frame_", [b"qk1 %FF - 0 0 0 -\n\n1", b"qk1 a - 0 0 0 =k%FF\n\n1", b"qk1 %ED - 0 0 0 -\n\n1"]
)
async def test_an_invalid_id_or_key_does_not_block_the_queue(
    backend: RedisListBackend, raw: Any, name: str, frame_: bytes
) -> None:
    await backend.declare(QueueSpec(name=name))
    await raw.rpush(name, frame_)
    await backend.publish(name, [Envelope("good", b"2")])
    assert len(await backend.peek(name, 10)) == 2
    async with backend.subscribe(spec(name)) as subscription:
        found: list[Delivery] = []
        async with asyncio.timeout(60):
            while len(found) < 2:
                found += await subscription.receive(10)
        assert [delivery.envelope.body for delivery in found] == [b"1", b"2"]


async def test_a_late_ack_does_not_affect_a_recreated_queue(
    backend: RedisListBackend, raw: Any, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, [Envelope("old", b"")])
    async with asyncio.timeout(60), backend.subscribe(spec(name)) as one:
        (old,) = await one.receive(1)
        await backend.delete(name)
        await backend.declare(QueueSpec(name=name))
        await backend.publish(name, [Envelope("new", b"")])
        async with backend.subscribe(spec(name)) as two:
            (new,) = await two.receive(1)
            with pytest.raises(QueueError):
                await one.ack(old)
            await two.release(new, 0.0)
            (again,) = await two.receive(1)
            assert again.envelope.id == "new"
            await two.ack(again)


async def test_messages_that_are_due_at_the_same_time_keep_the_order_of_sending(
    backend: RedisListBackend, name: str
) -> None:
    due = SystemClock().time() + 0.5
    spec = SubscriptionSpec(queue=name, group="g", consumer="c", prefetch=20)
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, [Envelope(f"{n:02}", b"", not_before=due) for n in range(3)])
    await asyncio.sleep(0.1)
    async with backend.subscribe(spec) as subscription:  # with a shorter delay for the same time
        for n in range(3, 6):
            await backend.publish(name, [Envelope(f"{n:02}", b"", not_before=due)])
        found: list[Delivery] = []
        while len(found) < 6:
            found += await subscription.receive(20)
        assert [item.envelope.id for item in found] == [f"{n:02}" for n in range(6)]


async def test_peeking_at_large_messages_does_not_use_the_shared_connection(
    backend: RedisListBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred messages of 1 MB took so long that the worker's own connection timed out."""
    body = b"x" * 2**20
    await backend.declare(QueueSpec(name=name))
    for n in range(100):
        await backend.publish(name, [Envelope(f"{n:03}", body, priority=n % 2 * 4 + 5)])
    shared = await backend.connection.current()
    sizes: list[int] = []
    received = PipelinedConnection._handle_reply

    def record(connection: PipelinedConnection, reply: Any) -> None:
        frames: list[bytes] = reply[1] if type(reply) is list else []
        sizes.append(sum(map(len, frames)))
        assert connection is not shared or sizes[-1] < 2**20
        received(connection, reply)

    monkeypatch.setattr(PipelinedConnection, "_handle_reply", record)
    found = await backend.peek(name, 100)
    odd, even = [f"{n:03}" for n in range(1, 100, 2)], [f"{n:03}" for n in range(0, 100, 2)]
    assert [item.id for item in found] == odd + even
    assert max(sizes) <= 6 * 2**20
    assert await backend.connection.current() is shared
    assert [item.id for item in await backend.peek(name, 7)] == odd[:7]
    assert await backend.purge(name) == 100


def test_use_in_a_second_event_loop_raises_before_anything_is_sent(
    redis_url: str, name: str
) -> None:
    """The message was queued, but the send raised ``RuntimeError``."""
    backend = RedisListBackend(redis_url)

    async def start() -> None:
        await backend.start()
        await backend.declare(QueueSpec(name=name))

    async def use() -> None:
        with pytest.raises(LifecycleError, match="another event loop"):
            await backend.publish(name, [Envelope("a", b"")])
        with pytest.raises(LifecycleError, match="another event loop"):
            await backend.publish(name, [Envelope("a", b"", priority=1)])
        with pytest.raises(LifecycleError, match="another event loop"):
            await backend.ping()
        with pytest.raises(LifecycleError, match="another event loop"):
            await backend.peek(name, 1)

    async def finish() -> None:
        assert (await backend.stats(name)).depth == 0
        await backend.delete(name)
        await backend.aclose()

    with asyncio.Runner() as owner:
        owner.run(start())
        asyncio.run(use())
        owner.run(finish())


async def test_use_in_a_forked_child_raises_before_anything_is_sent(
    backend: RedisListBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # for a fork beside threads
        child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                backend.publish(name, [Envelope("a", b"")]).send(None)
            except LifecycleError:
                code = 0
        os._exit(code)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (await backend.stats(name)).depth == 0
