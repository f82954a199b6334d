"""Settlement: a dead letter is written before the ack, and a failed step loses no message."""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest

from qkit import Channel, Reject, RetrySettings, Settings, consume
from qkit.backend import Delivery, SubscriptionSpec
from qkit.consuming.job import Job
from qkit.consuming.outcome import Abandon, Dead, Done, Pause, RetryLater
from qkit.consuming.settlement import Settlement
from qkit.errors import (
    AckDeadlineExceeded,
    BackendUnavailable,
    InvalidHeader,
    MessageNotFound,
    QueueFull,
    SubscriptionLost,
)
from qkit.message import DeadLetter, Envelope, Reason
from qkit.observability.events import DeadLettered, Events, Retried
from qkit.wiring import Wiring
from tests.support.backends import ScriptedBackend
from tests.support.services import failures, make_service, only_letter


class SettlementHarness:
    """A settlement with a fake subscription and scripted failures."""

    def __init__(self, clock, *, ordered=False, letters=True, broadcast=False) -> None:
        self.over = asyncio.Event()
        self.order: list[object] = []
        self.letters: list[DeadLetter] = []
        self.fails: dict[str, BaseException | float] = {}
        self.events: list[object] = []
        listeners = Events()
        listeners.on("retry", self.events.append)
        listeners.on("dead_letter", self.events.append)
        settings = Settings(type="native", send_timeout=10.0)
        wiring = Wiring.build(ScriptedBackend(), settings, clock, events=listeners)
        route = wiring.routes.resolve(Channel("orders", ordered=ordered, broadcast=broadcast))
        spec = SubscriptionSpec(
            queue="orders", group="billing", consumer="host-1-billing", prefetch=1
        )
        self.counters = route.counters
        self.connection = wiring.connection
        self.settlement = Settlement(wiring, route, spec, self.write if letters else None)

    async def _step(self, what: str, *facts: object) -> None:
        failure = self.fails.get(what)
        if isinstance(failure, float):
            await asyncio.sleep(failure)
        elif failure is not None:
            raise failure
        self.order.append((what, *facts) if facts else what)

    async def write(self, letter: DeadLetter) -> None:
        await self._step("write")
        self.letters.append(letter)

    async def ack(self, delivery: Delivery) -> None:
        await self._step("ack")

    async def release(self, delivery: Delivery, delay: float, *, count_attempt=True) -> None:
        await self._step("release", delay, count_attempt)

    async def settle(self, outcome, envelope: Envelope | None = None) -> None:
        envelope = envelope or Envelope("0190", b"{}", attempt=2)
        self.job = Job(Delivery(envelope, "orders", 1))
        await self.settlement.settle(self, self.job, outcome, self.over)  # type: ignore[arg-type]


@pytest.fixture
def harness(clock) -> SettlementHarness:
    return SettlementHarness(clock)


async def test_headers_that_the_broker_rejects_are_written_as_json(harness) -> None:
    """A permanent error must not prevent the dead letter from being written."""
    envelope = Envelope("0190", b"{}", {"odd name": "1", "lone": "\ud800"})
    refused: list[DeadLetter] = []

    async def write(letter: DeadLetter) -> None:
        if "odd name" in letter.headers:
            refused.append(letter)
            raise InvalidHeader("no spaces")
        harness.letters.append(letter)

    harness.settlement._write = write
    await harness.settle(Dead(Reason.UNDECODABLE, ValueError("no")), envelope)
    (letter,) = harness.letters
    assert len(refused) == 1
    assert harness.order == ["ack"]
    again = DeadLetter.from_envelope(letter.to_envelope())
    assert again.headers == {"odd name": "1", "lone": r"\ud800"}
    assert harness.settlement.failures.lasting() is None


async def test_a_failed_settlement_no_longer_affects_health_after_a_minute(harness, clock) -> None:
    harness.fails["ack"] = BackendUnavailable("gone")
    await harness.settle(Done())
    await asyncio.sleep(9.9)
    assert harness.settlement.failures.lasting() is None
    await asyncio.sleep(0.2)
    assert "gone" in harness.settlement.failures.lasting()
    await asyncio.sleep(45)
    assert harness.settlement.failures.lasting() is not None
    await asyncio.sleep(10)
    assert harness.settlement.failures.lasting() is None


@pytest.mark.parametrize(
    "error", [AckDeadlineExceeded("late"), MessageNotFound("gone"), SubscriptionLost("broke")]
)
async def test_a_message_that_another_consumer_has_does_not_make_the_consumer_unhealthy(
    harness, clock, error
) -> None:
    harness.fails["ack"] = error
    await harness.settle(Done())
    await asyncio.sleep(30)
    assert harness.settlement.failures.lasting() is None


def record_of(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    (record,) = caplog.records
    return record


@pytest.mark.proves("002-ack-3")
async def test_a_handled_message_is_acked(harness, clock, caplog):
    await harness.settle(Done())
    assert harness.order == ["ack"]
    assert harness.settlement.last_settle_at == clock.time() == harness.connection.last_success_at
    assert caplog.records == []


@pytest.mark.proves("003-retry-4")
async def test_a_retry_is_released_counted_emitted_and_logged_once(harness, clock, caplog):
    error = ValueError("no stock")
    envelope = Envelope("0190", b"{}", attempt=2)
    await harness.settle(RetryLater(4.0, error), envelope)
    assert harness.order == [("release", 4.0, True)]
    assert harness.counters.retried == 1
    assert harness.events == [Retried("orders", "0190", 2, 4.0, error)]
    assert envelope.headers == {"qkit-first-failed-at": repr(clock.time())}
    record = record_of(caplog)
    assert record.levelno == logging.WARNING
    assert "failed on attempt 2, retrying in 4 s: ValueError" in record.getMessage()
    assert (
        vars(record).items()
        >= {
            "queue": "orders",
            "consumer": "host-1-billing",
            "message_id": "0190",
            "attempt": 2,
            "error": "ValueError: no stock",
        }.items()
    )
    assert record.exc_info
    assert record.exc_info[1] is error


async def test_the_time_of_the_first_failure_is_stored_once(harness, clock):
    envelope = Envelope("0190", b"{}", {"qkit-first-failed-at": "5.0"})
    await harness.settle(RetryLater(1.0, ValueError()), envelope)
    assert envelope.headers == {"qkit-first-failed-at": "5.0"}


async def test_an_abandoned_message_is_released_immediately_without_counting_an_attempt(harness):
    await harness.settle(Abandon())
    assert harness.order == [("release", 0.0, False)]
    assert harness.counters.retried == 0


@pytest.mark.parametrize(("ordered", "wait"), [(False, 7.0), (True, 0.0)])
async def test_a_pause_releases_the_message_without_counting_an_attempt(clock, ordered, wait):
    # In an ordered channel there is no delay, so that no later message overtakes this one.
    harness = SettlementHarness(clock, ordered=ordered)
    await harness.settle(Pause(7.0, ValueError("down")))
    assert harness.order == [("release", wait, False)]
    assert harness.counters.retried == 0
    assert harness.events == []


async def test_a_dead_letter_is_written_before_the_ack(harness, clock, caplog):
    error = ValueError("bad total")
    envelope = Envelope(
        "0190", b"body", {"a": "b", "qkit-first-failed-at": "5.0"}, key="k", priority=3, attempt=3
    )
    await harness.settle(Dead(Reason.MAX_RETRIES_EXCEEDED, error), envelope)
    assert harness.order == ["write", "ack"]
    (letter,) = harness.letters
    assert letter == DeadLetter(
        message_id="0190",
        channel="orders",
        group=None,
        reason="MaxRetriesExceeded",
        error_type="ValueError",
        error="bad total",
        attempts=3,
        first_failed_at=5.0,
        last_failed_at=clock.time(),
        trace_id=None,
        body=b"body",
        headers={"a": "b"},
        key="k",
        priority=3,
    )
    assert harness.events == [DeadLettered(letter, kept=True)]
    assert (harness.counters.failed, harness.counters.dead_lettered) == (1, 1)
    record = record_of(caplog)
    assert record.levelno == logging.ERROR
    assert "failed for good (MaxRetriesExceeded), dead-lettered" in record.getMessage()
    assert vars(record)["error"] == "ValueError: bad total"
    assert record.exc_info


async def test_the_dead_letter_of_a_topic_names_the_group(clock):
    harness = SettlementHarness(clock, broadcast=True)
    await harness.settle(Dead(Reason.EXPLICIT_NACK, Reject("no")))
    assert harness.letters[0].group == "billing"


async def test_a_rejection_is_logged_without_a_traceback(harness, caplog):
    await harness.settle(Dead(Reason.EXPLICIT_NACK, Reject("no")))
    record = record_of(caplog)
    assert record.exc_info is None
    assert vars(record)["error"] == "Reject: no"


async def test_a_dead_letter_without_an_error_is_logged(harness, caplog):
    await harness.settle(Dead(Reason.TTL_EXPIRED, None))
    record = record_of(caplog)
    assert vars(record)["error"] is None
    assert "TTLExpired" in record.getMessage()
    assert harness.letters[0].error is None


@pytest.mark.proves("003-retry-6", "003-errors-7")
async def test_without_dead_letters_a_final_failure_is_logged_acked_and_counted(clock, caplog):
    harness = SettlementHarness(clock, letters=False)
    await harness.settle(Dead(Reason.MAX_RETRIES_EXCEEDED, ValueError("x")))
    assert harness.order == ["ack"]
    assert (harness.counters.failed, harness.counters.dead_lettered) == (1, 0)
    (event,) = harness.events
    assert isinstance(event, DeadLettered)
    assert not event.kept
    record = record_of(caplog)
    assert record.levelno == logging.ERROR
    assert "discarded: the channel keeps no dead letters" in record.getMessage()


@pytest.mark.parametrize("failure", [QueueFull("full"), TimeoutError()])
async def test_a_message_whose_dead_letter_cannot_be_written_is_released_at_the_end_of_the_session(
    harness, caplog, failure
):
    harness.fails["write"] = failure
    harness.over.set()
    await harness.settle(Dead(Reason.MAX_RETRIES_EXCEEDED, ValueError("x")))
    assert harness.order == [("release", 0.0, False)]
    assert (harness.counters.failed, harness.counters.dead_lettered) == (0, 0)
    assert harness.events == []
    assert "could not be dead-lettered" in record_of(caplog).getMessage()


async def test_a_slow_write_leaves_time_for_the_release(harness):
    async def slow(letter: DeadLetter) -> None:
        await asyncio.sleep(10.0)
        raise TimeoutError

    harness.settlement._write = slow
    harness.over.set()
    await harness.settle(Dead(Reason.MAX_RETRIES_EXCEEDED, ValueError("x")))
    assert harness.order == [("release", 0.0, False)]


async def test_writing_a_dead_letter_is_retried_with_backoff_while_the_message_is_held(
    harness, clock
):
    tries: list[float] = []

    async def late(letter: DeadLetter) -> None:
        tries.append(clock.monotonic())
        if len(tries) < 4:
            raise QueueFull("full")

    harness.settlement._write = late
    await harness.settle(Dead(Reason.MAX_RETRIES_EXCEEDED, ValueError("x")))
    waits = [after - before for before, after in itertools.pairwise(tries)]
    assert all(0.5 * 2**n <= wait <= 0.55 * 2**n for n, wait in enumerate(waits))
    assert harness.order == ["ack"]
    assert harness.counters.dead_lettered == 1


async def test_writing_the_dead_letter_of_a_lost_message_is_not_retried(harness, caplog):
    tries = 0

    async def refuse(letter: DeadLetter) -> None:
        nonlocal tries
        tries += 1
        harness.job.lost = True  # another consumer has the message and may succeed
        raise QueueFull("full")

    harness.settlement._write = refuse
    await harness.settle(Dead(Reason.MAX_RETRIES_EXCEEDED, ValueError("x")))
    assert (tries, harness.order) == (1, []), "retried the write or released the lost message"
    assert (harness.counters.failed, harness.counters.dead_lettered) == (0, 0)
    assert "settled too late" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("failure", "word"),
    [
        (AckDeadlineExceeded("late"), "settled too late: its lease has expired"),
        (MessageNotFound("gone"), "could not be settled: it no longer exists"),
        (BackendUnavailable("broken"), "could not be settled and will be delivered again"),
    ],
)
@pytest.mark.parametrize("outcome", [Done(), Dead(Reason.EXPLICIT_NACK, None)])
async def test_a_failed_settlement_is_logged_and_does_not_count_as_a_success(
    harness, caplog, failure, word, outcome
):
    harness.fails["ack"] = failure
    await harness.settle(outcome)
    assert word in caplog.records[-1].getMessage()
    assert harness.settlement.last_settle_at is None
    assert harness.connection.last_success_at is None


@pytest.mark.parametrize(
    ("outcome", "step"),
    [
        (Abandon(), "release"),
        (RetryLater(1.0, ValueError()), "release"),
        (Dead(Reason.EXPLICIT_NACK, None), "ack"),
    ],
)
async def test_a_settlement_without_a_response_ends_at_its_timeout(
    harness, clock, caplog, outcome, step
):
    harness.fails[step] = 1e6
    before = clock.monotonic()
    await harness.settle(outcome)
    assert clock.monotonic() - before == 10.0
    assert "could not be settled" in caplog.records[-1].getMessage()


# -- through the service -----------------------------------------------------------------------


async def reject(body: object) -> None:
    raise Reject("no")


async def test_the_dead_letter_is_confirmed_before_the_message_is_acked(clock):
    backend = ScriptedBackend()
    async with make_service(consume("orders")(reject), clock=clock, backend=backend) as service:
        sent = await service.send("orders", 1)
        backend.script("publish", 3.0)  # a slow broker
        await clock.advance(1)
        assert backend.of("ack") == []
        await clock.advance(3)
        assert backend.of("publish", "ack") == [
            ("publish", "orders", sent.message_id),
            ("publish", "orders_dlq", sent.message_id),
            ("ack", sent.message_id),
        ]


async def test_no_message_is_lost_if_the_dead_letter_queue_fails(clock):
    backend = ScriptedBackend()
    async with make_service(consume("orders")(reject), clock=clock, backend=backend) as service:
        sent = await service.send("orders", 1)
        backend.script("publish", QueueFull("full"), QueueFull("full"))
        await clock.advance(10)
        assert backend.of("release", "publish", "ack") == [
            ("publish", "orders", sent.message_id),
            ("publish", "orders_dlq", sent.message_id),
            ("ack", sent.message_id),
        ]
        assert failures(service, "orders") == (0, 1, 1)


async def test_no_message_is_lost_if_the_dead_letter_queue_does_not_respond(clock):
    backend = ScriptedBackend()
    async with make_service(
        consume("orders")(reject), clock=clock, backend=backend, send_timeout=5.0
    ) as service:
        sent = await service.send("orders", 1)
        backend.script("publish", 1e6)  # no response
        await clock.advance(20)
        assert backend.of("release", "publish", "ack") == [
            ("publish", "orders", sent.message_id),
            ("publish", "orders_dlq", sent.message_id),
            ("ack", sent.message_id),
        ]


async def test_a_channel_without_dead_letters_logs_the_discarded_message(clock, caplog):
    orders = Channel("orders", dead_letter=False)
    events: list[DeadLettered] = []

    @consume(orders)
    async def reject_order(body: object) -> None:
        raise Reject("no")

    async with make_service(reject_order, clock=clock) as service:
        service.on("dead_letter", events.append)
        sent = await service.send("orders", 1)
        await clock.advance(1)
        stats = await service.stats("orders")
        assert (stats.depth, stats.in_flight, stats.acked_total) == (0, 0, 1)
        assert failures(service, "orders") == (0, 1, 0)
    assert [(event.letter.message_id, event.kept) for event in events] == [(sent.message_id, False)]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [vars(record)["message_id"] for record in errors] == [sent.message_id]


async def test_an_error_whose_str_fails_is_dead_lettered_once(clock):
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    @consume("orders", retry=RetrySettings(max_attempts=2))
    async def handle(order: object) -> None:
        raise Broken

    async with make_service(handle, clock=clock) as service:
        await service.send("orders", 1)
        await clock.advance(10)
        letter = await only_letter(service, "orders")
        assert letter.attempts == 2
        assert "has no text" in (letter.error or "")
        assert service.health_check().status == "healthy"


async def test_shutdown_releases_messages_that_wait_for_their_dead_letter(clock):
    backend = ScriptedBackend()
    service = make_service(consume("orders")(reject), clock=clock, backend=backend)
    await service.start()
    sent = await service.send("orders", 1)
    backend.script("publish", *[QueueFull("full")] * 50)
    await clock.advance(5)
    began = clock.monotonic()
    await service.shutdown(timeout=5)
    assert clock.monotonic() - began < 1
    assert backend.of("release", "ack") == [("release", sent.message_id, 0.0, False)]
