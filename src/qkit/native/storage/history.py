"""History of a message: its status changes, as far as the log still contains them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from qkit.native.log.record import (
    Ack,
    Claim,
    DeadLetterMove,
    Fanout,
    Publish,
    Record,
    Release,
    Remove,
    decode,
)

__all__ = ["Status", "StatusChange", "history_of"]


class Status(StrEnum):
    """Status of a message."""

    PENDING = "Pending"
    DELIVERED = "Delivered"
    ACKNOWLEDGED = "Acknowledged"
    FAILED = "Failed"  # released, to be delivered again
    DEAD_LETTERED = "DeadLettered"
    REMOVED = "Removed"  # purged, dropped or replayed


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusChange:
    """One status change of a message.

    Attributes:
        status: The new status.
        queue: Number of the queue in the log.
        attempt: Number of deliveries so far; 0 if the record does not contain it.
        at: Wall time at which the message was accepted; only for ``PENDING``.
    """

    status: Status
    queue: int
    attempt: int = 0
    at: float | None = None


def history_of(id: str, contents: Iterable[bytes]) -> list[StatusChange]:
    """Return the status changes of all messages with an id, in the order of the log.

    The copies of a message in several groups of a topic have the same id.
    """
    encoded_id, history = id.encode(), _History(id)
    for content in contents:
        if history.queues or encoded_id in content:
            history.read(decode(content))
    return history.changes


class _History:
    """Status changes of the messages with one id, collected record by record."""

    def __init__(self, id: str) -> None:
        self._id = id
        self.queues: dict[int, int] = {}  # queue by message number
        self.changes: list[StatusChange] = []

    def read(self, record: Record) -> None:
        match record:
            case Publish() if record.id == self._id:
                self._publish(record.queue, record.seq, record)
            case Fanout() if record.message.id == self._id:
                for queue, seq in record.targets:
                    self._publish(queue, seq, record.message)
            case Claim():
                for seq, attempt in zip(record.seqs, record.attempts, strict=True):
                    self._add(Status.DELIVERED, record.queue, seq, attempt)
            case Ack() | Remove():
                status = Status.ACKNOWLEDGED if isinstance(record, Ack) else Status.REMOVED
                for seq in record.seqs:
                    self._add(status, record.queue, seq)
            case Release():
                self._add(Status.FAILED, record.queue, record.seq, record.attempt)
            case DeadLetterMove():
                self._add(Status.DEAD_LETTERED, record.queue, record.seq)
                if record.letter.id == self._id:
                    self.queues[record.letter.seq] = record.letter.queue
            case _:
                pass

    def _publish(self, queue: int, seq: int, message: Publish) -> None:
        if seq not in self.queues:  # a crash during compaction may leave it in two segments
            self.queues[seq] = queue
            self.changes.append(
                StatusChange(
                    status=Status.PENDING, queue=queue, attempt=message.attempt, at=message.at
                )
            )

    def _add(self, status: Status, queue: int, seq: int, attempt: int = 0) -> None:
        if seq in self.queues:
            self.changes.append(StatusChange(status=status, queue=queue, attempt=attempt))
