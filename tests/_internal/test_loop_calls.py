"""Calls into an event loop from another thread: results, errors, interrupts and closed loops."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable, Iterator

import pytest

from qkit import LifecycleError
from qkit._internal import loop_calls as module
from qkit._internal.loop_calls import LoopCall, LoopCaller

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class LoopInAThread:
    """An event loop in a thread, which a test can stop and close."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.caller = LoopCaller(self.loop)

    def stop(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()

    def close(self) -> None:
        self.stop()
        if self.loop.is_closed():
            return
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


@pytest.fixture
def other() -> Iterator[LoopInAThread]:
    other = LoopInAThread()
    yield other
    other.close()


@pytest.fixture(autouse=True)
def _quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOP_CHECK_INTERVAL_SECONDS", 0.02)


def outcome_of(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run a function in a thread; return the thread and a list that gets its result or error."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def test_the_coroutine_is_created_and_run_in_the_loop(other: LoopInAThread) -> None:
    made: list[threading.Thread] = []

    async def answer() -> threading.Thread:
        return threading.current_thread()

    def work() -> object:
        made.append(threading.current_thread())
        return answer()

    assert other.caller.submit(work).result() is other.thread  # type: ignore[arg-type]
    assert made == [other.thread]


def test_errors_in_the_coroutine_reach_the_caller(other: LoopInAThread) -> None:
    async def fail() -> None:
        raise KeyError("body")

    def refuse() -> object:
        raise ValueError("before there is a coroutine")

    with pytest.raises(KeyError, match="body"):
        other.caller.submit(fail).result()
    with pytest.raises(ValueError, match="before there is a coroutine"):
        other.caller.submit(refuse).result()  # type: ignore[arg-type]


def test_a_timeout_error_in_the_coroutine_is_raised_unchanged(other: LoopInAThread) -> None:
    async def late() -> None:
        await asyncio.sleep(0.1)
        raise TimeoutError("the broker was slow")

    with pytest.raises(TimeoutError, match="the broker was slow"):
        other.caller.submit(late).result()


def test_the_task_runs_in_a_copy_of_the_context_of_the_caller(other: LoopInAThread) -> None:
    async def look() -> str:
        seen = variable.get()
        variable.set("changed in the loop")
        return seen

    variable.set("the caller's")
    assert other.caller.submit(look).result() == "the caller's"
    assert variable.get() == "the caller's"


def test_a_closed_loop_raises_and_creates_no_coroutine(other: LoopInAThread) -> None:
    other.close()

    def work() -> object:
        pytest.fail("the function was called")

    with pytest.raises(LifecycleError, match="stopped before this call ended"):
        other.caller.submit(work)  # type: ignore[arg-type]


def test_closing_the_loop_wakes_a_waiting_thread(other: LoopInAThread) -> None:
    begun = threading.Event()

    async def never() -> None:
        begun.set()
        await asyncio.get_running_loop().create_future()

    call = other.caller.submit(never)
    thread, outcome = outcome_of(call.result)
    assert begun.wait(60)
    other.stop()
    tasks = asyncio.all_tasks(other.loop)
    other.loop.close()
    thread.join(60)
    assert not thread.is_alive()
    assert isinstance(outcome[0], LifecycleError)
    assert "may or may not have arrived" in str(outcome[0])
    for task in tasks:  # asyncio would log the pending task
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        task.get_coro().close()


def test_a_loop_that_ends_before_the_call_starts_wakes_the_thread(
    other: LoopInAThread,
) -> None:
    other.stop()

    def work() -> object:
        pytest.fail("the function was called")

    call: LoopCall[object] = other.caller.submit(work)  # type: ignore[arg-type]
    thread, outcome = outcome_of(call.result)
    other.loop.close()
    thread.join(60)
    assert isinstance(outcome[0], LifecycleError)


def test_a_loop_that_stays_stopped_wakes_the_thread_and_never_starts_the_call(
    other: LoopInAThread,
) -> None:
    other.stop()
    begun: list[bool] = []

    async def work() -> None:
        begun.append(True)

    with pytest.raises(LifecycleError, match="stopped before this call ended"):
        other.caller.submit(work).result()
    other.loop.run_until_complete(asyncio.sleep(0.01))
    assert begun == []


def test_a_call_survives_a_short_stop_of_the_loop(
    other: LoopInAThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOPPED_LOOP_CHECKS", 1_000)
    other.stop()

    async def work() -> int:
        return 7

    call = other.caller.submit(work)
    thread, outcome = outcome_of(call.result)
    thread.join(0.1)
    assert outcome == []
    other.loop.run_until_complete(asyncio.sleep(0.01))
    thread.join(60)
    assert outcome == [7]


def test_a_cancelled_task_raises_a_lifecycle_error(other: LoopInAThread) -> None:
    async def cancelled() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    with pytest.raises(LifecycleError, match="shut down before this call ended"):
        other.caller.submit(cancelled).result()


def test_an_interrupt_cancels_the_task(
    other: LoopInAThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def never() -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def interrupted(self: object, timeout: float | None = None) -> object:
        assert begun.wait(60)
        raise KeyboardInterrupt

    call = other.caller.submit(never)
    with monkeypatch.context() as patch:
        patch.setattr("concurrent.futures.Future.result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call.result()
    assert cancelled.wait(60)


def test_an_error_after_an_interrupt_is_not_logged_by_asyncio(
    other: LoopInAThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def stubborn() -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            asyncio.get_running_loop().call_later(0.01, ended.set)
            raise ValueError("the cleanup failed")

    def interrupted(self: object, timeout: float | None = None) -> object:
        assert begun.wait(60)
        raise KeyboardInterrupt

    call = other.caller.submit(stubborn)
    with monkeypatch.context() as patch:
        patch.setattr("concurrent.futures.Future.result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call.result()
    assert ended.wait(60)
    del call
    assert caplog.records == []


def test_a_call_in_a_forked_process_raises_immediately(
    other: LoopInAThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> object:
        pytest.fail("the function was called")

    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    with pytest.raises(LifecycleError, match=f"runs in process {own}, and its event loop"):
        other.caller.submit(work)  # type: ignore[arg-type]
