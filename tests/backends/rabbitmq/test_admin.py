"""Administration over AMQP, and queue limits."""

from __future__ import annotations

from typing import Any

import aiormq
import pytest

from qkit._internal.clock import SystemClock
from qkit._internal.ids import new_id
from qkit.backend import (
    QueueSpec,
)
from qkit.backends.rabbitmq import queue_reader
from qkit.backends.rabbitmq.backend import RabbitMQBackend
from qkit.backends.rabbitmq.topology import LOST, group_queue
from qkit.errors import (
    PartialSend,
    QueueFull,
    QueueNotFound,
    Unsupported,
)
from qkit.message import DeadLetter, Envelope, Sent
from tests.support.rabbitmq import (
    declare,
    has_depth,
    ready,
    spec,
    take,
)
from tests.support.waiting import eventually


async def test_calls_on_an_undeclared_queue_raise_queue_not_found(
    backend: RabbitMQBackend, name: str
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
    for broadcast in (False, True):
        with pytest.raises(QueueNotFound):
            async with backend.subscribe(spec(name, broadcast=broadcast)):
                pass
    with pytest.raises(Unsupported, match="set management_url"):
        await backend.queues()


async def test_a_full_dead_letter_queue_reports_dropped_letters(
    backend: RabbitMQBackend, name: str
) -> None:
    dropped: list[DeadLetter] = []
    backend.on_dropped_letter(dropped.append)
    await backend.declare(QueueSpec(name=name, max_depth=2, drop_oldest=True))
    await backend.publish(name, [Envelope("a", b"x")])
    await backend.publish(name, [Envelope("b", b"x"), Envelope("c", b"x")])
    await backend.publish(name, [Envelope("d", b"x")])
    assert [letter.message_id for letter in dropped] == ["a", "b"]
    assert [envelope.id for envelope in await backend.peek(name, 10)] == ["c", "d"]


async def test_a_full_queue_limited_by_another_program_raises_queue_full(
    classic: RabbitMQBackend, raw: aiormq.Channel, name: str
) -> None:
    arguments: dict[str, Any] = {"x-max-length": 1, "x-overflow": "reject-publish"}
    await raw.queue_declare(name, durable=True, arguments=arguments)
    with pytest.raises(PartialSend) as caught:
        await classic.publish(name, [Envelope("a", b"x"), Envelope("b", b"x")])
    assert caught.value.results[0] == Sent("a")
    assert isinstance(caught.value.results[1], QueueFull)
    await raw.queue_delete(name)


async def test_a_delayed_message_returns_to_a_full_queue(
    backend: RabbitMQBackend, name: str
) -> None:
    """A limit enforced by the broker would drop the message, because no sender waits for it."""
    await declare(backend, name, max_depth=1)
    later = SystemClock().time() + 3.0  # long enough for the next steps on a busy machine
    await backend.publish(name, [Envelope("late", b"x", not_before=later)])
    await backend.publish(name, [Envelope("first", b"x")])
    with pytest.raises(QueueFull):
        await backend.publish(name, [Envelope("rejected", b"x")])
    await eventually(lambda: has_depth(backend, name, 2))
    async with backend.subscribe(spec(name)) as subscription:
        found = await take(subscription, 2)
        assert sorted(delivery.envelope.id for delivery in found) == ["first", "late"]


async def test_peek_does_not_change_a_classic_queue(classic: RabbitMQBackend, name: str) -> None:
    await declare(classic, name, max_priority=9)
    for number, priority in enumerate((5, 1, 9, 5, 9)):
        await classic.publish(name, [Envelope(str(number), b"x", priority=priority)])
    for limit in (1, 3, 10, 2):
        found = [envelope.id for envelope in await classic.peek(name, limit)]
        assert found == ["2", "4", "0", "3", "1"][:limit]
    async with classic.subscribe(spec(name)) as subscription:
        found = [delivery.envelope.id for delivery in await take(subscription, 5)]
        assert found == ["2", "4", "0", "3", "1"]


async def test_peek_keeps_the_order_of_a_quorum_queue_and_counts_no_attempt(
    quorum: RabbitMQBackend, name: str
) -> None:
    await declare(quorum, name, max_deliveries=2)
    await quorum.publish(name, [Envelope(str(number), b"x") for number in range(5)])
    for limit in (1, 3, 10, 2):
        found = [envelope.id for envelope in await quorum.peek(name, limit)]
        assert found == list("01234")[:limit]
    async with quorum.subscribe(spec(name)) as subscription:
        taken = await take(subscription, 5)
        assert [delivery.envelope.id for delivery in taken] == list("01234")
        assert {delivery.envelope.attempt for delivery in taken} == {1}


async def test_peek_of_a_large_quorum_queue_changes_nothing(
    quorum: RabbitMQBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_reader, "MAX_ROTATED_DEPTH", 4)
    await declare(quorum, name)
    await quorum.publish(name, [Envelope(str(number), b"x") for number in range(5)])
    await quorum.publish(f"{name}.dlq", [Envelope(str(number), b"x") for number in range(5)])
    with pytest.raises(Unsupported, match="more than 4 messages"):
        await quorum.peek(name, 2)
    assert len(await quorum.peek(f"{name}.dlq", 9)) == 5, "deliveries of dead letters do not matter"
    async with quorum.subscribe(spec(name)) as subscription:
        taken = await take(subscription, 5)
        assert [delivery.envelope.id for delivery in taken] == list("01234")
        assert {delivery.envelope.attempt for delivery in taken} == {1}


async def test_peek_is_rejected_while_an_ordered_consumer_is_active(
    backend: RabbitMQBackend, quorum: RabbitMQBackend, name: str
) -> None:
    """The consumer would receive later messages while the peek holds earlier ones."""
    for number, each in enumerate((backend, quorum)):
        queue = f"{name}-{number}"
        await declare(each, queue)
        await each.publish(queue, [Envelope(str(number), b"x") for number in range(6)])
        async with each.subscribe(spec(queue, prefetch=2, ordered=True)) as subscription:
            held = await take(subscription, 2)
            with pytest.raises(Unsupported, match="pause it, then read the queue"):
                await each.peek(queue, 3)
            for delivery in held:
                await subscription.ack(delivery)
            for expected in range(2, 6):
                (delivery,) = await take(subscription)
                assert (delivery.envelope.id, delivery.envelope.attempt) == (str(expected), 1)
                await subscription.ack(delivery)


async def test_messages_are_in_the_queue_again_when_peek_and_remove_return(
    backend: RabbitMQBackend, name: str
) -> None:
    letters = f"{name}.dlq"
    await declare(backend, name)
    await backend.publish(letters, [Envelope(str(number), b"x") for number in range(20)])
    for _ in range(10):
        assert len(await backend.peek(letters, 20)) == 20
        assert (await backend.stats(letters)).depth == 20
        assert await backend.remove(letters, ["unknown"]) == 0
        assert (await backend.stats(letters)).depth == 20


async def test_peek_is_limited_by_size_and_uses_its_own_connection(
    backend: RabbitMQBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_reader, "MAX_READ_BYTES", 250)
    monkeypatch.setattr(queue_reader, "BYTES_AT_ONCE", 250)
    await declare(backend, name)
    await backend.publish(name, [Envelope(str(number), b"x" * 100) for number in range(9)])
    monkeypatch.setattr(backend._consuming, "own_channel", None)
    for _ in range(2):
        assert [item.id for item in await backend.peek(name, 9)] == ["0", "1", "2"]
    assert len(await backend.peek(name, 2_000)) == 9, "a complete list is not limited"
    assert backend._reading.is_open


async def test_remove_deletes_the_oldest_messages_with_an_id(
    backend: RabbitMQBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name, drop_oldest=True, max_depth=10))
    messages = [Envelope("a", b"1"), Envelope("b", b"2"), Envelope("a", b"3"), Envelope("a", b"4")]
    await backend.publish(name, messages)
    assert await backend.remove(name, ["a", "a", "b", "unknown"]) == 3
    assert [envelope.body for envelope in await backend.peek(name, 10)] == [b"4"]


async def test_stats_peek_purge_and_delete_include_all_groups_of_a_topic(
    backend: RabbitMQBackend, raw: aiormq.Channel, name: str
) -> None:
    await backend.declare(QueueSpec(name=name, broadcast=True))
    for group in ("mail", "audit"):
        async with backend.subscribe(spec(name, group=group, broadcast=True)):
            pass
    await backend.publish(name, [Envelope("a", b"x"), Envelope("b", b"x")])
    assert (await backend.stats(name)).depth == 4
    found = [(item.headers["qkit-group"], item.id) for item in await backend.peek(name, 3)]
    assert found == [("audit", "a"), ("audit", "b"), ("mail", "a")]
    later = SystemClock().time() + 60
    await backend.publish(name, [Envelope("late", b"x", not_before=later)])
    assert await backend.purge(name) == 5
    await backend.delete(name)
    with pytest.raises(QueueNotFound):
        await backend.stats(name)
    with pytest.raises(aiormq.exceptions.ChannelNotFoundEntity):
        await ready(raw, group_queue(name, "mail"))


async def test_a_delayed_message_of_a_deleted_queue_goes_to_the_lost_queue(
    classic: RabbitMQBackend, raw: aiormq.Channel, name: str
) -> None:
    await declare(classic, name)
    id = new_id()
    later = SystemClock().time() + 0.5
    await classic.publish(name, [Envelope(id, b"x", not_before=later)])
    await raw.queue_delete(name)  # not with qkit, which would also remove delayed messages

    async def kept() -> bool:
        return id in [envelope.id for envelope in await classic.peek(LOST, 10_000)]

    await eventually(kept)
    await classic.remove(LOST, [id])
