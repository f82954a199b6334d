"""Conformance scenarios for declarations of one channel with different options."""

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

# A capability that the options require ("" for none), and options that only the consumer declares.
OPTIONS: list[tuple[str, ChannelOptions]] = [
    ("", {"retry": QUICK.model_copy(update={"max_attempts": 5})}),
    ("lease", {"ack_deadline": 7.0}),
    ("dead_letters", {"dead_letter": False}),
    ("priority", {"max_priority": 3}),
    ("priority", {"max_priority": 9}),
    ("depth", {"max_depth": 50}),
    ("", {"balance": "round_robin"}),
]
each_option: pytest.MarkDecorator = pytest.mark.parametrize(
    ("capability", "options"), OPTIONS, ids=["-".join(options) for _, options in OPTIONS]
)


def failing(channel: Channel[str]) -> tuple[Callable[..., object], list[int]]:
    """Return a handler that always fails, and the list of attempt numbers it saw."""
    attempts: list[int] = []

    @consume(channel)
    async def fail(body: str, message: Message) -> None:
        attempts.append(message.attempt)
        raise RuntimeError("planted")

    return fail, attempts


class Declarations(Harness):
    """Scenarios for channels that senders and consumers declare with different options."""

    def _skip_without(self, capability: str) -> None:
        if capability and not self.column.supports(capability):
            pytest.skip(f"the backend does not support {capability}")

    @requires("queues")
    @each_option
    async def test_a_worker_starts_on_a_channel_declared_by_a_sender(
        self, serve: Serve, name: str, capability: str, options: ChannelOptions
    ) -> None:
        self._skip_without(capability)
        sender = await serve()
        await sender.send(name, "before")
        handler, got = collecting(Channel(name, str, **options), str)
        await serve(handler)
        await sender.send(name, "after")
        await self.until(lambda: len(got) == 2)
        assert sorted(map(str, got)) == ["after", "before"]

    @requires("queues")
    @each_option
    async def test_a_sender_uses_a_channel_declared_by_a_worker(
        self, serve: Serve, name: str, capability: str, options: ChannelOptions
    ) -> None:
        self._skip_without(capability)
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
        """Start versions without, with, and again without the option."""
        self._skip_without(capability)
        got: list[str] = []
        for declared in (Channel(name, str), Channel(name, str, **options), Channel(name, str)):

            @consume(declared)
            async def collect(body: str) -> None:
                got.append(body)

            service = await serve(collect)
            await service.send(name, "x")
        await self.until(lambda: len(got) == 3)

    @requires("queues", "dead_letters")
    async def test_retries_follow_the_settings_of_the_consuming_service(
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
    async def test_a_worker_with_dead_letters_disabled_stores_none_whatever_a_sender_declares(
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
    async def test_an_expired_message_is_not_dead_lettered_if_dead_letters_are_disabled(
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
    async def test_max_priority_limits_sends_to_the_channel(self, serve: Serve, name: str) -> None:
        service = await serve()
        narrow = Channel(name, str, max_priority=3)
        await service.send(narrow, "highest", priority=3)
        with pytest.raises(InvalidPriority, match="3"):
            await service.send(narrow, "too high", priority=4)

    async def _dead_letter_reason(self, backend: Backend, name: str) -> str:
        """Return the reason of the only dead letter of a queue."""
        async with self.subscribe(backend, f"{name}.dead") as subscription:
            (delivery,) = await self.take(subscription)
        return DeadLetter.from_envelope(delivery.envelope).reason

    # -- at the boundary ---------------------------------------------------------------------

    @requires("queues", "lease", "dead_letters")
    async def test_a_sender_does_not_change_max_deliveries(
        self, backend: Backend, name: str
    ) -> None:
        self.require_dead_letter_source(backend)
        await self.declare(backend, name, max_deliveries=2, consumed=True)
        await backend.declare(QueueSpec(name=name, dead_letter=f"{name}.other"))
        await self.put(backend, name, "x")
        async with self.subscribe(backend, name, ack_deadline=LEASE) as subscription:
            await self.take(subscription)
            await self.take(subscription)  # redelivered when the first lease expires
            await self.nothing(subscription, for_seconds=4 * LEASE)
        assert await self._dead_letter_reason(backend, name) == Reason.MAX_RETRIES_EXCEEDED

    @requires("queues", "lease")
    async def test_without_max_deliveries_a_message_is_redelivered_without_limit(
        self, backend: Backend, name: str
    ) -> None:
        await backend.declare(QueueSpec(name=name))
        await self.put(backend, name, "x")
        async with self.subscribe(backend, name, ack_deadline=LEASE) as subscription:
            attempts = [(await self.take(subscription))[0].envelope.attempt for _ in range(6)]
        assert attempts == [1, 2, 3, 4, 5, 6]

    @requires("queues", "lease")
    async def test_a_resubscribing_consumer_does_not_undo_newer_declarations(
        self, backend: Backend, name: str
    ) -> None:
        """An old version that reconnects after a new one has started leaves its options alone."""
        old = await self.declare(backend, name, max_deliveries=1, consumed=True)
        await self.declare(backend, name, max_deliveries=5, consumed=True)
        await backend.declare(replace(old, again=True))
        await self.put(backend, name, "x")
        async with self.subscribe(backend, name, ack_deadline=LEASE) as subscription:
            attempts = [(await self.take(subscription))[0].envelope.attempt for _ in range(3)]
        assert attempts == [1, 2, 3]

    @requires("queues", "lease", "dead_letters")
    async def test_the_last_consumer_sets_max_deliveries(self, backend: Backend, name: str) -> None:
        self.require_dead_letter_source(backend)
        await self.declare(backend, name, max_deliveries=5, consumed=True)
        await self.declare(backend, name, max_deliveries=1, consumed=True)
        await self.put(backend, name, "x")
        async with self.subscribe(backend, name, ack_deadline=LEASE) as subscription:
            await self.take(subscription)
            await self.nothing(subscription, for_seconds=4 * LEASE)
        assert await self._dead_letter_reason(backend, name) == Reason.MAX_RETRIES_EXCEEDED
