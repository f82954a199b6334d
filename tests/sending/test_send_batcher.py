"""Sends to a queue: batching, deadlines, retries and the circuit breaker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from qkit import Settings
from qkit._internal.ids import new_id
from qkit._internal.retry import Backoff
from qkit.backend import QueueSpec
from qkit.errors import (
    BackendUnavailable,
    CircuitOpen,
    PartialSend,
    PayloadTooLarge,
    QueueError,
    QueueFull,
    QueueNotFound,
    SendTimeout,
)
from qkit.handlers.channel import undeclared
from qkit.handlers.route import Route
from qkit.message import Envelope, Sent
from qkit.observability.connection_state import ConnectionState
from qkit.sending.circuit_breaker import BreakerState, CircuitBreaker
from qkit.sending.group_publisher import MAX_BATCH_MESSAGES
from qkit.sending.guarded_backend import GuardedBackend
from qkit.sending.send_batcher import SendBatcher
from qkit.testing.clock import VirtualClock
from qkit.wiring import Wiring
from tests.support.faulty import BLACK_HOLE, FaultyBackend

TIMEOUT = 10.0


class BatcherHarness:
    """A batcher on a backend with scripted faults."""

    def __init__(self, clock: VirtualClock, backend: FaultyBackend) -> None:
        self.clock = clock
        self.backend = backend
        settings = Settings(type="native", send_timeout=TIMEOUT)
        wiring = Wiring.build(backend, settings, clock)
        self.connection = wiring.connection
        self.connection.transition_to(ConnectionState.CONNECTED)
        self.guarded = GuardedBackend(wiring)
        self.breaker = self.guarded.breaker
        backoff = Backoff(initial=0.05, maximum=2.0)
        self.declare: Callable[[], Awaitable[None]] | None = None
        self.route = wiring.routes.resolve(undeclared("orders", broadcast=False))
        self.orders = SendBatcher(self.guarded, "orders", backoff, self._declare)
        self.audit = SendBatcher(self.guarded, "audit", backoff, self._declare)

    async def _declare(self, route: Route) -> None:
        if self.declare is not None:
            await self.declare()
        route.declared = True

    async def send(self, count: int = 1) -> list[Sent]:
        return await self.orders.send([envelope() for _ in range(count)])

    def begin(self, count: int = 1) -> asyncio.Task[list[Sent]]:
        return asyncio.create_task(self.send(count))

    async def drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT):
                await self.orders.drain()
        await self.orders.close()

    async def limit(self, depth: int) -> None:
        await self.backend.native.delete("orders")
        await self.backend.declare(QueueSpec(name="orders", max_depth=depth))

    async def depth(self) -> int:
        return (await self.backend.native.stats("orders")).depth


def envelope() -> Envelope:
    return Envelope(new_id(), b"{}")


def down(text: str = "refused") -> BackendUnavailable:
    return BackendUnavailable(text)


@pytest_asyncio.fixture
async def harness(virtual_clock: VirtualClock) -> AsyncIterator[BatcherHarness]:
    backend = FaultyBackend(virtual_clock)
    await backend.start()
    await backend.declare(QueueSpec(name="orders"))
    await backend.declare(QueueSpec(name="audit"))
    backend.calls.clear()
    yield BatcherHarness(virtual_clock, backend)
    await backend.aclose()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


# -- batching --------------------------------------------------------------------------------


async def test_a_single_send_is_published_immediately(harness: BatcherHarness) -> None:
    started = harness.clock.monotonic()
    (sent,) = await harness.send()
    assert harness.backend.published == [[sent.message_id]]
    assert harness.clock.monotonic() == started


async def test_sends_during_a_round_trip_share_the_next_one(harness: BatcherHarness) -> None:
    gate = asyncio.Event()
    harness.backend.script("publish", gate)
    sends = [harness.begin() for _ in range(100)]
    await settle()
    assert harness.backend.count("publish") == 1
    gate.set()
    results = await asyncio.gather(*sends)
    assert harness.backend.count("publish") == 2
    assert [len(ids) for ids in harness.backend.published] == [1, 99]
    order = [sent.message_id for (sent,) in results]
    assert [item for ids in harness.backend.published for item in ids] == order


async def test_a_batch_has_a_maximum_size(harness: BatcherHarness) -> None:
    gate = asyncio.Event()
    harness.backend.script("publish", gate)
    sends = [
        harness.begin(count) for count in (1, MAX_BATCH_MESSAGES - 1, 1, 1, MAX_BATCH_MESSAGES + 5)
    ]
    await settle()
    gate.set()
    await asyncio.gather(*sends)
    assert [len(ids) for ids in harness.backend.published] == [1, 1_000, 1, 1_005]


@pytest.mark.proves("001-concurrency-1", "002-performance-5")
async def test_queues_do_not_wait_for_each_other(harness: BatcherHarness) -> None:
    gate = asyncio.Event()
    harness.backend.script("publish", gate)
    slow = harness.begin()
    await settle()
    await harness.audit.send([envelope()])
    assert not slow.done()
    gate.set()
    await slow


async def test_each_sender_of_a_failed_batch_gets_its_own_error(harness: BatcherHarness) -> None:
    gate = asyncio.Event()
    harness.backend.script("publish", gate)
    first, *rest = [harness.begin() for _ in range(4)]
    await settle()
    await harness.limit(1)
    gate.set()
    await first
    errors = await asyncio.gather(*rest, return_exceptions=True)
    assert [type(error) for error in errors] == [QueueFull] * 3
    assert len({id(error) for error in errors}) == 3
    assert len({error.message_id for error in errors if isinstance(error, QueueFull)}) == 3


async def test_an_unexpected_error_reaches_every_sender(harness: BatcherHarness) -> None:
    class Odd(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__("cannot be copied")

    gate = asyncio.Event()
    harness.backend.script("publish", gate, Odd(1, 2))
    first, *rest = [harness.begin() for _ in range(3)]
    await settle()
    gate.set()
    await first
    errors = await asyncio.gather(*rest, return_exceptions=True)
    assert [type(error) for error in errors] == [Odd, Odd]
    assert harness.breaker.state is BreakerState.CLOSED


async def test_each_sender_gets_its_part_of_a_partial_send(harness: BatcherHarness) -> None:
    gate = asyncio.Event()
    harness.backend.script("publish", gate)
    sends = [harness.begin(count) for count in (1, 2, 3, 1)]
    await settle()
    await harness.limit(5)
    gate.set()
    first, two, three, one = await asyncio.gather(*sends, return_exceptions=True)
    assert isinstance(first, list)
    assert isinstance(two, list)
    assert len(two) == 2
    assert isinstance(three, PartialSend)
    assert "2 of 3 messages were confirmed" in str(three)
    assert [type(item) for item in three.results] == [Sent, Sent, QueueFull]
    assert isinstance(one, QueueFull)
    assert one.queue == "orders"


async def test_if_a_batch_fails_for_several_reasons_each_sender_gets_its_own_error(
    harness: BatcherHarness,
) -> None:
    gate = asyncio.Event()
    reasons: list[Sent | QueueError] = [PayloadTooLarge("large"), QueueFull("full")]
    harness.backend.script(
        "publish", gate, PartialSend.of(reasons, backend="faulty", queue="orders")
    )
    first, *rest = [harness.begin() for _ in range(3)]
    await settle()
    gate.set()
    await first
    outcomes = await asyncio.gather(*rest, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [PayloadTooLarge, QueueFull]


async def test_a_send_that_is_cancelled_before_its_publish_is_not_published(
    harness: BatcherHarness,
) -> None:
    gate = asyncio.Event()
    harness.backend.script("publish", gate)
    sends = [harness.begin() for _ in range(3)]
    await settle()
    sends[1].cancel()
    gate.set()
    results = await asyncio.gather(*sends, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    assert await harness.depth() == 2


async def test_a_send_that_is_cancelled_during_its_publish_cancels_no_other(
    harness: BatcherHarness,
) -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    harness.backend.script("publish", *gates)
    sends = [harness.begin() for _ in range(3)]
    await settle()
    gates[0].set()
    await settle()
    sends[1].cancel()
    await settle()
    gates[1].set()
    results = await asyncio.gather(*sends, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    assert isinstance(results[2], list)
    assert await harness.depth() == 3


async def test_if_the_first_send_is_cancelled_the_others_are_published(
    harness: BatcherHarness,
) -> None:
    harness.backend.script("publish", BLACK_HOLE)
    sends = [harness.begin() for _ in range(3)]
    await settle()
    sends[0].cancel()
    results = await asyncio.gather(*sends, return_exceptions=True)
    assert [isinstance(result, list) for result in results] == [False, True, True]
    assert harness.breaker.state is BreakerState.CLOSED
    assert harness.connection.state is ConnectionState.CONNECTED


async def test_random_senders_always_get_their_own_results(harness: BatcherHarness) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)

    async def sender() -> tuple[list[str], list[Sent] | BaseException]:
        await asyncio.sleep(dice.random())
        mine = [envelope() for _ in range(dice.randrange(1, 4))]
        ids = [item.id for item in mine]
        try:
            async with asyncio.timeout(dice.choice([None, None, 0.02])):
                return ids, await harness.orders.send(mine)
        except (QueueError, TimeoutError) as error:
            return ids, error

    for _ in range(150):
        pause = asyncio.Event()
        asyncio.get_running_loop().call_later(dice.random() * 2, pause.set)
        harness.backend.script("publish", dice.choice([None, pause, down()]))
    for ids, result in await asyncio.gather(*(sender() for _ in range(300))):
        if isinstance(result, list):
            assert [sent.message_id for sent in result] == ids
    confirmed = {item for ids in harness.backend.published for item in ids}
    assert await harness.depth() >= len(confirmed)


# -- deadlines -------------------------------------------------------------------------------


async def test_a_send_without_a_response_ends_at_the_deadline(harness: BatcherHarness) -> None:
    harness.backend.always("publish", BLACK_HOLE)
    started = harness.clock.monotonic()
    mine = envelope()
    with pytest.raises(SendTimeout, match=r"within 10 s; the message may or may not") as caught:
        await harness.orders.send([mine])
    assert harness.clock.monotonic() - started == TIMEOUT
    assert caught.value.context == {
        "backend": "faulty",
        "operation": "send",
        "queue": "orders",
        "message_id": mine.id,
    }
    assert harness.connection.state is ConnectionState.DISCONNECTED
    assert harness.connection.last_error == "TimeoutError: no response within 10 s"


async def test_without_a_response_each_send_ends_at_its_own_deadline(
    harness: BatcherHarness,
) -> None:
    harness.backend.always("publish", BLACK_HOLE)
    times: list[float] = []

    async def sender(after: float) -> None:
        await asyncio.sleep(after)
        started = harness.clock.monotonic()
        with pytest.raises(SendTimeout):
            await harness.send()
        times.append(harness.clock.monotonic() - started)

    await asyncio.gather(*(sender(after) for after in (0, 0, 1, 2.5, 9)))
    assert times == [TIMEOUT] * 5


async def test_a_queue_works_again_after_a_batch_without_a_response(
    harness: BatcherHarness,
) -> None:
    gate = asyncio.Event()
    harness.backend.script("publish", gate, BLACK_HOLE)
    first, *rest = [harness.begin() for _ in range(3)]
    await settle()
    gate.set()
    await first
    for outcome in await asyncio.gather(*rest, return_exceptions=True):
        assert isinstance(outcome, SendTimeout)
    started = harness.clock.monotonic()
    await harness.send()
    assert harness.clock.monotonic() - started < 0.1
    assert await harness.depth() == 2


async def test_a_cancelled_batch_ends_at_its_deadline(harness: BatcherHarness) -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    harness.backend.script("publish", gates[0], asyncio.CancelledError(), gates[1], BLACK_HOLE)
    started = harness.clock.monotonic()
    first, *cut_off = [harness.begin() for _ in range(3)]
    await settle()
    gates[0].set()
    await first
    await settle()
    later, behind = harness.begin(), harness.begin()  # these do not replace the cancelled batch
    await settle()
    gates[1].set()
    await later
    for outcome in await asyncio.gather(*cut_off, behind, return_exceptions=True):
        assert isinstance(outcome, SendTimeout)
    assert harness.clock.monotonic() - started == TIMEOUT


async def test_the_deadline_covers_the_declaration(harness: BatcherHarness) -> None:
    async def never_declare() -> None:
        await asyncio.Event().wait()

    harness.declare = never_declare
    started = harness.clock.monotonic()
    with pytest.raises(SendTimeout):
        await harness.orders.send([envelope()], harness.route)
    assert harness.clock.monotonic() - started == TIMEOUT
    assert harness.backend.count("publish") == 0


async def test_a_timeout_error_from_the_backend_is_raised_unchanged(
    harness: BatcherHarness,
) -> None:
    harness.backend.script("publish", TimeoutError("the driver's"))
    with pytest.raises(TimeoutError, match="the driver's"):
        await harness.send()


# -- retries ---------------------------------------------------------------------------------


async def test_a_connection_failure_is_retried_with_the_same_id(
    harness: BatcherHarness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.backend.script("publish", down(), down(), down())
    mine = envelope()
    sent = await harness.orders.send([mine])
    assert sent == [Sent(mine.id, 0)]
    assert harness.backend.count("publish") == 4
    assert harness.backend.published == [[mine.id]]
    assert harness.connection.state is ConnectionState.CONNECTED
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "orders: send failed, retrying: refused" in warned[1].getMessage()


async def test_the_timeout_error_of_a_long_outage_names_the_failure(
    harness: BatcherHarness,
) -> None:
    harness.breaker = harness.guarded.breaker = CircuitBreaker(
        failure_threshold=1_000, recovery_timeout=30.0, clock=harness.clock
    )
    harness.backend.always("publish", down())
    started = harness.clock.monotonic()
    mine = envelope()
    with pytest.raises(SendTimeout, match=r"connection failed \d+ times, last: refused") as caught:
        await harness.orders.send([mine])
    assert harness.clock.monotonic() - started == TIMEOUT
    assert isinstance(caught.value.cause, BackendUnavailable)
    assert caught.value.cause.context == caught.value.context
    assert caught.value.context["message_id"] == mine.id


async def test_a_failed_declaration_is_retried(harness: BatcherHarness) -> None:
    outcomes: list[Exception | None] = [down(), down(), None]

    async def declare() -> None:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome

    harness.declare = declare
    await harness.orders.send([envelope()], harness.route)
    assert outcomes == []
    assert harness.backend.count("publish") == 1


async def test_a_queue_that_no_longer_exists_is_declared_again(harness: BatcherHarness) -> None:
    harness.route.declared = True
    harness.backend.script("publish", QueueNotFound("deleted"))
    await harness.orders.send([envelope()], harness.route)
    assert harness.route.declared
    assert harness.backend.count("publish") == 2


async def test_a_queue_that_disappears_during_an_outage_is_declared_again(
    harness: BatcherHarness,
) -> None:
    harness.route.declared = True
    harness.backend.script("publish", down(), QueueNotFound("deleted"))
    await harness.orders.send([envelope()], harness.route)
    assert harness.route.declared
    assert harness.backend.count("publish") == 3


async def test_permanent_errors_are_raised_without_a_retry(harness: BatcherHarness) -> None:
    harness.backend.script("publish", QueueFull("full"))
    with pytest.raises(QueueFull) as caught:
        await harness.send(2)
    assert harness.backend.count("publish") == 1
    assert caught.value.context == {"backend": "faulty", "operation": "send", "queue": "orders"}


# -- the circuit breaker ---------------------------------------------------------------------


async def open_circuit(harness: BatcherHarness) -> None:
    harness.backend.always("publish", down())
    with pytest.raises(CircuitOpen):
        await harness.send()
    assert harness.breaker.state is BreakerState.OPEN


@pytest.mark.proves("003-errors-9")
async def test_after_the_threshold_sends_raise_circuit_open_immediately(
    harness: BatcherHarness,
) -> None:
    await open_circuit(harness)
    assert harness.backend.count("publish") == 5
    started = harness.clock.monotonic()
    with pytest.raises(CircuitOpen, match="open after 5 consecutive connection failures") as caught:
        await harness.send()
    assert harness.clock.monotonic() == started
    assert harness.backend.count("publish") == 5
    assert caught.value.backend == "faulty"
    assert caught.value.operation == "send"
    assert caught.value.queue == "orders"


async def test_the_error_of_the_send_that_opens_the_circuit_has_the_failure_as_its_cause(
    harness: BatcherHarness,
) -> None:
    harness.backend.always("publish", down("no route to host"))
    with pytest.raises(CircuitOpen) as caught:
        await harness.send()
    assert "no route to host" in str(caught.value.cause)


@pytest.mark.proves("003-errors-10")
async def test_one_trial_call_closes_the_circuit(harness: BatcherHarness) -> None:
    await open_circuit(harness)
    harness.backend.heal("publish")
    await harness.clock.advance(30)
    await harness.send()
    assert harness.breaker.state is BreakerState.CLOSED
    assert harness.connection.state is ConnectionState.CONNECTED


async def test_during_a_trial_call_other_sends_are_rejected(harness: BatcherHarness) -> None:
    await open_circuit(harness)
    harness.backend.heal("publish")
    await harness.clock.advance(30)
    gate = asyncio.Event()
    harness.backend.script("publish", gate)
    probe = harness.begin()
    await settle()
    for batcher in (harness.orders, harness.audit):
        with pytest.raises(CircuitOpen, match="a trial call is running"):
            await batcher.send([envelope()])
    gate.set()
    await probe
    await harness.send()


async def test_a_trial_call_without_a_response_opens_the_circuit_again(
    harness: BatcherHarness,
) -> None:
    await open_circuit(harness)
    await harness.clock.advance(30)
    harness.backend.always("publish", BLACK_HOLE)
    with pytest.raises(SendTimeout):
        await harness.send()
    assert harness.breaker.state is BreakerState.OPEN


async def test_after_a_cancelled_trial_call_the_next_send_is_a_trial_call(
    harness: BatcherHarness,
) -> None:
    await open_circuit(harness)
    harness.backend.heal("publish")
    await harness.clock.advance(30)
    harness.backend.script("publish", BLACK_HOLE)
    probe = harness.begin()
    await settle()
    probe.cancel()
    await asyncio.wait({probe})
    assert harness.breaker.state is BreakerState.HALF_OPEN
    await harness.send()
    await harness.send()  # the circuit is closed, so further sends pass


async def test_senders_that_share_a_round_trip_count_as_one_failure(
    harness: BatcherHarness,
) -> None:
    gate = asyncio.Event()
    harness.backend.script("publish", gate, down())
    sends = [harness.begin() for _ in range(100)]
    await settle()
    gate.set()
    await asyncio.gather(*sends)
    assert harness.breaker.state is BreakerState.CLOSED
    assert await harness.depth() == 100


async def test_waiting_sends_are_rejected_when_the_circuit_opens(harness: BatcherHarness) -> None:
    for _ in range(4):
        harness.breaker.record_failure(probe=False)
    harness.backend.always("publish", down())
    sends = [harness.begin() for _ in range(3)]
    results = await asyncio.gather(*sends, return_exceptions=True)
    assert [type(result) for result in results] == [CircuitOpen] * 3
    assert harness.backend.count("publish") == 1


@pytest.mark.parametrize("error", [QueueFull("full"), PartialSend("some", [])])
async def test_errors_from_the_broker_do_not_open_the_circuit(
    harness: BatcherHarness, error: QueueError
) -> None:
    harness.backend.always("publish", error)
    for _ in range(20):
        with pytest.raises(type(error)):
            await harness.send(2)
    assert harness.breaker.state is BreakerState.CLOSED
    harness.backend.heal("publish")
    await harness.send()


async def test_an_error_from_the_broker_resets_the_failure_count(harness: BatcherHarness) -> None:
    for _ in range(4):
        harness.breaker.record_failure(probe=False)
    harness.backend.script("publish", QueueFull("full"))
    with pytest.raises(QueueFull):
        await harness.send()
    harness.breaker.record_failure(probe=False)
    assert harness.breaker.state is BreakerState.CLOSED


# -- draining --------------------------------------------------------------------------------


async def test_drain_waits_for_all_sends_in_progress(harness: BatcherHarness) -> None:
    gate = asyncio.Event()
    harness.backend.script("publish", gate)
    sends = [harness.begin() for _ in range(3)]
    await settle()
    draining = asyncio.create_task(harness.drain())
    await settle()
    assert not draining.done()
    gate.set()
    await draining
    assert all(send.done() for send in sends)
    assert await harness.depth() == 3


async def test_draining_an_idle_batcher_takes_no_time(harness: BatcherHarness) -> None:
    await harness.send()
    started = harness.clock.monotonic()
    await harness.drain()
    assert harness.clock.monotonic() == started


async def test_drain_ends_even_without_a_response(harness: BatcherHarness) -> None:
    gate = asyncio.Event()
    harness.backend.script("publish", gate, BLACK_HOLE)
    sends = [harness.begin() for _ in range(3)]
    await settle()
    gate.set()
    await harness.clock.advance(5)
    started = harness.clock.monotonic()
    await harness.drain()
    assert harness.clock.monotonic() - started <= TIMEOUT
    await asyncio.gather(*sends, return_exceptions=True)


async def test_sends_that_remain_after_the_drain_are_cancelled(harness: BatcherHarness) -> None:
    gate = asyncio.Event()
    harness.backend.script("publish", gate, BLACK_HOLE)
    first = harness.begin()
    await settle()
    rest = asyncio.create_task(harness.send())
    draining = asyncio.create_task(harness.drain())
    await harness.clock.advance(5)
    gate.set()  # the remaining sends start now, and their round trip takes longer than the drain
    await first
    await draining
    await settle()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("qkit send")]
    with pytest.raises(SendTimeout):
        await rest


async def test_a_cancelled_sender_does_not_get_the_failure_of_its_batch(
    harness: BatcherHarness,
) -> None:
    gates = [asyncio.Event(), asyncio.Event()]

    harness.backend.script("publish", *gates)
    first, second, third = [harness.begin() for _ in range(3)]
    await settle()
    gates[0].set()
    await first
    await settle()
    second.cancel()
    await settle()
    await harness.backend.native.delete("orders")  # publishing the batch fails now
    gates[1].set()
    results = await asyncio.gather(second, third, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError, QueueNotFound]
