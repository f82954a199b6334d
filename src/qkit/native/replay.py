"""From the records of a log back to the queues and messages they tell of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from qkit.native.index import Index
from qkit.native.record import (
    Ack,
    Bury,
    Claim,
    Declare,
    Delete,
    Fanout,
    Inbox,
    Publish,
    Release,
    Remove,
    Take,
    decode,
)
from qkit.native.recovery import Entry

__all__ = ["Recovered", "Replay", "messages_in"]


class Recovered:
    """A message as the log tells of it; times are wall times, 0 for none."""

    __slots__ = (
        "at",
        "attempt",
        "body",
        "due",
        "expires",
        "headers",
        "held",
        "id",
        "key",
        "priority",
        "queue",
        "seq",
    )

    def __init__(self, record: Publish, queue: int, seq: int, body: bytes | None) -> None:
        self.queue = queue
        self.seq = seq
        self.id = record.id
        self.body = body  # ``None``: left on the disk
        self.priority = record.priority
        self.at = record.at
        self.due = record.due
        self.expires = record.expires
        self.key = record.key
        self.headers = record.headers
        self.attempt = record.attempt
        self.held = False  # a consumer had it when the log ends


class Replay:
    """What a log says, record by record; records about unknown messages say nothing.

    Bodies above ``limit`` bytes in sum are left on the disk.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.index = Index()
        self.queues: dict[int, Declare] = {}
        self.messages: dict[int, Recovered] = {}
        self.taken: dict[str, int] = {}  # bulk files and the first message of each, in order
        self.held = 0  # bytes of bodies in memory
        self.last_queue = 0
        self.last_seq = 0
        self.records = 0
        self._taking: dict[str, list[tuple[int, int]]] = {}

    def read(self, entries: Iterable[Entry]) -> None:
        """Follow the log from where it was left."""
        messages, index = self.messages, self.index
        for position, content in entries:
            self.records += 1
            record = decode(content)
            match record:
                case Publish():
                    self._publish(record, record.queue, record.seq)
                    index.add(record.seq, position)
                case Claim():
                    for seq, attempt in zip(record.seqs, record.attempts, strict=True):
                        if (message := messages.get(seq)) is not None:
                            message.attempt, message.held, message.due = attempt, True, 0.0
                case Ack() | Remove():
                    for seq in record.seqs:
                        self._forget(seq)
                case Release():
                    if (message := messages.get(record.seq)) is not None:
                        message.attempt, message.held = record.attempt, False
                        message.due = record.due
                        if record.headers is not None:
                            message.headers = record.headers or None
                case Bury():
                    self._forget(record.seq)
                    self._publish(record.letter, record.letter.queue, record.letter.seq)
                    index.add(record.letter.seq, position)
                case Fanout():
                    for queue, seq in record.targets:
                        self._publish(record.message, queue, seq)
                        index.add(seq, position)
                case Declare():
                    self.queues[record.queue] = record
                    self.last_queue = max(self.last_queue, record.queue)
                case Delete():
                    self.queues.pop(record.queue, None)
                case Take():
                    ranges = self._taking.setdefault(record.name, [])
                    ranges.append((record.first, record.last))
                case Inbox():
                    self.taken[record.name] = record.first
                    self._void(record.name, record.first)

    def load(self, contents: Iterable[bytes]) -> None:
        """Take over what a snapshot tells, of messages that are still in the log.

        The index is filled before. What compaction took out of the log since was settled since.
        """
        for content in contents:
            record = decode(content)
            match record:
                case Publish():
                    if self.index.find(record.seq) is not None:
                        message = Recovered(record, record.queue, record.seq, None)
                        self.messages[record.seq] = message
                case Claim():
                    if (message := self.messages.get(record.seqs[0])) is not None:  # type: ignore[assignment]
                        message.held = True
                case Declare():
                    self.queues[record.queue] = record
                case Inbox():
                    self.taken[record.name] = record.first
                case Take():
                    ranges = self._taking.setdefault(record.name, [])
                    ranges.append((record.first, record.last))
                case _:
                    raise AssertionError(record)

    def unfinished(self) -> Iterator[tuple[str, int, int]]:
        """Bulk files of which only a part was taken in so far."""
        for name, ranges in self._taking.items():
            for first, last in ranges:
                yield name, first, last

    def _void(self, name: str, first: float = float("inf")) -> None:
        """What was taken in of a bulk file before message ``first`` does not count."""
        for start, last in self._taking.pop(name, ()):
            if start < first:
                for seq in range(start, last + 1):
                    self._forget(seq)

    def _publish(self, record: Publish, queue: int, seq: int) -> None:
        self.last_seq = max(self.last_seq, seq)
        if queue not in self.queues:
            return  # deleted since, and its declaration is not in the log any more
        body: bytes | None = record.body
        if self.held + len(record.body) > self.limit:
            body = None
        else:
            self.held += len(record.body)
        self.messages[seq] = Recovered(record, queue, seq, body)

    def _forget(self, seq: int) -> None:
        message = self.messages.pop(seq, None)
        if message is not None:
            self.index.forget(seq)
            if message.body is not None:
                self.held -= len(message.body)

    def finish(self) -> list[Recovered]:
        """The messages that there are, in the order of the log.

        Those of deleted queues go, and those of bulk files that were not taken in whole.
        """
        for name in list(self._taking):
            self._void(name)
        queues = self.queues
        for seq, message in list(self.messages.items()):
            if message.queue not in queues:
                self._forget(seq)
        self.index.agree(self.messages)
        return [self.messages[seq] for seq in sorted(self.messages)]


def messages_in(content: bytes) -> list[int]:
    """The numbers of the messages whose body a record holds."""
    record = decode(content)
    match record:
        case Publish():
            return [record.seq]
        case Fanout():
            return [seq for _, seq in record.targets]
        case Bury():
            return [record.letter.seq]
        case _:
            return []
