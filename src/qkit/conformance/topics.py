"""Conformance scenarios for topics: each group has its own copy and its own failures."""

from __future__ import annotations

import pytest

from qkit.conformance.harness import Harness, Serve, requires
from qkit.errors import Reject, Unsupported
from qkit.handlers.channel import Channel
from qkit.handlers.decorators import consume
from qkit.message import Message

__all__ = ["Topics"]

QUICK: dict[str, float] = {"max_attempts": 3, "initial_delay": 0.05, "jitter": 0.0}


class _Group:
    """Handler of one group and the messages it received."""

    def __init__(self, topic: str, group: str, *, fails: int = 0, rejects: bool = False) -> None:
        self.name = group
        self.got: list[tuple[str, int]] = []
        self.ids: list[str] = []

        @consume(topic, group=group, broadcast=True)
        async def handle(body: str, message: Message) -> None:
            self.got.append((body, message.attempt))
            self.ids.append(message.id)
            if self.rejects:
                raise Reject(group)
            if message.attempt <= fails:
                raise ValueError(group)

        self.rejects = rejects
        self.handler = handle

    @property
    def bodies(self) -> list[str]:
        return sorted(body for body, _ in self.got)


class Topics(Harness):
    """Scenarios for topics, groups, and the retries and dead letters of a group."""

    @requires("topics")
    async def test_each_group_gets_a_copy(self, serve: Serve, name: str) -> None:
        mail, audit = _Group(name, "mail"), _Group(name, "audit")
        service = await serve(mail.handler, audit.handler)
        sent = [await service.publish(name, body) for body in ("a", "b")]
        await self.until(lambda: len(mail.got) == len(audit.got) == 2)
        await self.elapse(0.2)
        ids = [item.message_id for item in sent]
        for group in (mail, audit):
            assert group.got == [("a", 1), ("b", 1)]
            assert group.ids == ids, "every copy must have the id of the message"

    @requires("topics", "redelivery")
    async def test_the_consumers_of_a_group_share_its_messages(
        self, serve: Serve, name: str
    ) -> None:
        one, two = _Group(name, "same"), _Group(name, "same")
        service = await serve(one.handler)
        await serve(two.handler)
        bodies = [f"{number:02}" for number in range(20)]
        for body in bodies:
            await service.publish(name, body)
        await self.until(lambda: len(one.got) + len(two.got) == 20)
        await self.elapse(0.3)
        assert sorted(one.bodies + two.bodies) == bodies

    @requires("topics")
    async def test_services_with_different_groups_each_receive_a_copy(
        self, serve: Serve, name: str
    ) -> None:
        one, two = _Group(name, "one"), _Group(name, "two")
        service = await serve(one.handler)
        await serve(two.handler)
        await service.publish(name, "a")
        await self.until(lambda: one.bodies == two.bodies == ["a"])

    @requires("topics")
    async def test_a_message_to_a_topic_without_groups_is_accepted(
        self, serve: Serve, name: str
    ) -> None:
        service = await serve()
        sent = await service.publish(name, "a")
        assert sent.message_id
        assert service.metrics().channels[name].messages_sent == 1

    @requires("topics", "redelivery")
    async def test_a_group_receives_messages_sent_after_its_first_declaration(
        self, serve: Serve, name: str
    ) -> None:
        old, before = _Group(name, "old"), _Group(name, "new")
        service = await serve(old.handler)
        await service.publish(name, "before")
        await self.until(lambda: old.bodies == ["before"])
        first = await serve(before.handler)
        await service.publish(name, "while present")
        await self.until(lambda: before.got)
        await first.shutdown()
        await service.publish(name, "while absent")
        after = _Group(name, "new")
        await serve(after.handler)
        await self.until(lambda: after.got)
        await self.elapse(0.3)
        assert before.bodies == ["while present"]
        assert after.bodies == ["while absent"]

    @requires("topics", "dead_letters")
    async def test_a_failure_in_one_group_does_not_affect_another(
        self, serve: Serve, name: str
    ) -> None:
        good, bad = _Group(name, "good"), _Group(name, "bad", rejects=True)
        service = await serve(good.handler, bad.handler)
        sent = await service.publish(name, "a")
        (letter,) = await self.letters(service, name)
        await self.until(lambda: good.got)
        assert (letter.message_id, letter.channel) == (sent.message_id, name)
        assert (letter.group, letter.error) == ("bad", "bad")
        await self.elapse(0.3)
        assert good.got == bad.got == [("a", 1)]

    @requires("topics")
    async def test_retries_stay_inside_the_group(self, serve: Serve, name: str) -> None:
        good, slow = _Group(name, "good"), _Group(name, "slow", fails=2)
        service = await serve(good.handler, slow.handler, retry=QUICK)
        await service.publish(name, "a")
        await self.until(lambda: len(slow.got) == 3)
        await self.elapse(0.3)
        assert slow.got == [("a", 1), ("a", 2), ("a", 3)]
        assert good.got == [("a", 1)]

    @requires("topics", "dead_letters")
    async def test_a_dead_letter_is_replayed_to_its_group_only(
        self, serve: Serve, name: str
    ) -> None:
        good, bad = _Group(name, "good"), _Group(name, "bad", rejects=True)
        service = await serve(good.handler, bad.handler)
        sent = await service.publish(name, "a")
        await self.letters(service, name)
        bad.rejects = False
        assert await service.dead_letters(name).replay() == 1
        await self.until(lambda: len(bad.got) == 2)
        await self.elapse(0.3)
        assert bad.got == [("a", 1), ("a", 1)]
        assert bad.ids == [sent.message_id] * 2
        assert good.got == [("a", 1)]
        assert await service.dead_letters(name).list() == []

    @requires("topics", "dead_letters")
    async def test_a_message_that_failed_in_two_groups_is_replayed_to_both(
        self, serve: Serve, name: str
    ) -> None:
        one = _Group(name, "one", rejects=True)
        two = _Group(name, "two", rejects=True)
        service = await serve(one.handler, two.handler)
        await service.publish(name, "a")
        letters = await self.letters(service, name, 2)
        assert {letter.group for letter in letters} == {"one", "two"}
        one.rejects = two.rejects = False
        await service.dead_letters(name).replay()
        await self.until(lambda: len(one.got) == len(two.got) == 2)
        await self.elapse(0.3)
        assert len(one.got) == len(two.got) == 2
        assert await service.dead_letters(name).list() == []

    @requires("topics", "dead_letters")
    async def test_only_the_named_dead_letters_of_a_message_are_replayed_and_purged(
        self, serve: Serve, name: str
    ) -> None:
        groups = [_Group(name, group, rejects=True) for group in ("one", "two", "three")]
        service = await serve(*(group.handler for group in groups))
        sent = await service.publish(name, "a")
        letters = service.dead_letters(name)
        youngest = (await self.letters(service, name, 3))[-1]
        for group in groups:
            group.rejects = False
        assert await letters.replay([sent.message_id], group="none") == 0
        assert await letters.replay([sent.message_id], group=youngest.group) == 1
        (replayed,) = (group for group in groups if group.name == youngest.group)
        await self.until(lambda: len(replayed.got) == 2)
        left = await letters.list()
        assert len(left) == 2
        assert {letter.group for letter in left} == {"one", "two", "three"} - {youngest.group}
        assert await letters.purge([sent.message_id], group=left[-1].group) == 1
        assert await letters.list() == left[:1]
        await self.elapse(0.3)
        assert sorted(len(group.got) for group in groups) == [1, 1, 2]

    @requires("topics", "queues")
    async def test_send_and_publish_reject_the_wrong_kind_of_channel(
        self, serve: Serve, name: str
    ) -> None:
        group, queued = _Group(name, "g"), list[str]()

        @consume(f"{name}-queue")
        async def handle(body: str) -> None:
            queued.append(body)

        service = await serve(group.handler, handle)
        with pytest.raises(Unsupported, match="publish"):
            await service.send(name, "a")
        with pytest.raises(Unsupported, match="publish"):
            await service.send_many(name, ["a"])
        with pytest.raises(Unsupported, match="send"):
            await service.publish(f"{name}-queue", "a")
        other = await serve()
        with pytest.raises(Unsupported, match="publish"):
            await other.send(Channel(name, str, broadcast=True), "a")
        await self.elapse(0.3)
        assert (group.got, queued) == ([], [])
        assert service.metrics().messages_sent == 0
