"""``KeyLocks``: keys that ordered subscriptions hold, and the messages set aside for them. Sans-IO.

An ordered subscription holds a key while it has messages of that key in flight. A claim by another
ordered subscription sets the ready messages of the key aside, so that they are looked at once and
not by every claim. Messages set aside have a sequence number, so all messages that may be claimed
are claimed in the order of arrival, whether they were set aside or not.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Final, TypeAlias

from qkit.native.queue.stored_message import ASIDE, ReadyBuckets, Runs, StoredMessage

__all__ = ["Head", "KeyLocks", "new_holder"]

Head: TypeAlias = tuple[int, int, str]  # negative priority and sequence of a message, and its key

_HOLDERS: Final = itertools.count(1)


def new_holder() -> int:
    """Return a new number for an ordered subscription; 0 means unordered."""
    return next(_HOLDERS)


class _Lock:
    """Key held by a subscription, with the tokens of its deliveries."""

    __slots__ = ("holder", "tokens")

    def __init__(self, holder: int, token: int) -> None:
        self.holder = holder
        self.tokens = {token}


class _Aside(ReadyBuckets):
    """Messages of one key that were set aside, in order of delivery."""

    __slots__ = ("count", "offered")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0  # without removed messages
        self.offered: tuple[Head, int] | None = None  # last entry in a heap, and whose heap it is


class KeyLocks:
    """Locks of one queue's keys, and its messages that were set aside.

    Attributes:
        blocked: Number of messages that were set aside and whose key is held.
        freed: Whether a key with messages set aside became free; the queue resets it.
        wanted: Holders for whose keys there are more messages; the queue resets it.
    """

    __slots__ = ("_aside", "_counts", "_free", "_locks", "_own", "blocked", "freed", "wanted")

    def __init__(self) -> None:
        self._locks: dict[str, _Lock] = {}
        self._aside: dict[str, _Aside] = {}
        self._counts: dict[int, int] = {}  # messages set aside, by priority
        # Heaps of the first messages of keys, of free keys and of the keys of each holder. An
        # entry that is no longer the first message of its key is skipped.
        self._free: list[Head] = []
        self._own: dict[int, list[Head]] = {}
        self.blocked: int = 0
        self.freed: bool = False
        self.wanted: set[int] = set()

    def __iter__(self) -> Iterator[ReadyBuckets]:
        """Iterate over the messages set aside for each key, each in order of delivery."""
        return iter(tuple(self._aside.values()))

    def __bool__(self) -> bool:
        """Return whether any message is set aside."""
        return bool(self._aside)

    # Locks

    def lock(self, key: str, holder: int, token: int) -> None:
        """Record that a delivery of a subscription holds a key."""
        lock = self._locks.get(key)
        if lock is not None:
            lock.tokens.add(token)
            return
        self._locks[key] = _Lock(holder, token)
        aside = self._aside.get(key)
        if aside is not None:
            self.blocked += aside.count
            self._offer(key, aside)

    def unlock(self, key: str, token: int) -> None:
        """Record that a delivery has ended; its last delivery frees a key."""
        lock = self._locks.get(key)
        if lock is None or token not in lock.tokens:
            return  # an unordered consumer had the message
        lock.tokens.discard(token)
        if lock.tokens:
            return
        del self._locks[key]
        aside = self._aside.get(key)
        if aside is not None:
            self.blocked -= aside.count
            self.freed = True
            self._offer(key, aside)

    def held_with(self, key: str, token: int) -> list[int]:
        """Return all deliveries of a key that its holder has, if ``token`` is one of them."""
        lock = self._locks.get(key)
        return sorted(lock.tokens) if lock is not None and token in lock.tokens else []

    def must_wait(self, key: str, holder: int) -> bool:
        """Return whether a ready message of a key has to be set aside by a holder's claim."""
        lock = self._locks.get(key)
        return (lock is not None and lock.holder != holder) or key in self._aside

    def forget(self, holder: int) -> None:
        """Forget a subscription that has ended."""
        self._own.pop(holder, None)
        self.wanted.discard(holder)

    # Messages set aside

    def set_aside(self, messages: Runs, priority: int) -> None:
        """Set ready messages of one priority aside, by key, each list in order of arrival.

        They were removed from the ready messages and have a sequence number.
        """
        for key, added in messages.items():
            aside = self._aside_of(key)
            aside.extend(added, priority)
            self._added(key, aside, len(added), priority)

    def set_returned_aside(self, key: str, message: StoredMessage) -> None:
        """Set a ready message aside that was delivered before."""
        aside = self._aside_of(key)
        message.state = ASIDE
        aside.put_back(message)
        self._added(key, aside, 1, message.priority)

    def put_back(self, key: str, message: StoredMessage) -> bool:
        """Put back a message that was delivered, if its key has messages set aside.

        Returns:
            Whether it was put back; if not, it belongs to the ready messages.
        """
        aside = self._aside.get(key)
        if aside is None:
            return False
        message.state = ASIDE
        aside.put_back(message)
        self._added(key, aside, 1, message.priority)
        return True

    def head(self, holder: int) -> Head | None:
        """Return the first message set aside that a holder may claim, or ``None``.

        It belongs to a free key or, unless ``holder`` is 0, to a key of the holder.
        """
        if not self._aside:
            return None
        free, own = self._first(self._free, 0), self._first(self._own.get(holder), holder)
        if free is None or own is None:
            return free or own
        return min(free, own)

    def pop(self, head: Head) -> StoredMessage:
        """Remove and return the message of a ``head``."""
        key = head[2]
        aside = self._aside[key]
        message = aside.pop()
        assert message is not None
        self._count(key, aside, -1, message.priority)
        return message

    def discard(self, message: StoredMessage) -> None:
        """Remove a message set aside that has just become ``REMOVED``."""
        key = message.key or ""
        aside = self._aside[key]
        aside.discard(message)
        self._count(key, aside, -1, message.priority)

    def take(self, wanted: Counter[str]) -> list[StoredMessage]:
        """Remove and return messages by id, up to the counts in ``wanted``, and decrement these."""
        found: list[StoredMessage] = []
        for key, aside in tuple(self._aside.items()):
            for message in aside.take(wanted):
                found.append(message)
                self._count(key, aside, -1, message.priority)
        return found

    def clear(self) -> list[StoredMessage]:
        """Remove and return all messages set aside."""
        removed = [message for aside in self._aside.values() for message in aside]
        self._aside.clear()
        self._counts.clear()
        self._free.clear()
        self._own.clear()
        self.blocked = 0
        return removed

    def ahead(self, priority: int) -> int:
        """Return how many messages set aside have at least a given priority."""
        return sum(count for at, count in self._counts.items() if at >= priority)

    def oldest(self) -> StoredMessage | None:
        """Return the message set aside that has been ready longest, or ``None``."""
        heads = [head for aside in self._aside.values() if (head := next(iter(aside), None))]
        return min(heads, key=lambda message: message.since, default=None)

    # Internal

    def _aside_of(self, key: str) -> _Aside:
        aside = self._aside.get(key)
        if aside is None:
            aside = self._aside[key] = _Aside()
        return aside

    def _added(self, key: str, aside: _Aside, added: int, priority: int) -> None:
        lock = self._locks.get(key)
        if lock is not None:
            self.wanted.add(lock.holder)
        self._count(key, aside, added, priority)

    def _count(self, key: str, aside: _Aside, change: int, priority: int) -> None:
        aside.count += change
        self._counts[priority] = self._counts.get(priority, 0) + change
        if key in self._locks:
            self.blocked += change
        if aside.count:
            self._offer(key, aside)
        else:
            del self._aside[key]

    def _offer(self, key: str, aside: _Aside) -> None:
        """Add the first message of a key to the heap of those who may claim it."""
        first = aside.first()
        if first is None or isinstance(first, tuple):  # messages set aside have a key: no tuples
            return
        lock = self._locks.get(key)
        holder = 0 if lock is None else lock.holder
        head = (-first.priority, first.sequence, key)
        if aside.offered == (head, holder):
            return
        aside.offered = head, holder
        heappush(self._free if holder == 0 else self._own.setdefault(holder, []), head)

    def _first(self, heap: list[Head] | None, holder: int) -> Head | None:
        while heap:
            head = heap[0]
            aside = self._aside.get(head[2])
            if aside is not None and aside.offered == (head, holder):
                return head
            heappop(heap)
        return None
