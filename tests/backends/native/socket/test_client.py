"""A client of a native directory: nothing is lost, nothing hangs, leases outlive a blocked loop."""

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
from qkit.backends.native.socket.client import subscription as claimed
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


def test_it_is_all_that_the_native_backend_is(tmp_path: Any) -> None:
    backend = SocketBackend(tmp_path / "socket")
    assert isinstance(backend, Admin)
    assert isinstance(backend, DeadLetterSource)
    assert isinstance(backend, DroppedLetterSource)
    assert backend.capabilities.lease


async def test_before_it_is_started_it_says_so(tmp_path: Any) -> None:
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


async def test_each_publish_of_one_turn_has_its_own_answer(owner: Any) -> None:
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


async def test_large_batches_are_spread_over_frames(owner: Any) -> None:
    client = await owner.client()
    await client.declare(QueueSpec(name="q"))
    envelopes = [Envelope(f"{n:03}", bytes([n]) * 200_000) for n in range(30)]
    sent = await client.publish("q", envelopes)
    assert sent == [Sent(item.id, place) for place, item in enumerate(envelopes)]
    assert [item.body for item in await client.peek("q", 30)] == [item.body for item in envelopes]
    async with client.subscribe(spec(30)) as subscription:
        found: list[str] = []
        while len(found) < 30:
            found += [item.envelope.id for item in await subscription.receive(30)]
    assert found == [item.id for item in envelopes]


async def test_a_message_beyond_the_owner_s_limit_is_refused_here(owner: Any) -> None:
    await owner.server.aclose()
    owner.server._max_frame = 10_000
    await owner.server.start()
    client = await owner.client()
    await client.declare(QueueSpec(name="q"))
    large = Envelope("a", bytes(10_000))
    with pytest.raises(PayloadTooLarge):
        await client.publish("q", [large])
    await client.publish("q", [Envelope("b", bytes(5_000)), Envelope("c", bytes(5_000))])
    with pytest.raises(PartialSend) as caught:  # the messages of other senders beside it are sent
        await client.publish("q", [Envelope("d", b""), large, Envelope("e", b"")])
    first, refused, last = caught.value.results
    assert (first, last) == (Sent("d", 2), Sent("e", 3))
    assert isinstance(refused, PayloadTooLarge)
    assert (refused.queue, refused.message_id) == ("q", "a")


async def test_cancelled_receives_lose_nothing(owner: Any) -> None:
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


async def test_what_nobody_asks_for_goes_back_soon(owner: Any) -> None:
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
            async with asyncio.timeout(claimed.UNRECEIVED_RETURN_SECONDS * 4):
                (found,) = (
                    receiving.result() if not receiving.cancelled() else await awake.receive(1)
                )
            assert found.envelope.attempt == 1
            await (awake if receiving.cancelled() else paused).ack(found)


async def test_a_cancelled_receive_takes_its_credit_back(owner: Any) -> None:
    client = await owner.client()
    await client.declare(QueueSpec(name="q"))
    async with client.subscribe(spec()) as subscription:
        receiving = asyncio.create_task(subscription.receive(3))
        await client.ping()
        receiving.cancel()
        await asyncio.wait({receiving})
        await client.ping()
        await client.publish("q", [Envelope("a", b"")])
        assert (await client.stats("q")).in_flight == 0, "claimed for no receiver"
        (found,) = await subscription.receive(1)
        assert found.envelope.attempt == 1


async def test_several_receives_share_what_comes(owner: Any) -> None:
    client = await owner.client()
    await client.declare(QueueSpec(name="q"))
    async with client.subscribe(spec()) as subscription:
        waiting = [asyncio.create_task(subscription.receive(2)) for _ in range(3)]
        await client.ping()
        await client.publish("q", [Envelope(str(n), b"") for n in range(5)])
        async with asyncio.timeout(30):
            found = await asyncio.gather(*waiting)
        assert sorted(item.envelope.id for items in found for item in items) == list("01234")


async def test_a_stopped_subscription_settles_and_fetches_nothing(owner: Any) -> None:
    client = await owner.client()
    await client.declare(QueueSpec(name="q"))
    await client.publish("q", [Envelope("a", b"")])
    async with client.subscribe(spec()) as subscription:
        (found,) = await subscription.receive(1)
        parked = asyncio.create_task(subscription.receive(1))
        await asyncio.sleep(0)
        await subscription.stop()
        await subscription.stop()
        assert await parked == []
        await client.publish("q", [Envelope("b", b"")])
        assert await subscription.receive(1) == []
        await subscription.ack(found)
        with pytest.raises(MessageNotFound):
            await subscription.ack(found)
    assert (await client.stats("q")).depth == 1


async def test_each_settlement_of_one_turn_has_its_own_answer(owner: Any) -> None:
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
    """Record the frames of a kind that the client sends."""
    connection = client._connection
    assert connection is not None
    frames: list[int] = []
    ask = connection.ask

    def counted(asked: int, body: bytes, answered: Answered) -> int:
        if asked == kind:
            frames.append(len(body))
        return ask(asked, body, answered)

    monkeypatch.setattr(connection, "ask", counted)
    return frames


async def test_many_are_settled_by_one_frame_and_each_has_its_own_result(
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
        assert isinstance(last, MessageNotFound), "settled before; the others are extended"
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


async def test_many_that_meet_a_broken_connection(owner: Any) -> None:
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
        assert type(extended) is SubscriptionLost, "one error for all: it is logged once"


async def test_a_cancelled_settlement_ends_the_lease_when_it_is_answered(owner: Any) -> None:
    client = await owner.client()
    await client.declare(QueueSpec(name="q"))
    await client.publish("q", [Envelope("a", b"")])
    async with client.subscribe(spec()) as subscription:
        held = await subscription.receive(1)
        acking = asyncio.create_task(subscription.ack_many(held))
        await asyncio.sleep(0)
        acking.cancel()
        await asyncio.wait({acking})
        assert len(subscription._leases) == 1, "not before the owner has answered"
        await client.ping()
        assert subscription._leases == {}
    assert (await client.stats("q")).acked_total == 1


async def test_a_cancelled_publish_of_several_frames_leaves_no_unseen_error(
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


async def test_nothing_hangs_when_the_owner_dies(owner: Any) -> None:
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
            connection._transport.pause_reading()  # it answers no more
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
    await client.start()  # another connection
    await client.ping()
    await client.aclose()
    assert len(lost) == 1


async def test_a_deleted_queue_breaks_its_subscriptions(owner: Any) -> None:
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


async def test_an_ack_without_an_answer_is_given_up(
    owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claimed, "SETTLE_TIMEOUT", 0.05)
    client = await owner.client()
    await client.declare(QueueSpec(name="q"))
    await client.publish("q", [Envelope("a", b"")])
    async with client.subscribe(spec()) as subscription:
        (held,) = await subscription.receive(1)
        await client.ping()
        (connection,) = [c for c in owner.server._connections if c._handler._subscriptions]
        connection._transport.pause_reading()
        with pytest.raises(SubscriptionLost, match="no answer"):
            await subscription.ack(held)
        connection._transport.resume_reading()


async def test_a_loop_blocked_for_several_leases_keeps_them(owner: Any) -> None:
    """The owner is in this loop as well, so what the thread wrote meanwhile it reads first."""
    client, other = await owner.client(), await owner.client()
    await client.declare(QueueSpec(name="q", ack_deadline=0.15))
    await client.publish("q", [Envelope("a", b""), Envelope("b", b"")])
    async with client.subscribe(spec()) as subscription, other.subscribe(spec()) as rival:
        one, two = await subscription.receive(2)
        await subscription.ack(two)
        stealing = asyncio.create_task(rival.receive(1))
        await asyncio.sleep(0.01)
        time.sleep(0.6)  # noqa: ASYNC251  # blocking the loop is the point
        await asyncio.sleep(0.02)
        assert not stealing.done()
        await subscription.ack(one)
        stealing.cancel()
    assert (await client.stats("q")).acked_total == 2


async def test_in_a_living_loop_a_lease_that_is_not_renewed_ends(owner: Any) -> None:
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


@pytest.mark.parametrize("words", [b"\0" * 8 + b"\xff" * 8, protocol.frame(99, 1), b""])
async def test_whatever_is_no_owner_is_unavailable(directory: Path, words: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(words)
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, directory / "socket")
    with pytest.raises(BackendUnavailable):
        await asyncio.wait_for(SocketBackend(directory / "socket").start(), 30)
    server.close()


async def test_a_callback_that_fails_breaks_nothing(
    owner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = await owner.client()
    heard = asyncio.Event()

    def fail(letter: object) -> None:
        heard.set()
        raise RuntimeError("a listener's own fault")

    client.on_dead_letter(fail)
    await client.declare(QueueSpec(name="q"))
    await client.publish("q", [Envelope("a", b"", expires_at=time.time() + 0.01)])
    await asyncio.wait_for(heard.wait(), 30)
    await client.ping()
    assert "callback failed" in caplog.text


async def test_sends_wait_for_an_owner_that_does_not_keep_up(owner: Any) -> None:
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
    assert client._connection.write_buffer.waiting < 3_000_000, "what comes later waits outside"
    connection._transport.resume_reading()
    async with asyncio.timeout(30):
        await asyncio.gather(*sends, late)
    assert (await client.stats("q")).depth == 21


async def test_a_subscription_that_was_cancelled_while_it_opened_leaves_nothing(owner: Any) -> None:
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


async def test_an_owner_that_knows_fewer_fields_gets_the_rest(
    owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As version 0.1 does, which refuses what it does not know."""

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


def test_a_field_of_a_later_version_is_passed_over() -> None:
    body = protocol.encode_json({"name": "q", "max_depth": 3, "of_a_later_version": True})
    assert protocol.decode_record(QueueSpec, body) == QueueSpec(name="q", max_depth=3)
