"""Calls from other threads, each with its own event loop, in real time."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from qkit.errors import (
    AckDeadlineExceeded,
    LifecycleError,
    MessageNotFound,
    QueueError,
    QueueFull,
    QueueNotFound,
    SubscriptionLost,
)
from qkit.native import Delivery, Engine
from qkit.native.cross_thread import LoopPortal
from tests.support.services import until

T = TypeVar("T")


@pytest_asyncio.fixture(params=["memory", "durable"])
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Engine]:
    engine = Engine() if request.param == "memory" else await Engine.open(tmp_path / "engine")
    async with engine:
        await engine.create("tasks")
        yield engine


async def in_another_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new loop in another thread."""
    return await asyncio.to_thread(asyncio.run, coroutine)


def in_flight(engine: Engine, queue: str = "tasks") -> int:
    return engine.catalogue.queue(queue, "test").state.in_flight


class TestCalls:
    async def test_another_thread_can_publish_and_consume(self, engine: Engine) -> None:
        def thread() -> bytes:
            asyncio.run(engine.publish("tasks", b"x", headers={"a": "b"}, message_id="mine"))
            delivery = asyncio.run(engine.consume("tasks"))
            assert delivery is not None
            assert (delivery.message_id, delivery.headers) == ("mine", {"a": "b"})
            asyncio.run(delivery.extend(60))
            asyncio.run(delivery.ack())
            return delivery.body

        assert await asyncio.to_thread(thread) == b"x"
        assert (await engine.stats("tasks")).acked_total == 1

    @pytest.mark.proves("001-storage-1")
    async def test_every_coroutine_works_from_another_thread(self, engine: Engine) -> None:
        async def everything() -> None:
            await engine.create("other", max_depth=2)
            assert await engine.list() == ["other", "tasks"]
            sent = await engine.publish("other", b"1")
            assert sent.position == 0
            assert [item.body for item in await engine.peek("other")] == [b"1"]
            assert (await engine.stats("other")).depth == 1
            assert await engine.remove("other", [sent.message_id]) == 1
            await engine.publish("other", b"2")
            assert await engine.purge("other") == 1
            await engine.register("other", "anna", 5)
            assert [item.consumer for item in await engine.consumers("other")] == ["anna"]
            await engine.publish("other", b"3", wait=None)
            delivery = await engine.consume("other", 5, consumer="anna")
            assert delivery is not None
            assert await delivery.nack() == "requeued"
            await engine.unregister("other", "anna")
            delivery = await engine.consume("other")
            assert delivery is not None
            assert await delivery.nack(requeue=False) == "dead_lettered"
            assert len(await engine.dead_letters("other")) == 1
            assert await engine.retry_dead_letters("other") == 1
            assert await engine.purge_dead_letters("other") == 0
            await engine.written()
            await engine.delete("other")

        await in_another_thread(everything())
        assert await engine.list() == ["other_dlq", "tasks"]

    def test_every_public_coroutine_is_thread_safe_or_exempt(self) -> None:
        """A new coroutine must be made thread-safe, or added to ``loop_only`` with a reason."""
        loop_only = {
            "attach",  # called while the engine is opened
            "declare",  # called by the backend, in the engine's loop
            "publish_many",  # called by the backend, in the engine's loop
        }
        checked_inside = {"aclose", "consume", "publish"}
        coroutines = {
            name
            for name, value in vars(Engine).items()
            if inspect.iscoroutinefunction(value) and not name.startswith("_")
        }
        decorated = {name for name in coroutines if hasattr(vars(Engine)[name], "__wrapped__")}
        assert coroutines == decorated | checked_inside | loop_only

    async def test_errors_are_raised_in_the_calling_thread(self, engine: Engine) -> None:
        await engine.create("small", max_depth=1)

        async def fail() -> None:
            with pytest.raises(QueueNotFound):
                await engine.publish("unknown", b"x")
            await engine.publish("small", b"x")
            with pytest.raises(QueueFull):
                await engine.publish("small", b"x")
            with pytest.raises(QueueFull):
                await engine.publish("small", b"x", wait=0.01)
            delivery = await engine.consume("small", ack_deadline=0.01)
            assert delivery is not None
            await asyncio.sleep(0.1)
            with pytest.raises(AckDeadlineExceeded):
                await delivery.ack()
            delivery = await engine.consume("small")
            assert delivery is not None
            await delivery.ack()
            with pytest.raises(MessageNotFound):
                await delivery.nack()

        await in_another_thread(fail())

    async def test_a_call_runs_in_the_context_of_its_caller(self, engine: Engine) -> None:
        tenant: ContextVar[str] = ContextVar("tenant", default="none")
        seen: list[str] = []

        async def note() -> None:
            seen.append(tenant.get())

        async def call() -> None:
            tenant.set("acme")
            await engine.portal.run(note)

        await in_another_thread(call())
        assert seen == ["acme"]

    async def test_a_waiting_consume_of_another_thread_receives_a_message(
        self, engine: Engine
    ) -> None:
        waiting = asyncio.create_task(in_another_thread(engine.consume("tasks", 10)))
        await until(lambda: engine.catalogue.queue("tasks", "test").consumers == 1)
        await engine.publish("tasks", b"x")
        delivery = await waiting
        assert delivery is not None
        await delivery.ack()

    async def test_a_delivery_can_be_settled_from_any_thread(self, engine: Engine) -> None:
        for n in range(4):
            await engine.publish("tasks", str(n).encode())
        here = await engine.consume("tasks")
        there = await in_another_thread(engine.consume("tasks"))
        assert here is not None
        assert there is not None
        await in_another_thread(here.ack())
        await there.ack()
        assert (await engine.stats("tasks")).acked_total == 2


@pytest.mark.proves("000-scenarios-7", "001-storage-1")
@pytest.mark.slow
async def test_eight_threads_neither_lose_nor_duplicate_messages(engine: Engine) -> None:
    """Each thread sends five hundred messages and consumes messages of all threads."""
    threads, each = 8, 500
    taken: list[list[bytes]] = [[] for _ in range(threads)]
    done = threading.Barrier(threads)

    def run(number: int) -> None:
        async def produce() -> None:
            for n in range(each):
                await engine.publish("tasks", f"{number}-{n}".encode())

        async def work() -> None:
            while (delivery := await engine.consume("tasks", timeout=0.5)) is not None:
                taken[number].append(delivery.body)
                await delivery.ack()

        async def main() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(produce())
                group.create_task(work())

        asyncio.run(main())
        done.wait(60)
        asyncio.run(work())  # messages that arrived after its last consume

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(threads) as pool:
        await asyncio.gather(*(loop.run_in_executor(pool, run, n) for n in range(threads)))
    bodies = [body for received in taken for body in received]
    assert len(bodies) == len(set(bodies)) == threads * each
    stats = await engine.stats("tasks")
    assert (stats.depth, stats.in_flight, stats.acked_total) == (0, 0, threads * each)
    assert (stats.published_total, stats.consumers) == (threads * each, 0)


class TestCancelled:
    async def test_cancelling_a_call_cancels_it_in_the_loop_of_the_engine(
        self, engine: Engine
    ) -> None:
        async def time_out() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.consume("tasks", None), 0.05)

        await in_another_thread(time_out())
        actor = engine.catalogue.queue("tasks", "test")
        await until(lambda: actor.consumers == 0)
        assert not actor.waiters.waiters
        await engine.publish("tasks", b"x")
        assert in_flight(engine) == 0
        delivery = await engine.consume("tasks")
        assert delivery is not None
        await delivery.ack()

    async def test_a_delivery_that_arrives_after_the_cancellation_is_released(
        self, engine: Engine
    ) -> None:
        """The caller's loop is blocked, and the call is cancelled before its result is read."""
        delivered, called = threading.Event(), threading.Event()

        async def caller() -> None:
            task = asyncio.create_task(engine.consume("tasks", None))
            await asyncio.sleep(0.01)
            called.set()
            assert delivered.wait(60)  # blocks this loop, as a handler might
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        calling = asyncio.create_task(in_another_thread(caller()))
        await asyncio.to_thread(called.wait, 60)
        await until(lambda: engine.catalogue.queue("tasks", "test").consumers == 1)
        await engine.publish("tasks", b"x")
        await until(lambda: in_flight(engine) == 1)
        await asyncio.sleep(0.05)  # the task is done, but the caller has not read its result
        delivered.set()
        await calling
        delivery = await engine.consume("tasks", 10)
        assert delivery is not None
        assert (delivery.body, delivery.retry_count) == (b"x", 0)
        await delivery.ack()

    async def test_closing_the_loop_of_the_caller_cancels_its_consume(self, engine: Engine) -> None:
        """``asyncio.run`` cancels a pending consume when it ends, like any task."""

        async def leave() -> None:
            waiting.append(asyncio.create_task(engine.consume("tasks", None)))
            await asyncio.sleep(0.02)

        waiting: list[asyncio.Task[Delivery | None]] = []
        for _ in range(5):
            await in_another_thread(leave())
        await engine.publish("tasks", b"x")
        delivery = await engine.consume("tasks", 10)
        assert delivery is not None
        await delivery.ack()
        assert (await engine.stats("tasks")).consumers == 0

    async def test_a_call_cancelled_before_it_starts_never_runs(self, engine: Engine) -> None:
        """The engine's loop is blocked until the call is cancelled."""
        cancelled = threading.Event()

        def thread() -> None:
            async def caller() -> None:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(engine.publish("tasks", b"never"), 0.01)

            asyncio.run(caller())
            cancelled.set()

        calling = threading.Thread(target=thread)
        calling.start()
        assert cancelled.wait(60)  # blocks the engine's loop
        calling.join()
        await asyncio.sleep(0.05)
        assert (await engine.stats("tasks")).published_total == 0

    @pytest.mark.slow
    async def test_a_consume_cancelled_at_any_time_loses_no_message(self, engine: Engine) -> None:
        """Cancel consumes while messages arrive; a cancelled consume counts no attempt."""
        random = Random(20)
        rounds, taken = 200, list[bytes]()

        async def consume_and_cancel() -> None:
            for _ in range(rounds):
                task = asyncio.create_task(engine.consume("tasks", None))
                await asyncio.sleep(random.random() * 0.002)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    delivery = await task
                    assert delivery is not None
                    assert delivery.retry_count == 0
                    taken.append(delivery.body)
                    await delivery.ack()

        async def produce() -> None:
            for n in range(rounds):
                await engine.publish("tasks", str(n).encode())
                await asyncio.sleep(random.random() * 0.002)

        async with asyncio.TaskGroup() as group:
            group.create_task(in_another_thread(consume_and_cancel()))
            group.create_task(produce())
        await until(lambda: in_flight(engine) == 0)
        while (delivery := await engine.consume("tasks")) is not None:
            assert delivery.retry_count == 0
            taken.append(delivery.body)
            await delivery.ack()
        assert sorted(taken, key=int) == [str(n).encode() for n in range(rounds)]


class TestClosed:
    async def test_a_call_to_a_closed_engine_raises(self, engine: Engine) -> None:
        await engine.publish("tasks", b"x")
        delivery = await engine.consume("tasks")
        assert delivery is not None
        await engine.aclose()
        for call in (
            engine.publish("tasks", b"x"),
            engine.consume("tasks", None),
            engine.stats("tasks"),
            engine.list(),
            delivery.ack(),
            delivery.nack(),
            delivery.extend(5),
        ):
            with pytest.raises(LifecycleError, match="closed"):
                await in_another_thread(call)
        await in_another_thread(engine.aclose())

    async def test_a_call_to_an_unopened_engine_raises(self) -> None:
        for call in (Engine().publish("tasks", b"x"), Engine().list()):
            with pytest.raises(LifecycleError, match="async with"):
                await in_another_thread(call)
        await in_another_thread(Engine().aclose())

    async def test_a_waiting_call_raises_when_the_engine_is_closed(self, engine: Engine) -> None:
        await engine.create("small", max_depth=1)
        await engine.publish("small", b"x")
        consuming = asyncio.create_task(in_another_thread(engine.consume("tasks", None)))
        sending = asyncio.create_task(in_another_thread(engine.publish("small", b"y", wait=None)))
        await until(lambda: engine.catalogue.queue("tasks", "test").consumers == 1)
        await until(lambda: bool(engine.catalogue.queue("small", "test")._capacity_waiters.waiters))
        await engine.aclose()
        with pytest.raises(SubscriptionLost):
            await consuming
        with pytest.raises(LifecycleError):
            await sending

    async def test_several_threads_can_close_the_engine_concurrently(self, engine: Engine) -> None:
        consuming = asyncio.create_task(in_another_thread(engine.consume("tasks", None)))
        await until(lambda: engine.catalogue.queue("tasks", "test").consumers == 1)
        await asyncio.gather(*(in_another_thread(engine.aclose()) for _ in range(4)))
        assert engine.closed
        with pytest.raises(SubscriptionLost):
            await consuming

    @pytest.mark.parametrize("kind", ["memory", "durable"])
    @pytest.mark.parametrize("use_run", [True, False], ids=["asyncio.run", "a bare loop"])
    def test_no_call_hangs_when_the_engine_is_closed(
        self, tmp_path: Path, kind: str, use_run: bool
    ) -> None:
        """Threads call the engine in a loop while it and its event loop are closed."""
        ready, engines = threading.Event(), list[Engine]()
        errors: list[str] = []

        async def run_engine() -> None:
            engine = Engine() if kind == "memory" else await Engine.open(tmp_path / "engine")
            async with engine:
                await engine.create("tasks")
                await engine.create("quiet")
                engines.append(engine)
                ready.set()
                await asyncio.sleep(0.1)

        def owner() -> None:
            if use_run:
                asyncio.run(run_engine())
            else:  # closing a bare loop does not cancel its tasks
                loop = asyncio.new_event_loop()
                loop.run_until_complete(run_engine())
                loop.close()

        def caller(number: int) -> None:
            async def call() -> None:
                if number < 2:  # waits until the engine is closed
                    await engines[0].consume("quiet", None)
                while True:
                    await engines[0].publish("tasks", b"x")
                    delivery = await engines[0].consume("tasks", None if number % 2 else 0)
                    if delivery is not None and number % 3:
                        await delivery.ack()

            try:
                asyncio.run(call())
            except QueueError as error:
                errors.append(type(error).__name__)

        owner_thread = threading.Thread(target=owner)
        owner_thread.start()
        assert ready.wait(60)
        callers = [threading.Thread(target=caller, args=[n], daemon=True) for n in range(8)]
        for thread in callers:
            thread.start()
        owner_thread.join(20)
        deadline = time.monotonic() + 20
        for thread in callers:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in [owner_thread, *callers])
        assert len(errors) == 8
        assert set(errors) <= {"LifecycleError", "SubscriptionLost"}, errors

    def test_a_call_after_the_loop_has_ended_raises(self) -> None:
        engine = Engine()

        async def open_without_close() -> None:
            await engine.__aenter__()
            await engine.create("tasks")

        asyncio.run(open_without_close())

        def thread() -> None:
            with pytest.raises(LifecycleError, match="event loop has ended"):
                asyncio.run(engine.publish("tasks", b"x"))
            asyncio.run(engine.aclose())

        other = threading.Thread(target=thread)
        other.start()
        other.join(60)
        assert engine.closed


class TestLoopPortal:
    async def test_a_call_cancelled_by_the_loop_of_the_engine_raises(self) -> None:
        """Simulate ``asyncio.run``, which cancels all tasks before it closes the loop."""
        portal = LoopPortal()
        portal.open(asyncio.get_running_loop())
        calling = asyncio.create_task(in_another_thread(portal.run(lambda: asyncio.sleep(60))))
        await until(lambda: bool(portal._pending_calls))
        for task in portal._pending_calls:
            task.cancel()
        with pytest.raises(LifecycleError, match="ended"):
            await calling
        assert not portal._pending_calls

    async def test_wait_drained_waits_for_all_accepted_calls(self) -> None:
        portal, proceed = LoopPortal(), asyncio.Event()
        portal.open(asyncio.get_running_loop())

        async def work() -> str:
            await proceed.wait()
            return "done"

        calling = asyncio.create_task(in_another_thread(portal.run(work)))
        await until(lambda: bool(portal._pending_calls))
        assert portal.close()
        assert not portal.close()
        drained = asyncio.create_task(portal.wait_drained())
        await asyncio.sleep(0.01)
        assert not drained.done()
        proceed.set()
        await drained
        assert await calling == "done"

    async def test_an_accepted_call_that_starts_after_close_raises(self) -> None:
        portal = LoopPortal()
        portal.open(asyncio.get_running_loop())
        entered = threading.Event()

        def thread() -> None:
            async def call() -> None:
                task = asyncio.create_task(portal.run(lambda: asyncio.sleep(0)))
                await asyncio.sleep(0)
                entered.set()
                with pytest.raises(LifecycleError, match="closed"):
                    await task

            asyncio.run(call())

        calling = asyncio.create_task(asyncio.to_thread(thread))
        await asyncio.sleep(0)
        assert entered.wait(60)  # the call is queued, but this loop has not started it
        portal.close()
        await calling
