"""Dead letters: list, filter, replay and purge, including those that the engine writes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from qkit import (
    DeadLettered,
    Message,
    PartialSend,
    QueueError,
    QueueFull,
    QueueService,
    Reason,
    Reject,
    Settings,
    consume,
)
from qkit.backend import QueueSpec, SubscriptionSpec
from qkit.backends.native.backend import NativeBackend
from qkit.conformance import FaultInjectingBackend
from qkit.message import DeadLetter, Envelope, LeaseExpired, Sent
from qkit.testing.clock import VirtualClock
from tests.support.faulty import FaultyBackend


class FailingHandler:
    """A handler of orders that fails on demand and records its messages."""

    def __init__(self) -> None:
        self.failing: Callable[[int], Exception | None] = lambda body: None
        self.seen: list[Message] = []

    @consume("orders")
    async def handle(self, body: int, message: Message) -> None:
        self.seen.append(message)
        error = self.failing(body)
        if error is not None:
            raise error


def make(clock: VirtualClock, *handlers: object, **settings: Any) -> QueueService:
    service = QueueService(
        Settings(type="native", **({"retry": {"enabled": False}} | settings)),
        backend=FaultyBackend(clock, name="native"),
        clock=clock,
    )
    for handler in handlers:
        service.register(handler)
    return service


def backend_of(service: QueueService) -> FaultyBackend:
    backend = service._backend
    assert isinstance(backend, FaultyBackend)
    return backend


async def test_dead_letters_are_listed_with_reason_and_error(
    virtual_clock: VirtualClock,
) -> None:
    failing_handler = FailingHandler()
    failing_handler.failing = lambda body: [ValueError("negative total"), Reject("not ours"), None][
        body
    ]
    async with make(virtual_clock, failing_handler) as service:
        sent = await service.send_many("orders", [0, 1, 2], headers={"tenant": "acme"})
        await backend_of(service).publish("orders", [Envelope("their-id", b"no json")])
        await virtual_clock.advance(1)
        letters = {
            letter.message_id: letter for letter in await service.dead_letters("orders").list()
        }
    failed, rejected, foreign = letters[sent[0][0]], letters[sent[1][0]], letters["their-id"]
    assert len(letters) == 3
    assert (failed.reason, failed.error_type, failed.error) == (
        "MaxRetriesExceeded", "ValueError", "negative total",
    )  # fmt: skip
    assert (rejected.reason, rejected.error) == ("ExplicitNack", "not ours")
    assert (foreign.reason, foreign.body, foreign.error_type) == (
        "Undecodable", b"no json", "DecodeError",
    )  # fmt: skip
    assert {letter.channel for letter in letters.values()} == {"orders"}
    assert failed.headers == {"tenant": "acme"}
    assert failed.attempts == 1
    assert failed.first_failed_at == failed.last_failed_at


async def test_first_and_last_failure_have_different_times(virtual_clock: VirtualClock) -> None:
    failing_handler = FailingHandler()
    failing_handler.failing = lambda body: ValueError("no")
    async with make(virtual_clock, failing_handler, retry={"jitter": 0}) as service:
        await service.send("orders", 1)
        await virtual_clock.advance(60)
        (letter,) = await service.dead_letters("orders").list()
    assert letter.attempts == 3
    assert letter.last_failed_at - letter.first_failed_at == pytest.approx(3.0)


async def failed_orders(
    service: QueueService, failing_handler: FailingHandler, clock: VirtualClock
) -> list[str]:
    """Create six dead letters: three ValueErrors, two KeyErrors and one rejection."""
    errors = [
        ValueError("a"),
        KeyError("b"),
        Reject("c"),
        ValueError("d"),
        KeyError("a"),
        ValueError(),
    ]
    failing_handler.failing = lambda body: errors[body]
    sent = await service.send_many("orders", range(6))
    await clock.advance(1)
    failing_handler.failing = lambda body: None
    failing_handler.seen.clear()
    return [item.message_id for item in sent]


@pytest.mark.parametrize(
    ("filters", "places"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"reason": Reason.EXPLICIT_NACK}, [2]),
        ({"reason": "MaxRetriesExceeded"}, [0, 1, 3, 4, 5]),
        ({"error": "ValueError"}, [0, 3, 5]),
        ({"error": "'a'"}, [4]),
        ({"error": "a", "reason": "MaxRetriesExceeded"}, [0, 4]),
        ({"error": "nothing like it"}, []),
        ({"limit": 2}, [0, 1]),
        ({"limit": 2, "error": "ValueError"}, [0, 3]),
        ({"ids": []}, []),
    ],
)
async def test_filters_select_the_dead_letters_to_list_and_replay(
    virtual_clock: VirtualClock, filters: dict[str, Any], places: list[int]
) -> None:
    failing_handler = FailingHandler()
    async with make(virtual_clock, failing_handler) as service:
        ids = await failed_orders(service, failing_handler, virtual_clock)
        letters = service.dead_letters("orders")
        listed = await letters.list(**filters)
        assert [letter.message_id for letter in listed] == [ids[place] for place in places]
        assert len(await letters.list()) == 6  # listing removes nothing
        assert await letters.replay(**filters) == len(places)
        await virtual_clock.advance(1)
        assert sorted(message.id for message in failing_handler.seen) == sorted(
            ids[place] for place in places
        )
        assert len(await letters.list()) == 6 - len(places)


async def test_dead_letters_can_be_selected_by_id(virtual_clock: VirtualClock) -> None:
    failing_handler = FailingHandler()
    async with make(virtual_clock, failing_handler) as service:
        ids = await failed_orders(service, failing_handler, virtual_clock)
        letters = service.dead_letters("orders")
        assert [letter.message_id for letter in await letters.list(ids=ids[1])] == [ids[1]]
        assert await letters.replay([ids[1], ids[4], "no such id"]) == 2
        assert await letters.replay(ids[2]) == 1
        assert await letters.replay(ids[2]) == 0
        await virtual_clock.advance(1)
        assert {message.id for message in failing_handler.seen} == {ids[1], ids[2], ids[4]}


@pytest.mark.parametrize("limit", [0, -1])
async def test_a_limit_below_one_is_rejected(virtual_clock: VirtualClock, limit: int) -> None:
    failing_handler = FailingHandler()
    async with make(virtual_clock, failing_handler) as service:
        await failed_orders(service, failing_handler, virtual_clock)
        letters = service.dead_letters("orders")
        with pytest.raises(ValueError, match="must be at least 1"):
            await letters.list(limit)
        with pytest.raises(ValueError, match="must be at least 1"):
            await letters.replay(limit=limit)
        assert len(await letters.list()) == 6


async def test_a_replayed_message_keeps_its_id_and_starts_at_attempt_one(
    virtual_clock: VirtualClock,
) -> None:
    failing_handler = FailingHandler()
    failing_handler.failing = lambda body: ValueError("no")
    async with make(
        virtual_clock, failing_handler, retry={"jitter": 0}, prefix="staging."
    ) as service:
        sent = await service.send(
            "orders", 7, key="k", priority=8, headers={"tenant": "acme"}, ttl=100
        )
        await virtual_clock.advance(50)
        assert [message.attempt for message in failing_handler.seen] == [1, 2, 3]
        failing_handler.failing = lambda body: None
        assert await service.dead_letters("orders").replay() == 1
        await virtual_clock.advance(1)
        assert await service.dead_letters("orders").list() == []
        assert service.metrics().messages_sent == 2
    again = failing_handler.seen[-1]
    assert (again.id, again.attempt, again.channel) == (sent.message_id, 1, "orders")
    assert (again.key, again.priority, again.body) == ("k", 8, b"7")
    assert again.headers == {"tenant": "acme"}
    assert again.expires_at is None


async def test_an_expired_message_can_be_replayed(virtual_clock: VirtualClock) -> None:
    failing_handler = FailingHandler()
    async with make(virtual_clock, failing_handler) as service:
        service.pause("orders")
        await service.send("orders", 1, ttl=5)
        await virtual_clock.advance(10)
        (letter,) = await service.dead_letters("orders").list()
        assert letter.reason == "TTLExpired"
        service.resume("orders")
        assert await service.dead_letters("orders").replay(reason="TTLExpired") == 1
        await virtual_clock.advance(1)
    assert [message.body for message in failing_handler.seen] == [b"1"]


async def test_a_replayed_undecodable_message_fails_again(
    virtual_clock: VirtualClock,
) -> None:
    failing_handler = FailingHandler()
    async with make(virtual_clock, failing_handler) as service:
        await backend_of(service).publish("orders", [Envelope("x", b"[1,")])
        await virtual_clock.advance(1)
        assert await service.dead_letters("orders").replay(reason=Reason.UNDECODABLE) == 1
        await virtual_clock.advance(1)
        (letter,) = await service.dead_letters("orders").list()
    assert (letter.message_id, letter.body, letter.reason) == ("x", b"[1,", "Undecodable")


async def test_many_dead_letters_are_replayed_in_several_round_trips(
    virtual_clock: VirtualClock,
) -> None:
    failing_handler = FailingHandler()
    failing_handler.failing = lambda body: ValueError("no")
    async with make(virtual_clock, failing_handler) as service:
        await service.send_many("orders", range(250))
        await virtual_clock.advance(5)
        failing_handler.failing = lambda body: None
        failing_handler.seen.clear()
        backend_of(service).calls.clear()
        assert await service.dead_letters("orders").replay() == 250
        assert backend_of(service).count("publish") == 3
        await virtual_clock.advance(5)
    assert len(failing_handler.seen) == 250


async def test_a_crash_between_send_and_removal_duplicates_the_message(
    virtual_clock: VirtualClock,
) -> None:
    failing_handler = FailingHandler()
    async with make(virtual_clock, failing_handler) as service:
        ids = await failed_orders(service, failing_handler, virtual_clock)
        backend_of(service).script("remove", QueueError("gone"))
        with pytest.raises(QueueError, match="gone"):
            await service.dead_letters("orders").replay(ids[0])
        await virtual_clock.advance(1)
        assert [message.id for message in failing_handler.seen] == [ids[0]]
        assert len(await service.dead_letters("orders").list()) == 6


async def test_a_filtered_replay_removes_the_letter_that_it_sent(
    virtual_clock: VirtualClock,
) -> None:
    """A process that was killed after its dead letter may leave a second one with the same id."""
    service = make(virtual_clock)
    async with service:
        await service.send("orders", 1)
        (message,) = await service.peek("orders")
        for error in (ValueError("first"), LeaseExpired("second")):
            letter = DeadLetter.of(
                Envelope(message.id, message.body),
                channel="orders",
                group=None,
                reason=Reason.MAX_RETRIES_EXCEEDED,
                error=error,
                at=virtual_clock.time(),
            )
            await backend_of(service).publish("orders_dlq", [letter.to_envelope()])
        letters = service.dead_letters("orders")
        assert await letters.replay(error="LeaseExpired") == 1
        assert [letter.error_type for letter in await letters.list()] == ["ValueError"]


async def test_a_message_that_a_full_queue_rejects_stays_a_dead_letter(
    virtual_clock: VirtualClock,
) -> None:
    failing_handler = FailingHandler()
    async with make(virtual_clock, failing_handler, max_depth=8) as service:
        await failed_orders(service, failing_handler, virtual_clock)
        service.pause("orders")
        backend = backend_of(service)
        await backend.native.delete("orders")
        await backend.declare(QueueSpec(name="orders", max_depth=4))
        letters = service.dead_letters("orders")
        with pytest.raises(PartialSend):
            await letters.replay()
        assert (await service.stats("orders")).depth == 4
        assert len(await letters.list()) == 2
        with pytest.raises(QueueFull):
            await letters.replay()
        assert len(await letters.list()) == 2
        assert service.metrics().messages_sent == 10


async def test_purge_deletes_all_dead_letters(virtual_clock: VirtualClock) -> None:
    failing_handler = FailingHandler()
    async with make(virtual_clock, failing_handler) as service:
        await failed_orders(service, failing_handler, virtual_clock)
        assert await service.dead_letters("orders").purge() == 6
        assert await service.dead_letters("orders").list() == []


async def test_a_channel_without_a_dead_letter_queue_lists_none(
    virtual_clock: VirtualClock,
) -> None:
    async with make(virtual_clock) as service:
        letters = service.dead_letters("never-used")
        assert await letters.list() == []
        assert await letters.replay() == 0
        assert await letters.purge() == 0


async def test_a_deleted_dead_letter_queue_is_declared_again_when_needed(
    virtual_clock: VirtualClock,
) -> None:
    failing_handler = FailingHandler()
    failing_handler.failing = lambda body: ValueError("no")
    async with make(virtual_clock, failing_handler) as service:
        await service.delete("orders_dlq")
        await service.send("orders", 1)
        await virtual_clock.advance(1)
        assert len(await service.dead_letters("orders").list()) == 1
    assert len(failing_handler.seen) == 1


# -- topics ----------------------------------------------------------------------------------


class Prices:
    """Handlers of two groups of a topic, which fail on demand."""

    def __init__(self) -> None:
        self.failing: dict[str, Exception | None] = {"web": None, "risk": None}
        self.seen: list[tuple[str, int]] = []

    def _record(self, group: str, tick: int) -> None:
        self.seen.append((group, tick))
        error = self.failing[group]
        if error is not None:
            raise error

    @consume("prices", group="web", broadcast=True)
    async def web(self, tick: int) -> None:
        self._record("web", tick)

    @consume("prices", group="risk", broadcast=True)
    async def risk(self, tick: int) -> None:
        self._record("risk", tick)


async def test_every_group_of_a_topic_receives_a_copy(virtual_clock: VirtualClock) -> None:
    prices = Prices()
    async with make(virtual_clock, prices) as service:
        await service.publish("prices", 1)
        await service.publish("prices", 2)
        await virtual_clock.advance(1)
    assert sorted(prices.seen) == [("risk", 1), ("risk", 2), ("web", 1), ("web", 2)]


async def test_a_dead_letter_of_one_group_is_replayed_only_to_that_group(
    virtual_clock: VirtualClock,
) -> None:
    prices = Prices()
    prices.failing["risk"] = ValueError("no")
    async with make(virtual_clock, prices) as service:
        await service.publish("prices", 1)
        await virtual_clock.advance(1)
        (letter,) = await service.dead_letters("prices").list()
        assert letter.group == "risk"
        prices.failing["risk"] = None
        prices.seen.clear()
        assert await service.dead_letters("prices").replay() == 1
        await virtual_clock.advance(1)
        assert await service.dead_letters("prices").list() == []
    assert prices.seen == [("risk", 1)]


async def test_replaying_one_group_loses_no_dead_letter_of_another(
    virtual_clock: VirtualClock,
) -> None:
    prices = Prices()
    prices.failing = {"web": KeyError("w"), "risk": ValueError("r")}
    async with make(virtual_clock, prices) as service:
        await service.publish("prices", 1)
        await virtual_clock.advance(1)
        letters = service.dead_letters("prices")
        assert len(await letters.list()) == 2
        prices.failing = {"web": None, "risk": None}
        prices.seen.clear()
        assert await letters.replay(error="ValueError") == 1
        await virtual_clock.advance(1)
        assert prices.seen == [("risk", 1)]
        assert [letter.group for letter in await letters.list()] == ["web"]


async def test_an_older_letter_of_another_group_is_kept_when_writing_it_again_fails(
    virtual_clock: VirtualClock,
) -> None:
    """The replayed message is then sent twice, but no letter is lost."""
    prices = Prices()
    prices.failing = {"web": KeyError("w"), "risk": ValueError("r")}
    async with make(virtual_clock, prices) as service:
        await service.publish("prices", 1)
        await virtual_clock.advance(1)
        letters = service.dead_letters("prices")
        before = await letters.list()
        prices.failing = {"web": None, "risk": None}
        backend_of(service).script("publish", None, QueueFull("full"))
        with pytest.raises(QueueFull):
            await letters.replay(group=before[-1].group)
        assert await letters.list() == before


async def test_a_service_without_handlers_can_replay_dead_letters_of_a_topic(
    virtual_clock: VirtualClock,
) -> None:
    prices = Prices()
    prices.failing["risk"] = ValueError("no")
    async with make(virtual_clock, prices) as service:
        await service.publish("prices", 1)
        await virtual_clock.advance(1)
        prices.failing["risk"] = None
        prices.seen.clear()
        tool = QueueService(
            Settings(type="native", retry={"enabled": False}),
            backend=backend_of(service),
            clock=virtual_clock,
        )
        async with tool:
            assert await tool.dead_letters("prices").replay() == 1
            await virtual_clock.advance(1)
            assert prices.seen == [("risk", 1)]


# -- dead letters written by the engine ------------------------------------------------------


async def test_a_message_whose_lease_expires_too_often_is_counted_logged_and_emitted(
    virtual_clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    received: list[DeadLettered] = []
    service = make(virtual_clock, retry={"max_attempts": 3}, ack_deadline=10, prefix="staging.")
    service.on("dead_letter", received.append)
    async with service:
        sent = await service.send("orders", 1)
        worker = QueueSpec(name="staging.orders", max_deliveries=3, ack_deadline=10)
        await backend_of(service).declare(worker)
        spec = SubscriptionSpec(queue="staging.orders", group="g", consumer="dead", prefetch=1)
        for _ in range(3):  # workers that crash while they hold the message
            async with backend_of(service).subscribe(spec) as subscription:
                await subscription.receive(1)
                await virtual_clock.advance(11)
        (letter,) = await service.dead_letters("orders").list()
        metrics = service.metrics().channels["orders"]
    assert (letter.reason, letter.attempts) == ("MaxRetriesExceeded", 3)
    assert "expired" in (letter.error or "")
    assert [(event.letter.message_id, event.kept) for event in received] == [
        (sent.message_id, True)
    ]
    assert received[0].letter.channel == "orders"
    assert (metrics.messages_failed, metrics.messages_dead_lettered) == (1, 1)
    (logged,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert vars(logged)["queue"] == "orders"
    assert vars(logged)["message_id"] == sent.message_id


async def test_an_expired_message_is_counted_once_and_emitted(
    virtual_clock: VirtualClock,
) -> None:
    received: list[DeadLettered] = []
    service = make(virtual_clock)
    service.on("dead_letter", received.append)
    async with service:
        await service.send("orders", 1, ttl=5)
        await virtual_clock.advance(6)
        assert service.metrics().messages_dead_lettered == 1
    assert [event.letter.reason for event in received] == ["TTLExpired"]


async def test_a_dead_letter_is_counted_once_after_a_second_start(
    virtual_clock: VirtualClock,
) -> None:
    service = make(virtual_clock, FailingHandler())
    backend_of(service).script("declare", QueueError("not yet"))
    with pytest.raises(QueueError, match="not yet"):
        await service.start()
    async with service:
        service.pause("orders")
        await service.send("orders", 1, ttl=5)
        await virtual_clock.advance(6)
        assert service.metrics().messages_dead_lettered == 1


async def test_dead_letters_of_other_channels_are_not_counted(
    virtual_clock: VirtualClock,
) -> None:
    service = make(virtual_clock)
    async with service:
        backend = backend_of(service)
        await backend.declare(QueueSpec(name="theirs"))
        expiring = Envelope("x", b"", expires_at=virtual_clock.time() + 1)
        await backend.publish("theirs", [expiring])
        await virtual_clock.advance(2)
        assert service.metrics().messages_dead_lettered == 0


async def test_without_dead_letters_the_event_of_a_final_failure_has_kept_false(
    virtual_clock: VirtualClock,
) -> None:
    failing_handler = FailingHandler()
    failing_handler.failing = lambda body: ValueError("no")
    received: list[DeadLettered] = []
    service = make(virtual_clock, failing_handler, dead_letter={"enabled": False})
    service.on("dead_letter", received.append)
    async with service:
        await service.send("orders", 1)
        await asyncio.sleep(1)
        assert await service.queues() == ["orders"]
        metrics = service.metrics()
    assert [event.kept for event in received] == [False]
    assert (metrics.messages_failed, metrics.messages_dead_lettered) == (1, 0)


async def test_a_message_that_fails_again_during_its_replay_is_kept(
    virtual_clock: VirtualClock,
) -> None:
    @consume("orders")
    async def reject(order: int) -> None:
        raise Reject("never")

    class Slow(FaultInjectingBackend):
        async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
            sent = await super().publish(queue, envelopes)
            await asyncio.sleep(0.02)  # the confirmation is slow
            return sent

    backend = Slow(NativeBackend(clock=virtual_clock))
    service = QueueService(Settings(type="native"), backend=backend, clock=virtual_clock)
    service.register(reject)
    async with service:
        await service.send("orders", 1)
        await virtual_clock.advance(1)
        letters = service.dead_letters("orders")
        (before,) = await letters.list()
        assert await letters.replay() == 1
        await virtual_clock.advance(1)
        (after,) = await letters.list()
        assert after.message_id == before.message_id
        assert after.last_failed_at > before.last_failed_at


async def test_a_full_dead_letter_queue_reports_the_letter_that_it_drops(
    virtual_clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    @consume("orders")
    async def reject(order: int) -> None:
        raise Reject(f"order {order}")

    service = QueueService(
        Settings(type="native", dead_letter={"max_size": 2}), clock=virtual_clock
    )
    service.register(reject)
    dropped: list[str | None] = []

    def note(event: DeadLettered) -> None:
        if not event.kept:
            dropped.append(event.letter.error)

    service.on("dead_letter", note)
    async with service:
        await service.send_many("orders", [1, 2, 3])
        await virtual_clock.advance(1)
        assert dropped == ["order 1"]
        assert (await service.stats("orders_dlq")).dropped_total == 1
    assert "dropped the oldest dead letter" in caplog.text
