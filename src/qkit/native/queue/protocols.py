"""What a queue needs of the journal, of recovery and of its subscriptions, as protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from qkit.message import Envelope
from qkit.native.queue.consumers import Consumer
from qkit.native.queue.stored_message import StoredMessage, WaitingMessage

__all__ = ["QueueJournal", "RestoredMessage", "Subscriber"]


class QueueJournal(Protocol):
    """What a durable queue needs of its engine's journal."""

    held: int
    """Bytes of bodies in memory."""

    @property
    def disk_full(self) -> bool:
        """Whether records wait for space on the disk."""
        ...

    @property
    def reads_inline(self) -> bool:
        """Whether bodies may be read in the event loop."""
        ...

    def body_to_keep(self, body: bytes) -> bytes | None:
        """Return the body if memory has room for it, else ``None``: it stays on the disk."""
        ...

    def forget(self, seq: int) -> None:
        """Forget where a message lies: its queue is gone."""
        ...

    def claim(self, number: int, messages: Sequence[StoredMessage]) -> None:
        """Record that messages were handed out."""
        ...

    def ack(self, number: int, message: StoredMessage) -> None:
        """Record that the work on a message is done."""
        ...

    def release(
        self, number: int, message: StoredMessage, due: float | None, headers: dict[str, str] | None
    ) -> None:
        """Record that a message was given back; ``due`` is monotonic."""
        ...

    def release_body(self, message: StoredMessage) -> None:
        """Leave the body of a message that waits again on the disk, if memory is short."""
        ...

    def remove(self, number: int, entries: Sequence[WaitingMessage]) -> None:
        """Record that messages were purged, dropped or removed."""
        ...

    def dead_letter(
        self,
        number: int,
        message: StoredMessage,
        target: int,
        letter: Envelope,
        priority: int,
    ) -> int:
        """Record that a message died and its letter entered another queue; return its number."""
        ...

    def load(self, messages: Iterable[StoredMessage]) -> list[bytes | None]:
        """Read bodies, ``None`` for one that cannot be read any more. Blocking, for any thread."""
        ...

    def body(self, message: StoredMessage) -> bytes | None:
        """Return a message's body, read if needed."""
        ...

    def written(self) -> asyncio.Future[None] | None:
        """Return what to await until a crash of this process cannot undo what happened so far."""
        ...


class RestoredMessage(Protocol):
    """A message as the log has it; times are wall times, 0 for none."""

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
    """Whether a consumer had it when the log ended."""


class Subscriber(Protocol):
    """An open subscription, as its queue knows it."""

    def listed(self) -> Consumer:
        """How it is listed among the consumers."""
        ...

    def refresh(self) -> None:
        """Leases were lost, or the whole queue."""
        ...
