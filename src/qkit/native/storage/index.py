"""Where every message of the log lies, and which of them are still wanted.

Messages are numbered in the order of the log, so each segment needs only two sorted arrays and a
flag for each message: 13 bytes, against some hundred for an entry in a dictionary. Putting a
rewritten segment in place is the exchange of one object.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Iterator
from itertools import compress

from qkit.native.log.tail import Position

__all__ = ["Index", "SegmentIndex"]


class SegmentIndex:
    """The messages whose records are in one segment, dead ones included, in their order."""

    __slots__ = ("alive", "live", "number", "offsets", "seqs")

    def __init__(self, number: int, seqs: Iterable[int] = (), offsets: Iterable[int] = ()) -> None:
        self.number = number
        self.seqs = array("Q", seqs)
        self.offsets = array("I", offsets)
        self.alive = bytearray(b"\1") * len(self.seqs)
        self.live = len(self.seqs)

    def __len__(self) -> int:
        return len(self.seqs)

    def add(self, seq: int, offset: int) -> None:
        """A message was written behind the others."""
        self.seqs.append(seq)
        self.offsets.append(offset)
        self.alive.append(1)
        self.live += 1

    def find(self, seq: int) -> int:
        """Its place in the arrays, -1 if it is not here. Mostly there are no gaps: no search."""
        seqs = self.seqs
        at = seq - seqs[0]
        if not (0 <= at < len(seqs) and seqs[at] == seq):
            at = bisect_left(seqs, seq)
            if at == len(seqs) or seqs[at] != seq:
                return -1
        return at

    def forget(self, at: int) -> None:
        """The message at this place of the arrays is not wanted any more; again is no error."""
        self.live -= self.alive[at]
        self.alive[at] = 0

    def survivors(self, flags: bytes) -> set[int]:
        """The messages whose flag is set, in a copy of ``alive`` made before."""
        return set(compress(self.seqs, flags))


class Index:
    """The segments' arrays, and how a message is found in them by its number.

    >>> index = Index()
    >>> index.add(1, (1, 80)); index.add(2, (1, 200)); index.add(3, (2, 80))
    >>> index.forget(2)
    >>> index.position(3), index[1].live
    ((2, 80), 1)
    """

    __slots__ = ("_early", "_table")

    def __init__(self) -> None:
        # Numbers of the segments that hold a message, in order; the first message of each; the
        # segments. Replaced as one: threads look in here while the loop puts a segment in place.
        self._table: tuple[list[int], list[int], dict[int, SegmentIndex]] = ([], [], {})
        self._early: set[int] = set()  # settled before the writer told where they are

    def __getitem__(self, number: int) -> SegmentIndex:
        return self._table[2].get(number) or SegmentIndex(number)

    def __iter__(self) -> Iterator[SegmentIndex]:
        """The segments that hold a message, in order."""
        numbers, _, segments = self._table
        return (segments[number] for number in numbers)

    def add(self, seq: int, position: Position) -> None:
        """A message is in the log; each one comes behind the last."""
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
        """Take over a segment that was read or rewritten, in place of these.

        One without messages is left out.
        """
        segments = dict(self._table[2])
        for number in old:
            segments.pop(number, None)
        if new:
            segments[new.number] = new
        numbers = sorted(segments)
        self._table = numbers, [segments[number].seqs[0] for number in numbers], segments

    def retain_only(self, known: Container[int]) -> None:
        """Only these messages are wanted, each in the last segment that tells of it.

        A crash in the middle of compaction leaves records in two segments.
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
        """The last message of the segments before this one."""
        return max((other.seqs[-1] for other in self if other.number < segment.number), default=-1)

    def find(self, seq: int) -> tuple[SegmentIndex, int] | None:
        """The segment that holds a message, dead or alive, and its place in the arrays."""
        numbers, firsts, segments = self._table
        at = bisect_right(firsts, seq) - 1
        if at < 0:
            return None
        segment = segments[numbers[at]]
        place = segment.find(seq)
        return None if place < 0 else (segment, place)

    def position(self, seq: int) -> Position | None:
        """Where the record of a message begins."""
        found = self.find(seq)
        return None if found is None else (found[0].number, found[0].offsets[found[1]])

    def forget(self, seq: int) -> None:
        """A message is not wanted any more."""
        found = self.find(seq)
        if found is None:
            self._early.add(seq)
        else:
            found[0].forget(found[1])
