"""Taking out of the log what nobody needs any more, while it is written.

Adjacent segments of which little is wanted are written anew as one: the messages that are wanted,
and of the rest only what a replay of the remaining log would miss. The rule for that: what became
of a message must be told as long as any older segment tells of the message. A crash at any moment
leaves the old segments, or the new one beside some of the old; both say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Final

from qkit.native.log.encode import (
    encode_ack,
    encode_claim,
    encode_release,
    encode_remove,
    renumbered,
)
from qkit.native.log.log import Log, Rewrite
from qkit.native.log.record import (
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
    Release,
    Remove,
    decode,
)
from qkit.native.storage.index import Index, SegmentIndex

__all__ = ["CompactionPlan", "CompactionResult", "choose_segments", "compact", "plan", "reindex"]

COMPACT_BELOW_LIVE_RATIO: Final = 0.5  # a segment of which less is wanted is worth writing anew


@dataclass(slots=True)
class CompactionPlan:
    """Segments to be written as one; made in the loop, carried out in a thread."""

    segments: list[int]
    index: Index  # read only, and only what does not change: the numbers in complete segments
    flags: dict[int, bytes]  # which messages of each were wanted
    queues: set[int]
    first: bool  # there is no older segment


@dataclass(slots=True)
class CompactionResult:
    """What has come of a plan: the first segments of the run, as many as one can hold."""

    rewrite: Rewrite
    segments: list[int]
    seqs: list[int] = field(default_factory=list[int])
    offsets: list[int] = field(default_factory=list[int])


def choose_segments(
    sizes: Sequence[tuple[int, int]],
    index: Index,
    *,
    limit: int,
    border: int,
    skip: Callable[[int], bool],
) -> list[list[int]]:
    """Runs of adjacent segments that are worth writing as one.

    ``sizes`` are the complete segments with their sizes, the oldest first; a run's wanted part
    is at most ``limit`` bytes. No run goes beyond ``border``, the last segment that a snapshot
    covers: what it does not cover must stay where a replay begins. A single small segment is left
    alone, and so is a single one of ``skip``: nothing would be won.
    """
    runs: list[list[int]] = []
    run: list[int] = []
    wanted, total = 0.0, 0
    for number, size in sizes:
        segment = index[number]
        live = size * segment.live / len(segment) if segment else 0.0
        sparse = live < COMPACT_BELOW_LIVE_RATIO * size or size < limit / 16
        if not sparse or wanted + live > limit or (run and run[-1] <= border < number):
            _end(runs, run, wanted, total, skip)
            run, wanted, total = [], 0.0, 0
        if sparse:
            run.append(number)
            wanted += live
            total += size
    _end(runs, run, wanted, total, skip)
    return runs


def _end(
    runs: list[list[int]], run: list[int], wanted: float, total: int, skip: Callable[[int], bool]
) -> None:
    if len(run) > 1 or (run and wanted < COMPACT_BELOW_LIVE_RATIO * total and not skip(run[0])):
        runs.append(run)


def plan(segments: list[int], index: Index, queues: set[int], *, first: bool) -> CompactionPlan:
    """What ``compact`` has to know, as of now."""
    flags = {number: bytes(index[number].alive) for number in segments}
    return CompactionPlan(segments, index, flags, queues, first)


def compact(log: Log, plan: CompactionPlan, limit: int) -> CompactionResult:
    """Write a run of segments as one, beside them. Blocking, for any thread.

    None is added to one that has ``limit`` bytes: the estimate that chose the run is by the number
    of messages, and a few of them may be large.
    """
    kept: list[tuple[int, ...]] = []  # the messages in each record
    filtering = _Filter(plan)
    taken: list[int] = []

    def contents() -> Iterator[bytes]:
        size = 0
        for number in plan.segments:
            if size >= limit:
                break
            taken.append(number)
            filtering.enter(number)
            for entry in log.entries(number):
                for content, seqs in filtering.keep(entry.content):
                    kept.append(seqs)
                    size += len(content)
                    yield content
        for content in filtering.states():
            kept.append(())
            yield content

    rewrite = log.rewrite(plan.segments[0], contents())
    compacted = CompactionResult(rewrite, taken)
    for seqs, offset in zip(kept, rewrite.offsets, strict=True):
        for seq in seqs:
            compacted.seqs.append(seq)
            compacted.offsets.append(offset)
    return compacted


class _Filter:
    """Which records stay, and as what."""

    def __init__(self, plan: CompactionPlan) -> None:
        self._plan = plan
        self._oldest = plan.segments[0]
        self._wanted: set[int] = set()  # in this segment: a crash may have left some in two
        # Of what happened to a living message only the last is of interest: it may have been
        # handed out and given back a million times.
        self._claims: dict[int, tuple[int, int]] = {}
        self._releases: dict[int, Release] = {}

    def enter(self, number: int) -> None:
        """What follows is of this segment."""
        self._wanted = self._plan.index[number].survivors(self._plan.flags[number])

    def states(self) -> Iterator[bytes]:
        """Where the living messages stood at the end of the run."""
        for seq, record in self._releases.items():
            yield encode_release(record.queue, seq, record.attempt, record.due, record.headers)
        for seq, (queue, attempt) in self._claims.items():
            yield encode_claim(queue, [seq], [attempt])

    def keep(self, content: bytes) -> list[tuple[bytes, tuple[int, ...]]]:
        """What stays of a record, with the messages it holds."""
        if content[0] == PUBLISH:  # nearly all: not worth decoding
            seq = QUEUE_SEQ.unpack_from(content, QUEUE_SEQ_OFFSET)[1]
            return [(content, (seq,))] if seq in self._wanted else []
        return list(self._rest(content))

    def _rest(self, content: bytes) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        record = decode(content)
        match record:
            case Fanout():
                yield from self._fanout(record, content)
            case DeadLetterMove():
                yield from self._dead_letter_move(record, content)
            case Ack():
                yield from self._told(record.queue, record.seqs, encode_ack)
            case Remove():
                yield from self._told(record.queue, record.seqs, encode_remove)
            case Claim():
                self._claim(record)
            case Release():
                self._release(record)
            case Declare() | Delete() | BulkImport():
                if self._is_needed(record):
                    yield content, ()
            case Publish():
                raise AssertionError("dealt with before")

    def _is_needed(self, record: Declare | Delete | BulkImport) -> bool:
        if isinstance(record, Declare):
            return record.queue in self._plan.queues
        return isinstance(record, BulkImport) or not self._plan.first

    def _claim(self, record: Claim) -> None:
        for seq, attempt in zip(record.seqs, record.attempts, strict=True):
            if self._is_wanted(seq):
                self._claims[seq] = record.queue, attempt

    def _release(self, record: Release) -> None:
        if self._is_wanted(record.seq):
            self._claims.pop(record.seq, None)
            before = self._releases.get(record.seq)
            if record.headers is None and before is not None:
                record = record._replace(headers=before.headers)
            self._releases[record.seq] = record

    def _fanout(self, record: Fanout, content: bytes) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        targets = [target for target in record.targets if target[1] in self._wanted]
        if targets:
            message = content[TARGETS.size + QUEUE_SEQ.size * len(record.targets) :]
            yield renumbered(message, targets), tuple(seq for _, seq in targets)

    def _dead_letter_move(
        self, record: DeadLetterMove, content: bytes
    ) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        seq = record.letter.seq
        if seq in self._wanted:
            told = self._is_told_before(record.seq)
            yield (content if told else content[ONE_SEQ.size :]), (seq,)
        elif self._is_told_before(record.seq) and not self._is_wanted(record.seq):
            yield encode_remove(record.queue, [record.seq]), ()

    def _told(
        self, queue: int, seqs: Sequence[int], encode: Callable[[int, Sequence[int]], bytes]
    ) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        needed = [seq for seq in seqs if self._is_told_before(seq)]
        if needed:
            yield encode(queue, needed), ()

    def _is_told_before(self, seq: int) -> bool:
        """Whether a segment that stays, older than these, tells of a message."""
        if self._plan.first:
            return False
        found = self._plan.index.find(seq)
        return found is not None and found[0].number < self._oldest

    def _is_wanted(self, seq: int) -> bool:
        if seq in self._wanted:
            return True
        found = self._plan.index.find(seq)
        return found is not None and bool(found[0].alive[found[1]])


def reindex(
    old: Sequence[SegmentIndex], plan: CompactionPlan, compacted: CompactionResult
) -> SegmentIndex:
    """The index of the new segment; what was settled meanwhile is not wanted there either."""
    new = SegmentIndex(plan.segments[0], compacted.seqs, compacted.offsets)
    alive = bytearray()
    for segment in old:
        alive += bytes(compress(segment.alive, plan.flags[segment.number]))
    assert len(alive) == len(new)
    new.alive = alive
    new.live = sum(alive)
    return new
