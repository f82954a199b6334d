"""What a durable engine writes: the records of what happens, and the place of each message.

A message exists once its record is as safe as the policy says; only then does a queue get it. All
else happens in memory first and is written in the order in which it happened: ``written`` is what
a caller awaits who must know that a crash of the process cannot undo it.
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
from qkit.native.log.writer import AppendCallback
from qkit.native.queue.queue import Queue
from qkit.native.queue.stored_message import StoredMessage, WaitingMessage
from qkit.native.storage.replay import Replay
from qkit.native.storage.write_batch import PendingMessage, WriteBatch, unreserve

__all__ = ["Journal"]

MAX_SEQS_PER_RECORD: Final = 10_000  # messages in one record of a purge
MAX_BATCH_BYTES: Final = 1 << 20  # bytes of messages in one batch


class Journal:
    """The log of one engine, with the numbers of its queues and messages."""

    def __init__(self, log: Log, clock: Clock, replay: Replay) -> None:
        self.log = log
        self.writer = log.writer
        self.clock = clock
        self.index = replay.index
        self.next_seq = replay.last_seq + 1
        self.held = replay.held  # bytes of bodies in memory
        self._limit = replay.limit
        self._batch: WriteBatch | None = None  # that messages of this turn may join
        self._unwritten: dict[int, bytes] = {}  # of dead letters that are on their way
        self._loop = asyncio.get_running_loop()
        self._next_queue = replay.last_queue + 1

    # Messages arrive

    def publish(self, pending: Sequence[PendingMessage]) -> asyncio.Future[list[int | None]]:
        """Write messages, then hand them to their queues; the result is their positions.

        Every place in a queue must have been reserved; it is freed here. Messages of one turn of
        the loop share a batch.
        """
        future: asyncio.Future[list[int | None]] = self._loop.create_future()
        first, batch, writer = self.next_seq, self._batch, self.writer
        try:
            contents, size = self._encode(pending)
            if not contents:  # a topic without groups: no consumer will ever read it
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
        """Number messages; return their records, one for all groups of a topic, and their size."""
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
        """Write the messages of a bulk file: all of them count, or none if this does not return.

        What is written piece by piece counts once the last record is on the disk.
        """
        arrived: list[tuple[Queue, int, Publish]] = []
        begin = self.next_seq
        try:
            async for chunk in chunks:
                arrived += await self._import_chunk(chunk)
            await self.writer.append([encode_bulk_import(name, begin, self.next_seq - 1)])
        except BaseException:
            for _, seq, _ in arrived:
                self.index.forget(seq)
            raise
        return arrived

    async def _import_chunk(
        self, chunk: list[tuple[Sequence[Queue], bytes, Publish]]
    ) -> list[tuple[Queue, int, Publish]]:
        first, self._batch = self.next_seq, None
        contents: list[bytes] = []
        arrived: list[tuple[Queue, int, Publish]] = []
        for actors, content, message in chunk:
            targets = [(actor.number, self.next_seq + at) for at, actor in enumerate(actors)]
            self.next_seq += len(targets)
            contents.append(renumbered(content, targets, bulk=True))
            arrived += [
                (actor, seq, message) for actor, (_, seq) in zip(actors, targets, strict=True)
            ]
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(position: Position | None, error: StorageError | None) -> None:
            # Not after an await: messages are entered in the order in which they were written.
            if position is None:
                if error is not None and not future.done():
                    future.set_exception(error)
                return
            seq = first
            for place, item in zip(positions(position, contents), chunk, strict=True):
                for _ in item[0]:
                    self.index.add(seq, place)
                    seq += 1
            if not future.done():
                future.set_result(None)

        self.writer.append_with_callback(contents, done)
        await future
        return arrived

    def body_to_keep(self, body: bytes) -> bytes | None:
        """The body if there is room for it in memory, else ``None``: it stays on the disk."""
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
        """A queue exists, or (with its number) has other limits; return its number.

        What is published next must not join a batch in front of this record: a message to several
        groups counts only if all of them were declared before.
        """
        self._batch = None
        if number is None:
            number = self._next_queue
            self._next_queue += 1
        self._note(encode_declare(number, name, group, config))
        return number

    def delete(self, number: int, messages: Iterable[StoredMessage]) -> None:
        """A queue and all that was in it are gone."""
        self._note(encode_delete(number))
        self._forget(messages)

    # What queues ask

    @property
    def disk_full(self) -> bool:
        """Whether records wait for space on the disk."""
        return self.writer.deferred_records > 0

    @property
    def reads_inline(self) -> bool:
        """Whether bodies may be read in the event loop."""
        return self.log.inline

    def forget(self, seq: int) -> None:
        """Forget where a message lies."""
        self.index.forget(seq)

    # What happens to messages

    def claim(self, number: int, messages: Sequence[StoredMessage]) -> None:
        """Messages were handed out."""
        seqs = [message.seq for message in messages]
        self._note(encode_claim(number, seqs, [message.attempt for message in messages]))

    def ack(self, number: int, message: StoredMessage) -> None:
        """The work on a message is done."""
        self._note(encode_ack(number, (message.seq,)))
        self.index.forget(message.seq)
        if message.body is not None:
            self.held -= len(message.body)

    def release(
        self, number: int, message: StoredMessage, due: float | None, headers: dict[str, str] | None
    ) -> None:
        """A message was given back; ``due`` is monotonic."""
        wall = 0.0 if due is None else due + self.clock.time() - self.clock.monotonic()
        self._note(encode_release(number, message.seq, message.attempt, wall, headers))
        self.release_body(message)

    def release_body(self, message: StoredMessage) -> None:
        """A message waits again: above the limit its body stays on the disk."""
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
        """A message died and its letter enters the queue ``target``; return the letter's number."""
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
        self._note(encode_dead_letter_move(number, message.seq, content), done)
        self.next_seq = seq + 1
        self._forget((message,))
        return seq

    def remove(self, number: int, entries: Sequence[WaitingMessage]) -> None:
        """Messages were purged, dropped or removed."""
        for start in range(0, len(entries), MAX_SEQS_PER_RECORD):
            some = entries[start : start + MAX_SEQS_PER_RECORD]
            self._note(encode_remove(number, [_seq_of(entry) for entry in some]))
        self._forget(entries)

    def _forget(self, entries: Iterable[WaitingMessage]) -> None:
        for entry in entries:
            self.index.forget(_seq_of(entry))
            body = entry[1] if isinstance(entry, tuple) else entry.body
            if body is not None:
                self.held -= len(body)

    def _note(self, content: bytes, done: AppendCallback | None = None) -> None:
        """Write what has happened. A log that is read-only keeps what it told before.

        Time goes on there too (leases end, messages expire), and nobody could be told of an
        error; whoever waits for ``written`` is.
        """
        if not self.log.read_only:
            self.writer.append_nowait((content,), done)

    def written(self) -> asyncio.Future[None] | None:
        """What to await until a crash of this process cannot undo what happened so far."""
        return self.writer.written()

    # Reading back

    def load(self, messages: Iterable[StoredMessage]) -> list[bytes | None]:
        """The bodies of these messages, ``None`` for one that cannot be read any more.

        Blocking, for any thread.
        """
        return [self.body(message) for message in messages]

    def body(self, message: StoredMessage) -> bytes | None:
        """A message's body, read if need be. Blocking; ``None`` if it cannot be read."""
        for _ in range(3):  # it may have been moved by compaction between look-up and reading
            body = message.body
            if body is None:
                body = self._unwritten.get(message.seq)
            if body is not None:
                return body
            place = self.index.position(message.seq)
            try:
                if place is not None:
                    return _body_in(self.log.read(*place))
            except (QueueError, OSError):
                if self.index.position(message.seq) == place:
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
