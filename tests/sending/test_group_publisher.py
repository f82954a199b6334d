"""Publish groups: each has at most one publish in flight and is independent of the others."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Sequence

import pytest
import pytest_asyncio

from qkit import PublishGroups, Settings
from qkit._internal.ids import new_id
from qkit._internal.retry import Backoff
from qkit.backend import QueueSpec
from qkit.errors import (
    BackendUnavailable,
    CircuitOpen,
    PartialSend,
    PayloadTooLarge,
    QueueError,
    SendTimeout,
)
from qkit.handlers.channel import undeclared
from qkit.handlers.route import Route
from qkit.message import Envelope, Sent
from qkit.observability.connection_state import ConnectionState
from qkit.sending.circuit_breaker import BreakerState
from qkit.sending.guarded_backend import GuardedBackend
from qkit.sending.send_batcher import SendBatcher
from qkit.testing.clock import VirtualClock
from qkit.wiring import Wiring
from tests.support.faulty import BLACK_HOLE, FaultyBackend

TIMEOUT = 10.0


class GroupedBackend(FaultyBackend):
    """A backend that uses the key of a message as its group, with scripted faults for each group.

    ``arrived`` holds the published bodies of each group, in order.
    """

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock, name="grouped")
        self.arrived: dict[str, list[bytes]] = {}
        self.most_in_flight = 0
        self._in_flight: Counter[str] = Counter()

    def publish_group(self, queue: str, envelope: Envelope) -> Hashable:
        return envelope.key

    async def publish_in_group(
        self, queue: str, group: str, envelopes: Sequence[Envelope]
    ) -> list[Sent]:
        assert {envelope.key for envelope in envelopes} == {group}
        self._in_flight[group] += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight[group])
        try:
            await self.meet(group)
            sent = await self.publish(queue, envelopes)
        finally:
            self._in_flight[group] -= 1
        self.arrived.setdefault(group, []).extend(envelope.body for envelope in envelopes)
        return sent


class BatcherHarness:
    """A batcher on a ``GroupedBackend``."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.backend = GroupedBackend(clock)
        settings = Settings(type="native", send_timeout=TIMEOUT)
        wiring = Wiring.build(self.backend, settings, clock)
        wiring.connection.transition_to(ConnectionState.CONNECTED)
        guarded = GuardedBackend(wiring)
        self.breaker = guarded.breaker
        self.declarations: list[str] = []
        self.route = wiring.routes.resolve(undeclared("orders", broadcast=False))
        backoff = Backoff(initial=0.05, maximum=2.0)
        self.batcher = SendBatcher(guarded, "orders", backoff, self.declare)

    async def declare(self, route: Route) -> None:
        await asyncio.sleep(0.1)
        self.declarations.append(route.name)

    def begin(self, *keys: str, body: bytes = b"{}") -> asyncio.Task[list[Sent]]:
        envelopes = [Envelope(new_id(), body, key=key) for key in keys]
        return asyncio.create_task(self.batcher.send(envelopes))

    async def send(self, *keys: str) -> list[Sent]:
        return await self.begin(*keys)


@pytest_asyncio.fixture
async def harness(virtual_clock: VirtualClock) -> AsyncIterator[BatcherHarness]:
    harness = BatcherHarness(virtual_clock)
    await harness.backend.start()
    await harness.backend.declare(QueueSpec(name="orders"))
    yield harness
    await harness.batcher.close()
    await harness.backend.aclose()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_backend_of_these_tests_implements_publish_groups(
    harness: BatcherHarness,
) -> None:
    assert isinstance(harness.backend, PublishGroups)
    assert not isinstance(FaultyBackend(harness.clock), PublishGroups)


async def test_a_blocked_group_does_not_delay_another(harness: BatcherHarness) -> None:
    gate = asyncio.Event()
    harness.backend.script("a", gate)
    stuck = [harness.begin("a") for _ in range(3)]
    await settle()
    started = harness.clock.monotonic()
    await harness.send("b")
    await harness.send("b")
    assert harness.clock.monotonic() == started
    assert not any(send.done() for send in stuck)
    gate.set()
    await asyncio.gather(*stuck)


async def test_sends_during_a_publish_of_their_group_share_the_next_publish(
    harness: BatcherHarness,
) -> None:
    gate = asyncio.Event()
    harness.backend.script("a", gate)
    sends = [harness.begin("a", body=b"%d" % number) for number in range(50)]
    await settle()
    assert harness.backend.count("a") == 1
    gate.set()
    await asyncio.gather(*sends)
    assert harness.backend.count("a") == 2
    assert harness.backend.arrived["a"] == [b"%d" % number for number in range(50)]


async def test_messages_of_several_groups_wait_only_for_publishes_of_their_groups(
    harness: BatcherHarness,
) -> None:
    gate = asyncio.Event()
    harness.backend.script("a", gate)
    first = harness.begin("a")
    await settle()
    several = harness.begin("b", "a", "b", "c")
    await settle()
    assert set(harness.backend.arrived) == {"b", "c"}
    assert harness.backend.count("a") == 1
    gate.set()
    await first
    sent = await several
    assert len({item.message_id for item in sent}) == 4
    assert harness.backend.count("a") == 2
    assert harness.backend.most_in_flight == 1


async def test_results_of_several_groups_are_in_the_order_of_the_messages(
    harness: BatcherHarness,
) -> None:
    envelopes = [Envelope(new_id(), b"{}", key=key) for key in "abcabca"]
    sent = await harness.batcher.send(envelopes)
    assert [item.message_id for item in sent] == [envelope.id for envelope in envelopes]


async def test_if_one_group_is_rejected_the_others_are_confirmed(harness: BatcherHarness) -> None:
    harness.backend.script("b", PayloadTooLarge("too large"))
    with pytest.raises(PartialSend) as caught:
        await harness.send("a", "b", "a", "b")
    assert [type(item) for item in caught.value.results] == [
        Sent,
        PayloadTooLarge,
        Sent,
        PayloadTooLarge,
    ]
    assert caught.value.context == {"backend": "grouped", "operation": "publish", "queue": "orders"}


async def test_if_one_group_times_out_the_others_are_confirmed(
    harness: BatcherHarness,
) -> None:
    harness.backend.script("b", BLACK_HOLE)
    started = harness.clock.monotonic()
    with pytest.raises(PartialSend) as caught:
        await harness.send("a", "b")
    assert harness.clock.monotonic() - started == TIMEOUT
    assert [type(item) for item in caught.value.results] == [Sent, SendTimeout]


async def test_an_unexpected_error_reaches_the_sender_of_several_groups(
    harness: BatcherHarness,
) -> None:
    harness.backend.script("b", ZeroDivisionError("a fault of the backend"))
    with pytest.raises(ZeroDivisionError):
        await harness.send("a", "b")


async def test_a_connection_failure_is_retried_in_every_group(harness: BatcherHarness) -> None:
    for group in ("a", "b"):
        harness.backend.script(group, BackendUnavailable("refused"))
    sent = await harness.send("a", "b", "a")
    assert len(sent) == 3
    assert [harness.backend.count(group) for group in ("a", "b")] == [2, 2]


async def test_the_group_is_looked_up_after_the_queue_is_declared(harness: BatcherHarness) -> None:
    """Before the declaration, a backend may not know the partitions of the queue."""
    calls = harness.declarations
    name_group = harness.backend.publish_group

    def publish_group(queue: str, envelope: Envelope) -> Hashable:
        calls.append("group")
        return name_group(queue, envelope)

    harness.backend.publish_group = publish_group  # type: ignore[method-assign]
    for keys in ("a", "ab"):
        envelopes = [Envelope(new_id(), b"{}", key=key) for key in keys]
        await harness.batcher.send(envelopes, harness.route)
    assert calls == ["orders", "group", "orders", "group", "group"]


async def test_a_send_that_is_cancelled_while_it_waits_is_not_published(
    harness: BatcherHarness,
) -> None:
    gate = asyncio.Event()
    harness.backend.script("a", gate)
    first = harness.begin("a", body=b"1")
    await settle()
    second, third = harness.begin("a", body=b"2"), harness.begin("a", "b", body=b"3")
    fourth = harness.begin("a", body=b"4")
    await settle()
    second.cancel()
    third.cancel()
    await settle()
    gate.set()
    await asyncio.gather(first, fourth)
    assert second.cancelled()
    assert third.cancelled()
    assert harness.backend.arrived == {"a": [b"1", b"4"], "b": [b"3"]}  # group b was not blocked


async def test_a_waiting_send_times_out_at_its_own_deadline(
    harness: BatcherHarness,
) -> None:
    harness.backend.always("a", BLACK_HOLE)
    times: list[float] = []

    async def send(after: float) -> None:
        await asyncio.sleep(after)
        started = harness.clock.monotonic()
        with pytest.raises(SendTimeout):
            await harness.send("a")
        times.append(harness.clock.monotonic() - started)

    await asyncio.gather(*(send(after) for after in (0, 0, 1, 2.5)))
    assert times == [TIMEOUT] * 4


async def test_close_fails_the_sends_in_progress_of_every_group(harness: BatcherHarness) -> None:
    gates = {group: asyncio.Event() for group in ("a", "b")}
    for group, gate in gates.items():
        harness.backend.script(group, gate, BLACK_HOLE)
    first = [harness.begin(group) for group in gates]
    await settle()
    waiting = [harness.begin(group) for group in gates]
    await settle()
    for gate in gates.values():
        gate.set()
    await asyncio.gather(*first)
    await settle()
    await harness.batcher.close()
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, SendTimeout)
    await harness.batcher.drain()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("qkit send")]


async def open_circuit(harness: BatcherHarness) -> None:
    for _ in range(5):
        harness.breaker.record_failure(probe=False)
    await harness.clock.advance(30)
    assert harness.breaker.state is BreakerState.HALF_OPEN


async def test_a_send_to_several_groups_makes_one_trial_call_first(
    harness: BatcherHarness,
) -> None:
    await open_circuit(harness)
    probing = asyncio.Event()
    harness.backend.script("a", probing)
    several = harness.begin("a", "b", "c")
    await settle()
    assert harness.backend.count("b") == 0
    probing.set()
    sent = await several
    assert len(sent) == 3
    assert harness.breaker.state is BreakerState.CLOSED


async def test_a_trial_call_that_the_broker_rejects_closes_the_circuit(
    harness: BatcherHarness,
) -> None:
    await open_circuit(harness)
    harness.backend.script("a", PayloadTooLarge("too large"))
    with pytest.raises(PartialSend) as caught:
        await harness.send("a", "b")
    assert [type(item) for item in caught.value.results] == [PayloadTooLarge, Sent]


async def test_a_failed_trial_call_publishes_nothing_to_the_other_groups(
    harness: BatcherHarness,
) -> None:
    await open_circuit(harness)
    harness.backend.script("a", BackendUnavailable("refused"))
    with pytest.raises(CircuitOpen) as caught:
        await harness.send("a", "b")
    assert isinstance(caught.value.cause, BackendUnavailable)
    assert harness.backend.count("b") == 0


async def test_random_sends_keep_the_order_of_each_group(harness: BatcherHarness) -> None:
    """Each sender sends its next message after the previous one was confirmed or failed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for group in "abcd":
        for _ in range(60):
            pause = asyncio.Event()
            asyncio.get_running_loop().call_later(dice.random() * 30, pause.set)
            harness.backend.script(group, dice.choice([None, None, pause, QueueError("no")]))

    async def send(group: str) -> None:
        for number in range(60):
            keys = [group] if dice.random() < 0.7 else [group, *dice.sample("wxyz", 2)]
            with contextlib.suppress(QueueError, TimeoutError):
                async with asyncio.timeout(dice.choice([None, None, 0.02])):
                    await harness.begin(*keys, body=b"%03d" % number)

    await asyncio.gather(*(send(group) for group in "abcd"))
    assert harness.backend.most_in_flight == 1
    for group in "abcd":
        arrived = harness.backend.arrived[group]
        assert arrived == sorted(arrived)
        assert len(arrived) > 10
