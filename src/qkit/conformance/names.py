"""Conformance scenarios for names: valid ones work and do not collide, others are rejected."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence

import pytest

from qkit.backend import Backend, QueueSpec
from qkit.conformance.fault_injection import FaultInjectingBackend
from qkit.conformance.harness import Harness, NewBackend, Serve, case, requires
from qkit.conformance.sending import RecordingBackend
from qkit.errors import InvalidName, PartialSend, QueueError, QueueFull, QueueNotFound, Reject
from qkit.handlers.channel import Channel
from qkit.handlers.decorators import channel, consume
from qkit.message import Envelope, Message, Sent

__all__ = ["Names"]

# Names derived from a unique name. Only the one-character name may exist from an earlier run.
VALID: dict[str, Callable[[str], str]] = {
    "one-character": lambda name: random.choice(string.ascii_lowercase),
    "200-characters": lambda name: (name + "x" * 200)[:200],
    "dots": lambda name: f"{name}.eu.west.1",
    "dashes": lambda name: f"{name}-eu-west-1",
    "underscores": lambda name: f"{name}_eu_west_1",
    "digits": lambda name: str(int(name.encode().hex(), 16)),
    "mixed-case": lambda name: f"{name}EuWest",
    "leading-dot": lambda name: f".{name}",
    "leading-dash": lambda name: f"-{name}",
    "leading-underscore": lambda name: f"__{name}",
    "trailing-dots": lambda name: f"{name}..",
    "everything": lambda name: f"{name}.A-b_C..d--e__9",
}

INVALID = {
    "empty": "",
    "dot": ".",
    "dot-dot": "..",
    "parent": "../x",
    "absolute": "/etc/passwd",
    "slash": "a/b",
    "backslash": "a\\b",
    "space": "a b",
    "nul": "a\x00b",
    "crlf": "a\r\nb",
    "trailing-newline": "a\n",
    "colon": "a:b",
    "braces": "{a}",
    "star": "a.*",
    "hash": "a.#",
    "percent": "a%2Fb",
    "201-characters": "x" * 201,
    "300-characters": "x" * 300,
    "cyrillic-lookalike": "ord\u0435rs",
    "full-width-lookalike": "\uff4frders",
    "combining": "cafe\u0301",
    "digits-of-another-script": "\u0661\u0662",
    "zero-width": "a\u200bb",
    "surrogate": "a\ud800",
}

# Two suffixes, and whether a broker may reject the second name once the first exists: Kafka
# replaces dots with underscores in metric names, and rejects a topic whose metrics would collide.
LOOKALIKES = [
    pytest.param("Case", "case", False, id="case"),
    pytest.param(".a", "-a", False, id="dot-dash"),
    pytest.param("_a", "-a", False, id="underscore-dash"),
    pytest.param("-a", "--a", False, id="once-twice"),
    pytest.param(".a", "_a", True, id="dot-underscore"),
]


class DeclarationRecorder(RecordingBackend):
    """Backend that also records the name of every declared queue."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.declared: list[str] = []

    async def declare(self, spec: QueueSpec) -> None:
        self.declared.append(spec.name)
        await super().declare(spec)


class FullBackend(FaultInjectingBackend):
    """Backend whose queues are full after the first message of several."""

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        error = QueueFull("full (injected fault)", queue=queue)
        if len(envelopes) == 1:
            raise error
        results: list[Sent | QueueError] = [error] * len(envelopes)
        results[0] = Sent(envelopes[0].id)
        raise PartialSend.of(results, backend=self.name, queue=queue)


class Names(Harness):
    """Scenarios for the names of channels and groups."""

    @pytest.mark.parametrize("make", VALID.values(), ids=VALID.keys())
    async def test_a_valid_name_works_end_to_end(
        self, serve: Serve, name: str, make: Callable[[str], str]
    ) -> None:
        used = make(name)
        got: list[str] = []

        @consume(used)
        async def handle(text: str, message: Message) -> None:
            if text == f"{name} bad":
                raise Reject("requested")
            assert message.channel == used
            got.append(text)

        service = await serve(handle)
        await service.send(used, name)
        await self.until(lambda: name in got)
        if self.column.dead_letters:
            sent = await service.send(used, f"{name} bad")
            await self.until(lambda: service.metrics().messages_dead_lettered)
            letters = await service.dead_letters(used).list(ids=[sent.message_id])
            assert [letter.channel for letter in letters] == [used]
        if self.column.depth:
            assert (await service.stats(used)).queue == used

    @pytest.mark.parametrize(("one", "other", "may_be_rejected"), LOOKALIKES)
    async def test_names_that_look_alike_do_not_collide(
        self, serve: Serve, name: str, one: str, other: str, may_be_rejected: bool
    ) -> None:
        got: list[tuple[str, str]] = []

        @consume(name + one)
        async def first(text: str) -> None:
            got.append(("first", text))

        @consume(name + other)
        async def second(text: str) -> None:
            got.append(("second", text))

        service = await serve(first)
        try:
            other_service = await serve(second)
        except QueueError:
            assert may_be_rejected
            return
        for number in range(5):
            await service.send(name + one, f"first {number}")
            await other_service.send(name + other, f"second {number}")
        await self.until(lambda: len(got) >= 10)
        assert all(text.startswith(handler) for handler, text in got)
        assert len(got) == len(set(got)) == 10

    @requires("depth")
    async def test_a_channel_keeps_its_name_on_the_broker(
        self, serve: Serve, backend: Backend, name: str
    ) -> None:
        service = await serve()
        await service.send(name, "a")
        assert name in await service.queues()
        async with self.subscribe(backend, name) as subscription:
            (delivery,) = await self.take(subscription)
            assert delivery.envelope.body == b'"a"'
            await subscription.ack(delivery)

    async def test_services_with_different_prefixes_are_separate(
        self, serve: Serve, name: str
    ) -> None:
        got: list[tuple[str, str]] = []

        def handler(service_name: str) -> object:
            @consume(name)
            async def handle(text: str) -> None:
                got.append((service_name, text))

            return handle

        staging = await serve(handler("staging"), prefix="staging.")
        live = await serve(handler("live"), prefix="live.")
        await staging.send(name, "to staging")
        await live.send(name, "to live")
        await self.until(lambda: len(got) >= 2)
        assert sorted(got) == [("live", "to live"), ("staging", "to staging")]

    @requires("depth", "peek", "purge", "delete")
    async def test_an_error_names_the_channel_without_the_prefix(
        self, serve: Serve, new_backend: NewBackend, name: str
    ) -> None:
        service = await serve(prefix="staging.")
        await service.send(f"{name}-other", 1)
        for call in (service.stats, service.peek, service.purge, service.delete):
            with pytest.raises(QueueNotFound) as caught:
                await call(name)
            assert caught.value.queue == name
        service = await serve(backend=FullBackend(new_backend()), prefix="staging.")
        with pytest.raises(QueueFull) as full:
            await service.send(name, 1)
        assert full.value.queue == name
        with pytest.raises(PartialSend) as partial:
            await service.send_many(name, [1, 2])
        errors = [item for item in partial.value.results if isinstance(item, QueueError)]
        assert [error.queue for error in (partial.value, *errors)] == [name] * 2

    async def test_an_invalid_name_is_rejected_before_anything_is_sent(
        self, serve: Serve, new_backend: NewBackend
    ) -> None:
        recording = DeclarationRecorder(new_backend())
        service = await serve(backend=recording)
        for which, bad in INVALID.items():
            with case(which):
                for verb in (service.send, service.publish):
                    with pytest.raises(InvalidName) as caught:
                        await verb(bad, "a")
                    assert "1–200" in str(caught.value)
                    assert not {"\r", "\n", "\x00"} & set(str(caught.value))
                    assert len(str(caught.value)) < 400
                with pytest.raises(InvalidName):
                    await service.send_many(bad, ["a"])
                assert recording.published == []
                assert recording.declared == []

    def test_an_invalid_name_is_rejected_when_it_is_declared(self) -> None:
        for which, bad in INVALID.items():
            with case(which):
                with pytest.raises(InvalidName):
                    Channel(bad)
                with pytest.raises(InvalidName):
                    consume(bad)
                with pytest.raises(InvalidName):
                    channel(bad)
                with pytest.raises(InvalidName):
                    consume("fine", group=bad)

    @requires("depth", "peek", "purge", "delete", "dead_letters")
    async def test_admin_calls_reject_an_invalid_name(self, serve: Serve) -> None:
        service = await serve()
        for which, bad in INVALID.items():
            with case(which):
                for operation in (service.stats, service.peek, service.purge, service.delete):
                    with pytest.raises(InvalidName):
                        await operation(bad)
                with pytest.raises(InvalidName):
                    await service.dead_letters(bad).list()

    @requires("topics")
    @pytest.mark.parametrize("make", VALID.values(), ids=VALID.keys())
    async def test_a_valid_group_works_end_to_end(
        self, serve: Serve, name: str, make: Callable[[str], str]
    ) -> None:
        got: list[str] = []

        @consume(name, group=make(name), broadcast=True)
        async def handle(text: str) -> None:
            got.append(text)

        service = await serve(handle)
        await service.publish(name, "a")
        await self.until(lambda: got)
        assert got == ["a"]

    @requires("topics")
    async def test_groups_that_look_alike_each_get_a_copy(self, serve: Serve, name: str) -> None:
        got: list[tuple[str, str]] = []
        groups = ["team.a", "team_a", "team-a", "Team.a", "team.A"]

        def handler(group: str) -> object:
            @consume(name, group=group, broadcast=True)
            async def handle(text: str) -> None:
                got.append((group, text))

            return handle

        service = await serve(*(handler(group) for group in groups))
        await service.publish(name, "x")
        await service.publish(name, "y")
        await self.until(lambda: len(got) >= 10)
        assert sorted(got) == sorted((group, text) for group in groups for text in "xy")
