"""Messages in a queue, and the priority buckets of those that are ready. Sans-IO.

Most messages wait once and are delivered once. Until its delivery, such a message is a plain tuple,
which needs a fifth of the memory of an object. A message becomes a ``StoredMessage`` when it is
claimed, or on arrival if it has a delay, an expiry or a key.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Final, TypeAlias

__all__ = [
    "ASIDE",
    "MAX_RUN",
    "READY",
    "REMOVED",
    "SCHEDULED",
    "NewMessage",
    "ReadyBuckets",
    "Runs",
    "StoredMessage",
    "TaggedMessage",
    "WaitingMessage",
]

READY: Final = 0
SCHEDULED: Final = -1
REMOVED: Final = -2
ASIDE: Final = -3  # ready, but set aside for the holder of its key; see ``key_locks``
MAX_RUN: Final = 20_000  # messages that are set aside at once
COMPACT_ABOVE: Final = 64  # fewer stale entries are not worth a rebuild

# id, body (``None``: only on disk), headers, since, seq (0 in memory)
NewMessage: TypeAlias = tuple[str, bytes | None, dict[str, str] | None, float, int]


class StoredMessage:
    """Message in a queue.

    ``state`` is ``READY``, ``ASIDE``, ``SCHEDULED``, ``REMOVED``, or the token of the delivery that
    holds the message until ``deadline``. ``sequence`` is the token of the first delivery, or a
    number of the same series given when the message is set aside, and 0 before. Within a priority,
    both happen in the order of arrival, so messages need no number on arrival. ``seq`` is the
    number of the message in the log of a durable engine.
    ``since`` is when it first became ready. ``key`` and ``expires`` are rarely used. They are class
    attributes here, so they need no memory; ``TaggedMessage`` has slots for them.
    """

    __slots__ = (
        "attempt",
        "body",
        "deadline",
        "headers",
        "id",
        "priority",
        "seq",
        "sequence",
        "since",
        "state",
    )

    id: str
    body: bytes | None
    headers: dict[str, str] | None
    since: float
    seq: int
    key: str | None = None
    expires: float | None = None

    def __init__(self, fresh: NewMessage, priority: int) -> None:
        self.id, self.body, self.headers, self.since, self.seq = fresh
        self.priority: int = priority
        self.attempt: int = 0
        self.sequence: int = 0
        self.state: int = READY
        self.deadline: float = 0.0


class TaggedMessage(StoredMessage):
    """Message with a key or an expiry (in monotonic seconds)."""

    __slots__ = ("expires", "key")

    expires: float | None
    key: str | None


WaitingMessage: TypeAlias = NewMessage | StoredMessage
Runs: TypeAlias = dict[str, list[StoredMessage]]  # messages by key


class _Bucket:
    """Ready messages of one priority.

    ``returned`` is a heap, by sequence, of messages that were delivered before. ``fresh`` contains
    messages that were never delivered, in order of arrival. Every returned message arrived before
    every fresh one, so popping returned messages first keeps the order. ``stale`` counts entries
    in both whose message was removed.
    """

    __slots__ = ("fresh", "priority", "returned", "stale")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.fresh: deque[WaitingMessage] = deque()
        self.returned: list[tuple[int, StoredMessage]] = []
        self.stale = 0

    def __len__(self) -> int:
        return len(self.fresh) + len(self.returned) - self.stale

    def __iter__(self) -> Iterator[WaitingMessage]:
        for _, message in sorted(self.returned):
            if message.state != REMOVED:
                yield message
        for entry in self.fresh:
            if isinstance(entry, tuple) or entry.state != REMOVED:
                yield entry

    def head(self) -> WaitingMessage | None:
        """Return the next message, or ``None``; remove the stale entries before it."""
        while self.returned and self.returned[0][1].state == REMOVED:
            heappop(self.returned)
            self.stale -= 1
        if self.returned:
            return self.returned[0][1]
        while self.fresh:
            entry = self.fresh[0]
            if isinstance(entry, tuple) or entry.state != REMOVED:
                return entry
            self.fresh.popleft()
            self.stale -= 1
        return None

    def compact(self) -> None:
        self.keep(list(self))

    def keep(self, entries: list[WaitingMessage]) -> None:
        """Replace all entries with ``entries``, which are in order of delivery."""
        self.returned, self.fresh = [], deque()
        for entry in entries:
            if isinstance(entry, tuple) or not entry.sequence:
                self.fresh.append(entry)
            else:
                self.returned.append((entry.sequence, entry))
        heapify(self.returned)
        self.stale = 0


class ReadyBuckets:
    """Ready messages: highest priority first, in order of arrival within a priority.

    A bit mask of the non-empty buckets gives the highest priority in O(1). Buckets are created on
    first use, so unused priorities cost nothing.
    """

    __slots__ = ("_buckets", "mask")

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self.mask: int = 0  # 0: no message is ready

    def append(self, entry: WaitingMessage, priority: int) -> int:
        """Add a message that was never delivered; return how many are ahead of it."""
        bucket = self._buckets.get(priority)
        if bucket is None:
            bucket = self._bucket(priority)
        fresh = bucket.fresh
        ahead = len(fresh) + len(bucket.returned) - bucket.stale
        mask = self.mask
        if mask >> priority > 1:
            ahead += sum(len(other) for at, other in self._buckets.items() if at > priority)
        fresh.append(entry)
        if not mask >> priority & 1:
            self.mask = mask | 1 << priority
        return ahead

    def put_back(self, message: StoredMessage) -> None:
        """Put back a message that was delivered before, in order of arrival."""
        bucket = self._bucket(message.priority)
        heappush(bucket.returned, (message.sequence, message))
        self.mask |= 1 << message.priority

    def extend(self, messages: list[StoredMessage], priority: int) -> None:
        """Add messages, which come after those of the same priority that are here."""
        self._bucket(priority).fresh.extend(messages)
        self.mask |= 1 << priority

    def first(self) -> WaitingMessage | None:
        """Return the next message without removing it, or ``None`` if there is none."""
        while self.mask:
            bucket = self._buckets[self.mask.bit_length() - 1]
            head = bucket.head()
            if head is not None:
                return head
            self._unmask(bucket)
        return None

    def comes_before(self, priority: int, sequence: int) -> bool:
        """Return whether the next message is delivered before one that was set aside."""
        while self.mask:
            top = self.mask.bit_length() - 1
            if top != priority:
                return top > priority
            bucket = self._buckets[top]
            head = bucket.head()
            if head is not None:  # messages without a sequence arrived later
                return not isinstance(head, tuple) and 0 < head.sequence < sequence
            self._unmask(bucket)
        return False

    def pop_run(self, priority: int, run: Runs, must_wait: Callable[[str], bool], at: int) -> int:
        """Remove the messages at the front that have to wait for the holder of their key.

        Only messages that were never delivered are removed, up to ``MAX_RUN``.

        Args:
            priority: Highest priority that has a ready message, or had one until it was popped.
            run: Dictionary to which the messages are added, by key.
            must_wait: Returns whether messages of a key have to wait.
            at: Sequence number of the last message.

        Returns:
            The sequence number of the last removed message.
        """
        bucket = self._buckets[priority]
        fresh, end = bucket.fresh, at + MAX_RUN
        if bucket.returned:
            return at
        while fresh and at < end:
            entry = fresh[0]
            if isinstance(entry, tuple) or (key := entry.key) is None:
                break
            if entry.state == REMOVED:
                bucket.stale -= 1
            else:
                found = run.get(key)
                if found is None:
                    if not must_wait(key):
                        break
                    found = run[key] = []
                entry.sequence = at = at + 1
                entry.state = ASIDE
                found.append(entry)
            fresh.popleft()
        self._unmask(bucket)
        return at

    def _bucket(self, priority: int) -> _Bucket:
        bucket = self._buckets.get(priority)
        if bucket is None:
            bucket = self._buckets[priority] = _Bucket(priority)
        return bucket

    def pop(self) -> StoredMessage | None:
        """Remove and return the next message, or ``None`` if there is none."""
        while self.mask:
            top = self.mask.bit_length() - 1
            bucket = self._buckets[top]
            fresh, returned = bucket.fresh, bucket.returned
            entry = heappop(returned)[1] if returned else fresh.popleft()
            if not fresh and not returned:
                self.mask ^= 1 << top
            if isinstance(entry, tuple):
                return StoredMessage(entry, top)
            if entry.state != REMOVED:
                return entry
            bucket.stale -= 1
        return None

    def discard(self, message: StoredMessage) -> None:
        """Count the entry of a message that has just become ``REMOVED``.

        ``pop`` skips the entry; removing it from the middle of a bucket would be O(n).
        """
        bucket = self._buckets[message.priority]
        bucket.stale += 1
        if bucket.stale > COMPACT_ABOVE and bucket.stale > len(bucket):
            bucket.compact()
            self._unmask(bucket)

    def _unmask(self, bucket: _Bucket) -> None:
        if not bucket.fresh and not bucket.returned:
            self.mask &= ~(1 << bucket.priority)

    def oldest_since(self) -> float | None:
        """Return when the message that has been ready longest became ready, or ``None``."""
        oldest = self._oldest()
        return None if oldest is None else oldest[0]

    def pop_oldest(self) -> StoredMessage | None:
        """Remove and return the message that has been ready longest, or ``None``.

        Of several messages with the same time, the one with the lowest priority is returned.
        """
        oldest = self._oldest()
        if oldest is None:
            return None
        bucket = oldest[1]
        entry = heappop(bucket.returned)[1] if bucket.returned else bucket.fresh.popleft()
        self._unmask(bucket)
        return StoredMessage(entry, bucket.priority) if isinstance(entry, tuple) else entry

    def _oldest(self) -> tuple[float, _Bucket] | None:
        heads: list[tuple[float, _Bucket]] = []
        for priority in sorted(self._buckets):
            bucket = self._buckets[priority]
            head = bucket.head()
            if head is None:
                self._unmask(bucket)
            else:
                heads.append((head[3] if isinstance(head, tuple) else head.since, bucket))
        return min(heads, key=lambda head: head[0], default=None)

    def take(self, wanted: Counter[str]) -> list[StoredMessage]:
        """Remove and return messages by id, up to the counts in ``wanted``, and decrement these."""
        found: list[StoredMessage] = []
        for priority in sorted(self._buckets, reverse=True):
            bucket = self._buckets[priority]
            kept: list[WaitingMessage] = []
            before = len(found)
            for entry in bucket:
                id = entry[0] if isinstance(entry, tuple) else entry.id
                if wanted[id] > 0:
                    wanted[id] -= 1
                    found.append(
                        StoredMessage(entry, priority) if isinstance(entry, tuple) else entry
                    )
                else:
                    kept.append(entry)
            if len(found) > before:
                bucket.keep(kept)
                self._unmask(bucket)
        return found

    def clear(self) -> list[WaitingMessage]:
        """Remove and return all messages."""
        entries = [entry for bucket in self._buckets.values() for entry in bucket]
        self._buckets.clear()
        self.mask = 0
        return entries

    def __iter__(self) -> Iterator[StoredMessage]:
        """Iterate over all messages in order of delivery.

        A plain tuple is yielded as a new ``StoredMessage``.
        """
        for priority in sorted(self._buckets, reverse=True):
            for entry in self._buckets[priority]:
                yield StoredMessage(entry, priority) if isinstance(entry, tuple) else entry
