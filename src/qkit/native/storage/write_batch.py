"""``WriteBatch``: all messages that are published in one loop iteration and written together."""

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


# A message that is not written yet: id, body, headers, key, priority, due time and expiry
# (monotonic), and its queues. A plain tuple, because there is one for each message.
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
    """Messages published in one loop iteration, written by one append with one callback.

    Args:
        clock: Clock of the engine.
        index: Index of message positions.
        group_number: Number of the writer's group that the batch belongs to. While the writer
            collects that group, messages may be added.
        first: Number of the first message in the log.
        contents: Records to write; more may be added.
    """

    __slots__ = ("_clock", "_first", "_index", "calls", "contents", "group_number", "size")

    def __init__(
        self, clock: Clock, index: Index, group_number: int, first: int, contents: list[bytes]
    ) -> None:
        self._clock = clock
        self._index = index
        self._first = first
        self.group_number: int = group_number
        self.contents: list[bytes] = contents
        self.size: int = 0  # in bytes
        self.calls: list[_Call] = []  # messages of each call, and the future for its result

    def done(self, position: Position | None, error: StorageError | None) -> None:
        """Add the written messages to their queues, even if their senders were cancelled."""
        if position is None:
            self._fail(error)
            return
        segment, offset = position
        seq, add = self._first, self._index.add
        now = self._clock.monotonic()
        contents = iter(self.contents)
        for pending, future in self.calls:
            results: list[int | None] = []
            for id, body, headers, key, priority, due, expires, queues in pending:
                ahead = None
                for queue in queues:
                    queue.state.unreserve()
                    add(seq, (segment, offset))
                    ahead = queue.put(now, id, body, headers, key, priority, due, expires, seq)
                    seq += 1
                if queues:
                    offset += FRAME_SIZE + len(next(contents))
                results.append(ahead if len(queues) == 1 else None)
            if not future.done():
                future.set_result(results)

    def _fail(self, error: StorageError | None) -> None:
        for pending, future in self.calls:
            unreserve(pending)
            if error is not None and not future.done():
                future.set_exception(error)


def unreserve(pending: Sequence[PendingMessage]) -> None:
    """Free the capacity reserved for messages, and wake senders that wait for it."""
    for message in pending:
        for queue in message[-1]:
            queue.state.unreserve()
            queue.wake_capacity_waiters()
