"""Conformance scenarios for the lifecycle: start, pause, drain, shutdown and restart."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

from qkit._internal.clock import Clock
from qkit.conformance.harness import Harness, NewBackend, Serve, requires
from qkit.errors import LifecycleError
from qkit.handlers.decorators import consume
from qkit.message import Message
from qkit.testing.clock import VirtualClock

__all__ = ["Lifecycle"]


class Lifecycle(Harness):
    """Scenarios for a service from start to shutdown, and for the service that replaces it."""

    async def test_start_is_idempotent(self, serve: Serve, name: str) -> None:
        handled: list[str] = []

        @consume(name)
        async def handle(body: str) -> None:
            handled.append(body)

        service = await serve(handle)
        await service.start()
        assert len(service.health_check().consumers) == 1
        await service.send(name, "a")
        await self.until(lambda: handled)
        await self.elapse(0.2)
        assert handled == ["a"]

    async def test_a_call_in_the_wrong_state_raises_a_lifecycle_error(
        self, new_backend: NewBackend, clock: Clock, name: str
    ) -> None:
        @consume(name)
        async def handle(body: str) -> None: ...

        @consume(f"{name}-late")
        async def late(body: str) -> None: ...

        service = self.make_service(new_backend, clock, handle)
        with pytest.raises(LifecycleError, match="start"):
            await service.send(name, "a")
        async with service:
            with pytest.raises(LifecycleError, match="register"):
                service.register(late)
        with pytest.raises(LifecycleError, match="shut down"):
            await service.send(name, "a")
        with pytest.raises(LifecycleError, match="a new QueueService"):
            await service.start()
        await service.shutdown()  # idempotent

    async def test_shutdown_waits_for_running_handlers_and_settles_their_messages(
        self, serve: Serve, name: str
    ) -> None:
        started, finished = asyncio.Event(), list[str]()

        @consume(name)
        async def slow(body: str) -> None:
            started.set()
            await asyncio.sleep(1.0)
            finished.append(body)

        service = await serve(slow)
        await service.send(name, "a")
        await started.wait()
        await service.shutdown()
        assert finished == ["a"]
        redelivered: list[str] = []

        @consume(name)
        async def handle(body: str) -> None:
            redelivered.append(body)

        await serve(handle)
        await self.elapse(0.5)
        assert redelivered == [], "the message was acknowledged before the shutdown"

    @requires("redelivery")
    async def test_the_shutdown_deadline_cancels_handlers_without_counting_an_attempt(
        self, serve: Serve, name: str
    ) -> None:
        started, cancelled = asyncio.Event(), list[str]()
        abandoned: list[int] = []

        @consume(name)
        async def stuck(body: str) -> None:
            started.set()
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled.append(body)
                raise

        service = await serve(stuck)
        service.on("shutdown", lambda event: abandoned.append(event.abandoned))
        sent = await service.send(name, "a")
        await started.wait()
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        await service.shutdown(timeout=0.5)
        assert 0.5 - 0.002 <= loop.time() - started_at < 10
        assert (cancelled, abandoned) == (["a"], [1])
        got: list[tuple[str, int]] = []

        @consume(name)
        async def handle(body: str, message: Message) -> None:
            got.append((message.id, message.attempt))

        await serve(handle)
        await self.until(lambda: got)
        assert got == [(sent.message_id, 1)]

    @requires("redelivery", "prefetch")
    async def test_shutdown_releases_unstarted_messages_immediately(
        self, serve: Serve, name: str
    ) -> None:
        started, release = asyncio.Event(), asyncio.Event()

        @consume(name, prefetch=10)
        async def slow(body: str) -> None:
            started.set()
            await release.wait()

        service = await serve(slow)
        await service.send_many(name, ["0", "1", "2", "3", "4"])
        await started.wait()
        await self.until(lambda: service.health_check().consumers[0].in_flight == 5)
        stopping = asyncio.ensure_future(service.shutdown())
        got: list[tuple[str, int]] = []

        @consume(name, prefetch=10)
        async def handle(body: str, message: Message) -> None:
            got.append((body, message.attempt))

        await serve(handle)
        await self.until(lambda: len(got) == 4)
        assert not stopping.done(), "shutdown waits for the running handler"
        release.set()
        await stopping
        await self.elapse(0.3)
        assert sorted(got) == [("1", 1), ("2", 1), ("3", 1), ("4", 1)]

    @requires("redelivery")
    async def test_a_forced_shutdown_does_not_wait_for_handlers(
        self, serve: Serve, name: str
    ) -> None:
        started = asyncio.Event()

        @consume(name)
        async def stuck(body: str) -> None:
            started.set()
            await asyncio.sleep(3600)

        service = await serve(stuck)
        await service.send(name, "a")
        await started.wait()
        stopping = asyncio.ensure_future(service.shutdown(timeout=3600))
        await self.elapse(0.2)
        assert not stopping.done()
        service.force()
        async with asyncio.timeout(30):
            await stopping
        got: list[int] = []

        @consume(name)
        async def handle(body: str, message: Message) -> None:
            got.append(message.attempt)

        await serve(handle)
        await self.until(lambda: got)
        assert got == [1]

    async def test_the_shutdown_event_comes_last(self, serve: Serve, name: str) -> None:
        events: list[str] = []
        started = asyncio.Event()

        @consume(name)
        async def slow(body: str) -> None:
            started.set()
            await asyncio.sleep(0.5)
            events.append("handled")

        service = await serve(slow)
        service.on("state_change", lambda event: events.append(event.new))
        service.on("shutdown", lambda event: events.append(f"shutdown {event.abandoned}"))
        await service.send(name, "a")
        await started.wait()
        await service.shutdown()
        assert events == ["closing", "handled", "closed", "shutdown 0"]

    async def test_a_service_becomes_unhealthy_before_it_stops(
        self, serve: Serve, name: str
    ) -> None:
        started, finish = asyncio.Event(), asyncio.Event()

        @consume(name)
        async def slow(body: str) -> None:
            started.set()
            await finish.wait()

        service = await serve(slow)
        assert service.ready
        await service.send(name, "a")
        await started.wait()
        stopping = asyncio.ensure_future(service.shutdown())
        await self.until(lambda: not service.ready)
        assert not stopping.done()
        assert service.health_check().status == "unhealthy"
        assert service.metrics().in_flight == 1, "the handler still runs"
        finish.set()
        await stopping

    @requires("redelivery")
    async def test_a_new_service_handles_messages_left_by_the_previous_one(
        self, serve: Serve, name: str
    ) -> None:
        first = await serve()
        sent = await first.send_many(name, ["a", "b", "c"])
        await first.shutdown()
        got: list[str] = []

        @consume(name)
        async def handle(body: str, message: Message) -> None:
            got.append(message.id)

        await serve(handle)
        await self.until(lambda: len(got) == 3)
        assert sorted(got) == sorted(item.message_id for item in sent)

    async def test_a_handler_may_send_while_the_service_drains(
        self, serve: Serve, name: str
    ) -> None:
        received: list[str] = []
        started, finish = asyncio.Event(), asyncio.Event()

        @consume(f"{name}-next")
        async def follow(body: str) -> None:
            received.append(body)

        @consume(name)
        async def handle(body: str) -> None:
            started.set()
            await finish.wait()
            await service.send(f"{name}-next", body)

        await serve(follow)
        service = await serve(handle)
        await service.send(name, "a")
        await started.wait()
        stopping = asyncio.ensure_future(service.shutdown())
        await self.until(lambda: not service.ready)
        finish.set()
        await stopping
        await self.until(lambda: received == ["a"])

    @requires("redelivery")
    async def test_a_paused_channel_starts_no_handler_until_it_is_resumed(
        self, serve: Serve, name: str
    ) -> None:
        handled: list[tuple[str, int]] = []

        @consume(name)
        async def handle(body: str, message: Message) -> None:
            handled.append((body, message.attempt))

        service = await serve(handle)
        await service.send(name, "before")
        await self.until(lambda: handled)
        service.pause(name)
        await service.send_many(name, ["a", "b"])
        await self.elapse(0.5)
        assert handled == [("before", 1)]
        health = service.health_check()
        assert (health.status, health.consumers[0].state) == ("healthy", "paused")
        service.resume(name)
        await self.until(lambda: len(handled) == 3)
        assert sorted(handled[1:]) == [("a", 1), ("b", 1)], "waiting must not count as an attempt"

    async def test_shutdown_waits_for_a_synchronous_handler_and_settles_its_message(
        self, serve: Serve, name: str
    ) -> None:
        started, finish = threading.Event(), threading.Event()
        finished: list[str] = []

        @consume(name)
        def work(body: str) -> None:
            started.set()
            finish.wait(30)
            finished.append(body)

        service = await serve(work, shutdown={"timeout": 3600})
        await service.send(name, "a")
        await self.until_threads(started.is_set)
        stopping = asyncio.ensure_future(service.shutdown())
        await self.until(lambda: not service.ready)
        assert not stopping.done()
        finish.set()
        await self.until_threads(stopping.done)
        assert finished == ["a"]
        redelivered: list[str] = []

        @consume(name)
        async def handle(body: str) -> None:
            redelivered.append(body)

        await serve(handle)
        await self.elapse(0.5)
        assert redelivered == []

    async def test_a_cancelled_run_shuts_down_cleanly(
        self, new_backend: NewBackend, clock: Clock, name: str
    ) -> None:
        finished: list[str] = []
        started = asyncio.Event()

        @consume(name)
        async def slow(body: str) -> None:
            started.set()
            await asyncio.sleep(0.5)
            finished.append(body)

        service = self.make_service(new_backend, clock, slow)
        running = asyncio.ensure_future(service.run())
        await self.until(lambda: service.ready)
        await service.send(name, "a")
        await started.wait()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert running.cancelled()
        assert finished == ["a"]
        assert service.connection_state == "closed"

    async def test_a_handler_may_stop_a_running_service(
        self, new_backend: NewBackend, clock: Clock, name: str
    ) -> None:
        @consume(name)
        async def last(body: str) -> None:
            service.stop()

        service = self.make_service(new_backend, clock, last)
        async with asyncio.timeout(30):
            await service.start()
            await service.send(name, "a")
            await service.run()
        assert service.connection_state == "closed"

    @requires("lease")
    async def test_a_handler_that_runs_longer_than_ten_leases_runs_once(
        self, serve: Serve, name: str
    ) -> None:
        called: list[int] = []
        finished: list[int] = []

        @consume(name)
        async def long(body: str, message: Message) -> None:
            called.append(message.attempt)
            await asyncio.sleep(5.5)
            finished.append(message.attempt)

        service = await serve(long, ack_deadline=0.5)
        other = await serve(long, ack_deadline=0.5)  # would receive a redelivered message
        await service.send(name, "a")
        await self.until(lambda: finished)
        await self.elapse(1.0)
        assert called == finished == [1]
        assert other.metrics().messages_failed + service.metrics().messages_failed == 0

    @requires("lease")
    async def test_a_handler_that_blocks_the_loop_past_its_lease_runs_once(
        self, serve: Serve, clock: Clock, name: str
    ) -> None:
        called: list[int] = []
        finished: list[int] = []

        @consume(name)
        async def block(body: str, message: Message) -> None:
            called.append(message.attempt)
            if isinstance(clock, VirtualClock):
                clock.jump(5.0)
            else:
                time.sleep(1.2)  # noqa: ASYNC251  # the loop is blocked on purpose
            await asyncio.sleep(0.1)  # let overdue callbacks run, the lease renewal first
            finished.append(message.attempt)

        service = await serve(block, ack_deadline=0.4)
        await serve(block, ack_deadline=0.4)
        await service.send(name, "a")
        await self.until(lambda: finished)
        await self.elapse(1.0)
        assert called == finished == [1]
