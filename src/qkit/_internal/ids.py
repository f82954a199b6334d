"""Generation of message ids (UUIDv7), and the send time that an id contains."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator

from qkit._internal.forks import in_child

__all__ = ["IdGenerator", "new_id", "sent_at"]


class IdGenerator:
    """Generator of UUIDv7 ids without dashes.

    Ids sort by time and, within one process, by order of creation. An id consists of a prefix,
    which is computed once for each block of ids, and one of 4096 suffixes. The concatenation runs
    in C, because an id must cost little compared with a send, which takes a few microseconds.
    """

    def __init__(self) -> None:
        self._suffixes: list[str] = []
        self.reseed()

    def reseed(self) -> None:
        """Reset the state, so that a forked child does not generate the ids of its parent."""
        self._lock = threading.Lock()
        self._end = 0  # end of the current millisecond, in nanoseconds
        self._block = 0
        self._ids: Iterator[str] = iter(())
        self._random_words: Iterator[int] = iter(())  # read in bulk, because os.urandom is slow

    def next(self, time_ns: Callable[[], int] = time.time_ns) -> str:
        """Return the next id.

        A block of 4096 ids begins with the first id of a millisecond, or when the previous block
        is used up. The 12 bits after the version contain the block number. It counts up from a
        random start below 2048, so a millisecond has at least eight million ids. 48 random bits
        follow. If the clock is set back, ids continue from the last millisecond until the clock
        catches up.
        """
        now = time_ns()
        if now < self._end:
            id = next(self._ids, None)
            if id is not None:
                return id
        with self._lock:
            word = next(self._random_words, None)
            if word is None:
                self._suffixes = self._suffixes or [f"{number:03x}" for number in range(4096)]
                self._random_words = iter(array("Q", os.urandom(1024)))
                word = next(self._random_words)
            if now >= self._end:
                millisecond = now // 1_000_000
                self._end = (millisecond + 1) * 1_000_000
                self._block = word >> 48 & 0x7FF
            else:
                self._block += 1
                if self._block > 0xFFF:
                    self._end, self._block = self._end + 1_000_000, 0
                millisecond = self._end // 1_000_000 - 1
            prefix = f"{millisecond:012x}7{self._block:03x}8{word & 0xFFFF_FFFF_FFFF:012x}"
            self._ids = map(prefix.__add__, self._suffixes)
            return next(self._ids)


_generator = IdGenerator()
new_id = _generator.next
in_child(_generator.reseed)


def sent_at(message_id: str) -> float | None:
    """Return the send time in a qkit id, in seconds since the epoch; ``None`` for a foreign id."""
    if len(message_id) != 32 or message_id[12] != "7":
        return None
    try:
        return int(message_id[:12], 16) / 1000
    except ValueError:
        return None
