"""Messages on their way to the disk: one batch for all that are published in a turn of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

from qkit._internal.clock import Clock
from qkit.errors import StorageError
from qkit.native.log.segment import FRAME_SIZE
from qkit.native.log.tail import Position
from qkit.native.queue.queue import Queue
from qkit.native.storage.index import Index

__all__ = ["PendingMessage", "WriteBatch", "unreserve"]


# A message on its way to the disk: id, body, headers, key, priority, when it is due and expires
# (monotonic), and the queues that will get it. A plain tuple: one for each message.
PendingMessage: TypeAlias = tuple[
    str,
    bytes,
    dict[str, str] | None,
    str | None,
    int | None,
    float | None,
    float | None,
    Sequence[Queue],
]


_Call = tuple[Sequence[PendingMessage], "asyncio.Future[list[int | None]]"]


class WriteBatch:
    """Messages of one turn of the loop: one append to the log, with one callback.

    Args:
        clock: The engine's clock.
        index: Where the journal notes the position of each message.
        group_number: The writer's group that the batch belongs to; while it is collected, more
            messages may join.
        first: The number of the first message.
        contents: The records; more may be added.
    """

    __slots__ = ("_clock", "_first", "_index", "calls", "contents", "group_number", "size")

    def __init__(
        self, clock: Clock, index: Index, group_number: int, first: int, contents: list[bytes]
    ) -> None:
        self._clock = clock
        self._index = index
        self._first = first
        self.group_number = group_number
        self.contents = contents
        self.size = 0  # in bytes
        self.calls: list[_Call] = []  # messages of each call, and the future of their positions

    def done(self, position: Position | None, error: StorageError | None) -> None:
        """Hand the written messages to their queues, also if their senders are gone."""
        if position is None:
            self._fail(error)
            return
        segment, offset = position
        seq, add = self._first, self._index.add
        now = self._clock.monotonic()
        contents = iter(self.contents)
        for pending, future in self.calls:
            answers: list[int | None] = []
            for id, body, headers, key, priority, due, expires, queues in pending:
                ahead = None
                for queue in queues:
                    queue.state.unreserve()
                    add(seq, (segment, offset))
                    ahead = queue.put(now, id, body, headers, key, priority, due, expires, seq)
                    seq += 1
                if queues:
                    offset += FRAME_SIZE + len(next(contents))
                answers.append(ahead if len(queues) == 1 else None)
            if not future.done():
                future.set_result(answers)

    def _fail(self, error: StorageError | None) -> None:
        for pending, future in self.calls:
            unreserve(pending)
            if error is not None and not future.done():
                future.set_exception(error)


def unreserve(pending: Sequence[PendingMessage]) -> None:
    """Free the places that were reserved for messages, and wake senders that wait for some."""
    for message in pending:
        for queue in message[-1]:
            queue.state.unreserve()
            queue.wake_capacity_waiters()
