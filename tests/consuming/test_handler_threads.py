"""Threads for synchronous handlers: reuse, results, errors, context and process exit."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading

import pytest

from qkit.consuming.handler_threads import HandlerThreads
from tests.support.services import until

colour: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")


@pytest.fixture
def threads(request):
    threads = HandlerThreads(request.node.name)
    yield threads
    threads.close()


def alive(threads: HandlerThreads) -> list[threading.Thread]:
    return [item for item in threading.enumerate() if item.name.startswith(threads._pool._name)]


class Gate:
    """A callable that blocks its thread until ``open`` is set."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> int:
        self.began.set()
        self.open.wait(60)
        return threading.get_ident()


async def test_a_call_runs_in_a_daemon_thread_and_returns_its_result(threads):
    thread = await threads.submit(threading.current_thread)
    assert thread is not threading.main_thread()
    assert thread.daemon
    assert thread.name == f"{threads._pool._name}-1"


async def test_an_idle_thread_is_reused(threads):
    first = await threads.submit(threading.get_ident)
    assert await threads.submit(threading.get_ident) == first
    gate = Gate()
    blocked = threads.submit(gate)
    await until(gate.began.is_set)
    assert await threads.submit(threading.get_ident) != first
    assert not blocked.done()
    gate.open.set()
    assert await blocked == first
    assert len(alive(threads)) == 2


async def test_the_error_of_a_call_is_raised_when_it_is_awaited(threads):
    def fail() -> None:
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        await threads.submit(fail)


async def test_stop_iteration_becomes_a_runtime_error(threads):
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.submit(lambda: next(iter(())))


async def test_a_call_runs_in_a_copy_of_the_context(threads):
    colour.set("red")

    def paint() -> str:
        seen = colour.get()
        colour.set("blue")
        return seen

    assert await threads.submit(paint) == "red"
    assert colour.get() == "red"


async def test_the_result_of_a_cancelled_future_is_ignored(threads):
    gate = Gate()
    future = threads.submit(gate)
    await until(gate.began.is_set)
    future.cancel()
    gate.open.set()
    assert await threads.submit(lambda: "alive") == "alive"


async def test_close_ends_idle_threads_now_and_busy_threads_after_their_call(threads):
    gate = Gate()
    busy = threads.submit(gate)
    await until(gate.began.is_set)
    idle = await threads.submit(threading.current_thread)
    assert len(alive(threads)) == 2
    threads.close()
    await until(lambda: not idle.is_alive())
    assert len(alive(threads)) == 1
    gate.open.set()
    await busy
    await until(lambda: not alive(threads))


def test_a_thread_outlives_its_loop_and_ends_without_an_error(threads):
    gate = Gate()

    async def leave_it() -> None:
        left_behind = threads.submit(gate)
        await until(gate.began.is_set)
        left_behind.cancel()

    asyncio.run(leave_it())
    (thread,) = alive(threads)
    threads.close()
    gate.open.set()
    thread.join(60)
    assert not thread.is_alive()


def test_a_handler_that_hangs_does_not_keep_the_process_alive():
    program = (
        "import asyncio, threading\n"
        "from qkit.consuming.handler_threads import HandlerThreads\n"
        "async def main():\n"
        "    HandlerThreads().submit(threading.Event().wait)\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
