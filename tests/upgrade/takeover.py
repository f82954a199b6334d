"""Let the current version take over what an old one left behind, and compare.

The expectations were written down by the old version as it sent each message and listed its dead
letters. Only the public API is used here, so that this survives any change inside.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from qkit import DeadLetter, Message, QueueService, Settings, consume
from tests.support.waiting import eventually
from tests.upgrade.raw import DATA, PREFIX

__all__ = ["Expected", "Takeover", "consume_two", "unique_prefix"]

#: Stages of messages that have to arrive; the others were handled, are dead or not yet due.
ARRIVING = ("waiting", "delayed", "held", "retried")
GRACE = 1.0  # seconds in which a message that must not come would come


def unique_prefix() -> str:
    """A prefix for the names of one test, on servers that others use as well."""
    return f"upgrade-{uuid.uuid4().hex[:10]}."


class Expected:
    """What is in a state, as the old version wrote it down."""

    def __init__(self, name: str) -> None:
        found = json.loads((DATA / f"{name}.expected.json").read_text())
        self.messages: list[dict[str, Any]] = found["messages"]
        self.letters: list[dict[str, Any]] = found["letters"]
        self.held_attempt: int = found["held_attempt"]
        self.order: str = found["order"]

    def of(self, *stages: str, channels: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        """The messages in one of these stages."""
        return [
            message
            for message in self.messages
            if message["stage"] in stages and (not channels or message["channel"] in channels)
        ]

    @property
    def options(self) -> list[str]:
        """The channels that were declared with an option."""
        names = {message["channel"] for message in self.messages}
        return sorted(name for name in names if name.startswith("option-"))

    @property
    def channels(self) -> tuple[str, ...]:
        """The others."""
        names = {message["channel"] for message in self.messages}
        return tuple(sorted(names - set(self.options)))

    def attempt(self, message: Mapping[str, Any]) -> int:
        """The attempt of the first delivery by the current version."""
        return {"held": self.held_attempt, "retried": 2}.get(message["stage"], 1)


Place = tuple[str, str | None, str]  # channel, group, message id


def place(message: Mapping[str, Any]) -> Place:
    return message["channel"], message["group"], message["id"]


class Takeover:
    """A service of the current version whose handlers accept everything, and what they got."""

    def __init__(self, settings: Settings, expected: Expected) -> None:
        self.expected = expected
        self.service = QueueService(settings)
        self.got: list[tuple[Place, Message]] = []
        self._times: dict[Place, float] = {}
        for channel in expected.channels:
            if channel == "prices":
                for group in ("mail", "sms"):
                    self.service.register(self._subscriber(group))
            elif channel == "blobs":
                self.service.register(self._blobs())
            else:
                self.service.register(self._handler(channel))

    def _note(self, key: Place, message: Message) -> None:
        self.got.append((key, message))
        self._times.setdefault(key, time.time())

    def handled_at(self, message: Mapping[str, Any]) -> float:
        """When a message was first handled."""
        return self._times[place(message)]

    def _handler(self, channel: str) -> Callable[..., Any]:
        @consume(channel)
        async def handle(body: dict[str, object] | str, message: Message) -> None:
            self._note((channel, None, message.id), message)

        return handle

    def _subscriber(self, group: str) -> Callable[..., Any]:
        @consume("prices", broadcast=True, group=group)
        async def handle(tick: dict[str, object], message: Message) -> None:
            self._note(("prices", group, message.id), message)

        return handle

    def _blobs(self) -> Callable[..., Any]:
        @consume("blobs")
        async def handle(body: bytes, message: Message) -> None:
            self._note(("blobs", None, message.id), message)

        return handle

    async def run(self) -> None:
        """Everything arrives once and as it was; dead letters are listed, replayed and handled."""
        async with self.service:
            expected = self.expected
            arriving = {
                place(message): message
                for message in expected.of(*ARRIVING, channels=expected.channels)
            }
            await eventually(lambda: arriving.keys() <= self.places.keys(), within=60)
            await eventually(self._short_lived_is_dead)
            for key, message in arriving.items():
                self._check(message, self._first(key))
            self._check_order()
            await asyncio.sleep(GRACE)
            assert self.places == Counter(arriving.keys()), "one came twice, or should not come"
            await self._check_letters()
            await self._replay()
            await asyncio.sleep(GRACE)
            dead = {place(message) for message in expected.of("dead", "expired")}
            assert self.places == Counter(arriving.keys() | dead)
            far = expected.of("far")
            assert await self.service.purge("orders") == len(far) == 1, "the far one was lost"

    @property
    def places(self) -> Counter[Place]:
        return Counter(key for key, _ in self.got)

    def _first(self, wanted: Place) -> Message:
        return next(message for key, message in self.got if key == wanted)

    def _check(self, sent: Mapping[str, Any], message: Message) -> None:
        assert message.attempt == self.expected.attempt(sent), sent
        assert message.key == sent.get("key"), sent
        if "priority" in sent:
            assert message.priority == sent["priority"], sent
        assert sent.get("headers", {}).items() <= message.headers.items(), sent
        if "base64" in sent:
            assert message.body == base64.b64decode(sent["base64"]), sent
        else:
            assert json.loads(message.body)["name"] == sent["name"], sent

    def _check_order(self) -> None:
        """First in, first out within a priority, or where the backend has none, within a key."""
        waiting = [
            message
            for message in self.expected.of("waiting", channels=("orders",))
            if message["name"].startswith("waiting-")
        ]
        assert len(waiting) == 8
        lanes: dict[object, list[str]] = {}
        for message in waiting:
            lane = message["key"] if self.expected.order == "key" else None
            lanes.setdefault(lane, []).append(message["id"])
        if self.expected.order == "priority":
            by = {message["id"]: -message.get("priority", 5) for message in waiting}
            lanes = {None: sorted(by, key=lambda id: by[id])}  # sorting is stable
        for lane in lanes.values():
            assert [key[2] for key, _ in self.got if key[2] in lane] == lane
        for group in ("mail", "sms"):
            ticks = [
                message["id"]
                for message in self.expected.of("waiting", channels=("prices",))
                if message["group"] == group and message["name"].startswith("tick-waiting-")
            ]
            assert [key[2] for key, _ in self.got if key[1] == group and key[2] in ticks] == ticks

    async def _short_lived_is_dead(self) -> bool:
        (message,) = self.expected.of("expired")
        letters = await self.service.dead_letters("orders").list(reason="TTLExpired")
        return message["id"] in {letter.message_id for letter in letters}

    async def _check_letters(self) -> None:
        """Each dead letter says what it said to the old version."""
        new = {message["id"] for message in self.expected.of("expired")}
        for queue in ("orders", "prices"):
            listed = await self.service.dead_letters(queue).list()
            facts = [_facts(letter) for letter in listed if letter.message_id not in new]
            prefix = self.service.settings.prefix
            wanted = [
                {name: value for name, value in letter.items() if name != "queue"}
                | {"channel": letter["channel"].replace(PREFIX, prefix)}
                for letter in self.expected.letters
                if letter["queue"] == queue
            ]
            assert facts == wanted
        assert {letter["reason"] for letter in self.expected.letters} == {
            *("MaxRetriesExceeded", "ExplicitNack", "TTLExpired", "Undecodable")
        }

    async def _replay(self) -> None:
        """Replayed dead letters are handled as first attempts, and gone from the list."""
        dead = {place(message): message for message in self.expected.of("dead", "expired")}
        for queue in ("orders", "prices"):
            letters = self.service.dead_letters(queue)
            count = sum(message["channel"] == queue for message in dead.values())
            assert await letters.replay() == count
            assert await letters.list() == []
        await eventually(lambda: dead.keys() <= self.places.keys())
        for key, sent in dead.items():
            message = self._first(key)
            assert (message.attempt, message.key) == (1, sent.get("key"))
            assert sent.get("headers", {}).items() <= message.headers.items()


def _facts(letter: DeadLetter) -> dict[str, Any]:
    facts = dataclasses.asdict(letter)
    return facts | {"body": letter.body.decode(), "headers": dict(letter.headers)}


async def consume_two(settings: Settings, expected: Expected, channel: str) -> None:
    """A consumer without the channel's old options gets its two messages and a new one.

    The new one is sent before it starts, by a sender that does not know the options either.
    """
    sender = QueueService(settings)
    async with sender:
        sent = await sender.send(channel, {"name": "new"})
    got: list[str] = []
    service = QueueService(settings)

    @consume(channel)
    async def handle(body: dict[str, object], message: Message) -> None:
        got.append(message.id)

    service.register(handle)
    async with service:
        await eventually(lambda: len(got) >= 3)
        await asyncio.sleep(GRACE)
    old = [message["id"] for message in expected.messages if message["channel"] == channel]
    assert len(old) == 2
    assert Counter(got) == Counter([*old, sent.message_id])
