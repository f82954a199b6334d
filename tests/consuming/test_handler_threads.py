"""Threads for synchronous handlers: reuse, results, errors, context, and never in the way."""

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
    """A call that stays in its thread until told."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> int:
        self.began.set()
        self.open.wait(60)
        return threading.get_ident()


async def test_a_call_runs_in_a_daemon_thread_and_its_result_comes_back(threads):
    thread = await threads.submit(threading.current_thread)
    assert thread is not threading.main_thread()
    assert thread.daemon
    assert thread.name == f"{threads._pool._name}-1"


async def test_an_idle_thread_is_used_again_and_a_busy_one_is_not(threads):
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


async def test_what_a_call_raises_is_raised_to_whoever_awaits_it(threads):
    def fail() -> None:
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        await threads.submit(fail)


async def test_a_stop_iteration_becomes_an_error_that_a_future_can_carry(threads):
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.submit(lambda: next(iter(())))


async def test_a_call_sees_the_context_of_its_submitter_and_cannot_change_it(threads):
    colour.set("red")

    def paint() -> str:
        seen = colour.get()
        colour.set("blue")
        return seen

    assert await threads.submit(paint) == "red"
    assert colour.get() == "red"


async def test_a_result_that_nobody_waits_for_any_more_is_dropped(threads):
    gate = Gate()
    future = threads.submit(gate)
    await until(gate.began.is_set)
    future.cancel()
    gate.open.set()
    assert await threads.submit(lambda: "alive") == "alive"


async def test_closing_ends_idle_threads_now_and_busy_ones_when_they_return(threads):
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


def test_a_thread_survives_its_loop_and_ends_quietly(threads):
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


def test_a_stuck_handler_does_not_keep_the_process_alive():
    program = (
        "import asyncio, threading\n"
        "from qkit.consuming.handler_threads import HandlerThreads\n"
        "async def main():\n"
        "    HandlerThreads().submit(threading.Event().wait)\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
