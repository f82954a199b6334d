"""Who gets which partition: even shares, few moves, nothing taken from under a handler."""

from __future__ import annotations

import random

import pytest

from qkit.backends.kafka.assignor import Assignor, Claim, Share, deal
from qkit.backends.kafka.driver import MemberMetadata, TopicPartition

Shares = dict[str, Share]


def places(*partitions: int, topic: str = "t") -> frozenset[tuple[str, int]]:
    return frozenset((topic, partition) for partition in partitions)


def test_shares_are_even_and_whole() -> None:
    shares = deal({"t": range(10), "t.retry": range(13)}, {name: Claim() for name in "abc"})
    dealt = [place for share in shares.values() for place in share.assigned]
    assert len(dealt) == len(set(dealt)) == 23
    for topic, sizes in (("t", {3, 4}), ("t.retry", {4, 5})):
        counts = {sum(place[0] == topic for place in share.assigned) for share in shares.values()}
        assert counts == sizes


def test_whoever_had_a_partition_keeps_it() -> None:
    claims = {"a": Claim(3, places(0, 1, 2)), "b": Claim(3, places(3, 4, 5))}
    shares = deal({"t": range(6)}, claims)
    assert shares["a"].assigned == places(0, 1, 2)
    assert shares["b"].assigned == places(3, 4, 5)


def test_a_newcomer_gets_what_is_idle_at_once() -> None:
    claims = {"a": Claim(1, places(0, 1, 2, 3), busy=places(2, 3)), "b": Claim()}
    shares = deal({"t": range(4)}, claims)
    assert shares["a"] == Share(set(places(2, 3)), set())
    assert shares["b"] == Share(set(places(0, 1)), set())


def test_what_is_held_stays_until_it_is_settled_and_then_moves() -> None:
    topics = {"t": range(4)}
    busy = Claim(1, places(0, 1, 2, 3), busy=places(0, 1, 2, 3))
    first = deal(topics, {"a": busy, "b": Claim()})
    assert first["a"].assigned == places(0, 1, 2, 3)
    assert len(first["a"].wanted) == 2
    assert first["b"].assigned == set()
    given = first["a"].wanted
    kept = busy.owned - given
    second = deal(topics, {"a": Claim(2, kept, busy=kept), "b": Claim(2)})
    assert second["a"] == Share(set(kept), set())
    assert second["b"] == Share(set(given), set())


def test_who_is_about_to_go_keeps_only_what_it_holds() -> None:
    claims = {"a": Claim(4, places(0, 1, 2), busy=places(1), leaving=True), "b": Claim(4)}
    shares = deal({"t": range(3)}, claims)
    assert shares["a"] == Share(set(places(1)), set(places(1)))
    assert shares["b"].assigned == places(0, 2)


def test_when_all_are_about_to_go_nobody_gets_what_nobody_holds() -> None:
    shares = deal({"t": range(3)}, {"a": Claim(1, places(0, 1, 2), leaving=True)})
    assert shares == {"a": Share()}


def test_of_two_that_claim_a_partition_the_later_has_it() -> None:
    claims = {
        "ghost": Claim(1, places(0), busy=places(0)),
        "heir": Claim(7, places(0), busy=places(0)),
    }
    shares = deal({"t": [0]}, claims)
    assert shares["heir"].assigned == places(0)
    assert shares["ghost"] == Share()


def test_at_random_every_partition_has_one_owner_and_rounds_come_to_rest() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(50):
        topics = {"t": range(dice.randrange(1, 20)), "t.retry": range(13)}
        members = {f"m{number}": Claim() for number in range(dice.randrange(1, 6))}
        for generation in range(1, 12):
            shares = deal(topics, members)
            dealt = [place for share in shares.values() for place in share.assigned]
            assert len(dealt) == len(set(dealt)) == sum(map(len, topics.values()))
            if generation < 6 and dice.random() < 0.3:
                members[f"n{generation}"] = Claim()
                continue
            members = {
                member: Claim(
                    generation,
                    frozenset(share.assigned - share.wanted),
                    frozenset(
                        place for place in share.assigned - share.wanted if dice.random() < 0.5
                    ),
                )
                for member, share in shares.items()
            }
            if not any(share.wanted for share in shares.values()):
                again = deal(topics, members)
                assert {id: share.assigned for id, share in again.items()} == {
                    id: share.assigned for id, share in shares.items()
                }, "at rest nothing moves"


def test_the_group_s_protocol_carries_it() -> None:
    heard: list[frozenset[tuple[str, int]]] = []
    claim = Claim(3, places(0, 1), places(1), leaving=True)
    assert Claim.decode(claim.encode()) == claim
    assignor = Assignor(lambda: claim, heard.append)
    metadata = assignor.metadata({"t"})
    said = type(metadata).decode(metadata.encode())

    class Cluster:
        def partitions_for_topic(self, topic: str) -> set[int]:
            return {0, 1}

    newcomer = MemberMetadata(0, ["t"], Claim().encode())
    dealt = assignor.assign(Cluster(), {"a": said, "b": newcomer})
    mine = type(dealt["a"]).decode(dealt["a"].encode())
    assert set(mine.partitions()) == {TopicPartition("t", 1)}
    assignor.on_assignment(mine)
    assert heard == [places(1)]
    assignor.on_assignment(type(dealt["b"]).decode(dealt["b"].encode()))
    assert heard[1] == frozenset()


@pytest.mark.parametrize("data", [None, b"", b"{", b"[1]", b'{"owned": [[1], "x", ["t", "0"]]}'])
def test_a_member_that_says_nothing_we_understand_has_nothing(data: bytes | None) -> None:
    assert Claim.decode(data) == Claim()
