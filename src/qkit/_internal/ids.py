"""Message ids (UUIDv7) and the time inside them."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator

__all__ = ["IdGenerator", "new_id", "sent_at"]


class IdGenerator:
    """UUIDv7s without dashes: they sort by time, and within one process by order of creation.

    Each millisecond has a random prefix, made once; its ids are that and one of 4096 suffixes, put
    together in C. That is what makes an id cheap: a send costs a few microseconds in all.
    """

    def __init__(self) -> None:
        self._suffixes: list[str] = []
        self.reseed()

    def reseed(self) -> None:
        """Forget the past; a forked child must not go on with its parent's numbers."""
        self._lock = threading.Lock()
        self._end = 0  # of the millisecond, in nanoseconds
        self._block = 0
        self._ids: Iterator[str] = iter(())
        self._random_words: Iterator[int] = iter(())  # many at once: the system is slow to be asked

    def next(self, time_ns: Callable[[], int] = time.time_ns) -> str:
        """Return the next id.

        The first id of a millisecond begins a block of 4096; so does the first after a block is
        used up. The block's number is the 12 bits behind the version, counted up from a random
        start with room for eight million ids above it; 48 random bits follow. While the clock is
        behind, because it was set back, ids go on where they were.
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
os.register_at_fork(after_in_child=_generator.reseed)


def sent_at(message_id: str) -> float | None:
    """The wall time inside one of qkit's ids; ``None`` for an id of another making."""
    if len(message_id) != 32 or message_id[12] != "7":
        return None
    try:
        return int(message_id[:12], 16) / 1000
    except ValueError:
        return None
