"""An engine that is called from other threads, each with an event loop of its own; in real time."""

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


async def elsewhere(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new loop in another thread; it is made here, in the engine's loop."""
    return await asyncio.to_thread(asyncio.run, coroutine)


def in_flight(engine: Engine, queue: str = "tasks") -> int:
    return engine.catalogue.queue(queue, "test").state.in_flight


class TestCalls:
    async def test_a_plain_thread_publishes_and_consumes(self, engine: Engine) -> None:
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
    async def test_everything_that_can_be_awaited(self, engine: Engine) -> None:
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

        await elsewhere(everything())
        assert await engine.list() == ["other_dlq", "tasks"]

    def test_no_public_coroutine_is_left_out(self) -> None:
        """Whoever adds one decides: carried, or with a reason in this list."""
        own = {
            "attach",  # part of opening
            "declare",  # called by the backend, in the loop of the engine
            "publish_many",  # the same
        }
        by_hand = {"aclose", "consume", "publish"}
        coroutines = {
            name
            for name, value in vars(Engine).items()
            if inspect.iscoroutinefunction(value) and not name.startswith("_")
        }
        decorated = {name for name in coroutines if hasattr(vars(Engine)[name], "__wrapped__")}
        assert coroutines == decorated | by_hand | own

    async def test_errors_come_across(self, engine: Engine) -> None:
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

        await elsewhere(fail())

    async def test_a_call_runs_in_the_callers_context(self, engine: Engine) -> None:
        tenant: ContextVar[str] = ContextVar("tenant", default="none")
        seen: list[str] = []

        async def note() -> None:
            seen.append(tenant.get())

        async def call() -> None:
            tenant.set("acme")
            await engine.portal.run(note)

        await elsewhere(call())
        assert seen == ["acme"]

    async def test_a_waiting_consume_is_served(self, engine: Engine) -> None:
        waiting = asyncio.create_task(elsewhere(engine.consume("tasks", 10)))
        await until(lambda: engine.catalogue.queue("tasks", "test").consumers == 1)
        await engine.publish("tasks", b"x")
        delivery = await waiting
        assert delivery is not None
        await delivery.ack()

    async def test_a_deliverys_thread_does_not_matter(self, engine: Engine) -> None:
        for n in range(4):
            await engine.publish("tasks", str(n).encode())
        here = await engine.consume("tasks")
        there = await elsewhere(engine.consume("tasks"))
        assert here is not None
        assert there is not None
        await elsewhere(here.ack())
        await there.ack()
        assert (await engine.stats("tasks")).acked_total == 2


@pytest.mark.proves("000-scenarios-7", "001-storage-1")
@pytest.mark.slow
async def test_eight_threads_lose_and_double_nothing(engine: Engine) -> None:
    """RELIABILITY in small: each thread sends five hundred and takes what it finds."""
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
        asyncio.run(work())  # what came after this one's last look

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(threads) as pool:
        await asyncio.gather(*(loop.run_in_executor(pool, run, n) for n in range(threads)))
    bodies = [body for some in taken for body in some]
    assert len(bodies) == len(set(bodies)) == threads * each
    stats = await engine.stats("tasks")
    assert (stats.depth, stats.in_flight, stats.acked_total) == (0, 0, threads * each)
    assert (stats.published_total, stats.consumers) == (threads * each, 0)


class TestCancelled:
    async def test_a_wait_that_is_given_up_ends_here_too(self, engine: Engine) -> None:
        async def give_up() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.consume("tasks", None), 0.05)

        await elsewhere(give_up())
        actor = engine.catalogue.queue("tasks", "test")
        await until(lambda: actor.consumers == 0)
        assert not actor.waiters.waiters
        await engine.publish("tasks", b"x")
        assert in_flight(engine) == 0
        delivery = await engine.consume("tasks")
        assert delivery is not None
        await delivery.ack()

    async def test_a_delivery_that_was_on_its_way_goes_back(self, engine: Engine) -> None:
        """The answer is there and the caller, busy meanwhile, is cancelled before it reads it."""
        delivered, asked = threading.Event(), threading.Event()

        async def caller() -> None:
            task = asyncio.create_task(engine.consume("tasks", None))
            await asyncio.sleep(0.01)
            asked.set()
            assert delivered.wait(60)  # blocks this loop, as a handler might
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        calling = asyncio.create_task(elsewhere(caller()))
        await asyncio.to_thread(asked.wait, 60)
        await until(lambda: engine.catalogue.queue("tasks", "test").consumers == 1)
        await engine.publish("tasks", b"x")
        await until(lambda: in_flight(engine) == 1)
        await asyncio.sleep(0.05)  # the task is done, and its answer on its way
        delivered.set()
        await calling
        delivery = await engine.consume("tasks", 10)
        assert delivery is not None
        assert (delivery.body, delivery.retry_count) == (b"x", 0)
        await delivery.ack()

    async def test_a_loop_that_is_closed_gives_back_what_it_was_given(self, engine: Engine) -> None:
        """``asyncio.run`` ends with a consume under way: it is cancelled like any task."""

        async def leave() -> None:
            waiting.append(asyncio.create_task(engine.consume("tasks", None)))
            await asyncio.sleep(0.02)

        waiting: list[asyncio.Task[Delivery | None]] = []
        for _ in range(5):
            await elsewhere(leave())
        await engine.publish("tasks", b"x")
        delivery = await engine.consume("tasks", 10)
        assert delivery is not None
        await delivery.ack()
        assert (await engine.stats("tasks")).consumers == 0

    async def test_before_it_has_begun(self, engine: Engine) -> None:
        """The engine's loop is busy: the call is given up before it gets there."""
        gone = threading.Event()

        def thread() -> None:
            async def caller() -> None:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(engine.publish("tasks", b"never"), 0.01)

            asyncio.run(caller())
            gone.set()

        calling = threading.Thread(target=thread)
        calling.start()
        assert gone.wait(60)  # in the engine's loop, which does nothing meanwhile
        calling.join()
        await asyncio.sleep(0.05)
        assert (await engine.stats("tasks")).published_total == 0

    @pytest.mark.slow
    async def test_at_any_moment(self, engine: Engine) -> None:
        """Consumes that are cancelled while their messages arrive: none is lost or counted."""
        random = Random(20)
        rounds, taken = 200, list[bytes]()

        async def victims() -> None:
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
            group.create_task(elsewhere(victims()))
            group.create_task(produce())
        await until(lambda: in_flight(engine) == 0)
        while (delivery := await engine.consume("tasks")) is not None:
            assert delivery.retry_count == 0
            taken.append(delivery.body)
            await delivery.ack()
        assert sorted(taken, key=int) == [str(n).encode() for n in range(rounds)]


class TestClosed:
    async def test_a_call_to_a_closed_engine(self, engine: Engine) -> None:
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
                await elsewhere(call)
        await elsewhere(engine.aclose())

    async def test_an_engine_that_is_not_open(self) -> None:
        for call in (Engine().publish("tasks", b"x"), Engine().list()):
            with pytest.raises(LifecycleError, match="async with"):
                await elsewhere(call)
        await elsewhere(Engine().aclose())

    async def test_who_waits_is_told(self, engine: Engine) -> None:
        await engine.create("small", max_depth=1)
        await engine.publish("small", b"x")
        consuming = asyncio.create_task(elsewhere(engine.consume("tasks", None)))
        sending = asyncio.create_task(elsewhere(engine.publish("small", b"y", wait=None)))
        await until(lambda: engine.catalogue.queue("tasks", "test").consumers == 1)
        await until(lambda: bool(engine.catalogue.queue("small", "test")._capacity_waiters.waiters))
        await engine.aclose()
        with pytest.raises(SubscriptionLost):
            await consuming
        with pytest.raises(LifecycleError):
            await sending

    async def test_closed_from_another_thread_by_two_at_once(self, engine: Engine) -> None:
        consuming = asyncio.create_task(elsewhere(engine.consume("tasks", None)))
        await until(lambda: engine.catalogue.queue("tasks", "test").consumers == 1)
        await asyncio.gather(*(elsewhere(engine.aclose()) for _ in range(4)))
        assert engine.closed
        with pytest.raises(SubscriptionLost):
            await consuming

    @pytest.mark.parametrize("kind", ["memory", "durable"])
    @pytest.mark.parametrize("tidy", [True, False], ids=["asyncio.run", "a bare loop"])
    def test_nobody_hangs_when_the_engine_goes(self, tmp_path: Path, kind: str, tidy: bool) -> None:
        """Threads that call without end while the engine is closed and its loop with it."""
        ready, engines = threading.Event(), list[Engine]()
        endings: list[str] = []

        async def own() -> None:
            engine = Engine() if kind == "memory" else await Engine.open(tmp_path / "engine")
            async with engine:
                await engine.create("tasks")
                await engine.create("quiet")
                engines.append(engine)
                ready.set()
                await asyncio.sleep(0.1)

        def owner() -> None:
            if tidy:
                asyncio.run(own())
            else:  # no task is cancelled at its end
                loop = asyncio.new_event_loop()
                loop.run_until_complete(own())
                loop.close()

        def caller(number: int) -> None:
            async def call() -> None:
                if number < 2:  # let go by the engine in its last moment
                    await engines[0].consume("quiet", None)
                while True:
                    await engines[0].publish("tasks", b"x")
                    delivery = await engines[0].consume("tasks", None if number % 2 else 0)
                    if delivery is not None and number % 3:
                        await delivery.ack()

            try:
                asyncio.run(call())
            except QueueError as error:
                endings.append(type(error).__name__)

        owning = threading.Thread(target=owner)
        owning.start()
        assert ready.wait(60)
        callers = [threading.Thread(target=caller, args=[n], daemon=True) for n in range(8)]
        for thread in callers:
            thread.start()
        owning.join(20)
        deadline = time.monotonic() + 20
        for thread in callers:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in [owning, *callers])
        assert len(endings) == 8
        assert set(endings) <= {"LifecycleError", "SubscriptionLost"}, endings

    def test_the_loop_ended_without_a_word(self) -> None:
        engine = Engine()

        async def forget() -> None:
            await engine.__aenter__()
            await engine.create("tasks")

        asyncio.run(forget())

        def thread() -> None:
            with pytest.raises(LifecycleError, match="event loop has ended"):
                asyncio.run(engine.publish("tasks", b"x"))
            asyncio.run(engine.aclose())

        other = threading.Thread(target=thread)
        other.start()
        other.join(60)
        assert engine.closed


class TestGate:
    async def test_a_task_that_is_cancelled_from_within_says_so(self) -> None:
        """As when the loop's owner cancels all tasks before it closes the loop."""
        gate = LoopPortal()
        gate.open(asyncio.get_running_loop())
        calling = asyncio.create_task(elsewhere(gate.run(lambda: asyncio.sleep(60))))
        await until(lambda: bool(gate._pending_calls))
        for task in gate._pending_calls:
            task.cancel()
        with pytest.raises(LifecycleError, match="ended"):
            await calling
        assert not gate._pending_calls

    async def test_it_waits_for_everybody_inside(self) -> None:
        gate, proceed = LoopPortal(), asyncio.Event()
        gate.open(asyncio.get_running_loop())

        async def work() -> str:
            await proceed.wait()
            return "done"

        calling = asyncio.create_task(elsewhere(gate.run(work)))
        await until(lambda: bool(gate._pending_calls))
        assert gate.close()
        assert not gate.close()
        emptied = asyncio.create_task(gate.wait_drained())
        await asyncio.sleep(0.01)
        assert not emptied.done()
        proceed.set()
        await emptied
        assert await calling == "done"

    async def test_one_that_was_let_in_and_finds_it_closed(self) -> None:
        gate = LoopPortal()
        gate.open(asyncio.get_running_loop())
        entered = threading.Event()

        def thread() -> None:
            async def call() -> None:
                task = asyncio.create_task(gate.run(lambda: asyncio.sleep(0)))
                await asyncio.sleep(0)
                entered.set()
                with pytest.raises(LifecycleError, match="closed"):
                    await task

            asyncio.run(call())

        calling = asyncio.create_task(asyncio.to_thread(thread))
        await asyncio.sleep(0)
        assert entered.wait(60)  # the call is queued; this loop has not come to it
        gate.close()
        await calling
