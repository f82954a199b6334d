"""Who gets which partition: even shares, few moves, nothing taken from under a handler."""

from __future__ import annotations

import random

import pytest

from qkit.backends.kafka.assignor import Assignment, Assignor, MemberState, assign_partitions
from qkit.backends.kafka.driver import MemberMetadata, Partition

Assignments = dict[str, Assignment]


def partitions(*numbers: int, topic: str = "t") -> frozenset[Partition]:
    return frozenset(Partition(topic, number) for number in numbers)


def test_shares_are_even_and_whole() -> None:
    assignments = assign_partitions(
        {"t": range(10), "t.retry": range(13)}, {name: MemberState() for name in "abc"}
    )
    assigned = [
        partition for assignment in assignments.values() for partition in assignment.assigned
    ]
    assert len(assigned) == len(set(assigned)) == 23
    for topic, sizes in (("t", {3, 4}), ("t.retry", {4, 5})):
        counts = {
            sum(partition[0] == topic for partition in assignment.assigned)
            for assignment in assignments.values()
        }
        assert counts == sizes


def test_whoever_had_a_partition_keeps_it() -> None:
    states = {"a": MemberState(3, partitions(0, 1, 2)), "b": MemberState(3, partitions(3, 4, 5))}
    assignments = assign_partitions({"t": range(6)}, states)
    assert assignments["a"].assigned == partitions(0, 1, 2)
    assert assignments["b"].assigned == partitions(3, 4, 5)


def test_a_newcomer_gets_what_is_idle_at_once() -> None:
    states = {
        "a": MemberState(1, partitions(0, 1, 2, 3), busy=partitions(2, 3)),
        "b": MemberState(),
    }
    assignments = assign_partitions({"t": range(4)}, states)
    assert assignments["a"] == Assignment(set(partitions(2, 3)), set())
    assert assignments["b"] == Assignment(set(partitions(0, 1)), set())


def test_what_is_held_stays_until_it_is_settled_and_then_moves() -> None:
    topics = {"t": range(4)}
    busy = MemberState(1, partitions(0, 1, 2, 3), busy=partitions(0, 1, 2, 3))
    first = assign_partitions(topics, {"a": busy, "b": MemberState()})
    assert first["a"].assigned == partitions(0, 1, 2, 3)
    assert len(first["a"].wanted) == 2
    assert first["b"].assigned == set()
    given = first["a"].wanted
    kept = busy.owned - given
    second = assign_partitions(topics, {"a": MemberState(2, kept, busy=kept), "b": MemberState(2)})
    assert second["a"] == Assignment(set(kept), set())
    assert second["b"] == Assignment(set(given), set())


def test_who_is_about_to_go_keeps_only_what_it_holds() -> None:
    states = {
        "a": MemberState(4, partitions(0, 1, 2), busy=partitions(1), leaving=True),
        "b": MemberState(4),
    }
    assignments = assign_partitions({"t": range(3)}, states)
    assert assignments["a"] == Assignment(set(partitions(1)), set(partitions(1)))
    assert assignments["b"].assigned == partitions(0, 2)


def test_when_all_are_about_to_go_nobody_gets_what_nobody_holds() -> None:
    assignments = assign_partitions(
        {"t": range(3)}, {"a": MemberState(1, partitions(0, 1, 2), leaving=True)}
    )
    assert assignments == {"a": Assignment()}


def test_of_two_that_claim_a_partition_the_later_has_it() -> None:
    states = {
        "ghost": MemberState(1, partitions(0), busy=partitions(0)),
        "heir": MemberState(7, partitions(0), busy=partitions(0)),
    }
    assignments = assign_partitions({"t": [0]}, states)
    assert assignments["heir"].assigned == partitions(0)
    assert assignments["ghost"] == Assignment()


def test_at_random_every_partition_has_one_owner_and_rounds_come_to_rest() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(50):
        topics = {"t": range(dice.randrange(1, 20)), "t.retry": range(13)}
        members = {f"m{number}": MemberState() for number in range(dice.randrange(1, 6))}
        for generation in range(1, 12):
            assignments = assign_partitions(topics, members)
            assigned = [
                partition
                for assignment in assignments.values()
                for partition in assignment.assigned
            ]
            assert len(assigned) == len(set(assigned)) == sum(map(len, topics.values()))
            if generation < 6 and dice.random() < 0.3:
                members[f"n{generation}"] = MemberState()
                continue
            members = {
                member: MemberState(
                    generation,
                    frozenset(assignment.assigned - assignment.wanted),
                    frozenset(
                        partition
                        for partition in assignment.assigned - assignment.wanted
                        if dice.random() < 0.5
                    ),
                )
                for member, assignment in assignments.items()
            }
            if not any(assignment.wanted for assignment in assignments.values()):
                again = assign_partitions(topics, members)
                assert {id: assignment.assigned for id, assignment in again.items()} == {
                    id: assignment.assigned for id, assignment in assignments.items()
                }, "at rest nothing moves"


def test_the_group_s_protocol_carries_it() -> None:
    heard: list[frozenset[Partition]] = []
    state = MemberState(3, partitions(0, 1), partitions(1), leaving=True)
    assert MemberState.decode(state.encode()) == state
    assignor = Assignor(lambda: state, heard.append)
    metadata = assignor.metadata({"t"})
    said = type(metadata).decode(metadata.encode())

    class Cluster:
        def partitions_for_topic(self, topic: str) -> set[int]:
            return {0, 1}

    newcomer = MemberMetadata(0, ["t"], MemberState().encode())
    assigned = assignor.assign(Cluster(), {"a": said, "b": newcomer})
    mine = type(assigned["a"]).decode(assigned["a"].encode())
    assert set(mine.partitions()) == {Partition("t", 1)}
    assignor.on_assignment(mine)
    assert heard == [partitions(1)]
    assignor.on_assignment(type(assigned["b"]).decode(assigned["b"].encode()))
    assert heard[1] == frozenset()


@pytest.mark.parametrize("data", [None, b"", b"{", b"[1]", b'{"owned": [[1], "x", ["t", "0"]]}'])
def test_a_member_that_says_nothing_we_understand_has_nothing(data: bytes | None) -> None:
    assert MemberState.decode(data) == MemberState()
