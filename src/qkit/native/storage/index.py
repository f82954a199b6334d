"""``Index``: the position of every message in the log, and whether it is live.

A message is live until it is settled or removed. Messages are numbered in the order of the log, so
each segment needs only two sorted arrays and a flag for each message. That is 13 bytes per message,
instead of about a hundred for a dictionary entry. Only one object is exchanged when a segment is
rewritten.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Iterator
from itertools import compress

from qkit.native.log.tail import Position

__all__ = ["Index", "SegmentIndex"]


class SegmentIndex:
    """Messages of one segment in order, including those that are no longer live."""

    __slots__ = ("alive", "live", "number", "offsets", "seqs")

    def __init__(self, number: int, seqs: Iterable[int] = (), offsets: Iterable[int] = ()) -> None:
        self.number: int = number
        self.seqs: array[int] = array("Q", seqs)
        self.offsets: array[int] = array("I", offsets)
        self.alive: bytearray = bytearray(b"\1") * len(self.seqs)
        self.live: int = len(self.seqs)

    def __len__(self) -> int:
        return len(self.seqs)

    def add(self, seq: int, offset: int) -> None:
        """Add a message at the end."""
        self.seqs.append(seq)
        self.offsets.append(offset)
        self.alive.append(1)
        self.live += 1

    def find(self, seq: int) -> int:
        """Return the array index of a message, or -1 if it is not in this segment."""
        seqs = self.seqs
        at = seq - seqs[0]  # usually there are no gaps, and no search is needed
        if not (0 <= at < len(seqs) and seqs[at] == seq):
            at = bisect_left(seqs, seq)
            if at == len(seqs) or seqs[at] != seq:
                return -1
        return at

    def forget(self, at: int) -> None:
        """Mark the message at an array index as no longer live. Idempotent."""
        self.live -= self.alive[at]
        self.alive[at] = 0

    def survivors(self, flags: bytes) -> set[int]:
        """Return the numbers of the messages that are live in ``flags``, a copy of ``alive``."""
        return set(compress(self.seqs, flags))


class Index:
    """Index of all segments: finds the position of a message by its number.

    >>> index = Index()
    >>> index.add(1, (1, 80)); index.add(2, (1, 200)); index.add(3, (2, 80))
    >>> index.forget(2)
    >>> index.position(3), index[1].live
    ((2, 80), 1)
    """

    __slots__ = ("_early", "_table")

    def __init__(self) -> None:
        # Numbers of the segments that contain messages, in order; the first message of each; the
        # segments. Replaced as one object, because other threads read it while the loop replaces a
        # segment.
        self._table: tuple[list[int], list[int], dict[int, SegmentIndex]] = ([], [], {})
        self._early: set[int] = set()  # messages settled before their positions were known

    def __getitem__(self, number: int) -> SegmentIndex:
        return self._table[2].get(number) or SegmentIndex(number)

    def __iter__(self) -> Iterator[SegmentIndex]:
        """Iterate over the segments with messages, in order."""
        numbers, _, segments = self._table
        return (segments[number] for number in numbers)

    def add(self, seq: int, position: Position) -> None:
        """Add a message. Messages must be added in the order of their numbers."""
        number, offset = position
        numbers, firsts, segments = self._table
        segment = segments.get(number)
        if segment is None:
            segment = segments[number] = SegmentIndex(number)
            segment.add(seq, offset)
            numbers.append(number)
            firsts.append(seq)
        else:
            segment.add(seq, offset)
        if self._early and seq in self._early:
            self._early.discard(seq)
            segment.forget(len(segment) - 1)

    def replace(self, old: Iterable[int], new: SegmentIndex | None = None) -> None:
        """Remove the ``old`` segments, and add the ``new`` one if it has messages."""
        segments = dict(self._table[2])
        for number in old:
            segments.pop(number, None)
        if new:
            segments[new.number] = new
        numbers = sorted(segments)
        self._table = numbers, [segments[number].seqs[0] for number in numbers], segments

    def retain_only(self, known: Container[int]) -> None:
        """Mark messages as no longer live, except the last copy of each message in ``known``.

        A crash during compaction may leave a message in two segments.
        """
        self._early.clear()
        seen: set[int] = set()
        for segment in reversed(list(self)):
            for at, seq in enumerate(segment.seqs):
                if seq not in known or seq in seen:
                    segment.forget(at)
            if segment.seqs[0] <= self._last_before(segment):
                seen.update(segment.seqs)

    def _last_before(self, segment: SegmentIndex) -> int:
        """Return the highest message number in the segments before this one; -1 if none."""
        return max((other.seqs[-1] for other in self if other.number < segment.number), default=-1)

    def find(self, seq: int) -> tuple[SegmentIndex, int] | None:
        """Return the segment and the array index of a message, live or not, or ``None``."""
        numbers, firsts, segments = self._table
        at = bisect_right(firsts, seq) - 1
        if at < 0:
            return None
        segment = segments[numbers[at]]
        array_index = segment.find(seq)
        return None if array_index < 0 else (segment, array_index)

    def position(self, seq: int) -> Position | None:
        """Return the position of a message's record, or ``None`` if it is unknown."""
        found = self.find(seq)
        return None if found is None else (found[0].number, found[0].offsets[found[1]])

    def forget(self, seq: int) -> None:
        """Mark a message as no longer live."""
        found = self.find(seq)
        if found is None:
            self._early.add(seq)
        else:
            found[0].forget(found[1])
