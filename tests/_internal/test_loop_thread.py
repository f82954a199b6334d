"""Event loop in its own thread: calls, closing, forks and interrupts."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator

import pytest

from qkit import LifecycleError
from qkit._internal import loop_thread as module
from qkit._internal.loop_thread import LoopThread

NAME = "qkit-test-loop"


def loop_threads() -> int:
    return sum(thread.name == NAME for thread in threading.enumerate())


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread(NAME)
    yield thread
    thread.close()
    assert loop_threads() == 0
    assert thread.loop.is_closed()


async def forever(begun: threading.Event) -> None:
    begun.set()
    await asyncio.Event().wait()


def failing_call(loop: LoopThread, begun: threading.Event) -> tuple[threading.Thread, list[object]]:
    """Start an endless call in a thread; return the thread and a list that receives the error."""
    errors: list[object] = []

    def call() -> None:
        try:
            loop.call(lambda: forever(begun))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread, errors


def test_calls_run_in_one_loop_in_a_daemon_thread(loop: LoopThread) -> None:
    async def where() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
        return asyncio.get_running_loop(), threading.current_thread()

    running, thread = loop.call(where)
    assert running is loop.loop
    assert loop.call(where) == (running, thread)
    assert (thread.name, thread.daemon) == (NAME, True)


def test_an_error_in_the_coroutine_reaches_the_caller(loop: LoopThread) -> None:
    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        loop.call(fail)


def test_close_ends_a_waiting_call(loop: LoopThread) -> None:
    begun = threading.Event()
    thread, errors = failing_call(loop, begun)
    assert begun.wait(10)
    loop.close()
    thread.join(10)
    assert isinstance(errors[0], LifecycleError)
    assert "before this call ended" in str(errors[0])


def test_close_ends_an_accepted_call_that_has_not_started(loop: LoopThread) -> None:
    gate = threading.Event()
    loop.loop.call_soon_threadsafe(gate.wait, 10)  # the loop is blocked, so no call starts
    call = loop.submit(lambda: forever(threading.Event()))
    closing = threading.Thread(target=loop.close)
    closing.start()
    gate.set()
    closing.join(10)
    with pytest.raises(LifecycleError, match="before this call ended"):
        call.result()


def test_a_call_after_close_raises_and_creates_no_coroutine(loop: LoopThread) -> None:
    loop.close()
    loop.close()

    def work() -> object:
        pytest.fail("the function was called")

    with pytest.raises(LifecycleError, match="before this call started"):
        loop.call(work)  # type: ignore[arg-type]


def test_concurrent_calls_to_close_all_return(loop: LoopThread) -> None:
    threads = [threading.Thread(target=loop.close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert loop_threads() == 0


def test_close_does_not_wait_for_a_task_that_ignores_its_cancellation(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOP_DRAIN_SECONDS", 0.01)
    begun = threading.Event()
    tasks: list[asyncio.Task[None]] = []

    async def stubborn() -> None:
        begun.set()
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    async def start() -> None:
        tasks.append(asyncio.create_task(stubborn()))

    loop.call(start)
    assert begun.wait(10)
    loop.close()
    assert loop_threads() == 0
    assert not tasks[0].done()
    tasks[0]._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio would log the pending task
    tasks.clear()
    gc.collect()


def test_asynchronous_generators_are_closed(loop: LoopThread) -> None:
    ended: list[str] = []

    async def numbers() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            ended.append(threading.current_thread().name)

    generator = numbers()

    async def first() -> int:
        return await anext(generator)

    assert loop.call(first) == 1
    loop.close()
    assert ended == [NAME]


def test_the_loop_is_closed_if_the_thread_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    made: list[asyncio.AbstractEventLoop] = []
    new_event_loop = asyncio.new_event_loop

    def recorded() -> asyncio.AbstractEventLoop:
        made.append(new_event_loop())
        return made[-1]

    monkeypatch.setattr(asyncio, "new_event_loop", recorded)
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start"):
        LoopThread(NAME)
    assert made[0].is_closed()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not available")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_in_a_forked_process_calls_raise_and_close_returns(loop: LoopThread) -> None:
    with loop._entry:  # as during a call from another thread
        child = os.fork()
        if child == 0:  # the child must not continue with pytest
            code = 3
            try:
                signal.alarm(20)  # ends the child after a deadlock
                loop.call(lambda: asyncio.sleep(0))
            except LifecycleError as error:
                loop.close()
                code = 0 if "fork" in str(error) else 4
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert loop.call(lambda: asyncio.sleep(0, "still here")) == "still here"


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_process_ends_even_if_the_loop_was_never_closed() -> None:
    done = run(
        "import asyncio\n"
        "from qkit._internal.loop_thread import LoopThread\n"
        "loop = LoopThread('loop')\n"
        "loop.submit(lambda: asyncio.sleep(3600))\n"
        "loop.call(lambda: asyncio.sleep(0))\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_cancels_the_call_and_keeps_the_loop_running() -> None:
    done = run(
        "import asyncio, os, signal\n"
        "from qkit._internal.loop_thread import LoopThread\n"
        "async def wait():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    try:\n"
        "        await asyncio.sleep(3600)\n"
        "    except asyncio.CancelledError:\n"
        "        print('cancelled', flush=True)\n"
        "        raise\n"
        "with LoopThread('loop') as loop:\n"
        "    try:\n"
        "        loop.call(wait)\n"
        "    except KeyboardInterrupt:\n"
        "        print(loop.call(lambda: asyncio.sleep(0, 'continues')))\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["cancelled", "continues"]  # printed by two threads


def test_close_can_be_called_again_after_an_interrupt() -> None:
    done = run(
        "import asyncio, os, signal, threading\n"
        "from qkit._internal.loop_thread import LoopThread\n"
        "begun = threading.Event()\n"
        "async def interrupt():\n"
        "    begun.set()\n"
        "    try:\n"
        "        await asyncio.sleep(3600)\n"
        "    except asyncio.CancelledError:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        await asyncio.sleep(0.2)\n"
        "loop = LoopThread('loop')\n"
        "loop.submit(interrupt)\n"
        "begun.wait()\n"
        "try:\n"
        "    loop.close()\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
        "loop.close()\n"
        "print(loop.loop.is_closed(), threading.active_count())\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\nTrue 1\n", "")
