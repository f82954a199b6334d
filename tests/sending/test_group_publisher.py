"""Groups of messages: one publish of each in flight, independent of the others."""

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
    """The key of a message is its group; faults are scripted by group.

    ``arrived`` has the bodies that each group published, in order.
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


class Sending:
    """A batcher on a ``GroupedBackend``."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.backend = GroupedBackend(clock)
        settings = Settings(type="native", send_timeout=TIMEOUT)
        wiring = Wiring.build(self.backend, settings, clock)
        wiring.connection.transition_to(ConnectionState.CONNECTED)
        guarded = GuardedBackend(wiring)
        self.breaker = guarded.breaker
        self.batcher = SendBatcher(guarded, "orders", Backoff(initial=0.05, maximum=2.0))

    def begin(self, *keys: str, body: bytes = b"{}") -> asyncio.Task[list[Sent]]:
        envelopes = [Envelope(new_id(), body, key=key) for key in keys]
        return asyncio.create_task(self.batcher.send(envelopes))

    async def send(self, *keys: str) -> list[Sent]:
        return await self.begin(*keys)


@pytest_asyncio.fixture
async def sending(virtual_clock: VirtualClock) -> AsyncIterator[Sending]:
    sending = Sending(virtual_clock)
    await sending.backend.start()
    await sending.backend.declare(QueueSpec(name="orders"))
    yield sending
    await sending.batcher.close()
    await sending.backend.aclose()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_backend_of_these_tests_names_groups(sending: Sending) -> None:
    assert isinstance(sending.backend, PublishGroups)
    assert not isinstance(FaultyBackend(sending.clock), PublishGroups)


async def test_a_group_that_is_stuck_does_not_delay_another(sending: Sending) -> None:
    gate = asyncio.Event()
    sending.backend.script("a", gate)
    stuck = [sending.begin("a") for _ in range(3)]
    await settle()
    started = sending.clock.monotonic()
    await sending.send("b")
    await sending.send("b")
    assert sending.clock.monotonic() == started
    assert not any(send.done() for send in stuck)
    gate.set()
    await asyncio.gather(*stuck)


async def test_what_is_sent_during_a_publish_of_its_group_leaves_together_in_the_next(
    sending: Sending,
) -> None:
    gate = asyncio.Event()
    sending.backend.script("a", gate)
    sends = [sending.begin("a", body=b"%d" % number) for number in range(50)]
    await settle()
    assert sending.backend.count("a") == 1
    gate.set()
    await asyncio.gather(*sends)
    assert sending.backend.count("a") == 2
    assert sending.backend.arrived["a"] == [b"%d" % number for number in range(50)]


async def test_messages_of_several_groups_wait_only_for_publishes_of_their_own(
    sending: Sending,
) -> None:
    gate = asyncio.Event()
    sending.backend.script("a", gate)
    first = sending.begin("a")
    await settle()
    several = sending.begin("b", "a", "b", "c")
    await settle()
    assert set(sending.backend.arrived) == {"b", "c"}
    assert sending.backend.count("a") == 1
    gate.set()
    await first
    sent = await several
    assert len({item.message_id for item in sent}) == 4
    assert sending.backend.count("a") == 2
    assert sending.backend.most_in_flight == 1


async def test_results_of_several_groups_are_in_the_order_of_the_messages(
    sending: Sending,
) -> None:
    envelopes = [Envelope(new_id(), b"{}", key=key) for key in "abcabca"]
    sent = await sending.batcher.send(envelopes)
    assert [item.message_id for item in sent] == [envelope.id for envelope in envelopes]


async def test_a_group_that_refuses_leaves_the_others_accepted(sending: Sending) -> None:
    sending.backend.script("b", PayloadTooLarge("too large"))
    with pytest.raises(PartialSend) as caught:
        await sending.send("a", "b", "a", "b")
    assert [type(item) for item in caught.value.results] == [
        Sent,
        PayloadTooLarge,
        Sent,
        PayloadTooLarge,
    ]
    assert caught.value.context == {"backend": "grouped", "operation": "publish", "queue": "orders"}


async def test_a_group_that_never_answers_times_out_and_the_others_are_accepted(
    sending: Sending,
) -> None:
    sending.backend.script("b", BLACK_HOLE)
    started = sending.clock.monotonic()
    with pytest.raises(PartialSend) as caught:
        await sending.send("a", "b")
    assert sending.clock.monotonic() - started == TIMEOUT
    assert [type(item) for item in caught.value.results] == [Sent, SendTimeout]


async def test_an_error_that_is_not_ours_reaches_the_sender_of_several_groups(
    sending: Sending,
) -> None:
    sending.backend.script("b", ZeroDivisionError("a fault of the backend"))
    with pytest.raises(ZeroDivisionError):
        await sending.send("a", "b")


async def test_a_broken_connection_is_tried_again_in_every_group(sending: Sending) -> None:
    for group in ("a", "b"):
        sending.backend.script(group, BackendUnavailable("refused"))
    sent = await sending.send("a", "b", "a")
    assert len(sent) == 3
    assert [sending.backend.count(group) for group in ("a", "b")] == [2, 2]


async def test_the_group_is_named_after_the_queue_was_declared(sending: Sending) -> None:
    """Before, a backend may not know its partitions."""
    calls: list[str] = []
    name_group = sending.backend.publish_group

    def publish_group(queue: str, envelope: Envelope) -> Hashable:
        calls.append("group")
        return name_group(queue, envelope)

    async def prepare() -> None:
        await asyncio.sleep(0.1)
        calls.append("declare")

    sending.backend.publish_group = publish_group  # type: ignore[method-assign]
    for keys in ("a", "ab"):
        envelopes = [Envelope(new_id(), b"{}", key=key) for key in keys]
        await sending.batcher.send(envelopes, prepare=prepare)
    assert calls == ["declare", "group", "declare", "group", "group"]


async def test_a_sender_that_gives_up_while_it_waits_for_its_group_is_left_out(
    sending: Sending,
) -> None:
    gate = asyncio.Event()
    sending.backend.script("a", gate)
    first = sending.begin("a", body=b"1")
    await settle()
    second, third = sending.begin("a", body=b"2"), sending.begin("a", "b", body=b"3")
    fourth = sending.begin("a", body=b"4")
    await settle()
    second.cancel()
    third.cancel()
    await settle()
    gate.set()
    await asyncio.gather(first, fourth)
    assert second.cancelled()
    assert third.cancelled()
    assert sending.backend.arrived == {"a": [b"1", b"4"], "b": [b"3"]}  # b had left before


async def test_a_sender_that_waits_for_its_group_gives_up_at_its_own_deadline(
    sending: Sending,
) -> None:
    sending.backend.always("a", BLACK_HOLE)
    times: list[float] = []

    async def send(after: float) -> None:
        await asyncio.sleep(after)
        started = sending.clock.monotonic()
        with pytest.raises(SendTimeout):
            await sending.send("a")
        times.append(sending.clock.monotonic() - started)

    await asyncio.gather(*(send(after) for after in (0, 0, 1, 2.5)))
    assert times == [TIMEOUT] * 4


async def test_closing_gives_up_what_every_group_has_in_progress(sending: Sending) -> None:
    gates = {group: asyncio.Event() for group in ("a", "b")}
    for group, gate in gates.items():
        sending.backend.script(group, gate, BLACK_HOLE)
    first = [sending.begin(group) for group in gates]
    await settle()
    waiting = [sending.begin(group) for group in gates]
    await settle()
    for gate in gates.values():
        gate.set()
    await asyncio.gather(*first)
    await settle()
    await sending.batcher.close()
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, SendTimeout)
    await sending.batcher.drain()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("qkit send")]


async def open_circuit(sending: Sending) -> None:
    for _ in range(5):
        sending.breaker.record_failure(probe=False)
    await sending.clock.advance(30)
    assert sending.breaker.state is BreakerState.HALF_OPEN


async def test_a_send_to_several_groups_probes_with_one_and_then_sends_the_others(
    sending: Sending,
) -> None:
    await open_circuit(sending)
    probing = asyncio.Event()
    sending.backend.script("a", probing)
    several = sending.begin("a", "b", "c")
    await settle()
    assert sending.backend.count("b") == 0
    probing.set()
    sent = await several
    assert len(sent) == 3
    assert sending.breaker.state is BreakerState.CLOSED


async def test_a_probe_that_is_refused_by_the_broker_proves_the_connection(
    sending: Sending,
) -> None:
    await open_circuit(sending)
    sending.backend.script("a", PayloadTooLarge("too large"))
    with pytest.raises(PartialSend) as caught:
        await sending.send("a", "b")
    assert [type(item) for item in caught.value.results] == [PayloadTooLarge, Sent]


async def test_a_probe_that_fails_publishes_nothing_to_the_other_groups(sending: Sending) -> None:
    await open_circuit(sending)
    sending.backend.script("a", BackendUnavailable("refused"))
    with pytest.raises(CircuitOpen) as caught:
        await sending.send("a", "b")
    assert isinstance(caught.value.cause, BackendUnavailable)
    assert sending.backend.count("b") == 0


async def test_random_sends_keep_the_order_of_each_group(sending: Sending) -> None:
    """A sender sends its next message of a key after the last was confirmed or given up."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for group in "abcd":
        for _ in range(60):
            pause = asyncio.Event()
            asyncio.get_running_loop().call_later(dice.random() * 30, pause.set)
            sending.backend.script(group, dice.choice([None, None, pause, QueueError("no")]))

    async def send(group: str) -> None:
        for number in range(60):
            keys = [group] if dice.random() < 0.7 else [group, *dice.sample("wxyz", 2)]
            with contextlib.suppress(QueueError, TimeoutError):
                async with asyncio.timeout(dice.choice([None, None, 0.02])):
                    await sending.begin(*keys, body=b"%03d" % number)

    await asyncio.gather(*(send(group) for group in "abcd"))
    assert sending.backend.most_in_flight == 1
    for group in "abcd":
        arrived = sending.backend.arrived[group]
        assert arrived == sorted(arrived)
        assert len(arrived) > 10
