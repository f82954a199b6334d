"""Declarations: services that say different things of one channel, as senders and as workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from qkit.backend import Backend, QueueSpec
from qkit.conformance.harness import Harness, Serve, requires
from qkit.conformance.sending import collecting
from qkit.errors import InvalidPriority
from qkit.handlers.channel import Channel, ChannelOptions
from qkit.handlers.decorators import consume
from qkit.message import DeadLetter, Message, Reason
from qkit.settings.model import RetrySettings

__all__ = ["Declarations"]

QUICK = RetrySettings(initial_delay=0.01, jitter=0)
LEASE = 0.5

# Options that describe how a channel is consumed, or that a sender may leave out.
OPTIONS: list[tuple[str, ChannelOptions]] = [
    ("", {"retry": QUICK.model_copy(update={"max_attempts": 5})}),
    ("lease", {"ack_deadline": 7.0}),
    ("dead_letters", {"dead_letter": False}),
    ("priority", {"max_priority": 3}),
    ("priority", {"max_priority": 9}),
    ("depth", {"max_depth": 50}),
    ("", {"balance": "round_robin"}),
]
each_option = pytest.mark.parametrize(
    ("capability", "options"), OPTIONS, ids=["-".join(options) for _, options in OPTIONS]
)


def failing(channel: Channel[str]) -> tuple[Callable[..., object], list[int]]:
    """A handler that always fails, and its attempts."""
    attempts: list[int] = []

    @consume(channel)
    async def fail(body: str, message: Message) -> None:
        attempts.append(message.attempt)
        raise RuntimeError("planted")

    return fail, attempts


class Declarations(Harness):
    """A sender declares that a channel exists, a consumer how it is consumed."""

    def _need(self, capability: str) -> None:
        if capability and not self.column.supports(capability):
            pytest.skip(f"the backend declares {capability} as unsupported")

    @requires("queues")
    @each_option
    async def test_a_worker_starts_on_what_a_plain_sender_declared(
        self, serve: Serve, name: str, capability: str, options: ChannelOptions
    ) -> None:
        self._need(capability)
        sender = await serve()
        await sender.send(name, "before")
        handler, got = collecting(Channel(name, str, **options), str)
        await serve(handler)
        await sender.send(name, "after")
        await self.until(lambda: len(got) == 2)
        assert sorted(map(str, got)) == ["after", "before"]

    @requires("queues")
    @each_option
    async def test_a_plain_sender_sends_to_what_a_worker_declared(
        self, serve: Serve, name: str, capability: str, options: ChannelOptions
    ) -> None:
        self._need(capability)
        handler, got = collecting(Channel(name, str, **options), str)
        await serve(handler)
        sender = await serve()
        await sender.send(name, "first")
        late = await serve()
        await late.send(name, "second")
        await self.until(lambda: len(got) == 2)
        assert sorted(map(str, got)) == ["first", "second"]

    @requires("queues")
    @each_option
    async def test_two_versions_of_a_worker_run_side_by_side(
        self, serve: Serve, name: str, capability: str, options: ChannelOptions
    ) -> None:
        """The old version without the option, the new one with it, then the old one again."""
        self._need(capability)
        got: list[str] = []
        for declared in (Channel(name, str), Channel(name, str, **options), Channel(name, str)):

            @consume(declared)
            async def collect(body: str) -> None:
                got.append(body)

            service = await serve(collect)
            await service.send(name, "x")
        await self.until(lambda: len(got) == 3)

    @requires("queues", "dead_letters")
    async def test_the_retries_are_those_of_the_service_that_handles_the_message(
        self, serve: Serve, name: str
    ) -> None:
        sender = await serve(retry=QUICK)
        await sender.send(name, "before")
        five = QUICK.model_copy(update={"max_attempts": 5})
        handler, attempts = failing(Channel(name, str, retry=five))
        worker = await serve(handler)
        (letter,) = await self.letters(worker, name)
        assert (letter.attempts, attempts) == (5, [1, 2, 3, 4, 5])
        await sender.send(name, "after")
        letters = await self.letters(worker, name, 2)
        assert [letter.attempts for letter in letters] == [5, 5]

    @requires("queues", "dead_letters")
    async def test_a_worker_without_dead_letters_keeps_none_for_any_sender(
        self, serve: Serve, name: str
    ) -> None:
        sender = await serve()
        await sender.send(name, "before")
        once = RetrySettings(enabled=False)
        handler, attempts = failing(Channel(name, str, retry=once, dead_letter=False))
        worker = await serve(handler)
        await sender.send(name, "after")
        await self.until(lambda: worker.metrics().messages_failed == 2)
        assert attempts == [1, 1]
        assert worker.metrics().messages_dead_lettered == 0
        assert await sender.dead_letters(name).list() == []

    @requires("queues", "dead_letters", "ttl")
    async def test_what_expires_is_no_dead_letter_where_the_consumer_keeps_none(
        self, serve: Serve, name: str
    ) -> None:
        handler, got = collecting(Channel(name, str, dead_letter=False), str)
        worker = await serve(handler)
        worker.pause(name)
        await worker.send(name, "late", ttl=0.2)
        await self.elapse(0.5)
        worker.resume(name)
        await worker.send(name, "next")
        await self.until(lambda: got)
        await self.elapse(0.3)
        assert got == ["next"]
        assert await worker.dead_letters(name).list() == []

    @requires("queues", "priority")
    async def test_a_channel_limits_the_priorities_of_its_own_sends(
        self, serve: Serve, name: str
    ) -> None:
        service = await serve()
        narrow = Channel(name, str, max_priority=3)
        await service.send(narrow, "highest", priority=3)
        with pytest.raises(InvalidPriority, match="3"):
            await service.send(narrow, "too high", priority=4)

    async def _dead(self, backend: Backend, name: str) -> str:
        """The reason of a queue's dead letter."""
        async with self.subscribe(backend, f"{name}.dead") as subscription:
            (delivery,) = await self.take(subscription)
        return DeadLetter.from_envelope(delivery.envelope).reason

    # -- at the boundary ---------------------------------------------------------------------

    @requires("queues", "lease", "dead_letters")
    async def test_a_sender_does_not_change_how_often_a_message_may_crash(
        self, backend: Backend, name: str
    ) -> None:
        self.require_dead_letter_source(backend)
        await self.declare(backend, name, max_deliveries=2, consumed=True)
        await backend.declare(QueueSpec(name=name, dead_letter=f"{name}.other"))
        await self.put(backend, name, "x")
        async with self.subscribe(backend, name, ack_deadline=LEASE) as subscription:
            await self.take(subscription)
            await self.take(subscription)  # the first lease has expired
            await self.nothing(subscription, for_seconds=4 * LEASE)
        assert await self._dead(backend, name) == Reason.MAX_RETRIES_EXCEEDED

    @requires("queues", "lease")
    async def test_without_a_consumers_word_a_message_may_crash_without_end(
        self, backend: Backend, name: str
    ) -> None:
        await backend.declare(QueueSpec(name=name))
        await self.put(backend, name, "x")
        async with self.subscribe(backend, name, ack_deadline=LEASE) as subscription:
            attempts = [(await self.take(subscription))[0].envelope.attempt for _ in range(6)]
        assert attempts == [1, 2, 3, 4, 5, 6]

    @requires("queues", "lease")
    async def test_a_consumer_that_subscribes_again_leaves_newer_declarations(
        self, backend: Backend, name: str
    ) -> None:
        """An old version that reconnects after the new one started does not undo it."""
        old = await self.declare(backend, name, max_deliveries=1, consumed=True)
        await self.declare(backend, name, max_deliveries=5, consumed=True)
        await backend.declare(replace(old, again=True))
        await self.put(backend, name, "x")
        async with self.subscribe(backend, name, ack_deadline=LEASE) as subscription:
            attempts = [(await self.take(subscription))[0].envelope.attempt for _ in range(3)]
        assert attempts == [1, 2, 3]

    @requires("queues", "lease", "dead_letters")
    async def test_the_last_consumer_says_how_often_a_message_may_crash(
        self, backend: Backend, name: str
    ) -> None:
        self.require_dead_letter_source(backend)
        await self.declare(backend, name, max_deliveries=5, consumed=True)
        await self.declare(backend, name, max_deliveries=1, consumed=True)
        await self.put(backend, name, "x")
        async with self.subscribe(backend, name, ack_deadline=LEASE) as subscription:
            await self.take(subscription)
            await self.nothing(subscription, for_seconds=4 * LEASE)
        assert await self._dead(backend, name) == Reason.MAX_RETRIES_EXCEEDED
