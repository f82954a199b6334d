"""Partition assignment that is balanced and sticky, and does not move busy partitions.

A Kafka rebalance revokes every partition and assigns all of them again. Here each member reports
the partitions that it owns, which of them are busy, and whether it is leaving. A partition is busy
while it has messages in flight or uncommitted acks. The leader assigns the partitions by these
rules:

- Each member gets an equal share. It keeps partitions that it owns, busy ones first.
- A busy partition that should move stays with its owner and is marked as *wanted*. The owner stops
  reading it, waits until its messages are settled, and requests another rebalance.
- A leaving member keeps only its busy partitions, and all of them are wanted.
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
    """State that a member reports to the leader at each rebalance.

    Attributes:
        generation: Generation of the group in which ``owned`` was assigned; -1 if none.
        owned: Partitions that the member has and is not giving up.
        busy: Partitions with messages in flight, or with settled messages that are not committed.
        leaving: Whether the member is about to leave the group.
    """

    generation: int = -1
    owned: frozenset[Partition] = frozenset()
    busy: frozenset[Partition] = frozenset()
    leaving: bool = False

    def encode(self) -> bytes:
        """Return the state as user data for the group protocol."""
        fields = {
            "generation": self.generation,
            "owned": sorted(self.owned),
            "busy": sorted(self.busy),
            "leaving": self.leaving,
        }
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes | None) -> MemberState:
        """Parse user data of the group protocol; use the default for an invalid field."""
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
    """Partitions of one member.

    Attributes:
        assigned: All partitions of the member.
        wanted: Assigned partitions that it must give up as soon as they are no longer busy.
    """

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
    """Return the owner of each partition; if two members claim it, the later generation wins."""
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
    """Return the member that should own each partition; ``None`` if all members are leaving."""
    targets: dict[Partition, str | None] = dict.fromkeys(partitions)
    if not staying:
        return targets
    owned: dict[str, list[Partition]] = {member: [] for member in staying}
    for partition in partitions:
        owner = owners.get(partition)
        if owner in owned:
            owned[owner].append(partition)
    base, remainder = divmod(len(partitions), len(staying))
    # Members that own the most partitions get the larger shares, so that fewer partitions move.
    order = sorted(staying, key=lambda member: (-len(owned[member]), member))
    missing: dict[str, int] = {}
    for number, member in enumerate(order):
        share = base + (number < remainder)
        busy_first = sorted(
            owned[member], key=lambda partition: (partition not in states[member].busy, partition)
        )
        kept = busy_first[:share]
        targets.update(dict.fromkeys(kept, member))
        missing[member] = share - len(kept)
    receivers = (member for member in order for _ in range(missing[member]))
    for partition in partitions:
        if targets[partition] is None:
            targets[partition] = next(receivers)
    return targets


class Assignor:
    """Adapter from the driver's assignor interface to ``assign_partitions``, one per consumer.

    Args:
        state: Returns the state of this member.
        on_assigned: Called after each assignment with the wanted partitions.
    """

    name: Final = "qkit"

    def __init__(
        self, state: Callable[[], MemberState], on_assigned: Callable[[frozenset[Partition]], None]
    ) -> None:
        self._state = state
        self._on_assigned = on_assigned

    def metadata(self, topics: Iterable[str]) -> Any:
        """Return the metadata with which this member joins the group."""
        return MemberMetadata(0, sorted(topics), self._state().encode())

    def assign(self, cluster: Any, members: Mapping[str, Any]) -> dict[str, Any]:
        """Assign partitions to all members; the driver calls this in the leader."""
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
        """Report the wanted partitions; the driver calls this after an assignment."""
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
