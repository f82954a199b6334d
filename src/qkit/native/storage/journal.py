"""``Journal``: turns the changes of a durable engine into records of its log.

A message is added to its queue only after its record is written as the fsync policy requires.
Every other change is made in memory first, and changes are written in the order in which they were
made. A caller awaits ``written`` before it relies on a change surviving a crash of the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final

from qkit._internal.clock import Clock
from qkit.errors import QueueError, StorageError
from qkit.message import Envelope
from qkit.native.log.encode import (
    encode_ack,
    encode_bulk_import,
    encode_claim,
    encode_dead_letter_move,
    encode_declare,
    encode_delete,
    encode_fanout,
    encode_publish,
    encode_release,
    encode_remove,
    renumbered,
)
from qkit.native.log.log import Log, positions
from qkit.native.log.record import DeadLetterMove, Fanout, Publish, decode
from qkit.native.log.tail import Position
from qkit.native.log.writer import AppendCallback, Writer
from qkit.native.queue.queue import Queue
from qkit.native.queue.stored_message import StoredMessage, WaitingMessage
from qkit.native.storage.index import Index
from qkit.native.storage.replay import Replay
from qkit.native.storage.write_batch import PendingMessage, WriteBatch, unreserve

__all__ = ["Journal"]

MAX_SEQS_PER_RECORD: Final = 10_000  # messages in one REMOVE record
MAX_BATCH_BYTES: Final = 1 << 20


class Journal:
    """Journal of one engine, which also numbers the engine's queues and messages."""

    def __init__(self, log: Log, clock: Clock, replay: Replay) -> None:
        self.log = log
        self.writer: Writer = log.writer
        self.clock = clock
        self.index: Index = replay.index
        self.next_seq: int = replay.last_seq + 1
        self.held: int = replay.held  # bytes of bodies in memory
        self._limit = replay.limit
        self._batch: WriteBatch | None = None  # more messages may be added to it
        self._unwritten: dict[int, bytes] = {}  # bodies of dead letters that are being written
        self._loop = asyncio.get_running_loop()
        self._next_queue = replay.last_queue + 1

    # Publishing

    def publish(self, pending: Sequence[PendingMessage]) -> asyncio.Future[list[int | None]]:
        """Write messages, then add them to their queues.

        The caller must have reserved capacity in every queue. It is freed when the messages are
        written or the write fails. Messages of one loop iteration share a batch.

        Returns:
            A future for the positions of the messages in their queues.
        """
        future: asyncio.Future[list[int | None]] = self._loop.create_future()
        first, batch, writer = self.next_seq, self._batch, self.writer
        try:
            contents, size = self._encode(pending)
            if not contents:  # a topic without groups, which stores no messages
                future.set_result([None] * len(pending))
                return future
            if (
                batch is not None
                and batch.group_number == writer.group_number
                and batch.size + size <= MAX_BATCH_BYTES
            ):
                batch.contents += contents
            else:
                batch = WriteBatch(self.clock, self.index, writer.group_number, first, contents)
                writer.append_with_callback(contents, batch.done)
                self._batch = batch
        except BaseException:
            self.next_seq = first
            unreserve(pending)
            raise
        batch.size += size
        batch.calls.append((pending, future))
        return future

    def _encode(self, pending: Sequence[PendingMessage]) -> tuple[list[bytes], int]:
        """Number messages; return their records and the total size in bytes.

        All groups of a topic share one record.
        """
        seq, at, size = self.next_seq, self.clock.time(), 0
        contents: list[bytes] = []
        for id, body, headers, key, priority, due, expires, queues in pending:
            if not queues:
                continue
            content = encode_publish(
                queues[0].number,
                seq,
                id,
                body,
                priority=queues[0].state.default_priority if priority is None else priority,
                at=at,
                due=0.0 if due is None else due + at - self.clock.monotonic(),
                expires=0.0 if expires is None else expires + at - self.clock.monotonic(),
                key=key,
                headers=headers,
            )
            if len(queues) > 1:
                targets = [(queue.number, seq + nth) for nth, queue in enumerate(queues)]
                content = encode_fanout(targets, content)
            contents.append(content)
            size += len(content)
            seq += len(queues)
        self.next_seq = seq
        return contents, size

    async def import_messages(
        self, name: str, chunks: AsyncIterator[list[tuple[Sequence[Queue], bytes, Publish]]]
    ) -> list[tuple[Queue, int, Publish]]:
        """Write the messages of a bulk file atomically.

        They are written in chunks, and are valid once the final BULK_IMPORT record is on disk.

        Args:
            name: Name of the job.
            chunks: Chunks of messages, each with its queues, its record and its decoded record.

        Returns:
            The queue, number and decoded record of each imported message, for each of its queues.
        """
        imported: list[tuple[Queue, int, Publish]] = []
        begin = self.next_seq
        try:
            async for chunk in chunks:
                imported += await self._import_chunk(chunk)
            await self.writer.append([encode_bulk_import(name, begin, self.next_seq - 1)])
        except BaseException:
            for _, seq, _ in imported:
                self.index.forget(seq)
            raise
        return imported

    async def _import_chunk(
        self, chunk: list[tuple[Sequence[Queue], bytes, Publish]]
    ) -> list[tuple[Queue, int, Publish]]:
        first, self._batch = self.next_seq, None
        contents: list[bytes] = []
        imported: list[tuple[Queue, int, Publish]] = []
        for actors, content, message in chunk:
            targets = [(actor.number, self.next_seq + at) for at, actor in enumerate(actors)]
            self.next_seq += len(targets)
            contents.append(renumbered(content, targets, bulk=True))
            imported += [
                (actor, seq, message) for actor, (_, seq) in zip(actors, targets, strict=True)
            ]
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(position: Position | None, error: StorageError | None) -> None:
            # Done here, not after an await, because the index needs messages in log order.
            if position is None:
                if error is not None and not future.done():
                    future.set_exception(error)
                return
            seq = first
            for record_position, item in zip(positions(position, contents), chunk, strict=True):
                for _ in item[0]:
                    self.index.add(seq, record_position)
                    seq += 1
            if not future.done():
                future.set_result(None)

        self.writer.append_with_callback(contents, done)
        await future
        return imported

    def body_to_keep(self, body: bytes) -> bytes | None:
        """Return the body if the memory limit allows keeping it, otherwise ``None``."""
        held = self.held + len(body)
        if held > self._limit:
            return None
        self.held = held
        return body

    # Queues

    def declare(
        self,
        name: str,
        group: str | None,
        config: dict[str, object],
        number: int | None = None,
    ) -> int:
        """Record that a queue was created or, if ``number`` is given, reconfigured.

        The next message starts a new batch, which is written after this record, because a message
        to several groups is valid only if all of them were declared before it.

        Returns:
            The number of the queue in the log.
        """
        self._batch = None
        if number is None:
            number = self._next_queue
            self._next_queue += 1
        self._append(encode_declare(number, name, group, config))
        return number

    def delete(self, number: int, messages: Iterable[StoredMessage]) -> None:
        """Record that a queue was deleted with its messages."""
        self._append(encode_delete(number))
        self._forget(messages)

    # State for queues

    @property
    def disk_full(self) -> bool:
        """Whether records are waiting for space on the disk."""
        return self.writer.deferred_records > 0

    @property
    def reads_inline(self) -> bool:
        """Whether bodies may be read in the event loop."""
        return self.log.inline

    def forget(self, seq: int) -> None:
        """Mark a message as no longer live, because its queue was deleted."""
        self.index.forget(seq)

    def is_live(self, seq: int) -> bool:
        """Return whether a message is still in the log and not settled."""
        found = self.index.find(seq)
        return seq in self._unwritten if found is None else bool(found[0].alive[found[1]])

    # Changes of messages

    def claim(self, number: int, messages: Sequence[StoredMessage]) -> None:
        """Record that messages were delivered."""
        seqs = [message.seq for message in messages]
        self._append(encode_claim(number, seqs, [message.attempt for message in messages]))

    def ack(self, number: int, message: StoredMessage) -> None:
        """Record that a message was acked."""
        self._append(encode_ack(number, (message.seq,)))
        self.index.forget(message.seq)
        if message.body is not None:
            self.held -= len(message.body)

    def release(
        self, number: int, message: StoredMessage, due: float | None, headers: dict[str, str] | None
    ) -> None:
        """Record that a message was released; ``due`` is a monotonic time."""
        wall = 0.0 if due is None else due + self.clock.time() - self.clock.monotonic()
        self._append(encode_release(number, message.seq, message.attempt, wall, headers))
        self.release_body(message)

    def release_body(self, message: StoredMessage) -> None:
        """Drop a ready message's body from memory if the memory limit is exceeded."""
        if self.held > self._limit and message.body is not None:
            self.held -= len(message.body)
            message.body = None

    def dead_letter(
        self,
        number: int,
        message: StoredMessage,
        target: int,
        letter: Envelope,
        priority: int,
    ) -> int:
        """Record that a dead letter was added to the queue ``target``; return its seq."""
        seq, self._batch = self.next_seq, None
        content = encode_publish(
            target,
            seq,
            letter.id,
            letter.body,
            priority=priority,
            at=self.clock.time(),
            key=letter.key,
            headers=letter.headers,
        )

        def done(position: Position | None, error: StorageError | None) -> None:
            if position is not None:
                self.index.add(seq, position)
                self._unwritten.pop(seq, None)

        self._unwritten[seq] = letter.body
        self._append(encode_dead_letter_move(number, message.seq, content), done)
        self.next_seq = seq + 1
        self._forget((message,))
        return seq

    def remove(self, number: int, entries: Sequence[WaitingMessage]) -> None:
        """Record that messages were removed without an ack."""
        for start in range(0, len(entries), MAX_SEQS_PER_RECORD):
            chunk = entries[start : start + MAX_SEQS_PER_RECORD]
            self._append(encode_remove(number, [_seq_of(entry) for entry in chunk]))
        self._forget(entries)

    def _forget(self, entries: Iterable[WaitingMessage]) -> None:
        for entry in entries:
            self.index.forget(_seq_of(entry))
            body = entry[1] if isinstance(entry, tuple) else entry.body
            if body is not None:
                self.held -= len(body)

    def _append(self, content: bytes, done: AppendCallback | None = None) -> None:
        """Append a record of a change; do nothing if the log is read-only.

        In a read-only log, leases and messages still expire, and no caller could handle the error.
        Callers of ``written`` receive it.
        """
        if not self.log.read_only:
            self.writer.append_nowait((content,), done)

    def written(self) -> asyncio.Future[None] | None:
        """Return a future that is done once all changes so far survive a crash of this process.

        Returns ``None`` if they already do.
        """
        return self.writer.written()

    # Reading

    def load(self, messages: Iterable[StoredMessage]) -> list[bytes | None]:
        """Return the bodies of messages, with ``None`` for each body that cannot be read.

        Blocking; thread-safe.
        """
        return [self.body(message) for message in messages]

    def body(self, message: StoredMessage) -> bytes | None:
        """Return the body of a message, or ``None`` if it cannot be read. Blocking."""
        for _ in range(3):  # compaction may move the record between lookup and read
            body = message.body
            if body is None:
                body = self._unwritten.get(message.seq)
            if body is not None:
                return body
            position = self.index.position(message.seq)
            try:
                if position is not None:
                    return _body_in(self.log.read(*position))
            except (QueueError, OSError):
                if self.index.position(message.seq) == position:
                    break
        return None


def _seq_of(entry: WaitingMessage) -> int:
    return entry[4] if isinstance(entry, tuple) else entry.seq


def _body_in(content: bytes) -> bytes:
    record = decode(content)
    if isinstance(record, Fanout):
        return record.message.body
    if isinstance(record, DeadLetterMove):
        return record.letter.body
    assert isinstance(record, Publish)
    return record.body
