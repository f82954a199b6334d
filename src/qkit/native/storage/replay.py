"""``Replay``: reconstruction of queues and messages from the records of a log.

During the replay, a message is kept as the bytes of its record, and its changes are kept
separately. Most messages turn out to be settled, and a million objects would keep the garbage
collector busy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from heapq import merge
from operator import itemgetter
from typing import Final

from qkit.native.log.encode import (
    encode_bulk_import,
    encode_claim,
    encode_declare,
    encode_publish,
    renumbered,
    without_body,
)
from qkit.native.log.record import (
    BULK,
    ONE_SEQ,
    PUBLISH,
    QUEUE_SEQ,
    QUEUE_SEQ_OFFSET,
    TARGETS,
    Ack,
    BulkImport,
    Claim,
    DeadLetterMove,
    Declare,
    Delete,
    Fanout,
    Publish,
    Record,
    Release,
    Remove,
    decode,
    decode_publish,
)
from qkit.native.log.recovery import Entry
from qkit.native.log.tail import Position
from qkit.native.storage.index import Index

__all__ = ["RecoveredMessage", "Replay", "messages_in"]

_queue_seq: Final = QUEUE_SEQ.unpack_from


class RecoveredMessage:
    """Message recovered from the log. Times are wall times; 0 means none."""

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
        self.queue: int = queue
        self.seq: int = seq
        self.id: str = record.id
        self.body: bytes | None = body  # ``None``: only on disk
        self.priority: int = record.priority
        self.at: float = record.at
        self.due: float = record.due
        self.expires: float = record.expires
        self.key: str | None = record.key
        self.headers: dict[str, str] | None = record.headers
        self.attempt: int = record.attempt
        self.held: bool = False  # in flight at the end of the log

    def encode(self) -> bytes:
        """Return a ``Publish`` record of the message, without the body."""
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
    """State of an engine, rebuilt record by record. Records about unknown messages are ignored.

    Args:
        limit: Bytes of bodies to keep in memory; other bodies stay on disk. Default: 0.
        repaired: Keep the messages of queues that were neither declared nor deleted, under new
            queue names (``orphans``). If false (the default), such messages are discarded, because
            they were never confirmed.
    """

    def __init__(self, limit: int = 0, *, repaired: bool = False) -> None:
        self.limit = limit
        self.index: Index = Index()
        self.queues: dict[int, Declare] = {}
        self.imported: dict[str, tuple[int, int]] = {}  # first and last message, by bulk file
        self.orphans: list[str] = []
        self.lost: list[tuple[int, Publish]] = []  # messages that a repair lost, with the segment
        self.assumed: set[int] = set()  # queues whose declaration must be written again
        self.held: int = 0  # bytes of bodies in memory
        self.last_queue: int = 0
        self.last_seq: int = 0
        self.records: int = 0
        self._repaired = repaired
        self._messages: dict[int, bytes] = {}  # records by message number
        self._bodiless: set[int] = set()  # messages whose record is kept without its body
        self._claimed: dict[int, int] = {}  # attempts of messages in flight
        self._released: dict[int, Release] = {}
        self._bulk: dict[int, bytes] = {}  # records of bulk files that may be incomplete
        self._deleted: dict[int, int] = {}  # last message before the deletion, by queue

    def read(self, entries: Iterable[Entry]) -> None:
        """Apply the next records of the log."""
        index = self.index
        for position, content in entries:
            self.records += 1
            if content[0] == PUBLISH:
                self._publish(content)
                index.add(_queue_seq(content, QUEUE_SEQ_OFFSET)[1], position)
            else:
                self._apply(decode(content), content, position)

    def _apply(self, record: Record, content: bytes, position: Position) -> None:
        match record:
            case Claim():
                self._claim(record)
            case Ack() | Remove():
                for seq in record.seqs:
                    self._forget(seq)
            case Release():
                self._release(record)
            case DeadLetterMove():
                self._dead_letter_move(record, content[ONE_SEQ.size :])
                self.index.add(record.letter.seq, position)
            case Fanout():
                self._fan_out(record, content)
                for _, seq in record.targets:
                    self.index.add(seq, position)
            case Declare():
                self.queues[record.queue] = record
                self.last_queue = max(self.last_queue, record.queue)
            case Delete():
                self.queues.pop(record.queue, None)
                self.assumed.discard(record.queue)
                self._deleted[record.queue] = self.last_seq
                self.last_queue = max(self.last_queue, record.queue)
            case BulkImport():
                self._bulk_import(record)
            case Publish():
                raise AssertionError("PUBLISH records are handled by read()")

    def _claim(self, record: Claim) -> None:
        for seq, attempt in zip(record.seqs, record.attempts, strict=True):
            if seq in self._messages:
                self._claimed[seq] = attempt

    def _publish(self, content: bytes) -> None:
        seq = _queue_seq(content, QUEUE_SEQ_OFFSET)[1]
        self.last_seq = max(self.last_seq, seq)
        head = without_body(content)
        body = len(content) - len(head)
        if self.held + body > self.limit:
            content = head
            self._bodiless.add(seq)
        else:
            self.held += body
        (self._bulk if content[1] & BULK else self._messages)[seq] = content

    def _fan_out(self, record: Fanout, content: bytes) -> None:
        """Add a message to all its groups, or to none if the declaration of a group is missing.

        If a power loss removed the declaration, the message was never confirmed.
        """
        message = content[TARGETS.size + QUEUE_SEQ.size * len(record.targets) :]
        complete = self._repaired or all(queue in self.queues for queue, _ in record.targets)
        for target in record.targets:
            self.last_seq = max(self.last_seq, target[1])
            if complete:
                self._publish(renumbered(message, [target]))

    def _release(self, record: Release) -> None:
        seq = record.seq
        if seq not in self._messages:
            return
        self._claimed.pop(seq, None)
        before = self._released.get(seq)
        if record.headers is None and before is not None:
            record = record._replace(headers=before.headers)
        self._released[seq] = record

    def _dead_letter_move(self, record: DeadLetterMove, letter: bytes) -> None:
        if record.letter.queue not in self.queues:
            self._declare_dead_letter_queue(record)
        self._forget(record.seq)
        self._publish(letter)

    def _declare_dead_letter_queue(self, record: DeadLetterMove) -> None:
        """Declare a dead-letter queue that is not declared, as configured in the source queue.

        The declaration and this record may both be among the last writes, of which a power loss
        may keep any subset. Or compaction removed the declaration because the queue was deleted;
        then the deletion follows in the log.
        """
        source = self.queues.get(record.queue)
        if source is not None and source.group is not None:
            same_name = (other for other in self.queues.values() if other.name == source.name)
            source = next((other for other in same_name if other.group is None), None)
        name = None if source is None else source.config.get("dead_letter")
        if source is not None and isinstance(name, str):
            depth = source.config.get("dead_letter_max_depth", 10_000)
            config = {"drop_oldest": True, "max_depth": depth, "max_deliveries": None}
            number = record.letter.queue
            self.queues[number] = Declare(number, name, None, config)
            self.assumed.add(number)

    def _bulk_import(self, record: BulkImport) -> None:
        self.imported[record.name] = (record.first, record.last)
        for seq in [seq for seq in self._bulk if record.first <= seq <= record.last]:
            self._messages[seq] = self._bulk.pop(seq)

    def _forget(self, seq: int) -> None:
        content = self._messages.pop(seq, None) or self._bulk.pop(seq, None)
        if content is not None:
            self.index.forget(seq)
            self._claimed.pop(seq, None)
            self._released.pop(seq, None)
            if seq in self._bodiless:
                self._bodiless.discard(seq)
            else:
                self.held -= len(content) - len(without_body(content))

    # Snapshots

    def load(self, contents: Iterable[bytes], expected: Mapping[int, int]) -> None:
        """Apply the records of a snapshot to messages that are still in the log.

        The index must be filled first. Messages that compaction has removed from the log since the
        snapshot are settled, and are ignored.

        Args:
            contents: Records of the snapshot.
            expected: Segments of messages that a repair may have removed, by message; those that
                are missing are added to ``lost``.
        """
        find = self.index.find
        for content in contents:
            if content[0] == PUBLISH:
                seq = _queue_seq(content, QUEUE_SEQ_OFFSET)[1]
                if find(seq) is not None:
                    (self._bulk if content[1] & BULK else self._messages)[seq] = content
                    self._bodiless.add(seq)
                elif seq in expected:
                    self.lost.append((expected[seq], decode_publish(content)))
                continue
            record = decode(content)
            match record:
                case Claim():
                    self._claim(record)
                case Declare():
                    self.queues[record.queue] = record
                case BulkImport():
                    self.imported[record.name] = (record.first, record.last)
                case _:
                    raise AssertionError(record)

    def contents(self) -> Iterator[bytes]:
        """Yield the records of a snapshot, for ``load``."""
        for number, queue in self.queues.items():
            yield encode_declare(number, queue.name, queue.group, queue.config)
        for name, (first, last) in self.imported.items():
            yield encode_bulk_import(name, first, last)
        for seq, content in self._messages.items():
            queue_number = _queue_seq(content, QUEUE_SEQ_OFFSET)[0]
            if seq <= self._deleted.get(queue_number, 0):
                continue
            if seq in self._released:
                yield self._recovered(seq, content).encode()
            elif content[1] & BULK:  # its bulk file is imported
                yield renumbered(without_body(content), [(queue_number, seq)], bulk=False)
            else:
                yield without_body(content)
            if seq in self._claimed:
                yield encode_claim(queue_number, [seq], [self._claimed[seq]])
        for content in self._bulk.values():
            yield without_body(content)

    # Result

    def name_of(self, queue: int) -> str:
        """Return the name of a queue, or its number if it has no declaration."""
        return self.queues[queue].name if queue in self.queues else str(queue)

    def finish(self) -> list[RecoveredMessage]:
        """Return the recovered messages, in order. Call this at the end of the log.

        Messages of deleted queues, and of bulk files whose import was not completed, are discarded.
        """
        names = {queue.name for number, queue in self.queues.items() if number not in self.assumed}
        for number in self.assumed:
            queue = self.queues[number]
            if queue.name in names:  # created again later, under another number
                self.queues[number] = queue._replace(name=f"recovered-{number}")
        for seq in list(self._bulk):
            self._forget(seq)
        for seq, content in list(self._messages.items()):
            number = _queue_seq(content, QUEUE_SEQ_OFFSET)[0]
            self.last_queue = max(self.last_queue, number)  # numbers are never reused
            if seq <= self._deleted.get(number, 0) or not self._known(number):
                self._forget(seq)
        self.index.retain_only(self._messages)
        messages = self._messages
        return _by_arrival([self._recovered(seq, messages[seq]) for seq in sorted(messages)])

    def _known(self, queue: int) -> bool:
        if queue not in self.queues and self._repaired:
            name = f"recovered-{queue}"
            self.queues[queue] = Declare(queue, name, None, {})
            self.last_queue = max(self.last_queue, queue)
            self.orphans.append(name)
        return queue in self.queues

    def _recovered(self, seq: int, content: bytes) -> RecoveredMessage:
        record = decode_publish(content)
        body = None if seq in self._bodiless else record.body
        message = RecoveredMessage(record, record.queue, seq, body)
        released = self._released.get(seq)
        if released is not None:
            message.attempt = released.attempt
            # A message that goes back uncharged keeps its due time, and with it its place.
            message.due = released.due or (0.0 if released.attempt else record.due)
            if released.headers is not None:
                message.headers = released.headers or None
        if seq in self._claimed:
            message.attempt, message.held, message.due = self._claimed[seq], True, 0.0
        return message


def _by_arrival(recovered: list[RecoveredMessage]) -> list[RecoveredMessage]:
    """Return messages in the order in which they became ready: delayed ones by their due time.

    The others keep the order of the log, even if the wall clock was set back meanwhile. So do
    delayed messages that were delivered, because a release replaces their due time.
    """
    delayed = [message for message in recovered if message.due and not message.attempt]
    if not delayed:
        return recovered
    others = [message for message in recovered if not message.due or message.attempt]
    delayed.sort(key=lambda message: message.due)
    parts = [(message.at, message) for message in others], [(m.due, m) for m in delayed]
    return [message for _, message in merge(*parts, key=itemgetter(0))]


def messages_in(content: bytes) -> list[int]:
    """Return the numbers of the messages whose bodies are in a record."""
    if content[0] == PUBLISH:
        return [_queue_seq(content, QUEUE_SEQ_OFFSET)[1]]
    record = decode(content)
    match record:
        case Fanout():
            return [seq for _, seq in record.targets]
        case DeadLetterMove():
            return [record.letter.seq]
        case _:
            return []
