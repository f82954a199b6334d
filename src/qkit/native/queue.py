"""The state of one queue, sans-IO: plain data, and every method is told the time.

``now``, ``due`` and ``expires`` are monotonic seconds. Nothing here waits, wakes, logs or knows
another queue: whoever owns a state collects the messages that died (``dead``) and routes them,
so durability can be put around it without touching its rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final

from qkit.errors import AckDeadlineExceeded, InvalidPriority, MessageNotFound, QueueError, QueueFull
from qkit.message import Reason
from qkit.native.agenda import Agenda
from qkit.native.dead import Dead, LeaseExpired, TimeToLiveExpired
from qkit.native.stored import (
    COMPACT_ABOVE,
    GONE,
    READY,
    SCHEDULED,
    ReadyBuckets,
    Stored,
    TaggedStored,
)

__all__ = ["DEFAULT_PRIORITY", "QueueState"]

DEFAULT_PRIORITY: Final = 5
TICK: Final = 0.001  # how exact ``since`` is; messages of one tick share one float


class QueueState:
    """Ready, scheduled and in-flight messages of one queue.

    >>> queue = QueueState("orders")
    >>> queue.put(0.0, "a", b"first"), queue.put(0.0, "b", b"urgent", priority=9)
    (0, 0)
    >>> [message.id for message in queue.claim(1.0, limit=2, lease=30.0)]
    ['b', 'a']
    """

    __slots__ = (
        "_deadlines",
        "_default_priority",
        "_drop_oldest",
        "_expiries",
        "_extended",
        "_held_by",
        "_leases",
        "_max_deliveries",
        "_max_depth",
        "_max_priority",
        "_next",
        "_ready",
        "_scheduled",
        "_scheduled_live",
        "_size",
        "_tick",
        "acked",
        "claimed",
        "dead",
        "dead_lettered",
        "dropped",
        "evicted",
        "first_claimed",
        "name",
        "published",
        "released",
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
        self.limit(
            max_depth=max_depth,
            max_priority=max_priority,
            max_deliveries=max_deliveries,
            drop_oldest=drop_oldest,
        )
        self.dead: list[Dead] = []  # collected and emptied by the owner, and so are the next
        self.evicted: list[Stored] = []  # the oldest of a full queue, pushed out

        self._size = 0
        self._next = 0  # the last delivery's token
        self._tick = float("-inf")
        self._ready = ReadyBuckets()
        self._scheduled = Agenda()
        self._scheduled_live = 0
        self._expiries = Agenda()
        self._leases: dict[int, Stored] = {}  # by token
        self._deadlines: list[tuple[float, int]] = []  # at least one entry for each lease
        self._extended: dict[int, float] = {}  # the true end of leases that were extended
        self._held_by: dict[int, str] = {}

        self.published = 0
        self.claimed = 0
        self.first_claimed = 0
        self.acked = 0
        self.released = 0
        self.dead_lettered = 0
        self.dropped = 0
        self.waited = 0.0  # seconds between ready and first delivery, summed

    def limit(
        self, *, max_depth: int, max_priority: int, max_deliveries: int | None, drop_oldest: bool
    ) -> None:
        """Set the limits for what comes; what is in the queue stays."""
        self._max_depth = max_depth
        self._max_priority = max_priority
        self._default_priority = min(DEFAULT_PRIORITY, max_priority)
        self._max_deliveries = max_deliveries
        self._drop_oldest = drop_oldest

    # Figures

    @property
    def ready(self) -> int:
        """Messages that could be claimed now."""
        return self._size - self._scheduled_live - len(self._leases)

    @property
    def scheduled(self) -> int:
        """Messages that wait for their time."""
        return self._scheduled_live

    @property
    def in_flight(self) -> int:
        """Messages that a consumer holds."""
        return len(self._leases)

    def holds(self, token: int) -> bool:
        """Whether the delivery ``token`` still owns its message."""
        return token in self._leases

    def oldest_since(self) -> float | None:
        """When the oldest ready message became ready."""
        oldest = self._ready.oldest()
        return None if oldest is None else oldest.since

    # Arrivals

    def put(
        self,
        now: float,
        id: str,
        body: bytes,
        headers: dict[str, str] | None = None,
        key: str | None = None,
        priority: int | None = None,
        due: float | None = None,
        expires: float | None = None,
    ) -> int | None:
        """Add a message; return how many are ahead of it, ``None`` while it is delayed.

        Raises ``InvalidPriority``, or ``QueueFull`` unless the queue drops its oldest.
        """
        if priority is None:
            priority = self._default_priority
        elif not 0 <= priority <= self._max_priority:
            self.check(id, priority)
        if self._size >= self._max_depth:
            self.check(id, priority)
            self._make_room()
        if now - self._tick >= TICK:
            self._tick = now
        if key is None and expires is None:
            message = Stored(id, body, headers, priority, self._tick)
        else:
            message = self._tagged(id, body, headers, priority, key, expires)
        self._size += 1
        self.published += 1
        if due is not None and due > now:
            self._schedule(message, due)
            return None
        return self._ready.append(message)

    def _tagged(
        self,
        id: str,
        body: bytes,
        headers: dict[str, str] | None,
        priority: int,
        key: str | None,
        expires: float | None,
    ) -> TaggedStored:
        message = TaggedStored(id, body, headers, priority, self._tick)
        message.key = key
        message.expires = expires
        if expires is not None:
            self._expiries.add(expires, message)
        return message

    def check(self, id: str, priority: int | None) -> None:
        """Raise what ``put`` would raise for such a message."""
        if priority is not None and not 0 <= priority <= self._max_priority:
            raise InvalidPriority(
                f"priority {priority!r} is outside this queue's range 0–{self._max_priority}",
                operation="publish",
                queue=self.name,
                message_id=id,
            )
        if self._size >= self._max_depth and not self._drop_oldest:
            raise QueueFull(
                f"the queue holds {self._size} messages of at most {self._max_depth}: consume "
                "or purge some, or raise max_depth",
                operation="publish",
                queue=self.name,
                message_id=id,
            )

    def _make_room(self) -> None:
        oldest = self._ready.oldest()
        if oldest is None and self._scheduled_live:
            oldest = next(message for _, message in self._scheduled)
        if oldest is not None:  # else consumers hold every one: one over the limit, then
            self._discard(oldest)
            self.dropped += 1
            self.evicted.append(oldest)

    def _schedule(self, message: Stored, due: float) -> None:
        message.state = SCHEDULED
        self._scheduled_live += 1
        self._scheduled.add(due, message)

    def _back_to_ready(self, message: Stored) -> None:
        message.state = READY
        self._ready.put_back(message)

    # Deliveries

    def claim(
        self, now: float, limit: int, lease: float, consumer: str | None = None
    ) -> list[Stored]:
        """Lease up to ``limit`` messages; each one's ``state`` is its delivery's token.

        The attempt is counted here, before any handler runs, so that a message that kills its
        consumer is counted too. An expired message is never handed out.
        """
        if self._scheduled or self._expiries:
            self._advance(now)
        deadline = now + lease
        leases, deadlines = self._leases, self._deadlines
        claimed: list[Stored] = []
        while limit > 0:
            message = self._ready.pop()
            if message is None:
                break
            limit -= 1
            self._next = token = self._next + 1
            if not message.sequence:
                message.sequence = token
                self.first_claimed += 1
                self.waited += now - message.since
            message.attempt += 1
            message.state = token
            leases[token] = message
            heappush(deadlines, (deadline, token))
            if consumer is not None:
                self._held_by[token] = consumer
            claimed.append(message)
        self.claimed += len(claimed)
        if len(deadlines) > 2 * len(leases) + COMPACT_ABOVE:
            self._trim_deadlines()
        return claimed

    def ack(self, token: int) -> None:
        """The work is done: forget the message. ``AckDeadlineExceeded`` if the lease is lost."""
        message = self._leases.pop(token, None)
        if message is None:
            raise self._not_held(token, "ack")
        if self._extended or self._held_by:
            self._forget(token)
        message.state = GONE
        self._size -= 1
        self.acked += 1
        if message.expires is not None:
            self._expiries.outdate()

    def reject(self, token: int, reason: Reason, error: Exception | None = None) -> None:
        """Give up on a held message: it joins the dead."""
        message = self._take(token, "nack")
        self.released += 1
        self._bury(message, reason, error)

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
            self._bury(message, Reason.TTL_EXPIRED, _expired(message))
            return False
        if delay > 0:
            self._schedule(message, now + delay)
        else:
            self._back_to_ready(message)
        return True

    def extend(self, now: float, token: int, seconds: float) -> None:
        """Move the end of a lease to ``seconds`` from now."""
        if token not in self._leases:
            raise self._not_held(token, "extend")
        deadline = now + seconds
        self._extended[token] = deadline
        heappush(self._deadlines, (deadline, token))
        if len(self._deadlines) > 2 * len(self._leases) + COMPACT_ABOVE:
            self._trim_deadlines()

    def _take(self, token: int, operation: str) -> Stored:
        message = self._leases.pop(token, None)
        if message is None:
            raise self._not_held(token, operation)
        self._forget(token)
        return message

    def _forget(self, token: int) -> None:
        self._extended.pop(token, None)
        self._held_by.pop(token, None)

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

    def expire(self, now: float) -> list[Dead]:
        """Do all that is due, expired leases included; return the dead, for routing."""
        self._advance(now)
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            deadline, token = heappop(deadlines)
            if token not in self._leases:
                continue
            if self._extended.get(token, deadline) != deadline:
                continue  # its end was moved, and has an entry of its own
            consumer = self._held_by.get(token)
            message = self._take(token, "expire")
            if self._max_deliveries is not None and message.attempt >= self._max_deliveries:
                last = f", last with consumer {consumer}" if consumer else ""
                error = LeaseExpired(
                    f"the lease of delivery {message.attempt} of {self._max_deliveries} "
                    f"expired{last}: the handler crashed, hung or outran ack_deadline"
                )
                self._bury(message, Reason.MAX_RETRIES_EXCEEDED, error)
            elif message.expires is not None and message.expires <= now:
                self._bury(message, Reason.TTL_EXPIRED, _expired(message))
            else:
                self._back_to_ready(message)
        return self.take_dead()

    def advance(self, now: float) -> list[Dead]:
        """Do what is due except expiring leases; return the dead, for routing."""
        self._advance(now)
        return self.take_dead()

    def take_dead(self) -> list[Dead]:
        """Hand over the messages that died since the last call."""
        dead, self.dead = self.dead, []
        return dead

    def next_due(self) -> float | None:
        """When ``expire`` has something to do next; perhaps a little early, never late."""
        dues = (self._scheduled.first(), self._expiries.first(), self.next_lease())
        return min((due for due in dues if due is not None), default=None)

    def next_lease(self) -> float | None:
        """When a lease may end next."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][1] not in self._leases:
            heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def _advance(self, now: float) -> None:
        while (message := self._scheduled.pop_due(now)) is not None:
            self._scheduled_live -= 1
            if message.sequence:
                self._back_to_ready(message)
            else:  # delayed at its send: it takes its place among those that arrive now
                message.state = READY
                message.since = now
                self._ready.append(message)
        while (message := self._expiries.pop_due(now)) is not None:
            if message.state <= READY:  # one in flight is looked at when it is given back
                self._remove_waiting(message)
                self._bury(message, Reason.TTL_EXPIRED, _expired(message))

    # Departures

    def _leave(self, message: Stored) -> None:
        message.state = GONE
        self._size -= 1
        if message.expires is not None:
            self._expiries.outdate()

    def _bury(self, message: Stored, reason: Reason, error: Exception | None) -> None:
        self._leave(message)
        self.dead.append(Dead(message, reason, error))

    def _remove_waiting(self, message: Stored) -> None:
        """Take a ready or scheduled message out of its place, leaving a stale entry."""
        was_scheduled = message.state == SCHEDULED
        message.state = GONE
        if was_scheduled:
            self._scheduled_live -= 1
            self._scheduled.outdate()
        else:
            self._ready.discard(message)

    def _discard(self, message: Stored) -> None:
        self._remove_waiting(message)
        self._leave(message)

    def _trim_deadlines(self) -> None:
        """Drop stale entries once they outnumber the live ones.

        Taking each out when its delivery is settled would be O(n); waiting for its time would
        keep a whole lease's worth of settled deliveries.
        """
        leases, extended = self._leases, self._extended
        self._deadlines = [
            (at, token)
            for at, token in self._deadlines
            if token in leases and extended.get(token, at) == at
        ]
        heapify(self._deadlines)

    # Administration

    def waiting(self) -> Iterator[tuple[Stored, float | None]]:
        """Ready messages in order of delivery, then scheduled ones with the time they are due."""
        for message in self._ready:
            yield message, None
        for due, message in self._scheduled:
            yield message, due

    def peek(self, limit: int) -> list[tuple[Stored, float | None]]:
        """The first ``limit`` of ``waiting()``."""
        return list(islice(self.waiting(), limit))

    def purge(self) -> int:
        """Forget every message that no consumer holds; return how many."""
        removed = self._size - len(self._leases)
        for message, _ in self.waiting():
            message.state = GONE
        self._ready.clear()
        self._scheduled.rebuild()
        self._scheduled_live = 0
        self._expiries.rebuild()
        self._size = len(self._leases)
        return removed

    def remove(self, ids: Collection[str]) -> int:
        """Forget a message for each of these ids unless a consumer holds it; return how many.

        Of several with one id the first goes: an id that is named twice takes two.
        """
        wanted = Counter(ids)
        found: list[Stored] = []
        for message, _ in self.waiting():
            if wanted[message.id] > 0:
                wanted[message.id] -= 1
                found.append(message)
        for message in found:
            self._discard(message)
        return len(found)


def _expired(message: Stored) -> TimeToLiveExpired:
    return TimeToLiveExpired(f"time to live ran out after {message.attempt} deliveries")
