"""From the records of a log back to the queues and messages they tell of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from qkit.native.encode import (
    encode_claim,
    encode_declare,
    encode_inbox,
    encode_publish,
    renumbered,
)
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

    def encode(self) -> bytes:
        """Its record, without the body."""
        return encode_publish(
            self.queue,
            self.seq,
            self.id,
            b"",
            priority=self.priority,
            at=self.at,
            due=self.due,
            expires=self.expires,
            key=self.key,
            headers=self.headers,
            attempt=self.attempt,
        )


class Replay:
    """What a log says, record by record; records about unknown messages say nothing.

    Bodies above ``limit`` bytes in sum are left on the disk.
    """

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self.index = Index()
        self.queues: dict[int, Declare] = {}
        self.messages: dict[int, Recovered] = {}
        self.taken: dict[str, tuple[int, int]] = {}  # bulk files, with first and last message
        self.orphans: list[str] = []  # names given to queues without one
        self.recovered: list[Recovered] = []
        self.held = 0  # bytes of bodies in memory
        self.last_queue = 0
        self.last_seq = 0
        self.records = 0
        self._deleted: dict[int, int] = {}  # queues, and the last message before that
        self._bulk: dict[int, Recovered] = {}  # of bulk files that may not have come to their end

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
                    self._bury(record)
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
                    self._deleted[record.queue] = self.last_seq
                    self.last_queue = max(self.last_queue, record.queue)
                case Inbox():
                    self._take(record)

    def load(self, contents: Iterable[bytes]) -> None:
        """Take over what a snapshot tells, of messages that are still in the log.

        The index is filled before. What compaction took out of the log since was settled since.
        """
        for content in contents:
            record = decode(content)
            match record:
                case Publish():
                    if self.index.find(record.seq) is not None:
                        found = Recovered(record, record.queue, record.seq, None)
                        (self._bulk if record.bulk else self.messages)[record.seq] = found
                case Claim():
                    if (message := self.messages.get(record.seqs[0])) is not None:
                        message.held = True
                case Declare():
                    self.queues[record.queue] = record
                case Inbox():
                    self.taken[record.name] = (record.first, record.last)
                case _:
                    raise AssertionError(record)

    def contents(self) -> Iterator[bytes]:
        """What a snapshot has to tell so that ``load`` knows what was read."""
        for number, queue in self.queues.items():
            yield encode_declare(number, queue.name, queue.group, queue.config)
        for name, (first, last) in self.taken.items():
            yield encode_inbox(name, first, last)
        for message in self.messages.values():
            if message.seq > self._deleted.get(message.queue, 0):
                yield message.encode()
                if message.held:
                    yield encode_claim(message.queue, [message.seq], [message.attempt])
        for message in self._bulk.values():
            whose = [(message.queue, message.seq)]
            yield renumbered(message.encode(), whose, bulk=True)

    def _publish(self, record: Publish, queue: int, seq: int) -> None:
        self.last_seq = max(self.last_seq, seq)
        body: bytes | None = record.body
        if self.held + len(record.body) > self.limit:
            body = None
        else:
            self.held += len(record.body)
        message = Recovered(record, queue, seq, body)
        (self._bulk if record.bulk else self.messages)[seq] = message

    def _bury(self, record: Bury) -> None:
        """Nothing has happened if the letter's queue is unknown: the message is still there.

        Its declaration and this record may both be among the last writes, of which a power loss
        keeps any.
        """
        letter = record.letter
        self.last_seq = max(self.last_seq, letter.seq)
        if letter.queue in self.queues:
            self._forget(record.seq)
            self._publish(letter, letter.queue, letter.seq)

    def _take(self, record: Inbox) -> None:
        self.taken[record.name] = (record.first, record.last)
        for seq in [seq for seq in self._bulk if record.first <= seq <= record.last]:
            self.messages[seq] = self._bulk.pop(seq)

    def _forget(self, seq: int) -> None:
        message = self.messages.pop(seq, None) or self._bulk.pop(seq, None)
        if message is not None:
            self.index.forget(seq)
            if message.body is not None:
                self.held -= len(message.body)

    def finish(self) -> None:
        """The log has come to its end: ``recovered`` are the messages that there are, in order.

        Those of deleted queues go, and those of bulk files that were not taken in whole. Queues
        that nobody declared nor deleted lost their declaration to damage that was repaired: they
        get a name, and are noted in ``orphans``.
        """
        for seq in list(self._bulk):
            self._forget(seq)
        for seq, message in list(self.messages.items()):
            if seq <= self._deleted.get(message.queue, 0):
                self._forget(seq)
            elif message.queue not in self.queues:
                name = f"recovered-{message.queue}"
                self.queues[message.queue] = Declare(message.queue, name, None, {})
                self.orphans.append(name)
        self.last_queue = max((self.last_queue, *self.queues))
        self.index.agree(self.messages)
        self.recovered = [self.messages[seq] for seq in sorted(self.messages)]


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
