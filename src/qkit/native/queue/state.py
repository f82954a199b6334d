"""The state of one queue, sans-IO: plain data, and every method is told the time.

``now``, ``due`` and ``expires`` are monotonic seconds. Nothing here waits, wakes, logs or knows
another queue: whoever owns a state collects the messages that died (``dead``) and routes them,
so durability can be put around it without touching its rules.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from qkit.errors import AckDeadlineExceeded, InvalidPriority, MessageNotFound, QueueError, QueueFull
from qkit.message import Reason
from qkit.native.queue.dead_message import DeadMessage, LeaseExpired, TimeToLiveExpired
from qkit.native.queue.leases import Leases
from qkit.native.queue.schedule import Schedule
from qkit.native.queue.stored_message import (
    READY,
    REMOVED,
    SCHEDULED,
    NewMessage,
    ReadyBuckets,
    StoredMessage,
    TaggedMessage,
    WaitingMessage,
)

__all__ = ["DEFAULT_PRIORITY", "QueueState"]

DEFAULT_PRIORITY: Final = 5
EMPTY_SCHEDULE: Final = Schedule()  # shared by all queues that never had anything in theirs
TIMESTAMP_RESOLUTION_SECONDS: Final = 0.001  # of ``since``; messages within it share one float


class QueueState:
    """Ready, scheduled and in-flight messages of one queue.

    >>> queue = QueueState("orders")
    >>> queue.put(0.0, "a", b"first"), queue.put(0.0, "b", b"urgent", priority=9)
    (0, 0)
    >>> [message.id for message in queue.claim(1.0, limit=2, lease=30.0)]
    ['b', 'a']
    """

    __slots__ = (
        "_drop_oldest",
        "_expiries",
        "_max_deliveries",
        "_max_depth",
        "_max_priority",
        "_next",
        "_ready",
        "_reserved",
        "_room",
        "_scheduled",
        "_scheduled_live",
        "_size",
        "_tick",
        "acked",
        "claimed",
        "dead",
        "dead_lettered",
        "default_priority",
        "dropped",
        "evicted",
        "first_claimed",
        "leases",
        "name",
        "published",
        "released",
        "returned",
        "waited",
    )

    def __init__(
        self,
        name: str,
        *,
        max_depth: int = 100_000,
        max_priority: int = 9,
        max_deliveries: int | None = None,
        drop_oldest: bool = False,
    ) -> None:
        self.name = name
        self._reserved = 0  # places of messages on their way to the disk
        self.set_limits(
            max_depth=max_depth,
            max_priority=max_priority,
            max_deliveries=max_deliveries,
            drop_oldest=drop_oldest,
        )
        self.dead: list[DeadMessage] = []  # collected and emptied by the owner, and so are the next
        self.evicted: Sequence[StoredMessage] = ()  # the oldest of a full queue, pushed out
        self.returned: list[StoredMessage] = []  # held until their lease ended

        self._size = 0
        self._next = 0  # the last delivery's token
        self._tick = float("-inf")
        self._ready = ReadyBuckets()
        self._scheduled = EMPTY_SCHEDULE
        self._scheduled_live = 0
        self._expiries = EMPTY_SCHEDULE
        self.leases = Leases()

        self.published = 0
        self.claimed = 0
        self.first_claimed = 0
        self.acked = 0
        self.released = 0
        self.dead_lettered = 0
        self.dropped = 0
        self.waited = 0.0  # seconds between ready and first delivery, summed

    def set_limits(
        self, *, max_depth: int, max_priority: int, max_deliveries: int | None, drop_oldest: bool
    ) -> None:
        """Set the limits for what comes; what is in the queue stays."""
        self._max_depth = max_depth
        self._room = max_depth - self._reserved
        self._max_priority = max_priority
        self.default_priority = min(DEFAULT_PRIORITY, max_priority)
        self._max_deliveries = max_deliveries
        self._drop_oldest = drop_oldest

    # Figures

    @property
    def ready(self) -> int:
        """Messages that could be claimed now."""
        leases = self.leases
        return self._size - self._scheduled_live - len(leases.regular) - len(leases.custom)

    @property
    def scheduled(self) -> int:
        """Messages that wait for their time."""
        return self._scheduled_live

    @property
    def in_flight(self) -> int:
        """Messages that a consumer holds."""
        return len(self.leases)

    @property
    def full(self) -> bool:
        """Whether a message would find no room."""
        return self._size >= self._room and not self._drop_oldest

    @property
    def free(self) -> int:
        """For how many messages there is room."""
        return sys.maxsize if self._drop_oldest else self._room - self._size

    def holds(self, token: int) -> bool:
        """Whether the delivery ``token`` still owns its message."""
        return token in self.leases

    def oldest_since(self) -> float | None:
        """When the oldest ready message became ready."""
        return self._ready.oldest_since()

    # Arrivals

    def put(
        self,
        now: float,
        id: str,
        body: bytes | None,
        headers: dict[str, str] | None = None,
        key: str | None = None,
        priority: int | None = None,
        due: float | None = None,
        expires: float | None = None,
        seq: int = 0,
    ) -> int | None:
        """Add a message; return how many are ahead of it, ``None`` while it is delayed.

        Raises ``InvalidPriority``, or ``QueueFull`` unless the queue drops its oldest.
        """
        if priority is None:
            priority = self.default_priority
        elif not 0 <= priority <= self._max_priority and not seq:
            self.check(id, priority)
        if self._size >= self._room:
            if not seq:  # what has a number was accepted, perhaps under other limits
                self.check(id, priority)
            if self._drop_oldest:
                self._make_room()
        if now - self._tick >= TIMESTAMP_RESOLUTION_SECONDS:
            self._tick = now
        self._size += 1
        self.published += 1
        fresh = (id, body, headers, self._tick, seq)
        if key is None and expires is None and due is None:
            return self._ready.append(fresh, priority)
        message = self._stored(fresh, priority, key, expires)
        if due is not None and due > now:
            self._schedule(message, due)
            return None
        return self._ready.append(message, priority)

    def _stored(
        self, fresh: NewMessage, priority: int, key: str | None, expires: float | None
    ) -> StoredMessage:
        if key is None and expires is None:
            return StoredMessage(fresh, priority)
        message = TaggedMessage(fresh, priority)
        message.key = key
        message.expires = expires
        if expires is not None:
            if self._expiries is EMPTY_SCHEDULE:
                self._expiries = Schedule()
            self._expiries.add(expires, message)
        return message

    def restore(
        self,
        now: float,
        fresh: NewMessage,
        *,
        priority: int,
        key: str | None,
        due: float | None,
        expires: float | None,
        attempt: int,
    ) -> StoredMessage | None:
        """Take a message back from a log, in order of arrival; limits do not hold here.

        What was delivered before comes back as a ``StoredMessage``, ready or scheduled.
        """
        self._size += 1
        if not attempt and key is None and expires is None and due is None:
            self._ready.append(fresh, priority)
            return None
        message = self._stored(fresh, priority, key, expires)
        message.attempt = attempt
        if attempt:
            self._next = message.sequence = self._next + 1
        if due is not None and due > now:
            self._schedule(message, due)
        elif attempt:
            self._ready.put_back(message)
        else:
            self._ready.append(message, priority)
        return message

    def reserve(self, id: str, priority: int | None) -> None:
        """Keep a place for a message that is on its way to the disk, or raise as ``put`` does."""
        if self._size >= self._room or priority is not None:
            self.check(id, priority)
        self._reserved += 1
        self._room -= 1

    def unreserve(self) -> None:
        """The message is about to be put, or will not come."""
        self._reserved -= 1
        self._room += 1

    def check(self, id: str, priority: int | None) -> None:
        """Raise what ``put`` would raise for such a message."""
        if priority is not None and not 0 <= priority <= self._max_priority:
            raise InvalidPriority(
                f"priority {priority!r} is outside this queue's range 0–{self._max_priority}",
                operation="publish",
                queue=self.name,
                message_id=id,
            )
        if self._size >= self._room and not self._drop_oldest:
            raise QueueFull(
                f"the queue holds {self._size + self._reserved} messages of at most "
                f"{self._max_depth}: consume or purge some, or raise max_depth",
                operation="publish",
                queue=self.name,
                message_id=id,
            )

    def _make_room(self) -> None:
        oldest = self._ready.pop_oldest()
        if oldest is None and self._scheduled_live:
            oldest = next(message for _, message in self._scheduled)
            self._remove_waiting(oldest)
        if oldest is not None:  # else consumers hold every one: one over the limit, then
            self._leave(oldest)
            self.dropped += 1
            self.evicted = [*self.evicted, oldest]

    def _schedule(self, message: StoredMessage, due: float) -> None:
        message.state = SCHEDULED
        self._scheduled_live += 1
        if self._scheduled is EMPTY_SCHEDULE:
            self._scheduled = Schedule()
        self._scheduled.add(due, message)

    def _back_to_ready(self, message: StoredMessage) -> None:
        message.state = READY
        self._ready.put_back(message)

    # Deliveries

    def claim(
        self, now: float, limit: int, lease: float, consumer: str | None = None
    ) -> list[StoredMessage]:
        """Lease up to ``limit`` messages; each one's ``state`` is its delivery's token.

        The attempt is counted here, before any handler runs, so that a message that kills its
        consumer is counted too. An expired message is never handed out.
        """
        if self._scheduled_live or self._expiries.heap:
            self._advance(now)
        ready, leases, deadline = self._ready, self.leases, now + lease
        table = leases.regular
        if table and deadline < leases.latest:
            table = leases.custom
        else:
            leases.latest = deadline
        claimed: list[StoredMessage] = []
        while limit > 0 and ready.mask and (message := ready.pop()) is not None:
            limit -= 1
            self._next = token = self._next + 1
            if not message.sequence:
                message.sequence = token
                self.first_claimed += 1
                self.waited += now - message.since
            message.attempt += 1
            message.state = token
            message.deadline = deadline
            table[token] = message
            claimed.append(message)
        if claimed:
            self.claimed += len(claimed)
            if consumer is not None or table is leases.custom:
                leases.enter(claimed, consumer)
        return claimed

    def ack(self, token: int) -> StoredMessage:
        """The work is done: forget the message. ``AckDeadlineExceeded`` if the lease is lost."""
        leases = self.leases
        message = leases.regular.pop(token, None)
        if message is None or leases.holders:
            message = leases.take(token, message)
            if message is None:
                raise self._not_held(token, "ack")
        message.state = REMOVED
        self._size -= 1
        self.acked += 1
        if message.expires is not None:
            self._expiries.mark_stale()
        return message

    def reject(self, token: int, reason: Reason, error: Exception | None = None) -> None:
        """Give up on a held message: it joins the dead."""
        message = self._take(token, "nack")
        self.released += 1
        self._add_dead(message, reason, error)

    def release(
        self,
        now: float,
        token: int,
        delay: float = 0.0,
        *,
        count_attempt: bool = True,
        headers: dict[str, str] | None = None,
    ) -> bool:
        """Give a held message back, at once or after ``delay`` seconds.

        Without ``count_attempt`` its next delivery has the same number as this one. ``headers``,
        if given, replace its own. Its time to live may have run out meanwhile: then it dies, and
        the answer is false.
        """
        message = self._take(token, "release")
        self.released += 1
        if not count_attempt:
            message.attempt -= 1
        if headers is not None:
            message.headers = headers or None
        if message.expires is not None and message.expires <= now:
            self._add_dead(message, Reason.TTL_EXPIRED, _expired(message))
            return False
        if delay > 0:
            self._schedule(message, now + delay)
        else:
            self._back_to_ready(message)
        return True

    def extend(self, now: float, token: int, seconds: float) -> None:
        """Move the end of a lease to ``seconds`` from now."""
        if not self.leases.extend(token, now + seconds):
            raise self._not_held(token, "extend")

    def _take(self, token: int, operation: str) -> StoredMessage:
        message = self.leases.take(token)
        if message is None:
            raise self._not_held(token, operation)
        return message

    def _not_held(self, token: int, operation: str) -> QueueError:
        if 0 < token <= self._next:
            return AckDeadlineExceeded(
                "the lease of this delivery is lost, the message may be with another consumer: "
                "extend the lease while working, or raise ack_deadline",
                operation=operation,
                queue=self.name,
            )
        return MessageNotFound(
            "this queue gave out no such delivery", operation=operation, queue=self.name
        )

    # Time

    def expire(self, now: float) -> list[DeadMessage]:
        """Do all that is due, expired leases included; return the dead, for routing."""
        self._advance(now)
        for token in self.leases.ended(now):
            self._expire(now, token, "expired")
        return self.take_dead()

    def abandon(self, now: float, tokens: Iterable[int]) -> list[DeadMessage]:
        """The consumer of these deliveries is gone: their leases end now; return the dead."""
        for token in tokens:
            if self.holds(token):
                self._expire(now, token, "ended with its consumer")
        return self.take_dead()

    def dead_letter_restored(self, message: StoredMessage) -> None:
        """A restored message had been handed out for the last time when the engine stopped."""
        self._remove_waiting(message)
        self._add_dead(
            message, Reason.MAX_RETRIES_EXCEEDED, self._spent(message, "ended by a stop")
        )

    def drop_unreadable(self, token: int) -> None:
        """A held message cannot be read any more: forget it."""
        self._leave(self._take(token, "lose"))
        self.dropped += 1

    def _spent(self, message: StoredMessage, how: str) -> LeaseExpired:
        return LeaseExpired(
            f"the lease of delivery {message.attempt} of {self._max_deliveries} {how}: "
            "the handler crashed, hung or outran ack_deadline"
        )

    def _expire(self, now: float, token: int, how: str) -> None:
        consumer = self.leases.holders.get(token)
        message = self._take(token, "expire")
        if self._max_deliveries is not None and message.attempt >= self._max_deliveries:
            last = f", last with consumer {consumer}" if consumer else ""
            self._add_dead(message, Reason.MAX_RETRIES_EXCEEDED, self._spent(message, how + last))
        elif message.expires is not None and message.expires <= now:
            self._add_dead(message, Reason.TTL_EXPIRED, _expired(message))
        else:
            self._back_to_ready(message)
            self.returned.append(message)

    def advance(self, now: float) -> list[DeadMessage]:
        """Do what is due except expiring leases; return the dead, for routing."""
        self._advance(now)
        return self.take_dead()

    def take_dead(self) -> list[DeadMessage]:
        """Hand over the messages that died since the last call."""
        dead, self.dead = self.dead, []
        return dead

    def next_due(self) -> float | None:
        """When ``expire`` has something to do next; perhaps a little early, never late."""
        dues = (self._scheduled.next_due(), self._expiries.next_due(), self.leases.next_end())
        return min((due for due in dues if due is not None), default=None)

    def _advance(self, now: float) -> None:
        while (message := self._scheduled.pop_due(now)) is not None:
            self._scheduled_live -= 1
            if message.sequence:
                self._back_to_ready(message)
            else:  # delayed at its send: it takes its place among those that arrive now
                message.state = READY
                message.since = now
                self._ready.append(message, message.priority)
        while (message := self._expiries.pop_due(now)) is not None:
            if message.state <= READY:  # one in flight is looked at when it is given back
                self._remove_waiting(message)
                self._add_dead(message, Reason.TTL_EXPIRED, _expired(message))

    # Departures

    def _leave(self, message: StoredMessage) -> None:
        message.state = REMOVED
        self._size -= 1
        if message.expires is not None:
            self._expiries.mark_stale()

    def _add_dead(self, message: StoredMessage, reason: Reason, error: Exception | None) -> None:
        self._leave(message)
        self.dead.append(DeadMessage(message, reason, error))

    def _remove_waiting(self, message: StoredMessage) -> None:
        """Take a ready or scheduled message out of its place, leaving a stale entry."""
        was_scheduled = message.state == SCHEDULED
        message.state = REMOVED
        if was_scheduled:
            self._scheduled_live -= 1
            self._scheduled.mark_stale()
        else:
            self._ready.discard(message)

    # Administration

    def waiting(self) -> Iterator[tuple[StoredMessage, float | None]]:
        """Ready messages in order of delivery, then scheduled ones with the time they are due."""
        for message in self._ready:
            yield message, None
        for due, message in self._scheduled:
            yield message, due

    def peek(self, limit: int) -> list[tuple[StoredMessage, float | None]]:
        """The first ``limit`` of ``waiting()``."""
        return list(islice(self.waiting(), limit))

    def purge(self) -> list[WaitingMessage]:
        """Forget every message that no consumer holds; return them, in no order."""
        removed = self._ready.clear() + [message for _, message in self._scheduled]
        for entry in removed:
            if not isinstance(entry, tuple):
                entry.state = REMOVED
        self._scheduled.rebuild()
        self._scheduled_live = 0
        self._expiries.rebuild()
        self._size -= len(removed)
        return removed

    def remove(self, ids: Collection[str]) -> list[StoredMessage]:
        """Forget a message for each of these ids unless a consumer holds it; return them.

        Of several with one id the first goes: an id that is named twice takes two.
        """
        wanted = Counter(ids)
        found = self._ready.take(wanted)
        for _, message in list(self._scheduled):
            if wanted[message.id] > 0:
                wanted[message.id] -= 1
                self._remove_waiting(message)
                found.append(message)
        for message in found:
            self._leave(message)
        return found

    def all_messages(self) -> Iterator[StoredMessage]:
        """Every message, held ones included."""
        for message, _ in self.waiting():
            yield message
        yield from self.leases


def _expired(message: StoredMessage) -> TimeToLiveExpired:
    return TimeToLiveExpired(f"time to live ran out after {message.attempt} deliveries")
