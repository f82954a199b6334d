"""Offset tracker: messages settle in any order, and no unsettled message counts as settled."""

from __future__ import annotations

import random

import pytest

from qkit.backends.kafka.offsets import (
    METADATA_LIMIT,
    CommittedOffset,
    OffsetTracker,
    count_unsettled,
)


def tracker_of(count: int, start: int = 0) -> OffsetTracker:
    tracker = OffsetTracker(start)
    for offset in range(start, start + count):
        tracker.read(offset)
    return tracker


def unsettled(saved: CommittedOffset, end: int) -> set[int]:
    """Return the offsets that the next consumer of the partition would deliver."""
    successor = OffsetTracker(saved.offset, saved.metadata)
    return {offset for offset in range(saved.offset, end) if not successor.is_settled(offset)}


def test_the_commit_advances_with_messages_settled_in_order() -> None:
    tracker = tracker_of(5, start=10)
    for offset in range(10, 15):
        assert tracker.snapshot() == CommittedOffset(offset)
        tracker.settle(offset)
    assert tracker.snapshot() == CommittedOffset(15)


def test_the_oldest_unsettled_message_is_committed_and_later_settled_ones_are_recorded() -> None:
    tracker = tracker_of(10)
    for offset in (1, 2, 3, 5, 9):
        tracker.settle(offset)
    saved = tracker.snapshot()
    assert saved.offset == 0
    assert unsettled(saved, 10) == {0, 4, 6, 7, 8}
    tracker.settle(0)
    assert tracker.snapshot().offset == 4


def test_offsets_without_a_record_do_not_hold_the_commit_back() -> None:
    tracker = OffsetTracker(0)
    for offset in (0, 3, 7):  # the others were compacted or are transaction markers
        tracker.read(offset)
    tracker.settle(3)
    assert unsettled(tracker.snapshot(), 8) == {0, 7}
    tracker.settle(0)
    assert tracker.snapshot() == CommittedOffset(7)
    tracker.settle(7)
    assert tracker.snapshot() == CommittedOffset(8)


def test_settling_an_offset_twice_or_an_unread_offset_has_no_effect() -> None:
    tracker = tracker_of(3)
    tracker.settle(1)
    tracker.settle(1)
    tracker.settle(99)
    assert unsettled(tracker.snapshot(), 3) == {0, 2}


def test_a_new_consumer_does_not_settle_offsets_that_it_has_not_read() -> None:
    first = tracker_of(100)
    for offset in range(100):
        if offset not in {0, 50, 99}:
            first.settle(offset)
    successor = OffsetTracker(first.snapshot().offset, first.snapshot().metadata)
    successor.read(0)
    successor.settle(0)
    saved = successor.snapshot()
    assert saved.offset == 50
    assert unsettled(saved, 100) == {50, 99}
    successor.read(50)
    successor.settle(50)
    assert unsettled(successor.snapshot(), 100) == {99}


@pytest.mark.parametrize(
    "metadata",
    [
        "",
        "theirs",
        "qk1",
        "qk1 5",
        "qk1 3 9",
        "qk1 5 0-9",
        "qk1 5 -1",
        "qk1 x 0",
        "qk1 2 0-99999999",
    ],
)
def test_invalid_metadata_settles_nothing(metadata: str) -> None:
    assert unsettled(CommittedOffset(7, metadata), 20) == set(range(7, 20))


def test_metadata_stays_within_kafkas_limit_and_includes_no_unsettled_message() -> None:
    tracker = tracker_of(20_000, start=10**12)
    for offset in range(10**12, 10**12 + 20_000, 2):
        tracker.settle(offset + 1)
    saved = tracker.snapshot()
    assert len(saved.metadata) <= METADATA_LIMIT
    held = set(tracker.pending)
    assert held <= unsettled(saved, 10**12 + 20_000)
    assert len(unsettled(saved, 10**12 + 20_000)) < 20_000, "the metadata records nothing"


def test_many_settled_messages_after_a_slow_one_need_little_metadata() -> None:
    tracker = tracker_of(100_000)
    for offset in range(1, 100_000):
        tracker.settle(offset)
    assert tracker.snapshot() == CommittedOffset(0, "qk1 100000 0")
    assert len(tracker.pending) == 1, "settled messages use memory"


def test_unsettled_messages_are_counted() -> None:
    saved = CommittedOffset(10, "qk1 10 0,3-5")
    assert count_unsettled(saved, begin=0, end=25) == 4 + 5
    assert count_unsettled(saved, begin=14, end=25) == 2 + 5, "offsets below ``begin`` were purged"
    assert count_unsettled(saved, begin=30, end=30) == 0
    assert count_unsettled(CommittedOffset(10), begin=0, end=10) == 0


def test_random_settlements_never_commit_an_unsettled_message() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(100):
        tracker, held, end = OffsetTracker(0), set[int](), 0
        for _ in range(rng.randrange(300)):
            if held and rng.random() < 0.5:
                offset = rng.choice(sorted(held))
                held.discard(offset)
                tracker.settle(offset)
            elif not tracker.is_settled(end):
                tracker.read(end)
                held.add(end)
                end += 1
            else:
                tracker.skip_to(end + 1)
                end += 1
            if rng.random() < 0.05:  # another consumer takes over the partition
                saved = tracker.snapshot()
                assert unsettled(saved, end) == held
                tracker, end = OffsetTracker(saved.offset, saved.metadata), saved.offset
                held = set()
                continue
            assert held <= unsettled(tracker.snapshot(), max(end, 1_000))
