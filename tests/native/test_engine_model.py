"""Random histories of a durable engine, including restarts, compared with a simple model.

Times are chosen so that two kinds of events never coincide: actions happen at whole seconds, delays
end at .5, TTLs at .75, leases at .25, and backoffs are 2.125 times a power of two. Floats represent
all these values exactly.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from heapq import merge
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from qkit.errors import AckDeadlineExceeded, LifecycleError, QueueFull
from qkit.message import GROUP
from qkit.native.delivery import Delivery
from qkit.testing import VirtualClock
from tests.support.crash_model import body_of
from tests.support.disk import SimulatedDisk
from tests.support.engines import open_engine

MAX_DEPTH, MAX_PRIORITY, LIMIT = 10, 3, 4
BACKOFF = 2.125
QUEUE, TOPIC, GROUPS = "orders", "news", ("a", "b")
SHARES: list[tuple[str, str | None]] = [(QUEUE, None), *((TOPIC, group) for group in GROUPS)]

_T = TypeVar("_T")


@dataclass(eq=False)
class Copy:
    """A copy of a message in one queue or group.

    ``seq`` is its position in the log; ``place`` orders messages by the time they became ready.
    """

    share: tuple[str, str | None]
    id: str
    seq: int
    priority: int
    headers: dict[str, str]
    at: float
    due: float = 0.0  # of a delay that the sender set
    expires: float = math.inf
    place: int | None = None
    scheduled: tuple[float, int] | None = None  # due time, scheduling order
    delivery: Delivery | None = None
    deadline: float = math.inf
    attempt: int = 0


@dataclass
class Letter:
    """A dead letter of the model."""

    share: tuple[str, str | None]
    id: str
    reason: str
    attempts: int
    priority: int
    headers: dict[str, str] = field(default_factory=dict)

    def key(self) -> tuple[str, str | None, str, str, int, int, bytes]:
        return *self.share, self.id, self.reason, self.attempts, self.priority, body_of(self.id)


class EngineModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = VirtualClock()
        self.run(self.enter())
        self.messages: list[Copy] = []
        self.letters: list[Letter] = []
        self.stale: list[Delivery] = []  # deliveries whose leases expired
        self.foreign: list[Delivery] = []  # deliveries of closed engines
        self.count = 0

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self.loop.run_until_complete(work)

    async def enter(self) -> None:
        self.clock.__enter__()
        self.clock.jump(math.ceil(self.clock.monotonic()) - self.clock.monotonic())

    @initialize(
        segment_bytes=st.sampled_from((400, 2000, 1 << 20)),
        memory_limit=st.sampled_from((0, 300, 1 << 20)),
    )
    def open(self, segment_bytes: int, memory_limit: int) -> None:
        self.options = {"segment_bytes": segment_bytes, "memory_limit": memory_limit}
        self.disk = SimulatedDisk()
        self.engine = self.run(open_engine(self.disk, self.clock, **self.options))
        self.run(self.create(QUEUE))
        self.run(self.create(TOPIC))

    async def create(self, name: str) -> None:
        await self.engine.create(
            name,
            broadcast=name == TOPIC,
            max_depth=MAX_DEPTH,
            max_priority=MAX_PRIORITY,
            max_retries=LIMIT - 1,
            backoff=BACKOFF,
        )
        if name == TOPIC:
            for group in GROUPS:
                assert await self.engine.consume(name, group=group) is None

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.run(self.end())
        self.clock.__exit__(None, None, None)
        self.loop.close()

    async def end(self) -> None:
        """Remove all messages; check that none stays in memory or reappears after a restart."""
        for message in self.messages:
            if message.delivery is not None:
                await message.delivery.ack()
        for name in (QUEUE, TOPIC):
            await self.engine.purge(name)
            await self.engine.purge_dead_letters(name)
        self.check_accounts(0)
        assert self.engine.storage.journal.held == 0
        await self.engine.aclose()
        engine = await open_engine(SimulatedDisk(self.disk.files()), self.clock)
        assert [await engine.peek(name, 10) for name in await engine.list()] == [
            [] for _ in await engine.list()
        ]
        await engine.aclose()

    # The model

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    def number(self) -> int:
        self.count += 1
        return self.count

    def of(self, share: tuple[str, str | None]) -> list[Copy]:
        return [message for message in self.messages if message.share == share]

    def ready(self, share: tuple[str, str | None]) -> list[Copy]:
        found = [m for m in self.of(share) if m.delivery is None and m.scheduled is None]
        return sorted(found, key=lambda m: (-m.priority, m.place))

    def scheduled(self, share: tuple[str, str | None]) -> list[Copy]:
        found = [m for m in self.of(share) if m.scheduled is not None]
        return sorted(found, key=lambda m: m.scheduled or (0.0, 0))

    def held(self) -> list[Copy]:
        return [m for m in self.messages if m.delivery is not None]

    def dead_letter(self, message: Copy, reason: str) -> None:
        self.messages.remove(message)
        self.letters.append(
            Letter(
                message.share,
                message.id,
                reason,
                message.attempt,
                message.priority,
                message.headers,
            )
        )

    def expire_lease(self, message: Copy) -> None:
        assert message.delivery is not None
        self.stale.append(message.delivery)
        message.delivery = None
        message.deadline = math.inf

    def next_event(self) -> tuple[float, int, Copy] | None:
        events = [(m.deadline, 0, m) for m in self.held()]
        events += [(m.scheduled[0], m.scheduled[1], m) for m in self.messages if m.scheduled]
        events += [(m.expires, 0, m) for m in self.messages if m.delivery is None]
        return min(events, key=lambda event: event[:2], default=None)

    def pass_time(self, until: float) -> None:
        while (event := self.next_event()) is not None and event[0] <= until:
            at, _, message = event
            if message.delivery is not None:
                self.expire_lease(message)
                if message.attempt >= LIMIT:
                    self.dead_letter(message, "MaxRetriesExceeded")
                elif message.expires <= at:
                    self.dead_letter(message, "TTLExpired")
            elif message.expires <= at:
                self.dead_letter(message, "TTLExpired")
            else:
                message.scheduled = None
                if message.place is None:
                    message.place = self.number()

    # Actions

    @rule(
        name=st.sampled_from((QUEUE, QUEUE, TOPIC)),
        priority=st.integers(0, MAX_PRIORITY),
        delay=st.sampled_from((None, None, None, 0.5, 2.5, 7.5)),
        ttl=st.sampled_from((None, None, None, 1.75, 5.75, 20.75)),
        headers=st.sampled_from(({}, {"tenant": "acme"})),
        count=st.integers(1, 4),
    )
    def put(
        self,
        name: str,
        priority: int,
        delay: float | None,
        ttl: float | None,
        headers: dict[str, str],
        count: int,
    ) -> None:
        for _ in range(count):
            self.put_one(name, priority, delay, ttl, headers)

    def put_one(
        self,
        name: str,
        priority: int,
        delay: float | None,
        ttl: float | None,
        headers: dict[str, str],
    ) -> None:
        id = f"m{self.number()}"
        if delay is not None and ttl is not None and delay >= ttl:
            ttl = None
        shares = [share for share in SHARES if share[0] == name]
        work = self.engine.publish(
            name,
            body_of(id),
            priority,
            delay=delay,
            ttl=ttl,
            headers=headers,
            message_id=id,
        )
        if any(len(self.of(share)) >= MAX_DEPTH for share in shares):
            with pytest.raises(QueueFull):
                self.run(work)
            return
        expected = None
        if delay is None and name == QUEUE:
            expected = sum(other.priority >= priority for other in self.ready(shares[0]))
        for share in shares:
            message = Copy(share, id, self.number(), priority, headers, self.now)
            if ttl is not None:
                message.expires = self.now + ttl
            if delay is None:
                message.place = self.number()
            else:
                message.due = self.now + delay
                message.scheduled = (message.due, self.number())
            self.messages.append(message)
        sent = self.run(work)
        assert (sent.message_id, sent.position) == (id, expected)

    @rule(
        data=st.data(), lease=st.sampled_from((0.25, 3.25, 10.25, 60.25)), count=st.integers(1, 3)
    )
    def claim(self, data: st.DataObject, lease: float, count: int) -> None:
        shares = [share for share in SHARES if self.ready(share)] or SHARES
        share = data.draw(st.sampled_from(shares))
        for _ in range(count):
            self.claim_one(share, lease)

    def claim_one(self, share: tuple[str, str | None], lease: float) -> None:
        name, group = share
        expected = self.ready(share)[:1]
        delivery = self.run(self.engine.consume(name, 0, lease, group=group))
        assert (delivery is not None) == bool(expected)
        if delivery is None:
            return
        message = expected[0]
        message.attempt += 1
        message.delivery = delivery
        message.deadline = self.now + lease
        found = delivery.message_id, delivery.body, delivery.headers, delivery.priority
        assert found == (message.id, body_of(message.id), message.headers, message.priority)
        assert delivery.retry_count == message.attempt - 1

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(self.held()))
        assert message.delivery is not None
        self.run(message.delivery.ack())
        self.messages.remove(message)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), requeue=st.sampled_from((True, True, False)))
    def nack(self, data: st.DataObject, requeue: bool) -> None:
        message = data.draw(st.sampled_from(self.held()))
        assert message.delivery is not None
        result = self.run(message.delivery.nack(requeue))
        message.delivery = None
        if not requeue:
            self.dead_letter(message, "ExplicitNack")
        elif message.attempt >= LIMIT:
            self.dead_letter(message, "MaxRetriesExceeded")
        elif message.expires <= self.now:
            self.dead_letter(message, "TTLExpired")
        else:
            assert result == "requeued"
            delay = BACKOFF * 2 ** (message.attempt - 1)
            message.scheduled = (self.now + delay, self.number())
            return
        assert result == "dead_lettered"

    @precondition(lambda self: self.held())
    @rule(data=st.data(), seconds=st.sampled_from((1.25, 5.25, 30.25)))
    def extend(self, data: st.DataObject, seconds: float) -> None:
        message = data.draw(st.sampled_from(self.held()))
        assert message.delivery is not None
        self.run(message.delivery.extend(seconds))
        message.deadline = self.now + seconds

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def settle_late(self, data: st.DataObject) -> None:
        delivery = data.draw(st.sampled_from(self.stale))
        for work in (delivery.ack(), delivery.nack(), delivery.extend(1)):
            with pytest.raises(AckDeadlineExceeded):
                self.run(work)

    @precondition(lambda self: self.foreign)
    @rule(data=st.data())
    def settle_after_a_stop(self, data: st.DataObject) -> None:
        """Check that a delivery of a closed engine cannot be settled in the next one."""
        delivery = data.draw(st.sampled_from(self.foreign))
        self.foreign.remove(delivery)
        with pytest.raises(LifecycleError):
            self.run(delivery.ack())

    @rule(seconds=st.sampled_from((1, 1, 2, 4, 12)))
    def wait(self, seconds: int) -> None:
        self.run(self.clock.advance(seconds))
        self.pass_time(self.now)

    @precondition(lambda self: len(self.messages) >= 10)
    @rule(name=st.sampled_from((QUEUE, TOPIC)))
    def purge(self, name: str) -> None:
        purged = [m for m in self.messages if m.share[0] == name and m.delivery is None]
        assert self.run(self.engine.purge(name)) == len(purged)
        self.messages = [message for message in self.messages if message not in purged]

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.messages))
        removed = [
            message
            for message in self.messages
            if (message.share[0], message.id) == (chosen.share[0], chosen.id)
            and message.delivery is None
        ]
        assert self.run(self.engine.remove(chosen.share[0], [chosen.id])) == len(removed)
        self.messages = [message for message in self.messages if message not in removed]

    @precondition(lambda self: len(self.messages) >= 12)
    @rule(name=st.sampled_from((QUEUE, TOPIC)))
    def delete(self, name: str) -> None:
        """Delete a queue or topic and create it again. Its dead letters are kept."""
        self.run(self.engine.delete(name))
        self.run(self.create(name))
        self.messages = [message for message in self.messages if message.share[0] != name]

    @precondition(lambda self: self.letters)
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.letters))
        name = chosen.share[0]
        replayed = [
            letter for letter in self.letters if (letter.share[0], letter.id) == (name, chosen.id)
        ]
        if any(len(self.of(share)) + len(replayed) > MAX_DEPTH for share in SHARES):
            return
        self.letters = [letter for letter in self.letters if letter not in replayed]
        for letter in replayed:
            message = Copy(
                letter.share, letter.id, self.number(), letter.priority, letter.headers, self.now
            )
            message.place = self.number()
            self.messages.append(message)
        assert self.run(self.engine.retry_dead_letters(name, [chosen.id])) == len(replayed)

    @precondition(lambda self: len(self.letters) >= 5)
    @rule(name=st.sampled_from((QUEUE, TOPIC)))
    def purge_letters(self, name: str) -> None:
        purged = [letter for letter in self.letters if letter.share[0] == name]
        assert self.run(self.engine.purge_dead_letters(name)) == len(purged)
        self.letters = [letter for letter in self.letters if letter not in purged]

    @rule(rotate=st.booleans())
    def maintain(self, rotate: bool) -> None:
        """Compact the log and write a snapshot, which must not change visible state."""
        self.run(self.engine.storage.maintain(rotate=rotate))

    @precondition(lambda self: len(self.messages) >= 3)
    @rule(crash=st.booleans(), down=st.sampled_from((0, 0, 0, 1, 4)))
    def reopen(self, crash: bool, down: int) -> None:
        """Close or crash the engine and reopen it ``down`` seconds later."""
        self.run(self.engine.written())
        files = self.disk.files()
        self.run(self.engine.aclose())
        if not crash:
            files = self.disk.files()
        now = self.now
        self.clock.jump(math.ceil(now) - now + down)
        self.disk = SimulatedDisk(files)
        self.engine = self.run(open_engine(self.disk, self.clock, **self.options))
        assert self.engine.storage.damage == []
        self.run(self.clock.advance(0))
        self.void_leases(crash)

    def void_leases(self, crash: bool) -> None:
        self.foreign += [m.delivery for m in self.messages if m.delivery is not None]
        self.stale.clear()  # these deliveries belong to the previous engine
        for message in sorted(self.messages, key=lambda m: m.seq):
            was_held = message.delivery is not None
            message.delivery, message.deadline = None, math.inf
            if was_held and crash and message.attempt >= LIMIT:
                self.dead_letter(message, "MaxRetriesExceeded")
        delayed = [m for m in self.messages if m.due and not m.attempt]
        others = [m for m in self.messages if m not in delayed]
        in_log = sorted(others, key=lambda m: m.seq)
        by_due = sorted(delayed, key=lambda m: (m.due, m.seq))
        for message in in_log:  # retries that are not due overtake the others
            message.place = self.number() if message.scheduled and message.attempt else None
        for message in merge(in_log, by_due, key=lambda m: m.at if m in others else m.due):
            if message.scheduled is not None:
                message.scheduled = (message.scheduled[0], self.number())
                if message.scheduled[0] <= self.now:
                    message.scheduled, message.place = None, None
            if message.scheduled is None:
                message.place = self.number()
        self.pass_time(self.now)

    # Invariants

    @invariant()
    def same_messages_in_the_same_order(self) -> None:
        self.run(self.compare())

    async def compare(self) -> None:
        engine = self.engine
        await engine.written()
        for name in (QUEUE, TOPIC):
            shares = [share for share in SHARES if share[0] == name]
            expected = []
            for share in shares:
                for message in self.ready(share) + self.scheduled(share):
                    headers = dict(message.headers)
                    if share[1] is not None:
                        headers[GROUP] = share[1]
                    expected.append((message.id, message.attempt, headers, body_of(message.id)))
            found = await engine.peek(name, 1000)
            assert [(i.id, i.attempt, i.headers, i.body) for i in found] == expected
            stats = await engine.stats(name)
            assert (stats.depth, stats.scheduled, stats.in_flight) == (
                sum(len(self.ready(share)) for share in shares),
                sum(len(self.scheduled(share)) for share in shares),
                sum(message.share[0] == name for message in self.held()),
            )
            letters = await engine.dead_letters(name)
            found_letters = Counter(
                (
                    *(name, item.group, item.message_id, item.reason),
                    *(item.attempts, item.priority, item.body),
                )
                for item in letters
            )
            expected_letters = (letter.key() for letter in self.letters if letter.share[0] == name)
            assert found_letters == Counter(expected_letters)
        self.check_accounts(len(self.messages) + len(self.letters))

    def check_accounts(self, messages: int) -> None:
        """Check the counters that compaction and the memory limit use."""
        journal = self.engine.storage.journal
        assert journal.held == sum(
            len(message.body)
            for actor in self.engine.catalogue.all_actors()
            for message in actor.state.all_messages()
            if message.body is not None
        )
        assert sum(segment.live for segment in journal.index) == messages
        assert all(actor.journal is not None for actor in self.engine.catalogue.all_actors())


ORDINARY = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.proves("002-index-3", "002-compaction-4", "002-testing-3", "004-actors-5")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_durable_engine_behaves_like_its_model() -> None:
    run_state_machine_as_test(EngineModel, settings=ORDINARY)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_durable_engine_behaves_like_its_model_in_400_examples() -> None:
    run_state_machine_as_test(EngineModel, settings=settings(ORDINARY, max_examples=400))


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_a_durable_engine_behaves_like_its_model_in_2000_examples() -> None:
    run_state_machine_as_test(EngineModel, settings=settings(ORDINARY, max_examples=2000))
