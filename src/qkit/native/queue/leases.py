"""``Leases``: the messages in flight, by delivery token. Sans-IO."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from qkit.native.queue.key_locks import KeyLocks
from qkit.native.queue.stored_message import COMPACT_ABOVE, StoredMessage

__all__ = ["Leases"]


class Leases:
    """Messages in flight by delivery token, ordered by the expiry of their leases.

    Nearly all leases of a queue have the same length, so a new or extended lease is usually added
    to the end of ``regular``. Leases that would break the order are in ``custom``, with a heap of
    their deadlines. Times are monotonic seconds.
    """

    __slots__ = ("_busy", "custom", "custom_ends", "holders", "latest", "locks", "regular")

    def __init__(self) -> None:
        self.regular: dict[int, StoredMessage] = {}
        self.custom: dict[int, StoredMessage] = {}
        self.custom_ends: list[tuple[float, int]] = []  # at least one entry for each custom lease
        self.latest: float = float("-inf")  # deadline of the last regular lease
        self.holders: dict[int, str] = {}  # names of consumers that have a name, by token
        self._busy: dict[str, int] = {}  # messages in flight, by consumer name
        self.locks: KeyLocks | None = None  # created with the first ordered subscription

    def __len__(self) -> int:
        return len(self.regular) + len(self.custom)

    def __contains__(self, token: int) -> bool:
        return token in self.regular or token in self.custom

    def __iter__(self) -> Iterator[StoredMessage]:
        """Iterate over all messages in flight."""
        yield from self.regular.values()
        yield from self.custom.values()

    def get(self, token: int) -> StoredMessage | None:
        """Return the message of a delivery, or ``None`` if its lease has ended."""
        return self.regular.get(token) or self.custom.get(token)

    def busy(self, consumer: str | None) -> int:
        """Return how many messages a named consumer holds."""
        return self._busy.get(consumer, 0) if consumer is not None else 0

    def held_by(self, consumer: str) -> list[int]:
        """Return the tokens of the deliveries that a named consumer holds."""
        return [token for token, name in self.holders.items() if name == consumer]

    def enter(self, messages: Sequence[StoredMessage], consumer: str | None) -> None:
        """Record the consumer and the deadlines of leases that ``QueueState.claim`` has added."""
        if consumer is not None:
            self._busy[consumer] = self._busy.get(consumer, 0) + len(messages)
            for message in messages:
                self.holders[message.state] = consumer
        if messages[0].state in self.custom:
            self._enter_custom_ends(messages)

    def take(self, token: int, message: StoredMessage | None = None) -> StoredMessage | None:
        """End a lease; return its message, or ``None`` if there is no such lease.

        A caller that has already removed the message from ``regular`` passes it as ``message``.
        """
        message = message or self.regular.pop(token, None) or self.custom.pop(token, None)
        consumer = self.holders.pop(token, None)
        if consumer is not None:
            self._busy[consumer] -= 1
            if not self._busy[consumer]:
                del self._busy[consumer]
        if self.locks is not None and message is not None and message.key is not None:
            self.locks.unlock(message.key, token)
        return message

    def extend(self, token: int, deadline: float) -> bool:
        """Set the deadline of a lease; return whether there is such a lease."""
        message = self.regular.pop(token, None) or self.custom.pop(token, None)
        if message is None:
            return False
        message.deadline = deadline
        if deadline >= self.latest or not self.regular:
            self.latest = deadline
            self.regular[token] = message
        else:
            self.custom[token] = message
            self._enter_custom_ends((message,))
        return True

    def ended(self, now: float) -> list[int]:
        """Return the tokens of all expired leases. The caller ends them with ``take``."""
        # Collect the tokens first: after many removals at the start of a dict, finding its first
        # entry is slow.
        ended: list[int] = []
        for token, message in self.regular.items():
            if message.deadline > now:
                break
            ended.append(token)
        while (end := self._next_custom_end()) is not None and end[0] <= now:
            ended.append(heappop(self.custom_ends)[1])
        return ended

    def next_end(self) -> float | None:
        """Return the earliest deadline, or ``None`` if there is no lease."""
        custom = self._next_custom_end()
        for message in self.regular.values():
            return message.deadline if custom is None else min(message.deadline, custom[0])
        return None if custom is None else custom[0]

    def _next_custom_end(self) -> tuple[float, int] | None:
        ends, leases = self.custom_ends, self.custom
        while ends:
            at, token = ends[0]
            lease = leases.get(token)
            if lease is not None and lease.deadline == at:
                return ends[0]
            heappop(ends)
        return None

    def _enter_custom_ends(self, messages: Iterable[StoredMessage]) -> None:
        for message in messages:
            heappush(self.custom_ends, (message.deadline, message.state))
        if len(self.custom_ends) > 2 * len(self.custom) + COMPACT_ABOVE:
            # Rebuild the heap without stale entries. Removing each entry when its delivery is
            # settled would be O(n), and entries kept until their deadlines would pile up.
            self.custom_ends = [(lease.deadline, token) for token, lease in self.custom.items()]
            heapify(self.custom_ends)
