"""``QueueState``: the state of one queue, sans-IO. Methods get the time as an argument.

``now``, ``due`` and ``expires`` are monotonic seconds. Nothing here waits, wakes tasks, logs or
uses another queue. The owner of a state, a ``Queue``, collects dead messages (``dead``) and routes
them, so durability is added around the state without changing its rules.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from heapq import merge
from itertools import islice
from typing import Final

from qkit.errors import AckDeadlineExceeded, InvalidPriority, MessageNotFound, QueueError, QueueFull
from qkit.message import Reason
from qkit.native.queue.dead_message import DeadMessage, LeaseExpired, TimeToLiveExpired
from qkit.native.queue.key_locks import KeyLocks
from qkit.native.queue.leases import Leases
from qkit.native.queue.schedule import Schedule
from qkit.native.queue.stored_message import (
    ASIDE,
    MAX_RUN,
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
EMPTY_SCHEDULE: Final = Schedule()  # shared by all queues that have not needed one yet
TIMESTAMP_RESOLUTION_SECONDS: Final = 0.001  # messages that arrive within it share one ``since``


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
        "uncharged",
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
        self.name: str = name
        self._reserved = 0  # capacity reserved for messages that are being written
        self.set_limits(
            max_depth=max_depth,
            max_priority=max_priority,
            max_deliveries=max_deliveries,
            drop_oldest=drop_oldest,
        )
        # The owner collects and empties these four.
        self.dead: list[DeadMessage] = []
        self.evicted: Sequence[StoredMessage] = ()  # oldest messages, dropped from a full queue
        self.returned: list[StoredMessage] = []  # ready again because their lease expired
        # Ready again because another lease of their key expired; their attempt was not counted.
        self.uncharged: Sequence[StoredMessage] = ()

        self._size = 0
        self._next = 0  # token of the last delivery
        self._tick = float("-inf")
        self._ready = ReadyBuckets()
        self._scheduled = EMPTY_SCHEDULE
        self._scheduled_live = 0
        self._expiries = EMPTY_SCHEDULE
        self.leases: Leases = Leases()

        self.published: int = 0
        self.claimed: int = 0
        self.first_claimed: int = 0
        self.acked: int = 0
        self.released: int = 0
        self.dead_lettered: int = 0
        self.dropped: int = 0
        self.waited: float = 0.0  # total time from ready to first delivery, in seconds

    def set_limits(
        self, *, max_depth: int, max_priority: int, max_deliveries: int | None, drop_oldest: bool
    ) -> None:
        """Set the limits for new messages; messages already in the queue are kept."""
        self._max_depth = max_depth
        self._room = max_depth - self._reserved
        self._max_priority = max_priority
        self.default_priority: int = min(DEFAULT_PRIORITY, max_priority)
        self._max_deliveries = max_deliveries
        self._drop_oldest = drop_oldest

    # Statistics

    @property
    def ready(self) -> int:
        """Number of messages that are neither delayed nor in flight."""
        leases = self.leases
        return self._size - self._scheduled_live - len(leases.regular) - len(leases.custom)

    @property
    def claimable(self) -> int:
        """Number of ready messages, without those of keys that subscriptions hold."""
        leases = self.leases
        blocked = 0 if leases.locks is None else leases.locks.blocked
        waiting = self._size - self._scheduled_live - blocked
        return waiting - len(leases.regular) - len(leases.custom)

    @property
    def scheduled(self) -> int:
        """Number of messages whose delay has not passed."""
        return self._scheduled_live

    @property
    def in_flight(self) -> int:
        """Number of messages in flight."""
        return len(self.leases)

    @property
    def full(self) -> bool:
        """Whether ``put`` would raise ``QueueFull``."""
        return self._size >= self._room and not self._drop_oldest

    @property
    def free(self) -> int:
        """Number of messages that can be added."""
        return sys.maxsize if self._drop_oldest else self._room - self._size

    def holds(self, token: int) -> bool:
        """Return whether the delivery ``token`` still holds its message."""
        return token in self.leases

    def oldest_since(self) -> float | None:
        """Return when the oldest ready message became ready, or ``None`` if none is ready."""
        since, locks = self._ready.oldest_since(), self.leases.locks
        aside = None if locks is None else locks.oldest()
        if since is None or aside is None:
            return since if aside is None else aside.since
        return min(since, aside.since)

    # Adding messages

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
        """Add a message.

        Args:
            now: Current time.
            id: Id of the message.
            body: Body; ``None`` if it is only on disk.
            headers: Headers. Default: none.
            key: Key. Default: none.
            priority: Priority. Default: ``default_priority``.
            due: Time from which it may be delivered. Default: immediately.
            expires: Time at which it expires. Default: never.
            seq: Number of the message in the log; 0 (the default) in memory. A message with a
                number was already accepted, so limits are not checked.

        Returns:
            The number of messages ahead of it, or ``None`` if it is delayed.

        Raises:
            InvalidPriority: The priority is out of range.
            QueueFull: The queue is full and does not drop its oldest message.
        """
        if priority is None:
            priority = self.default_priority
        elif not 0 <= priority <= self._max_priority and not seq:
            self.check(id, priority)
        if self._size >= self._room:
            if not seq:  # otherwise the message was already accepted, perhaps under other limits
                self.check(id, priority)
            if self._drop_oldest:
                self._drop_oldest_message()
        if now - self._tick >= TIMESTAMP_RESOLUTION_SECONDS:
            self._tick = now
        self._size += 1
        self.published += 1
        fresh = (id, body, headers, self._tick, seq)
        locks = self.leases.locks
        if key is None and expires is None and due is None:
            ahead = self._ready.append(fresh, priority)
            return ahead if not locks else ahead + locks.ahead(priority)
        message = self._stored(fresh, priority, key, expires)
        if due is not None and due > now:
            self._schedule(message, due)
            return None
        ahead = self._ready.append(message, priority)
        return ahead if not locks else ahead + locks.ahead(priority)

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
        """Add a message recovered from the log, in order of arrival, regardless of limits.

        Returns:
            The message if it is a ``StoredMessage``, for example because it was delivered before;
            ``None`` if it is kept as a plain tuple.
        """
        self._size += 1
        if not attempt and key is None and expires is None and due is None:
            self._ready.append(fresh, priority)
            return None
        message = self._stored(fresh, priority, key, expires)
        message.attempt = attempt
        if due is not None and due > now:
            if attempt:  # a retry, which overtakes messages that were never delivered
                self._next = message.sequence = self._next + 1
            self._schedule(message, due)
        else:
            self._ready.append(message, priority)
        return message

    def reserve(self, id: str, priority: int | None) -> None:
        """Reserve capacity for a message that is being written; raise the errors of ``put``."""
        if self._size >= self._room or priority is not None:
            self.check(id, priority)
        self._reserved += 1
        self._room -= 1

    def unreserve(self) -> None:
        """Free reserved capacity, before the message is put or after its write failed."""
        self._reserved -= 1
        self._room += 1

    def check(self, id: str, priority: int | None) -> None:
        """Raise the error that ``put`` would raise for this message."""
        if priority is not None and not 0 <= priority <= self._max_priority:
            raise InvalidPriority(
                f"priority {priority!r} is outside this queue's range 0–{self._max_priority}",
                operation="publish",
                queue=self.name,
                message_id=id,
            )
        if self._size >= self._room and not self._drop_oldest:
            raise QueueFull(
                f"the queue holds {self._size + self._reserved} messages and may "
                f"hold at most {self._max_depth}: consume or purge some, or raise max_depth",
                operation="publish",
                queue=self.name,
                message_id=id,
            )

    def _drop_oldest_message(self) -> None:
        locks, oldest = self.leases.locks, None
        if locks and (aside := locks.oldest()) is not None:
            since = self._ready.oldest_since()
            if since is None or aside.since < since:
                self._remove_waiting(aside)
                oldest = aside
        oldest = oldest or self._ready.pop_oldest()
        if oldest is None and self._scheduled_live:
            oldest = next(message for _, message in self._scheduled)
            self._remove_waiting(oldest)
        if oldest is not None:  # if all messages are in flight, the queue exceeds its limit by one
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
        locks, key = self.leases.locks, message.key
        if locks is not None and key is not None and locks.put_back(key, message):
            return
        message.state = READY
        self._ready.put_back(message)

    # Deliveries

    def claim(
        self,
        now: float,
        limit: int,
        lease: float,
        consumer: str | None = None,
        holder: int = 0,
    ) -> list[StoredMessage]:
        """Lease up to ``limit`` ready messages for ``lease`` seconds.

        The attempt is counted here, before the handler runs, so that attempts are counted even if
        the message crashes its consumer. An expired message is never delivered.

        Args:
            now: Current time.
            limit: Maximum number of messages.
            lease: Length of the lease in seconds.
            consumer: Name of the consumer. Default: none.
            holder: Number of an ordered subscription, which claims no message whose key another
                one holds. It needs a ``consumer``. Default: 0, an unordered consumer.

        Returns:
            The messages. The ``state`` of each is its delivery token.
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
        if holder or leases.locks:
            claimed, limit = self._next_by_key(limit, holder), 0
            self._lease_by_key(now, claimed, holder, deadline, table)
        while limit > 0 and ready.mask and (message := ready.pop()) is not None:
            limit -= 1
            self._next = token = self._next + 1
            if not message.sequence:
                message.sequence = token
                if not message.attempt:  # otherwise it was delivered before the engine was opened
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

    def _next_by_key(self, limit: int, holder: int) -> list[StoredMessage]:
        """Remove and return the next messages that a holder may claim; set others aside.

        At most about ``MAX_RUN`` messages are set aside, so the result may be empty although more
        messages can be claimed.
        """
        ready, locks = self._ready, self.leases.locks
        if locks is None:
            locks = self.leases.locks = KeyLocks()
        found: list[StoredMessage] = []
        may_set_aside = MAX_RUN
        while len(found) < limit and may_set_aside > 0:
            head = locks.head(holder)
            if head is not None and not ready.comes_before(-head[0], head[1]):
                found.append(locks.pop(head))
                continue
            message = ready.pop()
            if message is None:
                break
            key = message.key
            if not holder or key is None or not locks.must_wait(key, holder):
                found.append(message)
            elif message.sequence:
                locks.set_returned_aside(key, message)
                may_set_aside -= 1
            else:
                may_set_aside -= self._set_run_aside(locks, key, message, holder)
        return found

    def _set_run_aside(self, locks: KeyLocks, key: str, message: StoredMessage, holder: int) -> int:
        """Set a message aside with those behind it that must wait too; return their number."""
        first = self._next = message.sequence = self._next + 1
        message.state = ASIDE
        run = {key: [message]}
        must_wait = partial(locks.must_wait, holder=holder)
        self._next = self._ready.pop_run(message.priority, run, must_wait, first)
        locks.set_aside(run, message.priority)
        return self._next + 1 - first

    def _lease_by_key(
        self,
        now: float,
        messages: list[StoredMessage],
        holder: int,
        deadline: float,
        table: dict[int, StoredMessage],
    ) -> None:
        locks = self.leases.locks
        for message in messages:
            self._next = token = self._next + 1
            if not message.sequence:
                message.sequence = token
            if not message.attempt and not message.deadline:  # never delivered
                self.first_claimed += 1
                self.waited += now - message.since
            message.attempt += 1
            message.state = token
            message.deadline = deadline
            table[token] = message
            if holder and locks is not None and message.key is not None:
                locks.lock(message.key, holder, token)

    def ack(self, token: int) -> StoredMessage:
        """Ack a delivery and remove its message.

        Raises ``AckDeadlineExceeded`` if the lease has expired.
        """
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
        """Dead-letter a message in flight."""
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
        """Release a message in flight.

        Args:
            now: Current time.
            token: Token of the delivery.
            delay: Seconds until the message may be delivered again. Default: 0.
            count_attempt: Count this delivery as an attempt. If false, the next delivery has the
                same attempt number. Default: true.
            headers: New headers. Default: unchanged.

        Returns:
            True, or false if the message had expired and was dead-lettered instead.
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
        """Extend a lease so that it expires ``seconds`` from now."""
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
                "the lease of this delivery has expired, and another consumer may have the "
                "message: extend the lease while working, or raise ack_deadline",
                operation=operation,
                queue=self.name,
            )
        return MessageNotFound(
            "there is no such delivery in this queue", operation=operation, queue=self.name
        )

    # Time

    def expire(self, now: float) -> list[DeadMessage]:
        """Process delays, TTLs and leases that have ended; return the dead messages."""
        self._advance(now)
        ended = self.leases.ended(now)
        with_them = self._of_the_same_keys(ended) if self.leases.locks is not None else ()
        for token in ended:
            self._expire(now, token, "expired")
        for token in with_them:
            message = self._take(token, "expire")
            message.attempt -= 1
            if message.expires is not None and message.expires <= now:
                self._add_dead(message, Reason.TTL_EXPIRED, _expired(message))
            else:
                self._back_to_ready(message)
                self.uncharged = [*self.uncharged, message]
        return self.take_dead()

    def _of_the_same_keys(self, ended: list[int]) -> list[int]:
        """Return other deliveries of keys whose holder let a lease expire: it loses all of them."""
        others: dict[int, None] = {}
        for token in ended:
            message, locks = self.leases.get(token), self.leases.locks
            if message is not None and message.key is not None and locks is not None:
                others.update(dict.fromkeys(locks.held_with(message.key, token)))
        return [token for token in others if token not in set(ended)]

    def abandon(self, now: float, tokens: Iterable[int]) -> list[DeadMessage]:
        """End the leases of a consumer that is gone; return the dead messages."""
        for token in tokens:
            if self.holds(token):
                self._expire(now, token, "ended with its consumer")
        return self.take_dead()

    def dead_letter_restored(self, message: StoredMessage) -> None:
        """Dead-letter a restored message that was in flight for the last time at the crash."""
        self._remove_waiting(message)
        self._add_dead(
            message,
            Reason.MAX_RETRIES_EXCEEDED,
            self._lease_expired(message, "ended when the engine stopped"),
        )

    def drop_unreadable(self, token: int) -> None:
        """Remove a message in flight whose body cannot be read."""
        self._leave(self._take(token, "lose"))
        self.dropped += 1

    def _lease_expired(self, message: StoredMessage, how: str) -> LeaseExpired:
        return LeaseExpired(
            f"the lease of delivery {message.attempt} of {self._max_deliveries} {how}: "
            "the handler crashed, hung or exceeded ack_deadline"
        )

    def _expire(self, now: float, token: int, how: str) -> None:
        consumer = self.leases.holders.get(token)
        message = self._take(token, "expire")
        if self._max_deliveries is not None and message.attempt >= self._max_deliveries:
            last = f" (consumer {consumer})" if consumer else ""
            error = self._lease_expired(message, how + last)
            self._add_dead(message, Reason.MAX_RETRIES_EXCEEDED, error)
        elif message.expires is not None and message.expires <= now:
            self._add_dead(message, Reason.TTL_EXPIRED, _expired(message))
        else:
            self._back_to_ready(message)
            self.returned.append(message)

    def advance(self, now: float) -> list[DeadMessage]:
        """Process delays and TTLs that have ended, but not leases; return the dead messages."""
        self._advance(now)
        return self.take_dead()

    def take_dead(self) -> list[DeadMessage]:
        """Return the messages that became dead since the last call."""
        dead, self.dead = self.dead, []
        return dead

    def next_due(self) -> float | None:
        """Return when ``expire`` must be called next. The time may be too early, never too late."""
        dues = (self._scheduled.next_due(), self._expiries.next_due(), self.leases.next_end())
        return min((due for due in dues if due is not None), default=None)

    def _advance(self, now: float) -> None:
        while (message := self._scheduled.pop_due(now)) is not None:
            self._scheduled_live -= 1
            if message.sequence:
                self._back_to_ready(message)
            else:  # delayed by its sender: order it as if it arrived now
                message.state = READY
                message.since = now
                self._ready.append(message, message.priority)
        while (message := self._expiries.pop_due(now)) is not None:
            if message.state <= READY:  # a message in flight is checked when it is released
                self._remove_waiting(message)
                self._add_dead(message, Reason.TTL_EXPIRED, _expired(message))

    # Removing messages

    def _leave(self, message: StoredMessage) -> None:
        message.state = REMOVED
        self._size -= 1
        if message.expires is not None:
            self._expiries.mark_stale()

    def _add_dead(self, message: StoredMessage, reason: Reason, error: Exception | None) -> None:
        self._leave(message)
        self.dead.append(DeadMessage(message, reason, error))

    def _remove_waiting(self, message: StoredMessage) -> None:
        """Mark a ready or scheduled message as removed, leaving a stale entry."""
        was_scheduled, was_aside = message.state == SCHEDULED, message.state == ASIDE
        message.state = REMOVED
        if was_scheduled:
            self._scheduled_live -= 1
            self._scheduled.mark_stale()
        elif was_aside and self.leases.locks is not None:
            self.leases.locks.discard(message)
        else:
            self._ready.discard(message)

    # Administration

    def waiting(self) -> Iterator[tuple[StoredMessage, float | None]]:
        """Yield ready messages in order of delivery, then scheduled ones with their due times."""
        locks = self.leases.locks
        ready = merge(self._ready, *locks, key=_order_of) if locks else self._ready
        for message in ready:
            yield message, None
        for due, message in self._scheduled:
            yield message, due

    def peek(self, limit: int) -> list[tuple[StoredMessage, float | None]]:
        """Return the first ``limit`` messages of ``waiting()``."""
        return list(islice(self.waiting(), limit))

    def purge(self) -> list[WaitingMessage]:
        """Remove all messages that are not in flight; return them in arbitrary order."""
        removed = self._ready.clear() + [message for _, message in self._scheduled]
        if self.leases.locks is not None:
            removed += self.leases.locks.clear()
        for entry in removed:
            if not isinstance(entry, tuple):
                entry.state = REMOVED
        self._scheduled.rebuild()
        self._scheduled_live = 0
        self._expiries.rebuild()
        self._size -= len(removed)
        return removed

    def remove(self, ids: Collection[str]) -> list[StoredMessage]:
        """Remove one message for each id, unless it is in flight; return the removed messages.

        If several messages have the same id, the first is removed. An id that is given twice
        removes two messages.
        """
        wanted = Counter(ids)
        found = self.leases.locks.take(wanted) if self.leases.locks is not None else []
        found += self._ready.take(wanted)
        for _, message in list(self._scheduled):
            if wanted[message.id] > 0:
                wanted[message.id] -= 1
                self._remove_waiting(message)
                found.append(message)
        for message in found:
            self._leave(message)
        return found

    def all_messages(self) -> Iterator[StoredMessage]:
        """Yield all messages, including those in flight."""
        for message, _ in self.waiting():
            yield message
        yield from self.leases


def _expired(message: StoredMessage) -> TimeToLiveExpired:
    return TimeToLiveExpired(f"the TTL expired after {message.attempt} deliveries")


def _order_of(message: StoredMessage) -> tuple[int, float]:
    """Return a sort key by order of delivery; messages without a sequence arrived last."""
    return -message.priority, message.sequence or float("inf")
