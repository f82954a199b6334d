"""What the log still tells of a message: its statuses, in their order."""

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
    """What had become of a message."""

    PENDING = "Pending"
    DELIVERED = "Delivered"
    ACKNOWLEDGED = "Acknowledged"
    FAILED = "Failed"  # given back, to be delivered again
    DEAD_LETTERED = "DeadLettered"
    REMOVED = "Removed"  # purged, dropped or replayed


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusChange:
    """One step of a message's life.

    ``queue`` is the number of the queue in the log; ``attempt`` counts deliveries so far; ``at``
    is when it was accepted, known of the first step alone.
    """

    status: Status
    queue: int
    attempt: int = 0
    at: float | None = None


def history_of(id: str, contents: Iterable[bytes]) -> list[StatusChange]:
    """The steps of the messages of that id; copies of one in several groups of a topic mingle."""
    wanted, history = id.encode(), _History(id)
    for content in contents:
        if history.queues or wanted in content:
            history.read(decode(content))
    return history.steps


class _History:
    """Steps of the messages of one id, record by record."""

    def __init__(self, id: str) -> None:
        self._id = id
        self.queues: dict[int, int] = {}  # the queue of each message of that id
        self.steps: list[StatusChange] = []

    def read(self, record: Record) -> None:
        match record:
            case Publish() if record.id == self._id:
                self._arrived(record.queue, record.seq, record)
            case Fanout() if record.message.id == self._id:
                for queue, seq in record.targets:
                    self._arrived(queue, seq, record.message)
            case Claim():
                for seq, attempt in zip(record.seqs, record.attempts, strict=True):
                    self._step(Status.DELIVERED, record.queue, seq, attempt)
            case Ack() | Remove():
                status = Status.ACKNOWLEDGED if isinstance(record, Ack) else Status.REMOVED
                for seq in record.seqs:
                    self._step(status, record.queue, seq)
            case Release():
                self._step(Status.FAILED, record.queue, record.seq, record.attempt)
            case DeadLetterMove():
                self._step(Status.DEAD_LETTERED, record.queue, record.seq)
                if record.letter.id == self._id:
                    self.queues[record.letter.seq] = record.letter.queue
            case _:
                pass

    def _arrived(self, queue: int, seq: int, message: Publish) -> None:
        if seq not in self.queues:  # compaction may have left it in two places
            self.queues[seq] = queue
            self.steps.append(
                StatusChange(
                    status=Status.PENDING, queue=queue, attempt=message.attempt, at=message.at
                )
            )

    def _step(self, status: Status, queue: int, seq: int, attempt: int = 0) -> None:
        if seq in self.queues:
            self.steps.append(StatusChange(status=status, queue=queue, attempt=attempt))
