"""The way out: gathering, deadlines, retries and the circuit breaker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator

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
from qkit.message import Envelope, Sent
from qkit.observability.connection_state import ConnectionState
from qkit.sending.circuit_breaker import BreakerState, CircuitBreaker
from qkit.sending.guarded_backend import GuardedBackend
from qkit.sending.send_batcher import MAX_BATCH_MESSAGES, SendBatcher
from qkit.testing.clock import VirtualClock
from qkit.wiring import Wiring
from tests.support.faulty import BLACK_HOLE, FaultyBackend

TIMEOUT = 10.0


class Way:
    """A batcher for each queue with all it needs, on a backend that fails as the test says."""

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
        self.orders = SendBatcher(self.guarded, "orders", backoff)
        self.audit = SendBatcher(self.guarded, "audit", backoff)

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
async def way(virtual_clock: VirtualClock) -> AsyncIterator[Way]:
    backend = FaultyBackend(virtual_clock)
    await backend.start()
    await backend.declare(QueueSpec(name="orders"))
    await backend.declare(QueueSpec(name="audit"))
    backend.calls.clear()
    yield Way(virtual_clock, backend)
    await backend.aclose()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


# -- gathering -------------------------------------------------------------------------------


async def test_a_lone_send_goes_at_once(way: Way) -> None:
    started = way.clock.monotonic()
    (sent,) = await way.send()
    assert way.backend.published == [[sent.message_id]]
    assert way.clock.monotonic() == started


async def test_what_is_sent_during_a_round_trip_leaves_together_in_the_next(way: Way) -> None:
    gate = asyncio.Event()
    way.backend.script("publish", gate)
    sends = [way.begin() for _ in range(100)]
    await settle()
    assert way.backend.count("publish") == 1
    gate.set()
    results = await asyncio.gather(*sends)
    assert way.backend.count("publish") == 2
    assert [len(ids) for ids in way.backend.published] == [1, 99]
    order = [sent.message_id for (sent,) in results]
    assert [item for ids in way.backend.published for item in ids] == order


async def test_a_group_has_a_limit(way: Way) -> None:
    gate = asyncio.Event()
    way.backend.script("publish", gate)
    sends = [
        way.begin(count) for count in (1, MAX_BATCH_MESSAGES - 1, 1, 1, MAX_BATCH_MESSAGES + 5)
    ]
    await settle()
    gate.set()
    await asyncio.gather(*sends)
    assert [len(ids) for ids in way.backend.published] == [1, 1_000, 1, 1_005]


@pytest.mark.proves("001-concurrency-1", "002-performance-5")
async def test_queues_do_not_wait_for_each_other(way: Way) -> None:
    gate = asyncio.Event()
    way.backend.script("publish", gate)
    slow = way.begin()
    await settle()
    await way.audit.send([envelope()])
    assert not slow.done()
    gate.set()
    await slow


async def test_a_failed_group_gives_each_sender_an_error_of_its_own(way: Way) -> None:
    gate = asyncio.Event()
    way.backend.script("publish", gate)
    first, *rest = [way.begin() for _ in range(4)]
    await settle()
    await way.limit(1)
    gate.set()
    await first
    errors = await asyncio.gather(*rest, return_exceptions=True)
    assert [type(error) for error in errors] == [QueueFull] * 3
    assert len({id(error) for error in errors}) == 3
    assert len({error.message_id for error in errors if isinstance(error, QueueFull)}) == 3


async def test_an_error_that_is_not_ours_reaches_every_sender(way: Way) -> None:
    class Odd(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__("cannot be copied")

    gate = asyncio.Event()
    way.backend.script("publish", gate, Odd(1, 2))
    first, *rest = [way.begin() for _ in range(3)]
    await settle()
    gate.set()
    await first
    errors = await asyncio.gather(*rest, return_exceptions=True)
    assert [type(error) for error in errors] == [Odd, Odd]
    assert way.breaker.state is BreakerState.CLOSED


async def test_a_group_that_was_accepted_in_part_is_shared_out(way: Way) -> None:
    gate = asyncio.Event()
    way.backend.script("publish", gate)
    sends = [way.begin(count) for count in (1, 2, 3, 1)]
    await settle()
    await way.limit(5)
    gate.set()
    first, two, three, one = await asyncio.gather(*sends, return_exceptions=True)
    assert isinstance(first, list)
    assert isinstance(two, list)
    assert len(two) == 2
    assert isinstance(three, PartialSend)
    assert "2 of 3 messages were accepted" in str(three)
    assert [type(item) for item in three.results] == [Sent, Sent, QueueFull]
    assert isinstance(one, QueueFull)
    assert one.queue == "orders"


async def test_if_a_group_failed_for_several_reasons_each_sender_hears_its_own(
    way: Way,
) -> None:
    gate = asyncio.Event()
    reasons: list[Sent | QueueError] = [PayloadTooLarge("large"), QueueFull("full")]
    way.backend.script("publish", gate, PartialSend.of(reasons, backend="faulty", queue="orders"))
    first, *rest = [way.begin() for _ in range(3)]
    await settle()
    gate.set()
    await first
    outcomes = await asyncio.gather(*rest, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [PayloadTooLarge, QueueFull]


async def test_a_sender_that_gives_up_before_it_left_is_left_out(way: Way) -> None:
    gate = asyncio.Event()
    way.backend.script("publish", gate)
    sends = [way.begin() for _ in range(3)]
    await settle()
    sends[1].cancel()
    gate.set()
    results = await asyncio.gather(*sends, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    assert await way.depth() == 2


async def test_a_sender_that_gives_up_under_way_takes_nobody_with_it(way: Way) -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    way.backend.script("publish", *gates)
    sends = [way.begin() for _ in range(3)]
    await settle()
    gates[0].set()
    await settle()
    sends[1].cancel()
    await settle()
    gates[1].set()
    results = await asyncio.gather(*sends, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    assert isinstance(results[2], list)
    assert await way.depth() == 3


async def test_when_the_first_of_all_gives_up_the_others_leave(way: Way) -> None:
    way.backend.script("publish", BLACK_HOLE)
    sends = [way.begin() for _ in range(3)]
    await settle()
    sends[0].cancel()
    results = await asyncio.gather(*sends, return_exceptions=True)
    assert [isinstance(result, list) for result in results] == [False, True, True]
    assert way.breaker.state is BreakerState.CLOSED
    assert way.connection.state is ConnectionState.CONNECTED


async def test_random_senders_never_lose_or_mix_up_an_answer(way: Way) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)

    async def sender() -> tuple[list[str], list[Sent] | BaseException]:
        await asyncio.sleep(dice.random())
        mine = [envelope() for _ in range(dice.randrange(1, 4))]
        ids = [item.id for item in mine]
        try:
            async with asyncio.timeout(dice.choice([None, None, 0.02])):
                return ids, await way.orders.send(mine)
        except (QueueError, TimeoutError) as error:
            return ids, error

    for _ in range(150):
        pause = asyncio.Event()
        asyncio.get_running_loop().call_later(dice.random() * 2, pause.set)
        way.backend.script("publish", dice.choice([None, pause, down()]))
    for ids, result in await asyncio.gather(*(sender() for _ in range(300))):
        if isinstance(result, list):
            assert [sent.message_id for sent in result] == ids
    confirmed = {item for ids in way.backend.published for item in ids}
    assert await way.depth() >= len(confirmed)


# -- deadlines -------------------------------------------------------------------------------


async def test_a_send_into_a_black_hole_ends_at_the_deadline(way: Way) -> None:
    way.backend.always("publish", BLACK_HOLE)
    started = way.clock.monotonic()
    mine = envelope()
    with pytest.raises(SendTimeout, match=r"within 10 s; the message may or may not") as caught:
        await way.orders.send([mine])
    assert way.clock.monotonic() - started == TIMEOUT
    assert caught.value.context == {
        "backend": "faulty",
        "operation": "send",
        "queue": "orders",
        "message_id": mine.id,
    }
    assert way.connection.state is ConnectionState.DISCONNECTED
    assert way.connection.last_error == "TimeoutError: no answer within 10 s"


async def test_everyone_in_a_black_hole_is_let_go_at_their_own_deadline(way: Way) -> None:
    way.backend.always("publish", BLACK_HOLE)
    times: list[float] = []

    async def sender(after: float) -> None:
        await asyncio.sleep(after)
        started = way.clock.monotonic()
        with pytest.raises(SendTimeout):
            await way.send()
        times.append(way.clock.monotonic() - started)

    await asyncio.gather(*(sender(after) for after in (0, 0, 1, 2.5, 9)))
    assert times == [TIMEOUT] * 5


async def test_a_queue_whose_group_fell_into_a_black_hole_works_when_that_heals(way: Way) -> None:
    gate = asyncio.Event()
    way.backend.script("publish", gate, BLACK_HOLE)
    first, *rest = [way.begin() for _ in range(3)]
    await settle()
    gate.set()
    await first
    for outcome in await asyncio.gather(*rest, return_exceptions=True):
        assert isinstance(outcome, SendTimeout)
    started = way.clock.monotonic()
    await way.send()
    assert way.clock.monotonic() - started < 0.1
    assert await way.depth() == 2


async def test_a_group_that_was_cut_off_is_let_go_at_its_deadline(way: Way) -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    way.backend.script("publish", gates[0], asyncio.CancelledError(), gates[1], BLACK_HOLE)
    started = way.clock.monotonic()
    first, *cut_off = [way.begin() for _ in range(3)]
    await settle()
    gates[0].set()
    await first
    await settle()
    later, behind = way.begin(), way.begin()  # the next group does not take their place
    await settle()
    gates[1].set()
    await later
    for outcome in await asyncio.gather(*cut_off, behind, return_exceptions=True):
        assert isinstance(outcome, SendTimeout)
    assert way.clock.monotonic() - started == TIMEOUT


async def test_a_declaration_is_under_the_same_deadline(way: Way) -> None:
    async def prepare() -> None:
        await asyncio.Event().wait()

    started = way.clock.monotonic()
    with pytest.raises(SendTimeout):
        await way.orders.send([envelope()], prepare=prepare)
    assert way.clock.monotonic() - started == TIMEOUT
    assert way.backend.count("publish") == 0


async def test_a_time_out_of_the_backends_own_is_passed_on(way: Way) -> None:
    way.backend.script("publish", TimeoutError("the driver's"))
    with pytest.raises(TimeoutError, match="the driver's"):
        await way.send()


# -- retries ---------------------------------------------------------------------------------


async def test_a_broken_connection_is_tried_again_with_the_same_id(
    way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    way.backend.script("publish", down(), down(), down())
    mine = envelope()
    sent = await way.orders.send([mine])
    assert sent == [Sent(mine.id, 0)]
    assert way.backend.count("publish") == 4
    assert way.backend.published == [[mine.id]]
    assert way.connection.state is ConnectionState.CONNECTED
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "orders: sending failed, trying again: refused" in warned[1].getMessage()


async def test_an_outage_longer_than_the_deadline_says_what_failed(way: Way) -> None:
    way.breaker = way.guarded.breaker = CircuitBreaker(
        failure_threshold=1_000, recovery_timeout=30.0, clock=way.clock
    )
    way.backend.always("publish", down())
    started = way.clock.monotonic()
    mine = envelope()
    with pytest.raises(SendTimeout, match=r"connection failed \d+ times, last: refused") as caught:
        await way.orders.send([mine])
    assert way.clock.monotonic() - started == TIMEOUT
    assert isinstance(caught.value.cause, BackendUnavailable)
    assert caught.value.cause.context == caught.value.context
    assert caught.value.context["message_id"] == mine.id


async def test_a_failed_declaration_is_tried_again(way: Way) -> None:
    outcomes: list[Exception | None] = [down(), down(), None]

    async def prepare() -> None:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome

    await way.orders.send([envelope()], prepare=prepare)
    assert outcomes == []
    assert way.backend.count("publish") == 1


async def test_errors_that_trying_again_cannot_cure_are_raised_at_once(way: Way) -> None:
    way.backend.script("publish", QueueFull("full"))
    with pytest.raises(QueueFull) as caught:
        await way.send(2)
    assert way.backend.count("publish") == 1
    assert caught.value.context == {"backend": "faulty", "operation": "send", "queue": "orders"}


# -- the circuit breaker ---------------------------------------------------------------------


async def open_circuit(way: Way) -> None:
    way.backend.always("publish", down())
    with pytest.raises(CircuitOpen):
        await way.send()
    assert way.breaker.state is BreakerState.OPEN


@pytest.mark.proves("003-errors-9")
async def test_after_the_threshold_sends_are_refused_at_once_with_clear_words(way: Way) -> None:
    await open_circuit(way)
    assert way.backend.count("publish") == 5
    started = way.clock.monotonic()
    with pytest.raises(CircuitOpen, match="open after 5 connection failures in a row") as caught:
        await way.send()
    assert way.clock.monotonic() == started
    assert way.backend.count("publish") == 5
    assert caught.value.backend == "faulty"
    assert caught.value.operation == "send"
    assert caught.value.queue == "orders"


async def test_who_opened_the_circuit_learns_what_failed(way: Way) -> None:
    way.backend.always("publish", down("no route to host"))
    with pytest.raises(CircuitOpen) as caught:
        await way.send()
    assert "no route to host" in str(caught.value.cause)


@pytest.mark.proves("003-errors-10")
async def test_it_recovers_by_one_probe(way: Way) -> None:
    await open_circuit(way)
    way.backend.heal("publish")
    await way.clock.advance(30)
    await way.send()
    assert way.breaker.state is BreakerState.CLOSED
    assert way.connection.state is ConnectionState.CONNECTED


async def test_while_one_probes_the_others_are_refused(way: Way) -> None:
    await open_circuit(way)
    way.backend.heal("publish")
    await way.clock.advance(30)
    gate = asyncio.Event()
    way.backend.script("publish", gate)
    probe = way.begin()
    await settle()
    for batcher in (way.orders, way.audit):
        with pytest.raises(CircuitOpen, match="another call is probing"):
            await batcher.send([envelope()])
    gate.set()
    await probe
    await way.send()


async def test_a_probe_into_a_black_hole_opens_it_again(way: Way) -> None:
    await open_circuit(way)
    await way.clock.advance(30)
    way.backend.always("publish", BLACK_HOLE)
    with pytest.raises(SendTimeout):
        await way.send()
    assert way.breaker.state is BreakerState.OPEN


async def test_a_cancelled_probe_lets_the_next_send_probe(way: Way) -> None:
    await open_circuit(way)
    way.backend.heal("publish")
    await way.clock.advance(30)
    way.backend.script("publish", BLACK_HOLE)
    probe = way.begin()
    await settle()
    probe.cancel()
    await asyncio.wait({probe})
    assert way.breaker.state is BreakerState.HALF_OPEN
    await way.send()
    await way.send()  # it is closed again: more than one passes


async def test_senders_that_shared_a_round_trip_met_one_failure(way: Way) -> None:
    gate = asyncio.Event()
    way.backend.script("publish", gate, down())
    sends = [way.begin() for _ in range(100)]
    await settle()
    gate.set()
    await asyncio.gather(*sends)
    assert way.breaker.state is BreakerState.CLOSED
    assert await way.depth() == 100


async def test_a_group_that_comes_after_the_circuit_opened_is_refused(way: Way) -> None:
    for _ in range(4):
        way.breaker.record_failure(probe=False)
    way.backend.always("publish", down())
    sends = [way.begin() for _ in range(3)]
    results = await asyncio.gather(*sends, return_exceptions=True)
    assert [type(result) for result in results] == [CircuitOpen] * 3
    assert way.backend.count("publish") == 1


@pytest.mark.parametrize("error", [QueueFull("full"), PartialSend("some", [])])
async def test_answers_of_the_broker_do_not_trip_the_breaker(way: Way, error: QueueError) -> None:
    way.backend.always("publish", error)
    for _ in range(20):
        with pytest.raises(type(error)):
            await way.send(2)
    assert way.breaker.state is BreakerState.CLOSED
    way.backend.heal("publish")
    await way.send()


async def test_an_answer_of_the_broker_ends_a_row_of_failures(way: Way) -> None:
    for _ in range(4):
        way.breaker.record_failure(probe=False)
    way.backend.script("publish", QueueFull("full"))
    with pytest.raises(QueueFull):
        await way.send()
    way.breaker.record_failure(probe=False)
    assert way.breaker.state is BreakerState.CLOSED


# -- draining --------------------------------------------------------------------------------


async def test_draining_waits_for_everything_on_its_way_out(way: Way) -> None:
    gate = asyncio.Event()
    way.backend.script("publish", gate)
    sends = [way.begin() for _ in range(3)]
    await settle()
    draining = asyncio.create_task(way.drain())
    await settle()
    assert not draining.done()
    gate.set()
    await draining
    assert all(send.done() for send in sends)
    assert await way.depth() == 3


async def test_draining_an_idle_sender_takes_no_time(way: Way) -> None:
    await way.send()
    started = way.clock.monotonic()
    await way.drain()
    assert way.clock.monotonic() == started


async def test_draining_into_a_black_hole_ends(way: Way) -> None:
    gate = asyncio.Event()
    way.backend.script("publish", gate, BLACK_HOLE)
    sends = [way.begin() for _ in range(3)]
    await settle()
    gate.set()
    await way.clock.advance(5)
    started = way.clock.monotonic()
    await way.drain()
    assert way.clock.monotonic() - started <= TIMEOUT
    await asyncio.gather(*sends, return_exceptions=True)


async def test_what_is_left_after_draining_is_cancelled(way: Way) -> None:
    gate = asyncio.Event()
    way.backend.script("publish", gate, BLACK_HOLE)
    first = way.begin()
    await settle()
    rest = asyncio.create_task(way.send())
    draining = asyncio.create_task(way.drain())
    await way.clock.advance(5)
    gate.set()  # only now does the rest leave, and its round trip outlasts the drain
    await first
    await draining
    await settle()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("qkit send")]
    with pytest.raises(SendTimeout):
        await rest


async def test_a_sender_that_gave_up_is_not_told_of_the_groups_failure(way: Way) -> None:
    gates = [asyncio.Event(), asyncio.Event()]

    way.backend.script("publish", *gates)
    first, second, third = [way.begin() for _ in range(3)]
    await settle()
    gates[0].set()
    await first
    await settle()
    second.cancel()
    await settle()
    await way.backend.native.delete("orders")  # so that the group's publish fails
    gates[1].set()
    results = await asyncio.gather(second, third, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError, QueueNotFound]
