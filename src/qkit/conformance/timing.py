"""Conformance scenarios for order and time: priorities, delays, TTL and order per key."""

from __future__ import annotations

import asyncio
import random

from qkit._internal.clock import Clock
from qkit._internal.ids import new_id
from qkit.backend import Backend
from qkit.conformance.harness import Harness, Serve, bodies, requires
from qkit.handlers.channel import Channel
from qkit.handlers.decorators import consume
from qkit.message import Envelope, Message, Reason

__all__ = ["Timing"]


class Timing(Harness):
    """Scenarios for the time and order of deliveries."""

    # -- priority ----------------------------------------------------------------------------

    @requires("priority")
    async def test_higher_priorities_are_delivered_first_and_equal_ones_in_order(
        self, backend: Backend, name: str
    ) -> None:
        await self.declare(backend, name, max_priority=9)
        wanted = [(1, "a"), (9, "b"), (5, "c"), (9, "d"), (0, "e"), (1, "f"), (5, "g")]
        for priority, body in wanted:
            await self.put(backend, name, body, priority=priority)
        async with self.subscribe(backend, name) as subscription:
            assert bodies(await self.take(subscription, 7)) == list("bdcgafe")

    @requires("priority")
    async def test_a_message_without_a_priority_gets_the_default_priority(
        self, serve: Serve, name: str
    ) -> None:
        got: list[str] = []

        @consume(name)
        async def handle(text: str) -> None:
            got.append(text)

        sender = await serve()
        for text, priority in (("4", 4), ("none", None), ("5", 5), ("none too", None), ("6", 6)):
            await sender.send(name, text, priority=priority)
        await serve(handle)
        await self.until(lambda: len(got) == 5)
        assert got == ["6", "none", "5", "none too", "4"]

    @requires("priority", "redelivery")
    async def test_a_retried_message_keeps_its_priority(self, backend: Backend, name: str) -> None:
        await self.declare(backend, name, max_priority=9)
        await self.put(backend, name, "high", priority=8)
        async with self.subscribe(backend, name, prefetch=1) as subscription:
            (delivery,) = await self.take(subscription)
            await self.put(backend, name, "low", "lower", priority=2)
            await subscription.release(delivery, 0.0)
            (redelivered,) = await self.take(subscription)
            assert redelivered.envelope.body == b"high"
            assert redelivered.envelope.priority == 8

    # -- delay -------------------------------------------------------------------------------

    @requires("delay")
    async def test_a_delayed_message_is_delivered_on_time(self, serve: Serve, name: str) -> None:
        called: dict[float, float] = {}
        loop = asyncio.get_running_loop()

        @consume(name)
        async def handle(delay: float) -> None:
            called[delay] = loop.time()

        service = await serve(handle)
        started_at: dict[float, float] = {}
        for delay in (1.7, 0.3, 1.0):
            started_at[delay] = loop.time()
            await service.send(name, delay, delay=delay)
        await self.until(lambda: len(called) == 3)
        for delay in started_at:
            assert self.on_time(called[delay] - started_at[delay], delay), delay

    @requires("delay")
    async def test_a_delayed_message_does_not_hold_up_later_ones(
        self, serve: Serve, name: str
    ) -> None:
        got: list[str] = []

        @consume(name)
        async def handle(text: str) -> None:
            got.append(text)

        service = await serve(handle)
        await service.send(name, "late", delay=60.0)
        await service.send(name, "soon", delay=1.0)
        await service.send(name, "now")
        await self.until(lambda: len(got) == 2, within=20.0)
        assert got == ["now", "soon"]

    @requires("delay")
    async def test_messages_with_equal_delays_keep_the_order_of_sending(
        self, serve: Serve, name: str
    ) -> None:
        got: list[int] = []

        @consume(name)
        async def handle(number: int) -> None:
            got.append(number)

        service = await serve(handle)
        await service.send_many(name, list(range(12)), delay=0.5)
        for number in (12, 13):
            await service.send(name, number, delay=0.5)
        await self.until(lambda: len(got) == 14)
        assert got == list(range(14))

    async def test_a_message_with_zero_delay_is_delivered_immediately(
        self, serve: Serve, name: str
    ) -> None:
        """Backends that do not support delays accept a delay of zero too."""
        called: list[float] = []
        loop = asyncio.get_running_loop()

        @consume(name)
        async def handle(text: str) -> None:
            called.append(loop.time())

        service = await serve(handle)
        started_at = loop.time()
        await service.send(name, "a", delay=0)
        await self.until(lambda: called)
        assert called[0] - started_at <= self.late(1.0)

    # -- TTL ---------------------------------------------------------------------------------

    @requires("ttl", "dead_letters", "depth")
    async def test_a_message_that_expires_in_the_queue_is_dead_lettered_and_not_handled(
        self, serve: Serve, name: str
    ) -> None:
        got: list[str] = []

        @consume(name)
        async def handle(text: str) -> None:
            got.append(text)

        sender = await serve()
        sent = await sender.send(name, "stale", ttl=0.5, headers={"tenant": "acme"})
        await sender.send(name, "fresh", ttl=60)
        await self.elapse(0.7)
        service = await serve(handle)
        (letter,) = await self.letters(service, name)
        assert letter.message_id == sent.message_id
        assert letter.reason == Reason.TTL_EXPIRED
        assert letter.channel == name
        assert letter.body == b'"stale"'
        assert letter.headers["tenant"] == "acme"
        await self.until(lambda: got)
        assert got == ["fresh"]

    @requires("ttl", "dead_letters")
    async def test_a_message_that_arrives_expired_is_dead_lettered_and_not_handled(
        self, serve: Serve, backend: Backend, clock: Clock, name: str
    ) -> None:
        got: list[str] = []

        @consume(name)
        async def handle(text: str) -> None:
            got.append(text)

        service = await serve(handle)
        stale = Envelope(new_id(), b'"stale"', expires_at=clock.time() - 1)
        await backend.publish(name, [stale])
        await service.send(name, "fresh")
        (letter,) = await self.letters(service, name)
        assert (letter.message_id, letter.reason) == (stale.id, Reason.TTL_EXPIRED)
        await self.until(lambda: got)
        assert got == ["fresh"]

    @requires("ttl", "dead_letters")
    async def test_a_message_that_expires_while_its_handler_is_busy_is_not_handled(
        self, serve: Serve, name: str
    ) -> None:
        """The consumer may have fetched the message before it expired."""
        got: list[str] = []
        gate = asyncio.Event()

        @consume(name)
        async def handle(text: str) -> None:
            got.append(text)
            await gate.wait()

        service = await serve(handle)
        await service.send(name, "first")
        await self.until(lambda: got)
        sent = await service.send(name, "stale", ttl=0.5)
        await self.elapse(0.7)
        gate.set()
        (letter,) = await self.letters(service, name)
        assert (letter.message_id, letter.reason) == (sent.message_id, Reason.TTL_EXPIRED)
        await service.send(name, "last")
        await self.until(lambda: len(got) == 2)
        assert got == ["first", "last"]

    @requires("ttl", "dead_letters")
    async def test_a_message_does_not_expire_once_its_handler_has_started(
        self, serve: Serve, name: str
    ) -> None:
        events: list[str] = []

        @consume(name)
        async def handle(text: str) -> None:
            events.append("started")
            await asyncio.sleep(1.0)
            events.append("finished")

        service = await serve(handle)
        await service.send(name, "a", ttl=0.5)
        await self.until(lambda: "finished" in events)
        await self.elapse(0.5)
        assert events == ["started", "finished"]
        assert await service.dead_letters(name).list() == []

    @requires("ttl", "dead_letters", "delay")
    async def test_a_retry_keeps_the_ttl(self, serve: Serve, name: str) -> None:
        attempts: list[int] = []

        @consume(name)
        async def handle(text: str, message: Message) -> None:
            attempts.append(message.attempt)
            raise RuntimeError("not yet")

        service = await serve(handle, retry={"initial_delay": 1.5, "max_attempts": 10})
        await service.send(name, "a", ttl=1.0)
        (letter,) = await self.letters(service, name)
        assert letter.reason == Reason.TTL_EXPIRED
        assert attempts == [1]

    @requires("ttl")
    async def test_the_ttl_of_a_channel_applies_to_sends_without_one(
        self, serve: Serve, clock: Clock, name: str
    ) -> None:
        expires: dict[str, float | None] = {}

        @consume(Channel(name, str, ttl=30.0))
        async def handle(text: str, message: Message) -> None:
            expires[text] = message.expires_at

        service = await serve(handle)
        started_at = clock.time()
        await service.send(name, "default")
        await service.send(name, "own", ttl=300.0)
        await self.until(lambda: len(expires) == 2)
        default, own = expires["default"], expires["own"]
        assert default is not None
        assert own is not None
        assert started_at + 29 <= default <= started_at + 35
        assert started_at + 299 <= own <= started_at + 305

    # -- order per key -----------------------------------------------------------------------

    @requires("key_order", "prefetch")
    async def test_messages_with_the_same_key_are_handled_in_order_and_never_concurrently(
        self, serve: Serve, name: str
    ) -> None:
        seed = random.randrange(2**32)
        print(f"seed {seed}")
        rng = random.Random(seed)
        got: dict[str, list[int]] = {key: [] for key in "abcd"}
        busy: list[str] = []
        overlaps: list[str] = []
        peak = 0

        @consume(name, concurrency=4, prefetch=50, ordered=True)
        async def handle(number: int, message: Message) -> None:
            nonlocal peak
            key = message.key or ""
            overlaps.extend([key] * (key in busy))
            busy.append(key)
            peak = max(peak, len(busy))
            await asyncio.sleep(rng.random() / 100)
            busy.remove(key)
            got[key].append(number)

        service = await serve(handle)
        for number in range(10):
            for key in "abcd":
                await service.send(name, number, key=key)
        await self.until(lambda: sum(map(len, got.values())) >= 40)
        assert got == {key: list(range(10)) for key in "abcd"}
        assert overlaps == []
        assert peak > 1

    @requires("key_order", "prefetch")
    async def test_a_busy_key_does_not_block_other_keys(self, serve: Serve, name: str) -> None:
        got: list[str] = []
        gate = asyncio.Event()

        @consume(name, concurrency=2, prefetch=10, ordered=True)
        async def handle(text: str) -> None:
            if text == "a1":
                await gate.wait()
            got.append(text)

        service = await serve(handle)
        for text, key in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("b2", "b")):
            await service.send(name, text, key=key)
        await self.until(lambda: len(got) == 2)
        await self.elapse(0.2)
        assert got == ["b1", "b2"]
        gate.set()
        await self.until(lambda: len(got) == 5)
        assert got[2:] == ["a1", "a2", "a3"]

    @requires("key_order", "prefetch")
    async def test_a_retry_keeps_the_order_of_its_key(self, serve: Serve, name: str) -> None:
        got: list[str] = []

        @consume(name, concurrency=2, prefetch=10, ordered=True)
        async def handle(text: str, message: Message) -> None:
            if text == "a1" and message.attempt < 3:
                raise RuntimeError("not yet")
            got.append(text)

        service = await serve(handle, retry={"initial_delay": 0.1})
        for text, key in (("a1", "a"), ("a2", "a"), ("b1", "b")):
            await service.send(name, text, key=key)
        await self.until(lambda: len(got) == 3)
        assert [text for text in got if text.startswith("a")] == ["a1", "a2"]
