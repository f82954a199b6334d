"""Log compaction: removal of records that are no longer needed, while the log is in use.

Adjacent segments with few live messages are rewritten as one segment. It contains the live messages
and the other records that a replay of the remaining log needs: a record that changes a message is
kept as long as an older segment contains the message. A crash at any moment leaves either the old
segments, or the new segment and some of the old ones. Both replay to the same state.
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

COMPACT_BELOW_LIVE_RATIO: Final = (
    0.5  # segments with a smaller share of live messages are rewritten
)


@dataclass(slots=True)
class CompactionPlan:
    """Plan to rewrite segments as one, made in the event loop and executed in a thread."""

    segments: list[int]
    index: Index  # the thread reads only messages of sealed segments, which are constant
    flags: dict[int, bytes]  # which messages of each segment are live
    queues: set[int]
    first: bool  # there is no older segment


@dataclass(slots=True)
class CompactionResult:
    """Result of ``compact``: the new segment, and the old segments that it replaces.

    These are the first segments of the plan, as many as fit into one segment. ``seqs`` and
    ``offsets`` are the messages of the new segment.
    """

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
    """Return the runs of adjacent segments that are worth rewriting as one.

    A single small segment is not rewritten, because that would save nothing.

    Args:
        sizes: Number and size in bytes of each sealed segment, oldest first.
        index: Index of the log.
        limit: Maximum size of the live messages in a run, in bytes.
        border: Last segment that the snapshot covers. No run crosses it, because a replay starts
            after it.
        skip: Returns whether rewriting a given segment alone would save nothing.
    """
    runs: list[list[int]] = []
    run: list[int] = []
    live_total, total = 0.0, 0
    for number, size in sizes:
        segment = index[number]
        live = size * segment.live / len(segment) if segment else 0.0
        sparse = live < COMPACT_BELOW_LIVE_RATIO * size or size < limit / 16
        if not sparse or live_total + live > limit or (run and run[-1] <= border < number):
            _end(runs, run, live_total, total, skip)
            run, live_total, total = [], 0.0, 0
        if sparse:
            run.append(number)
            live_total += live
            total += size
    _end(runs, run, live_total, total, skip)
    return runs


def _end(
    runs: list[list[int]], run: list[int], live: float, total: int, skip: Callable[[int], bool]
) -> None:
    if len(run) > 1 or (run and live < COMPACT_BELOW_LIVE_RATIO * total and not skip(run[0])):
        runs.append(run)


def plan(segments: list[int], index: Index, queues: set[int], *, first: bool) -> CompactionPlan:
    """Return a plan to rewrite segments, with a copy of the current live flags."""
    flags = {number: bytes(index[number].alive) for number in segments}
    return CompactionPlan(segments, index, flags, queues, first)


def compact(log: Log, plan: CompactionPlan, limit: int) -> CompactionResult:
    """Rewrite a run of segments as one new segment. Blocking; thread-safe.

    The old segments are not changed. No segment is added after ``limit`` bytes, because
    ``choose_segments`` estimates sizes by the number of messages, and a few messages may be large.
    """
    kept: list[tuple[int, ...]] = []  # the messages in each kept record
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
    """Filter that selects the records to keep, and shortens them where possible."""

    def __init__(self, plan: CompactionPlan) -> None:
        self._plan = plan
        self._oldest = plan.segments[0]
        # Live messages of the current segment, because a crash may have left some messages in two
        # segments.
        self._live: set[int] = set()
        # Only the last change of a live message is kept, because the message may have been
        # delivered and released a million times.
        self._claims: dict[int, tuple[int, int]] = {}
        self._releases: dict[int, Release] = {}

    def enter(self, number: int) -> None:
        """Start filtering the records of a segment."""
        self._live = self._plan.index[number].survivors(self._plan.flags[number])

    def states(self) -> Iterator[bytes]:
        """Yield records of the last changes of live messages; called at the end of the run."""
        for seq, record in self._releases.items():
            yield encode_release(record.queue, seq, record.attempt, record.due, record.headers)
        for seq, (queue, attempt) in self._claims.items():
            yield encode_claim(queue, [seq], [attempt])

    def keep(self, content: bytes) -> list[tuple[bytes, tuple[int, ...]]]:
        """Return the records that replace a record, each with the messages that it contains."""
        if content[0] == PUBLISH:  # most records; decoding these would be slow
            seq = QUEUE_SEQ.unpack_from(content, QUEUE_SEQ_OFFSET)[1]
            return [(content, (seq,))] if seq in self._live else []
        return list(self._keep_decoded(content))

    def _keep_decoded(self, content: bytes) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        record = decode(content)
        match record:
            case Fanout():
                yield from self._fanout(record, content)
            case DeadLetterMove():
                yield from self._dead_letter_move(record, content)
            case Ack():
                yield from self._settled(record.queue, record.seqs, encode_ack)
            case Remove():
                yield from self._settled(record.queue, record.seqs, encode_remove)
            case Claim():
                self._claim(record)
            case Release():
                self._release(record)
            case Declare() | Delete() | BulkImport():
                if self._is_needed(record):
                    yield content, ()
            case Publish():
                raise AssertionError("PUBLISH records are handled by keep()")

    def _is_needed(self, record: Declare | Delete | BulkImport) -> bool:
        if isinstance(record, Declare):
            return record.queue in self._plan.queues
        return isinstance(record, BulkImport) or not self._plan.first

    def _claim(self, record: Claim) -> None:
        for seq, attempt in zip(record.seqs, record.attempts, strict=True):
            if self._is_live(seq):
                self._claims[seq] = record.queue, attempt

    def _release(self, record: Release) -> None:
        if self._is_live(record.seq):
            self._claims.pop(record.seq, None)
            before = self._releases.get(record.seq)
            if record.headers is None and before is not None:
                record = record._replace(headers=before.headers)
            self._releases[record.seq] = record

    def _fanout(self, record: Fanout, content: bytes) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        targets = [target for target in record.targets if target[1] in self._live]
        if targets:
            message = content[TARGETS.size + QUEUE_SEQ.size * len(record.targets) :]
            yield renumbered(message, targets), tuple(seq for _, seq in targets)

    def _dead_letter_move(
        self, record: DeadLetterMove, content: bytes
    ) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        seq = record.letter.seq
        if seq in self._live:
            is_older = self._is_in_older_segment(record.seq)
            yield (content if is_older else content[ONE_SEQ.size :]), (seq,)
        elif self._is_in_older_segment(record.seq) and not self._is_live(record.seq):
            yield encode_remove(record.queue, [record.seq]), ()

    def _settled(
        self, queue: int, seqs: Sequence[int], encode: Callable[[int, Sequence[int]], bytes]
    ) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        needed = [seq for seq in seqs if self._is_in_older_segment(seq)]
        if needed:
            yield encode(queue, needed), ()

    def _is_in_older_segment(self, seq: int) -> bool:
        """Return whether a segment that is older than the plan's contains a message."""
        if self._plan.first:
            return False
        found = self._plan.index.find(seq)
        return found is not None and found[0].number < self._oldest

    def _is_live(self, seq: int) -> bool:
        if seq in self._live:
            return True
        found = self._plan.index.find(seq)
        return found is not None and bool(found[0].alive[found[1]])


def reindex(
    old: Sequence[SegmentIndex], plan: CompactionPlan, compacted: CompactionResult
) -> SegmentIndex:
    """Return the index of the new segment; messages that were settled meanwhile are not live."""
    new = SegmentIndex(plan.segments[0], compacted.seqs, compacted.offsets)
    alive = bytearray()
    for segment in old:
        alive += bytes(compress(segment.alive, plan.flags[segment.number]))
    assert len(alive) == len(new)
    new.alive = alive
    new.live = sum(alive)
    return new
