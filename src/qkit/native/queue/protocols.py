"""Interfaces of the journal, recovered messages and subscriptions that a queue uses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from qkit.message import Envelope
from qkit.native.queue.consumers import Consumer
from qkit.native.queue.stored_message import StoredMessage, WaitingMessage

__all__ = ["QueueJournal", "RestoredMessage", "Subscriber"]


class QueueJournal(Protocol):
    """Interface of the journal that a durable queue uses."""

    held: int
    """Total size of the bodies in memory, in bytes."""

    @property
    def disk_full(self) -> bool:
        """Whether records are waiting for space on the disk."""
        ...

    @property
    def reads_inline(self) -> bool:
        """Whether bodies may be read in the event loop."""
        ...

    def body_to_keep(self, body: bytes) -> bytes | None:
        """Return the body if the memory limit allows keeping it, otherwise ``None``."""
        ...

    def forget(self, seq: int) -> None:
        """Mark a message as no longer live, because its queue was deleted."""
        ...

    def is_live(self, seq: int) -> bool:
        """Return whether a message is still in the log and not settled."""
        ...

    def claim(self, number: int, messages: Sequence[StoredMessage]) -> None:
        """Record that messages were delivered."""
        ...

    def ack(self, number: int, message: StoredMessage) -> None:
        """Record that a message was acked."""
        ...

    def release(
        self, number: int, message: StoredMessage, due: float | None, headers: dict[str, str] | None
    ) -> None:
        """Record that a message was released; ``due`` is a monotonic time."""
        ...

    def release_body(self, message: StoredMessage) -> None:
        """Drop a ready message's body from memory if the memory limit is exceeded."""
        ...

    def remove(self, number: int, entries: Sequence[WaitingMessage]) -> None:
        """Record that messages were removed without an ack."""
        ...

    def dead_letter(
        self,
        number: int,
        message: StoredMessage,
        target: int,
        letter: Envelope,
        priority: int,
    ) -> int:
        """Record that a dead letter was added to the queue ``target``; return its seq."""
        ...

    def load(self, messages: Iterable[StoredMessage]) -> list[bytes | None]:
        """Return the bodies of messages, with ``None`` for each body that cannot be read.

        Blocking; thread-safe.
        """
        ...

    def body(self, message: StoredMessage) -> bytes | None:
        """Return the body of a message, or ``None`` if it cannot be read. Blocking."""
        ...

    def written(self) -> asyncio.Future[None] | None:
        """Return a future that is done once all changes so far survive a crash of this process.

        Returns ``None`` if they already do.
        """
        ...


class RestoredMessage(Protocol):
    """Message recovered from the log. Times are wall times; 0 means none."""

    id: str
    body: bytes | None
    headers: dict[str, str] | None
    at: float
    seq: int
    priority: int
    key: str | None
    due: float
    expires: float
    attempt: int
    held: bool
    """Whether the message was in flight at the end of the log."""


class Subscriber(Protocol):
    """Interface of an open subscription that its queue uses."""

    @property
    def holder(self) -> int:
        """Number of an ordered subscription; 0 if it is unordered."""
        ...

    def wake(self) -> None:
        """Wake a waiting ``receive``, because a message of one of its keys is ready."""
        ...

    def listed(self) -> Consumer:
        """Return the subscription's entry in the list of consumers."""
        ...

    def refresh(self) -> None:
        """Handle expired leases, or the closing of the queue."""
        ...
