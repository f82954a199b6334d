"""Conformance scenarios for handlers: functions, methods, threads, batches and message metadata."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from qkit._internal.clock import Clock
from qkit.conformance.harness import Harness, Serve, requires
from qkit.handlers.channel import Channel
from qkit.handlers.decorators import channel, consume
from qkit.message import Message, Sent

__all__ = ["Handlers"]


class Handlers(Harness):
    """Scenarios for the kinds of handlers and how they are called."""

    # -- batches -----------------------------------------------------------------------------

    @requires("batch")
    async def test_a_full_batch_is_handled_immediately(self, serve: Serve, name: str) -> None:
        batches: list[list[int]] = []

        @consume(name, batch_size=3, batch_wait=60)
        async def handle(numbers: list[int]) -> None:
            batches.append(numbers)

        service = await serve(handle)
        await service.send_many(name, range(3), key="one")
        await self.until(lambda: batches, within=30)
        assert batches == [[0, 1, 2]]

    @requires("batch")
    async def test_a_partial_batch_is_handled_after_batch_wait(
        self, serve: Serve, name: str
    ) -> None:
        batches: list[list[int]] = []

        @consume(name, batch_size=100, batch_wait=1.0)
        async def handle(numbers: list[int]) -> None:
            batches.append(numbers)

        service = await serve(handle)
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        await service.send_many(name, range(3), key="one")
        await self.until(lambda: batches)
        assert self.on_time(loop.time() - started_at, 1.0)
        assert batches == [[0, 1, 2]]

    @requires("batch")
    async def test_a_backlog_is_handled_in_several_batches(self, serve: Serve, name: str) -> None:
        batches: list[list[int]] = []
        ids: list[str] = []

        @consume(name, batch_size=10, batch_wait=0.2)
        async def handle(numbers: list[int], messages: list[Message]) -> None:
            assert len(numbers) == len(messages)
            batches.append(numbers)
            ids.extend(message.id for message in messages)

        service = await serve(handle)
        sent = await service.send_many(name, range(25), key="one")
        await self.until(lambda: sum(map(len, batches)) >= 25)
        assert [number for batch in batches for number in batch] == list(range(25))
        assert ids == [item.message_id for item in sent]
        assert max(map(len, batches)) <= 10

    # -- kinds of handlers -------------------------------------------------------------------

    async def test_functions_methods_and_static_methods_can_be_handlers(
        self, serve: Serve, name: str
    ) -> None:
        got: list[tuple[str, int]] = []

        @channel(f"{name}.method")
        class Method:
            def __init__(self, prefix: str) -> None:
                self.prefix = prefix

            @consume
            async def handle(self, number: int) -> None:
                got.append((self.prefix, number))

        @channel(Channel(f"{name}.static", int))
        class Static:
            @staticmethod
            @consume(concurrency=2)
            async def handle(number: int) -> None:
                got.append(("static", number))

        @consume(f"{name}.function")
        async def function(number: int) -> None:
            got.append(("function", number))

        service = await serve(Method("method"), Static(), function)
        for number, kind in enumerate(("method", "static", "function")):
            await service.send(f"{name}.{kind}", number)
        await self.until(lambda: len(got) == 3)
        assert sorted(got) == [("function", 2), ("method", 0), ("static", 1)]

    async def test_a_synchronous_handler_runs_in_a_thread_and_does_not_block_the_loop(
        self, serve: Serve, name: str
    ) -> None:
        threads: list[threading.Thread] = []
        got: list[str] = []
        started, gate, finished = threading.Event(), threading.Event(), threading.Event()

        @consume(f"{name}.sync")
        def blocking(text: str) -> None:
            threads.append(threading.current_thread())
            started.set()
            gate.wait(60)
            got.append(text)
            finished.set()

        @consume(f"{name}.async")
        async def handle(text: str) -> None:
            got.append(text)

        service = await serve(blocking, handle)
        await service.send(f"{name}.sync", "blocking")
        # Wait in a thread, because the handler's thread runs in real time even on a virtual clock.
        assert await asyncio.to_thread(started.wait, 15)
        await service.send(f"{name}.async", "free")
        await self.until(lambda: got)
        gate.set()
        assert await asyncio.to_thread(finished.wait, 15)
        assert got == ["free", "blocking"]
        assert threads[0] is not threading.main_thread()

    async def test_a_message_sent_by_a_synchronous_handler_is_delivered(
        self, serve: Serve, name: str
    ) -> None:
        got: list[int] = []
        sent: list[Sent] = []

        @consume(f"{name}.orders")
        def place(number: int) -> None:
            sent.append(service.sync.send(f"{name}.invoices", number))
            sent.extend(service.sync.send_many(f"{name}.invoices", [number + 1, number + 2]))

        @consume(f"{name}.invoices")
        async def bill(number: int) -> None:
            got.append(number)

        service = await serve(place, bill)
        await service.send(f"{name}.orders", 1)
        await self.until_threads(lambda: len(got) >= 3 and len(sent) >= 3)
        assert sorted(got) == [1, 2, 3]
        assert len({item.message_id for item in sent}) == 3

    async def test_a_send_by_a_synchronous_handler_is_confirmed_when_it_returns(
        self, serve: Serve, name: str
    ) -> None:
        sent_counts: list[int] = []

        @consume(name)
        def place(number: int) -> None:
            service.sync.send(f"{name}.invoices", number)
            sent_counts.append(service.metrics().messages_sent)

        service = await serve(place)
        await service.send(name, 1)
        await self.until_threads(lambda: sent_counts)
        assert sent_counts == [2]

    async def test_an_asynchronous_send_in_a_synchronous_handler_fails_the_attempt(
        self, serve: Serve, name: str
    ) -> None:
        attempts: list[int] = []

        @consume(name)
        def place(number: int) -> None:
            attempts.append(number)
            _ = service.send(f"{name}.invoices", number)

        service = await serve(place, retry={"max_attempts": 2, "initial_delay": 0.05})
        await service.send(name, 1)
        (letter,) = await self.letters(service, name)
        assert letter.error_type == "LifecycleError"
        assert "service.sync.send(" in (letter.error or "")
        assert letter.attempts == 2
        assert attempts == [1, 1]
        assert service.metrics().messages_sent == 1

    async def test_a_handler_receives_the_metadata_of_its_message(
        self, serve: Serve, clock: Clock, name: str
    ) -> None:
        seen: list[Message] = []

        @consume(name)
        async def handle(body: dict[str, int], message: Message) -> None:
            seen.append(message)

        service = await serve(handle, retry={"max_attempts": 4})
        priority = 7 if self.column.priority else None
        ttl = 60.0 if self.column.ttl else None
        sent_at, clock_time = time.time(), clock.time()
        sent = await service.send(
            name, {"id": 1}, headers={"tenant": "acme"}, key="k-1", priority=priority, ttl=ttl
        )
        await self.until(lambda: seen)
        (message,) = seen
        assert message.id == sent.message_id
        assert message.channel == name
        assert message.body == b'{"id":1}'
        assert message.headers["tenant"] == "acme"
        assert message.key == "k-1"
        assert message.priority == priority
        assert (message.attempt, message.retry_count, message.max_attempts) == (1, 0, 4)
        assert message.sent_at == pytest.approx(sent_at, abs=5)
        if ttl is not None:
            assert message.expires_at == pytest.approx(clock_time + ttl, abs=5)
