"""Partition assignment: even, with few moves, and no partition moves while messages are held.

Kafka's rebalance revokes every partition and assigns all of them again. Here each member says what
it had, where it still holds messages, and whether it is about to go; the leader assigns so that

- each gets its share, and keeps what it had as far as that goes, first of all where it holds some;
- a partition that should move while its owner holds messages stays for now and is *wanted*: the
  owner stops reading it, finishes what it holds, and asks for another round;
- a member that is about to go keeps only what it still holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from qkit.backends.kafka.driver import MemberAssignment, MemberMetadata, Partition

__all__ = ["Assignment", "Assignor", "MemberState", "assign_partitions"]


@dataclass(frozen=True, slots=True)
class MemberState:
    """What a member tells the leader when it joins."""

    generation: int = -1
    owned: frozenset[Partition] = frozenset()
    busy: frozenset[Partition] = frozenset()
    leaving: bool = False

    def encode(self) -> bytes:
        """As the group's protocol carries it."""
        fields = {
            "generation": self.generation,
            "owned": sorted(self.owned),
            "busy": sorted(self.busy),
            "leaving": self.leaving,
        }
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes | None) -> MemberState:
        """What a member said; one that says nothing we understand has nothing."""
        fields = _json_object(data)
        generation = fields.get("generation")
        return cls(
            generation if isinstance(generation, int) else -1,
            _partitions(fields.get("owned")),
            _partitions(fields.get("busy")),
            fields.get("leaving") is True,
        )


@dataclass(slots=True)
class Assignment:
    """What a member gets, and which of it it should hand over as soon as it holds nothing there."""

    assigned: set[Partition] = field(default_factory=set[Partition])
    wanted: set[Partition] = field(default_factory=set[Partition])


def assign_partitions(
    topics: Mapping[str, Sequence[int]], states: Mapping[str, MemberState]
) -> dict[str, Assignment]:
    """Assign the partitions of each topic to the members.

    >>> state = MemberState(1, owned=frozenset({Partition("orders", 0), Partition("orders", 1)}))
    >>> assignments = assign_partitions({"orders": [0, 1]}, {"a": state, "b": MemberState()})
    >>> len(assignments["a"].assigned), len(assignments["b"].assigned)
    (1, 1)
    """
    assignments = {member: Assignment() for member in states}
    owners = _owners(states)
    staying = sorted(member for member, state in states.items() if not state.leaving)
    for topic, numbers in sorted(topics.items()):
        partitions = [Partition(topic, number) for number in sorted(numbers)]
        for partition, member in _targets(partitions, owners, staying, states).items():
            owner = owners.get(partition)
            if owner is not None and owner != member and partition in states[owner].busy:
                assignments[owner].assigned.add(partition)
                assignments[owner].wanted.add(partition)
            elif member is not None:
                assignments[member].assigned.add(partition)
    return assignments


def _owners(states: Mapping[str, MemberState]) -> dict[Partition, str]:
    """Who had what; of two that say so the one of the later generation."""
    owners: dict[Partition, str] = {}
    for member, state in sorted(states.items(), key=lambda item: (item[1].generation, item[0])):
        owners.update(dict.fromkeys(state.owned, member))
    return owners


def _targets(
    partitions: Sequence[Partition],
    owners: Mapping[Partition, str],
    staying: Sequence[str],
    states: Mapping[str, MemberState],
) -> dict[Partition, str | None]:
    """The member that should have each partition in the end; none if all members leave."""
    targets: dict[Partition, str | None] = dict.fromkeys(partitions)
    if not staying:
        return targets
    had: dict[str, list[Partition]] = {member: [] for member in staying}
    for partition in partitions:
        owner = owners.get(partition)
        if owner in had:
            had[owner].append(partition)
    least, more = divmod(len(partitions), len(staying))
    # Who had most keeps the larger shares: fewer partitions move.
    order = sorted(staying, key=lambda member: (-len(had[member]), member))
    free: dict[str, int] = {}
    for number, member in enumerate(order):
        room = least + (number < more)
        kept = sorted(
            had[member], key=lambda partition: (partition not in states[member].busy, partition)
        )
        targets.update(dict.fromkeys(kept[:room], member))
        free[member] = room - len(kept[:room])
    takers = (member for member in order for _ in range(free[member]))
    for partition in partitions:
        if targets[partition] is None:
            targets[partition] = next(takers)
    return targets


class Assignor:
    """The driver's interface to ``assign_partitions``, one for each consumer.

    Args:
        state: returns what this member tells the leader.
        on_assigned: called with the partitions that this member should hand over.
    """

    name: Final = "qkit"

    def __init__(
        self, state: Callable[[], MemberState], on_assigned: Callable[[frozenset[Partition]], None]
    ) -> None:
        self._state = state
        self._on_assigned = on_assigned

    def metadata(self, topics: Iterable[str]) -> Any:
        """What this member says when it joins."""
        return MemberMetadata(0, sorted(topics), self._state().encode())

    def assign(self, cluster: Any, members: Mapping[str, Any]) -> dict[str, Any]:
        """The leader's part."""
        topics: dict[str, list[int]] = {}
        for member in members.values():
            for topic in member.subscription:
                topics.setdefault(topic, sorted(cluster.partitions_for_topic(topic) or ()))
        states = {id: MemberState.decode(member.user_data) for id, member in members.items()}
        return {
            id: MemberAssignment(
                0, _by_topic(assignment.assigned), _encode_wanted(assignment.wanted)
            )
            for id, assignment in assign_partitions(topics, states).items()
        }

    def on_assignment(self, assignment: Any) -> None:
        """Take note of what this member was assigned."""
        self._on_assigned(_partitions(_json_object(assignment.user_data).get("wanted")))


def _by_topic(partitions: Iterable[Partition]) -> list[tuple[str, list[int]]]:
    topics: dict[str, list[int]] = {}
    for topic, number in sorted(partitions):
        topics.setdefault(topic, []).append(number)
    return list(topics.items())


def _encode_wanted(partitions: set[Partition]) -> bytes:
    return json.dumps({"wanted": sorted(partitions)}).encode() if partitions else b""


def _json_object(data: bytes | None) -> dict[str, object]:
    try:
        found: object = json.loads(data or b"{}")
    except ValueError:
        return {}
    return cast("dict[str, object]", found) if isinstance(found, dict) else {}


def _partitions(found: object) -> frozenset[Partition]:
    if not isinstance(found, list):
        return frozenset()
    partitions: set[Partition] = set()
    for item in cast("list[object]", found):
        match item:
            case [str(topic), int(number)]:
                partitions.add(Partition(topic, number))
            case _:
                pass
    return frozenset(partitions)
