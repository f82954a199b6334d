"""Client of a native directory: publishing, receiving, settling, leases, and loss of the owner."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from qkit.backend import (
    AckMany,
    Admin,
    DeadLetterSource,
    DroppedLetterSource,
    ExtendMany,
    QueueSpec,
    SubscriptionSpec,
)
from qkit.backends.native.socket import protocol
from qkit.backends.native.socket.client import subscription as client_subscription
from qkit.backends.native.socket.client.backend import SocketBackend
from qkit.backends.native.socket.client.connection import Answered
from qkit.errors import (
    AckDeadlineExceeded,
    BackendUnavailable,
    InvalidPriority,
    MessageNotFound,
    PartialSend,
    PayloadTooLarge,
    QueueFull,
    QueueNotFound,
    SubscriptionLost,
)
from qkit.message import Envelope, Sent

SEED = int(os.environ.get("QKIT_TEST_SEED", "20240501"))


def spec(prefetch: int = 10, **options: Any) -> SubscriptionSpec:
    return SubscriptionSpec(queue="q", group="g", consumer="c", prefetch=prefetch, **options)


def test_the_socket_backend_implements_the_protocols(tmp_path: Any) -> None:
    backend = SocketBackend(tmp_path / "socket")
    assert isinstance(backend, Admin)
    assert isinstance(backend, DeadLetterSource)
    assert isinstance(backend, DroppedLetterSource)
    assert backend.capabilities.lease


async def test_calls_before_start_raise_backend_unavailable(tmp_path: Any) -> None:
    backend = SocketBackend(tmp_path / "socket")
    for call in (
        backend.ping(),
        backend.queues(),
        backend.publish("q", [Envelope("a", b"")]),
        backend.subscribe(spec()).__aenter__(),
        backend.start(),
    ):
        with pytest.raises(BackendUnavailable):
            await call
    await backend.aclose()


async def test_concurrent_publishes_get_separate_results(owner: Any) -> None:
    client = await owner.client()
    await client.declare(QueueSpec(name="q", max_depth=5, max_priority=9))
    calls = [
        client.publish("q", [Envelope("a", b"1"), Envelope("b", b"2")]),
        client.publish("q", [Envelope("c", b"3", priority=77)]),
        client.publish("q", [Envelope("d", b"4"), Envelope("e", b"5", priority=-1)]),
        client.publish("q", [Envelope("f", b"6"), Envelope("g", b"7")]),
        client.publish("q", [Envelope("h", b"8")]),
        client.publish("nowhere", [Envelope("i", b"9")]),
    ]
    first, bad, half, last, full, lost = await asyncio.gather(*calls, return_exceptions=True)
    assert first == [Sent("a", 0), Sent("b", 1)]
    assert isinstance(bad, InvalidPriority)
    assert bad.message_id == "c"
    assert isinstance(half, PartialSend)
    assert half.results[0] == Sent("d", 2)
    assert isinstance(half.results[1], InvalidPriority)
    assert last == [Sent("f", 3), Sent("g", 4)]
    assert isinstance(full, QueueFull)
    assert isinstance(lost, QueueNotFound)
    assert await client.publish("q", []) == []


async def test_large_batches_are_split_into_frames(owner: Any) -> None:
    client = await owner.client()
    await client.declare(QueueSpec(name="q"))
    envelopes = [Envelope(f"{n:03}", bytes([n]) * 200_000) for n in range(30)]
    sent = await client.publish("q", envelopes)
    assert sent == [Sent(item.id, position) for position, item in enumerate(envelopes)]
    assert [item.body for item in await client.peek("q", 30)] == [item.body for item in envelopes]
    async with client.subscribe(spec(30)) as subscription:
        found: list[str] = []
        while len(found) < 30:
            found += [item.envelope.id for item in await subscription.receive(30)]
    assert found == [item.id for item in envelopes]


async def test_the_client_rejects_a_message_above_the_limit_of_the_owner(owner: Any) -> None:
    await owner.server.aclose()
    owner.server._max_frame = 10_000
    await owner.server.start()
    client = await owner.client()
    await client.declare(QueueSpec(name="q"))
    large = Envelope("a", bytes(10_000))
    with pytest.raises(PayloadTooLarge):
        await client.publish("q", [large])
    await client.publish("q", [Envelope("b", bytes(5_000)), Envelope("c", bytes(5_000))])
    with pytest.raises(PartialSend) as caught:  # but the other messages are sent
        await client.publish("q", [Envelope("d", b""), large, Envelope("e", b"")])
    first, rejected, last = caught.value.results
    assert (first, last) == (Sent("d", 2), Sent("e", 3))
    assert isinstance(rejected, PayloadTooLarge)
    assert (rejected.queue, rejected.message_id) == ("q", "a")


async def test_cancelled_receives_lose_no_message(owner: Any) -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    client = await owner.client()
    await client.declare(QueueSpec(name="q", max_deliveries=1))
    got: list[str] = []
    async with client.subscribe(spec(5)) as subscription:
        for number in range(50):
            receiving = asyncio.create_task(subscription.receive(chance.randrange(1, 4)))
            publishing = asyncio.create_task(client.publish("q", [Envelope(str(number), b"")]))
            for _ in range(chance.randrange(9)):
                await asyncio.sleep(0)
            if not receiving.done() or chance.random() < 0.5:
                receiving.cancel()
            await asyncio.wait({receiving, publishing})
            if not receiving.cancelled():
                for item in receiving.result():
                    assert item.envelope.attempt == 1
                    got.append(item.envelope.id)
                    await subscription.ack(item)
        async with asyncio.timeout(30):
            while len(got) < 50:
                for item in await subscription.receive(5):
                    assert item.envelope.attempt == 1
                    got.append(item.envelope.id)
                    await subscription.ack(item)
    assert sorted(got) == sorted(map(str, range(50)))
    assert (await client.stats("q")).in_flight == 0


async def test_deliveries_that_no_receive_takes_are_released_soon(owner: Any) -> None:
    client, other = await owner.client(), await owner.client()
    await client.declare(QueueSpec(name="q"))
    async with client.subscribe(spec()) as paused, other.subscribe(spec()) as awake:
        for number in range(6):
            receiving = asyncio.create_task(paused.receive(1))
            await client.ping()
            await owner.engine.publish("q", str(number).encode())
            await asyncio.sleep(0)
            receiving.cancel()
            await asyncio.wait({receiving})
            async with asyncio.timeout(client_subscription.UNRECEIVED_RETURN_SECONDS * 4):
                (found,) = (
                    receiving.result() if not receiving.cancelled() else await awake.receive(1)
                )
            assert found.envelope.attempt == 1
            await (awake if receiving.cancelled() else paused).ack(found)


async def test_a_cancelled_receive_withdraws_its_credit(owner: Any) -> None:
    client = await owner.client()
    await client.declare(QueueSpec(name="q"))
    async with client.subscribe(spec()) as subscription:
        receiving = asyncio.create_task(subscription.receive(3))
        await client.ping()
        receiving.cancel()
        await asyncio.wait({receiving})
        await client.ping()
        await client.publish("q", [Envelope("a", b"")])
        assert (await client.stats("q")).in_flight == 0, "claimed without a receiver"
        (found,) = await subscription.receive(1)
        assert found.envelope.attempt == 1


async def test_several_receives_share_new_messages(owner: Any) -> None:
    client = await owner.client()
    await client.declare(QueueSpec(name="q"))
    async with client.subscribe(spec()) as subscription:
        waiting = [asyncio.create_task(subscription.receive(2)) for _ in range(3)]
        await client.ping()
        await client.publish("q", [Envelope(str(n), b"") for n in range(5)])
        async with asyncio.timeout(30):
            found = await asyncio.gather(*waiting)
        assert sorted(item.envelope.id for items in found for item in items) == list("01234")


async def test_a_stopped_subscription_can_settle_but_fetches_nothing(owner: Any) -> None:
    client = await owner.client()
    await client.declare(QueueSpec(name="q"))
    await client.publish("q", [Envelope("a", b"")])
    async with client.subscribe(spec()) as subscription:
        (found,) = await subscription.receive(1)
        receiving = asyncio.create_task(subscription.receive(1))
        await asyncio.sleep(0)
        await subscription.stop()
        await subscription.stop()
        assert await receiving == []
        await client.publish("q", [Envelope("b", b"")])
        assert await subscription.receive(1) == []
        await subscription.ack(found)
        with pytest.raises(MessageNotFound):
            await subscription.ack(found)
    assert (await client.stats("q")).depth == 1


async def test_concurrent_settlements_get_separate_results(owner: Any) -> None:
    client = await owner.client()
    await client.declare(QueueSpec(name="q", ack_deadline=1.0))
    await client.publish("q", [Envelope(str(n), b"") for n in range(3)])
    async with client.subscribe(spec()) as subscription:
        one, two, three = await subscription.receive(3)
        await subscription.extend(two, 30)
        await subscription.extend(three, 30)
        await asyncio.sleep(1.5)
        two.envelope.headers["seen"] = "yes"
        calls = [subscription.ack(one), subscription.release(two, 0.0), subscription.ack(three)]
        late, released, done = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(late, AckDeadlineExceeded)
        assert late.message_id == "0"
        assert (released, done) == (None, None)
        again = {item.envelope.id: item.envelope for item in await subscription.receive(3)}
        assert again["1"].headers == {"seen": "yes"}
        assert again["1"].attempt == 2


def count_frames(client: SocketBackend, kind: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the size of each sent frame of this kind is added."""
    connection = client._connection
    assert connection is not None
    frames: list[int] = []
    send_request = connection.send_request

    def counted(sent_kind: int, body: bytes, answered: Answered) -> int:
        if sent_kind == kind:
            frames.append(len(body))
        return send_request(sent_kind, body, answered)

    monkeypatch.setattr(connection, "send_request", counted)
    return frames


async def test_several_deliveries_are_settled_in_one_frame_with_separate_results(
    owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: SocketBackend = await owner.client()
    await client.declare(QueueSpec(name="q", ack_deadline=1.0))
    await client.publish("q", [Envelope(str(n), b"") for n in range(4)])
    async with client.subscribe(spec()) as subscription:
        assert isinstance(subscription, AckMany)
        assert isinstance(subscription, ExtendMany)
        late, one, two, done = await subscription.receive(4)
        await subscription.ack(done)
        frames = count_frames(client, protocol.SETTLE, monkeypatch)
        first, *others, last = await subscription.extend_many([late, one, two, done], 30)
        assert (first, others) == (None, [None, None])
        assert isinstance(last, MessageNotFound), "this delivery was already settled"
        await subscription.extend(late, 0.01)
        await asyncio.sleep(0.1)
        assert len(frames) == 2
        lost, *acked, again = await subscription.ack_many([late, one, two, done])
        assert isinstance(lost, AckDeadlineExceeded)
        assert lost.message_id == "0"
        assert acked == [None, None]
        assert isinstance(again, MessageNotFound)
        assert one.receipt is two.receipt is None
        assert len(frames) == 3
        assert await subscription.ack_many([]) == await subscription.extend_many([], 1.0) == []
        assert len(frames) == 3
    stats = await client.stats("q")
    assert (stats.depth, stats.acked_total) == (1, 3)


async def test_settling_several_deliveries_over_a_lost_connection_raises_subscription_lost(
    owner: Any,
) -> None:
    client = await owner.client()
    await client.declare(QueueSpec(name="q"))
    await client.publish("q", [Envelope(str(n), b"") for n in range(3)])
    async with client.subscribe(spec()) as subscription:
        held = await subscription.receive(3)
        for connection in tuple(owner.server._connections):
            connection._transport.pause_reading()
        calls = asyncio.gather(
            subscription.ack_many(held), subscription.extend_many(held, 30), return_exceptions=True
        )
        await asyncio.sleep(0.02)
        for connection in tuple(owner.server._connections):
            connection._transport.abort()
        acked, extended = await asyncio.wait_for(calls, 30)
        assert isinstance(acked, list)
        assert [type(error) for error in acked] == [SubscriptionLost] * 3
        assert [error.message_id for error in acked] == ["0", "1", "2"]
        assert type(extended) is SubscriptionLost, "all leases must share one error"


async def test_a_cancelled_settlement_ends_the_lease_when_the_owner_replies(owner: Any) -> None:
    client = await owner.client()
    await client.declare(QueueSpec(name="q"))
    await client.publish("q", [Envelope("a", b"")])
    async with client.subscribe(spec()) as subscription:
        held = await subscription.receive(1)
        acking = asyncio.create_task(subscription.ack_many(held))
        await asyncio.sleep(0)
        acking.cancel()
        await asyncio.wait({acking})
        assert len(subscription._leases) == 1, "the lease must be kept until the owner replies"
        await client.ping()
        assert subscription._leases == {}
    assert (await client.stats("q")).acked_total == 1


async def test_a_cancelled_publish_of_several_frames_leaves_no_unretrieved_error(
    owner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = await owner.client()
    sending = asyncio.create_task(
        client.publish("missing", [Envelope(str(n), bytes(700_000)) for n in range(3)])
    )
    await asyncio.sleep(0)
    sending.cancel()
    await asyncio.wait({sending})
    await client.ping()
    del sending
    gc.collect()
    assert "never retrieved" not in caplog.text
    with pytest.raises(QueueNotFound):
        await client.publish("missing", [Envelope(str(n), bytes(700_000)) for n in range(3)])


async def test_all_pending_calls_fail_when_the_owner_dies(owner: Any) -> None:
    lost: list[BackendUnavailable] = []
    client = SocketBackend(owner.path, on_lost=lost.append)
    await client.start()
    await client.declare(QueueSpec(name="q"))
    await client.publish("q", [Envelope("a", b"")])
    async with client.subscribe(spec()) as subscription:
        (held,) = await subscription.receive(1)
        receiving = asyncio.create_task(subscription.receive(1))
        await asyncio.sleep(0.01)
        for connection in tuple(owner.server._connections):
            connection._transport.pause_reading()  # the owner no longer replies
        calls = [
            client.publish("q", [Envelope("b", b"")]),
            client.stats("q"),
            client.ping(),
            client.declare(QueueSpec(name="r")),
            subscription.ack(held),
            receiving,
        ]
        waiting = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0.02)
        assert not waiting.done()
        for connection in tuple(owner.server._connections):
            connection._transport.abort()
        *requests, ack, receive = await asyncio.wait_for(waiting, 30)
        for error in requests:
            assert type(error) is BackendUnavailable
            assert error.cause is not None
        assert type(ack) is type(receive) is SubscriptionLost
        with pytest.raises(SubscriptionLost):
            await subscription.receive(1)
    assert len(lost) == 1
    with pytest.raises(BackendUnavailable):
        await client.publish("q", [])
    await client.start()  # opens another connection
    await client.ping()
    await client.aclose()
    assert len(lost) == 1


async def test_a_deleted_queue_ends_its_subscriptions(owner: Any) -> None:
    client = await owner.client()
    await client.declare(QueueSpec(name="q"))
    async with client.subscribe(spec()) as subscription:
        receiving = asyncio.create_task(subscription.receive(1))
        await client.ping()
        await client.delete("q")
        with pytest.raises(SubscriptionLost):
            await receiving
    with pytest.raises(QueueNotFound):
        async with client.subscribe(spec()):
            pass
    await client.ping()


async def test_an_ack_without_a_reply_raises_subscription_lost(
    owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_subscription, "SETTLE_TIMEOUT", 0.05)
    client = await owner.client()
    await client.declare(QueueSpec(name="q"))
    await client.publish("q", [Envelope("a", b"")])
    async with client.subscribe(spec()) as subscription:
        (held,) = await subscription.receive(1)
        await client.ping()
        (connection,) = [c for c in owner.server._connections if c._handler._subscriptions]
        connection._transport.pause_reading()
        with pytest.raises(SubscriptionLost, match="did not respond"):
            await subscription.ack(held)
        connection._transport.resume_reading()


async def test_leases_are_renewed_while_the_loop_is_blocked(owner: Any) -> None:
    """A thread sends the renewals, which the owner, in the same loop, reads after the block."""
    client, other = await owner.client(), await owner.client()
    await client.declare(QueueSpec(name="q", ack_deadline=0.15))
    await client.publish("q", [Envelope("a", b""), Envelope("b", b"")])
    async with client.subscribe(spec()) as subscription, other.subscribe(spec()) as rival:
        one, two = await subscription.receive(2)
        await subscription.ack(two)
        receiving = asyncio.create_task(rival.receive(1))
        await asyncio.sleep(0.01)
        time.sleep(0.6)  # noqa: ASYNC251  # block the loop on purpose
        await asyncio.sleep(0.02)
        assert not receiving.done()
        await subscription.ack(one)
        receiving.cancel()
    assert (await client.stats("q")).acked_total == 2


async def test_a_lease_that_is_not_renewed_expires_while_the_loop_runs(owner: Any) -> None:
    client = await owner.client()
    await client.declare(QueueSpec(name="q", ack_deadline=0.1))
    await client.publish("q", [Envelope("a", b"")])
    async with client.subscribe(spec()) as subscription:
        (held,) = await subscription.receive(1)
        async with asyncio.timeout(30):
            (again,) = await subscription.receive(1)
        assert again.envelope.attempt == 2
        with pytest.raises(AckDeadlineExceeded):
            await subscription.ack(held)


@pytest.mark.parametrize("data", [b"\0" * 8 + b"\xff" * 8, protocol.frame(99, 1), b""])
async def test_a_server_with_another_protocol_raises_backend_unavailable(
    directory: Path, data: bytes
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, directory / "socket")
    with pytest.raises(BackendUnavailable):
        await asyncio.wait_for(SocketBackend(directory / "socket").start(), 30)
    server.close()


async def test_a_failing_callback_is_logged(owner: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = await owner.client()
    called = asyncio.Event()

    def fail(letter: object) -> None:
        called.set()
        raise RuntimeError("planted")

    client.on_dead_letter(fail)
    await client.declare(QueueSpec(name="q"))
    await client.publish("q", [Envelope("a", b"", expires_at=time.time() + 0.01)])
    await asyncio.wait_for(called.wait(), 30)
    await client.ping()
    assert "callback failed" in caplog.text


async def test_sends_wait_for_a_slow_owner(owner: Any) -> None:
    client = await owner.client()
    await client.declare(QueueSpec(name="q"))
    (connection,) = owner.server._connections
    connection._transport.pause_reading()
    sends = [
        asyncio.create_task(client.publish("q", [Envelope(str(n), bytes(100_000))]))
        for n in range(20)
    ]
    await asyncio.sleep(0.02)
    late = asyncio.create_task(client.publish("q", [Envelope("late", bytes(1_000_000))]))
    await asyncio.sleep(0.02)
    assert client._connection is not None
    assert client._connection.write_buffer.waiting < 3_000_000, "later sends were buffered"
    connection._transport.resume_reading()
    async with asyncio.timeout(30):
        await asyncio.gather(*sends, late)
    assert (await client.stats("q")).depth == 21


async def test_a_subscription_cancelled_while_opening_leaves_no_consumer(owner: Any) -> None:
    client = await owner.client()
    await client.declare(QueueSpec(name="q"))
    for passes in range(6):
        opening = asyncio.create_task(client.subscribe(spec()).__aenter__())
        for _ in range(passes):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait({opening})
        if not opening.cancelled():
            await opening.result().leave()
        await client.ping()
    assert (await client.stats("q")).consumers == 0


async def test_an_older_owner_receives_only_fields_that_it_knows(
    owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner of version 0.1 rejects unknown fields."""

    def strict(cls: type, body: bytes) -> Any:
        values = protocol.decode_json(body)
        for name in ("consumed", "again", "needs_delay"):
            if name in values:
                raise protocol.ProtocolError(
                    f"no {cls.__name__}: got an unexpected keyword argument {name}"
                )
        return cls(**values)

    monkeypatch.setattr(protocol, "decode_record", strict)
    client = await owner.client()
    await client.declare(QueueSpec(name="new", max_deliveries=2, consumed=True))
    await client.declare(QueueSpec(name="new", max_deliveries=2, consumed=True, again=True))
    await client.publish("new", [Envelope("a", b"")])
    subscription = SubscriptionSpec(
        queue="new", group="g", consumer="c", prefetch=1, needs_delay=True
    )
    async with client.subscribe(subscription) as opened:
        assert [item.envelope.id for item in await opened.receive(1)] == ["a"]


def test_a_field_from_a_later_version_is_ignored() -> None:
    body = protocol.encode_json({"name": "q", "max_depth": 3, "of_a_later_version": True})
    assert protocol.decode_record(QueueSpec, body) == QueueSpec(name="q", max_depth=3)


async def test_a_key_belongs_to_one_ordered_subscription_of_all_clients(owner: Any) -> None:
    one, two = await owner.client(), await owner.client()
    await one.declare(QueueSpec(name="q"))
    await one.publish("q", [Envelope(id, b"", key=id[0]) for id in ("a1", "a2", "a3", "b1")])
    async with two.subscribe(spec(ordered=True)) as second:
        async with one.subscribe(spec(ordered=True)) as first:
            assert [d.envelope.id for d in await first.receive(2)] == ["a1", "a2"]
            (other,) = await second.receive(10)
            assert other.envelope.id == "b1"
        found = await second.receive(10)
        assert [(d.envelope.id, d.envelope.attempt) for d in found] == [
            ("a1", 1),
            ("a2", 1),
            ("a3", 1),
        ]


async def test_an_older_owner_serves_an_ordered_subscription_with_a_warning(
    owner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = await owner.client()
    del client._connection.hello["capabilities"]["key_lock"]  # as an older owner greets
    await client.declare(QueueSpec(name="q"))
    await client.publish("q", [Envelope("a1", b"", key="a")])
    async with client.subscribe(spec(ordered=True)) as subscription:
        assert len(await subscription.receive(1)) == 1
    assert "does not keep the order per key" in caplog.text
