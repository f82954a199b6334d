"""Checks that the current version takes over the state of an old one.

The old version recorded each message that it sent and each dead letter that it listed. The checks
use only the public API, so that internal changes do not affect them.
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

#: Stages of messages that must arrive; all others are handled, dead, expired or not yet due.
ARRIVING = ("waiting", "delayed", "held", "retried")
GRACE = 1.0  # seconds to wait for unexpected messages


def unique_prefix() -> str:
    """Return a new prefix for the names of one test, because tests share servers."""
    return f"upgrade-{uuid.uuid4().hex[:10]}."


class Expected:
    """Expected contents of a state, as the old version recorded them."""

    def __init__(self, name: str) -> None:
        found = json.loads((DATA / f"{name}.expected.json").read_text())
        self.messages: list[dict[str, Any]] = found["messages"]
        self.letters: list[dict[str, Any]] = found["letters"]
        self.held_attempt: int = found["held_attempt"]
        self.order: str = found["order"]

    def of(self, *stages: str, channels: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        """Return the messages in one of the stages, of all channels or only those given."""
        return [
            message
            for message in self.messages
            if message["stage"] in stages and (not channels or message["channel"] in channels)
        ]

    @property
    def options(self) -> list[str]:
        """Names of the channels that were declared with an option."""
        names = {message["channel"] for message in self.messages}
        return sorted(name for name in names if name.startswith("option-"))

    @property
    def channels(self) -> tuple[str, ...]:
        """Names of the channels that were declared without an option."""
        names = {message["channel"] for message in self.messages}
        return tuple(sorted(names - set(self.options)))

    def attempt(self, message: Mapping[str, Any]) -> int:
        """Return the attempt number of the first delivery by the current version."""
        return {"held": self.held_attempt, "retried": 2}.get(message["stage"], 1)


Place = tuple[str, str | None, str]  # channel, group, message id


def place(message: Mapping[str, Any]) -> Place:
    return message["channel"], message["group"], message["id"]


class Takeover:
    """Service of the current version that handles every message and records it."""

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
        """Return the time at which a message was first handled."""
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
        """Check that each message arrives once, unchanged, and that dead letters are replayed."""
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
            assert self.places == Counter(arriving.keys()), (
                "a message was unexpected, or arrived twice"
            )
            await self._check_letters()
            await self._replay()
            await asyncio.sleep(GRACE)
            dead = {place(message) for message in expected.of("dead", "expired")}
            assert self.places == Counter(arriving.keys() | dead)
            far = expected.of("far")
            assert await self.service.purge("orders") == len(far) == 1, (
                "the message with the long delay was lost"
            )

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
        """Check the order that the backend guarantees: by priority, by key, or as sent."""
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
        """Check that the dead letters are those that the old version listed."""
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
        """Check that replayed dead letters are handled as first attempts and removed."""
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
    """Check that a channel with old options can be used by services that do not set the options.

    A sender adds a message; then a consumer must receive it and the two old ones, each once.
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
