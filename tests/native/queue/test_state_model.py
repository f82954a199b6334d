"""Random histories of one queue, compared with a simple model."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from qkit.errors import AckDeadlineExceeded, QueueFull
from qkit.message import Reason
from qkit.native.queue.state import QueueState

MAX_DEPTH, MAX_PRIORITY, MAX_DELIVERIES = 12, 3, 3
SECONDS = st.integers(1, 12).map(float)


@dataclass(eq=False)
class Copy:
    """A message of the model; ``place`` orders messages by the time they became ready."""

    id: str
    priority: int
    expires: float
    key: str | None = None
    holder: int = 0
    place: int | None = None
    scheduled: tuple[float, int] | None = None  # due time, scheduling order
    token: int | None = None
    deadline: float = 0.0
    attempt: int = 0
    headers: dict[str, str] = field(default_factory=dict)


class QueueModel(RuleBasedStateMachine):
    keys: tuple[str | None, ...] = (None,)
    holders: tuple[int, ...] = (0,)

    def __init__(self) -> None:
        super().__init__()
        self.queue = QueueState(
            "q", max_depth=MAX_DEPTH, max_priority=MAX_PRIORITY, max_deliveries=MAX_DELIVERIES
        )
        self.now = 100.0
        self.messages: list[Copy] = []
        self.stale: list[int] = []
        self.dead: list[tuple[str, Reason, int]] = []
        self.count = 0

    # The model

    def number(self) -> int:
        self.count += 1
        return self.count

    def ready(self) -> list[Copy]:
        found = [m for m in self.messages if m.token is None and m.scheduled is None]
        return sorted(found, key=lambda m: (-m.priority, m.place))

    def scheduled(self) -> list[Copy]:
        found = [m for m in self.messages if m.scheduled is not None]
        return sorted(found, key=lambda m: m.scheduled or (0.0, 0))

    def held(self) -> list[Copy]:
        return [m for m in self.messages if m.token is not None]

    def claimable(self, holder: int) -> list[Copy]:
        """Return the ready messages without those of keys that other holders have."""
        locked = {m.key for m in self.held() if m.holder != holder and m.key is not None}
        return [m for m in self.ready() if m.key not in locked]

    def dead_letter(self, message: Copy, reason: Reason) -> None:
        self.messages.remove(message)
        self.dead.append((message.id, reason, message.attempt))

    def pass_time(self) -> None:
        """Process all due events except the expiry of leases."""
        for message in self.scheduled():
            if message.scheduled and message.scheduled[0] <= self.now:
                message.scheduled = None
                if message.place is None:
                    message.place = self.number()
        for message in self.ready() + self.scheduled():
            if message.expires <= self.now:
                self.dead_letter(message, Reason.TTL_EXPIRED)

    def end_delivery(self, message: Copy) -> None:
        self.stale.append(message.token or 0)
        message.token = None

    # Actions

    @rule(
        priority=st.integers(0, MAX_PRIORITY),
        delay=st.none() | SECONDS,
        ttl=st.none() | SECONDS,
        data=st.data(),
    )
    def put(
        self, priority: int, delay: float | None, ttl: float | None, data: st.DataObject
    ) -> None:
        key = data.draw(st.sampled_from(self.keys))
        message = Copy(
            id=f"m{self.number()}",
            priority=priority,
            key=key,
            expires=float("inf") if ttl is None else self.now + ttl,
        )
        due = None if delay is None else self.now + delay
        expires = None if ttl is None else message.expires
        if len(self.messages) >= MAX_DEPTH:
            with pytest.raises(QueueFull):
                self.queue.put(
                    self.now, message.id, b"", priority=priority, due=due, expires=expires
                )
            return
        expected = None
        if due is None:
            expected = sum(other.priority >= priority for other in self.ready())
            message.place = self.number()
        else:
            message.scheduled = (due, self.number())
        self.messages.append(message)
        position = self.queue.put(
            self.now, message.id, b"", key=key, priority=priority, due=due, expires=expires
        )
        assert position == expected

    @rule(limit=st.integers(1, 4), lease=SECONDS, data=st.data())
    def claim(self, limit: int, lease: float, data: st.DataObject) -> None:
        self.pass_time()
        holder = data.draw(st.sampled_from(self.holders))
        expected = self.claimable(holder)[:limit]
        consumer = str(holder) if holder else None
        claimed = self.queue.claim(self.now, limit, lease, consumer, holder)
        assert [message.id for message in claimed] == [message.id for message in expected]
        for real, message in zip(claimed, expected, strict=True):
            message.attempt += 1
            message.token, message.holder = real.state, holder
            message.deadline = self.now + lease
            assert (real.attempt, real.headers or {}) == (message.attempt, message.headers)

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(self.held()))
        assert message.token is not None
        self.queue.ack(message.token)
        self.end_delivery(message)
        self.messages.remove(message)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), delay=st.just(0.0) | SECONDS, count=st.booleans())
    def release(self, data: st.DataObject, delay: float, count: bool) -> None:
        message = data.draw(st.sampled_from(self.held()))
        assert message.token is not None
        message.headers = {"released": str(self.number())}
        alive = self.queue.release(
            self.now, message.token, delay, count_attempt=count, headers=message.headers
        )
        self.end_delivery(message)
        message.attempt -= not count
        if message.expires <= self.now:
            self.dead_letter(message, Reason.TTL_EXPIRED)
            assert not alive
        elif delay:
            message.scheduled = (self.now + delay, self.number())

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(self.held()))
        assert message.token is not None
        self.queue.reject(message.token, Reason.EXPLICIT_NACK)
        self.end_delivery(message)
        self.dead_letter(message, Reason.EXPLICIT_NACK)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), seconds=SECONDS)
    def extend(self, data: st.DataObject, seconds: float) -> None:
        message = data.draw(st.sampled_from(self.held()))
        assert message.token is not None
        self.queue.extend(self.now, message.token, seconds)
        message.deadline = self.now + seconds

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def settle_late(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(self.stale))
        with pytest.raises(AckDeadlineExceeded):
            self.queue.ack(token)
        with pytest.raises(AckDeadlineExceeded):
            self.queue.release(self.now, token)
        with pytest.raises(AckDeadlineExceeded):
            self.queue.extend(self.now, token, 1.0)

    @rule(seconds=SECONDS)
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        self.pass_time()
        expired = [message for message in self.held() if message.deadline <= self.now]
        lost = {(m.key, m.holder) for m in expired if m.holder and m.key is not None}
        others = [m for m in self.held() if (m.key, m.holder) in lost and m not in expired]
        for message in expired:
            self.end_delivery(message)
            if message.attempt >= MAX_DELIVERIES:
                self.dead_letter(message, Reason.MAX_RETRIES_EXCEEDED)
            elif message.expires <= self.now:
                self.dead_letter(message, Reason.TTL_EXPIRED)
        for message in others:  # a holder that lets a lease expire loses the whole key
            self.end_delivery(message)
            message.attempt -= 1
            if message.expires <= self.now:
                self.dead_letter(message, Reason.TTL_EXPIRED)
        self.compare_dead(self.queue.expire(self.now))
        due = self.queue.next_due()
        assert due is None or due > self.now

    @rule()
    def purge(self) -> None:
        kept = self.held()
        assert len(self.queue.purge()) == len(self.messages) - len(kept)
        self.messages = kept

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(self.messages))
        assert len(self.queue.remove([message.id])) == (message.token is None)
        if message.token is None:
            self.messages.remove(message)

    # Invariants

    def compare_dead(self, dead) -> None:
        found = [(item.message.id, item.reason, item.message.attempt) for item in dead]
        assert sorted(found) == sorted(self.dead)
        self.dead = []

    @invariant()
    def same_messages_in_the_same_order(self) -> None:
        queue = self.queue
        ready, scheduled = self.ready(), self.scheduled()
        assert (queue.ready, queue.scheduled) == (len(ready), len(scheduled))
        assert queue.in_flight == len(self.held())
        assert [m.id for m, _ in queue.peek(MAX_DEPTH)] == [m.id for m in ready + scheduled]
        assert all(queue.holds(message.token or 0) for message in self.held())
        self.compare_dead(queue.take_dead())

    @invariant()
    def a_message_is_claimable_unless_its_key_is_held(self) -> None:
        """The queue may count blocked messages that no claim has seen yet, but never too few."""
        assert len(self.claimable(-1)) <= self.queue.claimable <= len(self.ready())

    @invariant()
    def the_timer_is_never_late(self) -> None:
        dues = [message.deadline for message in self.held()]
        dues += [message.scheduled[0] for message in self.messages if message.scheduled]
        dues += [message.expires for message in self.ready() + self.scheduled()]
        first = min(dues, default=float("inf"))
        due = self.queue.next_due()
        assert first == float("inf") or (due is not None and due <= first)


class OrderedQueueModel(QueueModel):
    """All consumers are ordered subscriptions: a key belongs to one of them at a time."""

    keys = (None, "a", "b")
    holders = (1, 2, 3)


ORDINARY = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.proves(
    "000-intro-1",
    "000-structures-2",
    "001-overview-1",
    "001-storage-1",
    "001-storage-2",
    "002-testing-3",
    "002-testing-4",
    "004-actors-2",
    "004-actors-3",
    "004-structures-4",
)
def test_a_queue_behaves_like_its_model() -> None:
    run_state_machine_as_test(QueueModel, settings=ORDINARY)


def test_an_ordered_queue_behaves_like_its_model() -> None:
    run_state_machine_as_test(OrderedQueueModel, settings=ORDINARY)


@pytest.mark.torture
@pytest.mark.timeout(1800)  # the default limit is too short on a busy machine
def test_a_queue_behaves_like_its_model_in_2000_histories() -> None:
    """Crashes and restarts are not covered, because a queue in memory has no files."""
    run_state_machine_as_test(QueueModel, settings=settings(ORDINARY, max_examples=2000))


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_an_ordered_queue_behaves_like_its_model_in_2000_histories() -> None:
    run_state_machine_as_test(OrderedQueueModel, settings=settings(ORDINARY, max_examples=2000))
