"""Partition assignment: balanced, sticky, and without moving partitions in use."""

from __future__ import annotations

import random

import pytest

from qkit.backends.kafka.assignor import Assignment, Assignor, MemberState, assign_partitions
from qkit.backends.kafka.driver import MemberMetadata, Partition

Assignments = dict[str, Assignment]


def partitions(*numbers: int, topic: str = "t") -> frozenset[Partition]:
    return frozenset(Partition(topic, number) for number in numbers)


def test_all_partitions_are_assigned_in_even_shares() -> None:
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


def test_a_member_keeps_its_partitions() -> None:
    states = {"a": MemberState(3, partitions(0, 1, 2)), "b": MemberState(3, partitions(3, 4, 5))}
    assignments = assign_partitions({"t": range(6)}, states)
    assert assignments["a"].assigned == partitions(0, 1, 2)
    assert assignments["b"].assigned == partitions(3, 4, 5)


def test_a_new_member_gets_idle_partitions_immediately() -> None:
    states = {
        "a": MemberState(1, partitions(0, 1, 2, 3), busy=partitions(2, 3)),
        "b": MemberState(),
    }
    assignments = assign_partitions({"t": range(4)}, states)
    assert assignments["a"] == Assignment(set(partitions(2, 3)), set())
    assert assignments["b"] == Assignment(set(partitions(0, 1)), set())


def test_a_busy_partition_moves_after_its_messages_are_settled() -> None:
    topics = {"t": range(4)}
    busy = MemberState(1, partitions(0, 1, 2, 3), busy=partitions(0, 1, 2, 3))
    first = assign_partitions(topics, {"a": busy, "b": MemberState()})
    assert first["a"].assigned == partitions(0, 1, 2, 3)
    assert len(first["a"].wanted) == 2
    assert first["b"].assigned == set()
    handed_over = first["a"].wanted
    kept = busy.owned - handed_over
    second = assign_partitions(topics, {"a": MemberState(2, kept, busy=kept), "b": MemberState(2)})
    assert second["a"] == Assignment(set(kept), set())
    assert second["b"] == Assignment(set(handed_over), set())


def test_a_leaving_member_keeps_only_busy_partitions() -> None:
    states = {
        "a": MemberState(4, partitions(0, 1, 2), busy=partitions(1), leaving=True),
        "b": MemberState(4),
    }
    assignments = assign_partitions({"t": range(3)}, states)
    assert assignments["a"] == Assignment(set(partitions(1)), set(partitions(1)))
    assert assignments["b"].assigned == partitions(0, 2)


def test_idle_partitions_are_not_assigned_if_all_members_are_leaving() -> None:
    assignments = assign_partitions(
        {"t": range(3)}, {"a": MemberState(1, partitions(0, 1, 2), leaving=True)}
    )
    assert assignments == {"a": Assignment()}


def test_a_partition_with_two_owners_stays_with_the_later_generation() -> None:
    states = {
        "earlier": MemberState(1, partitions(0), busy=partitions(0)),
        "later": MemberState(7, partitions(0), busy=partitions(0)),
    }
    assignments = assign_partitions({"t": [0]}, states)
    assert assignments["later"].assigned == partitions(0)
    assert assignments["earlier"] == Assignment()


def test_random_rebalances_keep_one_owner_per_partition_and_become_stable() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(50):
        topics = {"t": range(rng.randrange(1, 20)), "t.retry": range(13)}
        members = {f"m{number}": MemberState() for number in range(rng.randrange(1, 6))}
        for generation in range(1, 12):
            assignments = assign_partitions(topics, members)
            assigned = [
                partition
                for assignment in assignments.values()
                for partition in assignment.assigned
            ]
            assert len(assigned) == len(set(assigned)) == sum(map(len, topics.values()))
            if generation < 6 and rng.random() < 0.3:
                members[f"n{generation}"] = MemberState()
                continue
            members = {
                member: MemberState(
                    generation,
                    frozenset(assignment.assigned - assignment.wanted),
                    frozenset(
                        partition
                        for partition in assignment.assigned - assignment.wanted
                        if rng.random() < 0.5
                    ),
                )
                for member, assignment in assignments.items()
            }
            if not any(assignment.wanted for assignment in assignments.values()):
                again = assign_partitions(topics, members)
                assert {id: assignment.assigned for id, assignment in again.items()} == {
                    id: assignment.assigned for id, assignment in assignments.items()
                }, "a stable assignment changed"


def test_state_and_assignment_survive_encoding_in_the_group_protocol() -> None:
    reported: list[frozenset[Partition]] = []
    state = MemberState(3, partitions(0, 1), partitions(1), leaving=True)
    assert MemberState.decode(state.encode()) == state
    assignor = Assignor(lambda: state, reported.append)
    metadata = assignor.metadata({"t"})
    decoded = type(metadata).decode(metadata.encode())

    class Cluster:
        def partitions_for_topic(self, topic: str) -> set[int]:
            return {0, 1}

    new_member = MemberMetadata(0, ["t"], MemberState().encode())
    assigned = assignor.assign(Cluster(), {"a": decoded, "b": new_member})
    mine = type(assigned["a"]).decode(assigned["a"].encode())
    assert set(mine.partitions()) == {Partition("t", 1)}
    assignor.on_assignment(mine)
    assert reported == [partitions(1)]
    assignor.on_assignment(type(assigned["b"]).decode(assigned["b"].encode()))
    assert reported[1] == frozenset()


@pytest.mark.parametrize("data", [None, b"", b"{", b"[1]", b'{"owned": [[1], "x", ["t", "0"]]}'])
def test_invalid_user_data_of_a_member_is_decoded_as_an_empty_state(data: bytes | None) -> None:
    assert MemberState.decode(data) == MemberState()
