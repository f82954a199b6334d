"""A message at rest in the native engine, and the priority buckets that hold the ready ones.

Sans-IO and small: a queue of a hundred thousand messages is a hundred thousand of these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Final

__all__ = ["GONE", "READY", "SCHEDULED", "ReadyBuckets", "Stored", "TaggedStored"]

READY: Final = 0
SCHEDULED: Final = -1
GONE: Final = -2
COMPACT_ABOVE: Final = 64  # stale entries below this are not worth a rebuild


class Stored:
    """One message of one queue.

    ``state`` is ``READY``, ``SCHEDULED``, ``GONE``, or the token of the delivery that holds it.
    ``sequence`` is the token of its first delivery, 0 before that: inside a priority the order
    of first delivery is the order of arrival, so nothing need be numbered on arrival.
    ``since`` is when it first became ready. ``key`` and ``expires`` are rare: here they are
    class attributes that cost a plain message nothing; ``TaggedStored`` has room for them.
    """

    __slots__ = ("attempt", "body", "headers", "id", "priority", "sequence", "since", "state")

    key: str | None = None
    expires: float | None = None

    def __init__(
        self, id: str, body: bytes, headers: dict[str, str] | None, priority: int, since: float
    ) -> None:
        self.id = id
        self.body = body
        self.headers = headers
        self.priority = priority
        self.since = since
        self.attempt = 0
        self.sequence = 0
        self.state: int = READY


class TaggedStored(Stored):
    """A message with a key or an expiry (monotonic seconds)."""

    __slots__ = ("expires", "key")

    expires: float | None
    key: str | None


class _Bucket:
    """The ready messages of one priority.

    ``returned`` holds those delivered before, a heap by sequence; ``fresh`` those never
    delivered, in order of arrival. Every returned one arrived before every fresh one, so taking
    the returned first is exact. ``stale`` counts entries of either whose message is gone.
    """

    __slots__ = ("fresh", "returned", "stale")

    def __init__(self) -> None:
        self.fresh: deque[Stored] = deque()
        self.returned: list[tuple[int, Stored]] = []
        self.stale = 0

    def __len__(self) -> int:
        return len(self.fresh) + len(self.returned) - self.stale

    def __iter__(self) -> Iterator[Stored]:
        for _, message in sorted(self.returned):
            if message.state == READY:
                yield message
        for message in self.fresh:
            if message.state == READY:
                yield message

    def head(self) -> Stored | None:
        """The next message; the stale entries before it go, so that finding it stays cheap."""
        while self.returned and self.returned[0][1].state != READY:
            heappop(self.returned)
            self.stale -= 1
        if self.returned:
            return self.returned[0][1]
        while self.fresh and self.fresh[0].state != READY:
            self.fresh.popleft()
            self.stale -= 1
        return self.fresh[0] if self.fresh else None

    def compact(self) -> None:
        self.fresh = deque(message for message in self.fresh if message.state == READY)
        self.returned = [entry for entry in self.returned if entry[1].state == READY]
        heapify(self.returned)
        self.stale = 0


class ReadyBuckets:
    """Ready messages: highest priority first, in order of arrival inside a priority.

    A bit mask of the buckets that hold entries finds the highest in O(1). Buckets are made when
    first used, so that a queue of 256 priorities costs no more than it needs.
    """

    __slots__ = ("_buckets", "_mask")

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._mask: int = 0

    def append(self, message: Stored) -> int:
        """Add a message that was never delivered; return how many are ahead of it."""
        priority = message.priority
        bucket = self._buckets.get(priority)
        if bucket is None:
            bucket = self._buckets[priority] = _Bucket()
        ahead = len(bucket.fresh) + len(bucket.returned) - bucket.stale
        if self._mask >> priority > 1:
            ahead += sum(len(other) for at, other in self._buckets.items() if at > priority)
        bucket.fresh.append(message)
        self._mask |= 1 << priority
        return ahead

    def put_back(self, message: Stored) -> None:
        """Return a message that was delivered before to its place: by its sequence."""
        priority = message.priority
        bucket = self._buckets.get(priority)
        if bucket is None:  # purged while the message was held
            bucket = self._buckets[priority] = _Bucket()
        heappush(bucket.returned, (message.sequence, message))
        self._mask |= 1 << priority

    def pop(self) -> Stored | None:
        """Take the next message."""
        while self._mask:
            top = self._mask.bit_length() - 1
            bucket = self._buckets[top]
            fresh, returned = bucket.fresh, bucket.returned
            message = heappop(returned)[1] if returned else fresh.popleft()
            if not fresh and not returned:
                self._mask ^= 1 << top
            if message.state == READY:
                return message
            bucket.stale -= 1
        return None

    def discard(self, message: Stored) -> None:
        """Note that a message in a bucket has just become ``GONE``.

        Its entry is skipped when its turn comes; cutting it out of the middle would be O(n) each.
        """
        bucket = self._buckets[message.priority]
        bucket.stale += 1
        if bucket.stale > COMPACT_ABOVE and bucket.stale > len(bucket):
            bucket.compact()
            if not bucket.fresh and not bucket.returned:
                self._mask &= ~(1 << message.priority)

    def oldest(self) -> Stored | None:
        """The message that has been ready longest; at equal times that of lowest priority."""
        heads: list[Stored] = []
        for priority in sorted(self._buckets):
            head = self._buckets[priority].head()
            if head is not None:
                heads.append(head)
            else:
                self._mask &= ~(1 << priority)
        return min(heads, key=lambda head: head.since, default=None)

    def clear(self) -> None:
        """Forget every message."""
        self._buckets.clear()
        self._mask = 0

    def __iter__(self) -> Iterator[Stored]:
        """Every message in order of delivery."""
        for priority in sorted(self._buckets, reverse=True):
            yield from self._buckets[priority]
