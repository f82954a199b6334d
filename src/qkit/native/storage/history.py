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
    wanted = id.encode()
    queues: dict[int, int] = {}  # the queue of each message of that id
    steps: list[StatusChange] = []

    def arrived(queue: int, seq: int, message: Publish) -> None:
        if seq not in queues:  # compaction may have left it in two places
            queues[seq] = queue
            at, attempt = message.at, message.attempt
            steps.append(StatusChange(status=Status.PENDING, queue=queue, attempt=attempt, at=at))

    for content in contents:
        if not queues and wanted not in content:
            continue
        record = decode(content)
        match record:
            case Publish() if record.id == id:
                arrived(record.queue, record.seq, record)
            case Fanout() if record.message.id == id:
                for queue, seq in record.targets:
                    arrived(queue, seq, record.message)
            case Claim():
                for seq, attempt in zip(record.seqs, record.attempts, strict=True):
                    if seq in queues:
                        steps.append(
                            StatusChange(
                                status=Status.DELIVERED, queue=record.queue, attempt=attempt
                            )
                        )
            case Ack() | Remove():
                status = Status.ACKNOWLEDGED if isinstance(record, Ack) else Status.REMOVED
                steps += [
                    StatusChange(status=status, queue=record.queue)
                    for seq in record.seqs
                    if seq in queues
                ]
            case Release() if record.seq in queues:
                steps.append(
                    StatusChange(status=Status.FAILED, queue=record.queue, attempt=record.attempt)
                )
            case DeadLetterMove():
                if record.seq in queues:
                    steps.append(StatusChange(status=Status.DEAD_LETTERED, queue=record.queue))
                if record.letter.id == id:
                    queues[record.letter.seq] = record.letter.queue
            case _:
                pass
    return steps
