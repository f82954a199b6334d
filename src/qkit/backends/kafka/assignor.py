"""Who reads which partition: evenly, with few moves, and nothing is taken from under a handler.

Kafka's rebalance takes every partition away and deals them out again. Here each member says what it
had, where it still holds messages, and whether it is about to go; the leader deals so that

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

from qkit.backends.kafka.driver import MemberAssignment, MemberMetadata, TopicPartition

__all__ = ["Assignor", "Claim", "Share", "deal"]

Place = tuple[str, int]  # topic and partition


@dataclass(frozen=True, slots=True)
class Claim:
    """What a member says when it joins."""

    generation: int = -1
    owned: frozenset[Place] = frozenset()
    busy: frozenset[Place] = frozenset()
    leaving: bool = False

    def encode(self) -> bytes:
        """As the group's protocol carries it."""
        facts = {
            "generation": self.generation,
            "owned": sorted(self.owned),
            "busy": sorted(self.busy),
            "leaving": self.leaving,
        }
        return json.dumps(facts, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes | None) -> Claim:
        """What a member said; one that says nothing we understand has nothing."""
        facts = _facts(data)
        generation = facts.get("generation")
        return cls(
            generation if isinstance(generation, int) else -1,
            _places(facts.get("owned")),
            _places(facts.get("busy")),
            facts.get("leaving") is True,
        )


@dataclass(slots=True)
class Share:
    """What a member gets, and which of it it should hand over as soon as it holds nothing there."""

    assigned: set[Place] = field(default_factory=set[Place])
    wanted: set[Place] = field(default_factory=set[Place])


def deal(topics: Mapping[str, Sequence[int]], claims: Mapping[str, Claim]) -> dict[str, Share]:
    """Deal the partitions of each topic out to the members.

    >>> shares = deal({"orders": [0, 1]}, {"a": Claim(1, frozenset({("orders", 0), ("orders", 1)})),
    ...                                    "b": Claim()})
    >>> len(shares["a"].assigned), len(shares["b"].assigned)
    (1, 1)
    """
    shares = {member: Share() for member in claims}
    owners = _owners(claims)
    staying = sorted(member for member, claim in claims.items() if not claim.leaving)
    for topic, partitions in sorted(topics.items()):
        places = [(topic, partition) for partition in sorted(partitions)]
        for place, member in _targets(places, owners, staying, claims).items():
            owner = owners.get(place)
            if owner is not None and owner != member and place in claims[owner].busy:
                shares[owner].assigned.add(place)
                shares[owner].wanted.add(place)
            elif member is not None:
                shares[member].assigned.add(place)
    return shares


def _owners(claims: Mapping[str, Claim]) -> dict[Place, str]:
    """Who had what; of two that say so the one of the later generation."""
    owners: dict[Place, str] = {}
    for member, claim in sorted(claims.items(), key=lambda item: (item[1].generation, item[0])):
        owners.update(dict.fromkeys(claim.owned, member))
    return owners


def _targets(
    places: Sequence[Place],
    owners: Mapping[Place, str],
    staying: Sequence[str],
    claims: Mapping[str, Claim],
) -> dict[Place, str | None]:
    """Where each place should be in the end; nowhere when nobody stays."""
    targets: dict[Place, str | None] = dict.fromkeys(places)
    if not staying:
        return targets
    had: dict[str, list[Place]] = {member: [] for member in staying}
    for place in places:
        owner = owners.get(place)
        if owner in had:
            had[owner].append(place)
    least, more = divmod(len(places), len(staying))
    # Who had most keeps the larger shares: fewer places move.
    order = sorted(staying, key=lambda member: (-len(had[member]), member))
    free: dict[str, int] = {}
    for number, member in enumerate(order):
        room = least + (number < more)
        kept = sorted(had[member], key=lambda place: (place not in claims[member].busy, place))
        targets.update(dict.fromkeys(kept[:room], member))
        free[member] = room - len(kept[:room])
    takers = (member for member in order for _ in range(free[member]))
    for place in places:
        if targets[place] is None:
            targets[place] = next(takers)
    return targets


class Assignor:
    """The driver's interface to ``deal``, one for each consumer: it asks ``claim`` what to say."""

    name: Final = "qkit"

    def __init__(
        self, claim: Callable[[], Claim], dealt: Callable[[frozenset[Place]], None]
    ) -> None:
        self._claim = claim
        self._dealt = dealt

    def metadata(self, topics: Iterable[str]) -> Any:
        """What this member says when it joins."""
        return MemberMetadata(0, sorted(topics), self._claim().encode())

    def assign(self, cluster: Any, members: Mapping[str, Any]) -> dict[str, Any]:
        """The leader's part."""
        topics: dict[str, list[int]] = {}
        for member in members.values():
            for topic in member.subscription:
                topics.setdefault(topic, sorted(cluster.partitions_for_topic(topic) or ()))
        claims = {id: Claim.decode(member.user_data) for id, member in members.items()}
        return {
            id: MemberAssignment(0, _by_topic(share.assigned), _encode_wanted(share.wanted))
            for id, share in deal(topics, claims).items()
        }

    def on_assignment(self, assignment: Any) -> None:
        """What this member was dealt."""
        self._dealt(_places(_facts(assignment.user_data).get("wanted")))


def _by_topic(places: Iterable[Place]) -> list[tuple[str, list[int]]]:
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted(places):
        topics.setdefault(topic, []).append(partition)
    return list(topics.items())


def _encode_wanted(places: set[Place]) -> bytes:
    return json.dumps({"wanted": sorted(places)}).encode() if places else b""


def _facts(data: bytes | None) -> dict[str, object]:
    try:
        found: object = json.loads(data or b"{}")
    except ValueError:
        return {}
    return cast("dict[str, object]", found) if isinstance(found, dict) else {}


def _places(found: object) -> frozenset[Place]:
    if not isinstance(found, list):
        return frozenset()
    places: set[Place] = set()
    for item in cast("list[object]", found):
        match item:
            case [str(topic), int(partition)]:
                places.add(TopicPartition(topic, partition))
            case _:
                pass
    return frozenset(places)
