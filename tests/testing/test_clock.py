"""Virtual clock: jumps, work in threads, and restoring the event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from qkit.testing.clock import EPOCH, VirtualClock


async def test_time_jumps_and_the_clocks_agree() -> None:
    loop = asyncio.get_running_loop()
    real = time.perf_counter()
    with VirtualClock() as clock:
        start = clock.monotonic()
        assert clock.time() == EPOCH
        await asyncio.sleep(30 * 24 * 3600)
        assert clock.monotonic() - start == 30 * 24 * 3600
        assert clock.monotonic() == loop.time()
        await clock.advance(0.5)
        assert clock.time() == EPOCH + 30 * 24 * 3600 + 0.5
    assert time.perf_counter() - real < 60


async def test_timers_fire_in_order_and_timeouts_work() -> None:
    order: list[float] = []

    async def wait(seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append(seconds)

    with VirtualClock():
        async with asyncio.TaskGroup() as group:
            for seconds in (3.0, 1.0, 2.0, 0.0):
                group.create_task(wait(seconds))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.Event().wait()
    assert order == [0.0, 1.0, 2.0, 3.0]


async def test_time_does_not_jump_while_a_thread_works() -> None:
    with VirtualClock() as clock:
        start = clock.monotonic()
        async with asyncio.timeout(60):  # a jump would expire it immediately
            await asyncio.to_thread(time.sleep, 0.05)
        assert clock.monotonic() == start
        await asyncio.sleep(60)
        assert clock.monotonic() == start + 60


async def test_a_timer_waits_in_real_time_while_a_thread_works() -> None:
    with VirtualClock() as clock:
        start, released = clock.monotonic(), threading.Event()
        asyncio.get_running_loop().call_later(0.05, released.set)
        assert await asyncio.to_thread(released.wait, 60)
        assert clock.monotonic() - start == pytest.approx(0.05)


async def test_a_failed_run_in_executor_does_not_stop_the_clock() -> None:
    with VirtualClock() as clock:
        with pytest.raises(AttributeError):
            asyncio.get_running_loop().run_in_executor(object(), print)  # type: ignore[arg-type]
        await clock.advance(3600)


async def test_without_timers_the_clock_waits_for_real_events() -> None:
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with ours, theirs, VirtualClock():
        ours.setblocking(False)
        threading.Timer(0.05, theirs.send, [b"x"]).start()
        assert await loop.sock_recv(ours, 1) == b"x"


async def test_the_loop_is_restored_when_the_clock_exits() -> None:
    loop = asyncio.get_running_loop()
    selector = loop._selector  # type: ignore[attr-defined]
    clock = VirtualClock()
    with clock:
        assert "time" in vars(loop)
        assert "select" in vars(selector)
        with pytest.raises(RuntimeError, match="already active"), clock:
            pass
        with pytest.raises(RuntimeError, match="one clock at a time"), VirtualClock():
            pass
        assert "time" in vars(loop)
    assert not {"time", "run_in_executor"} & vars(loop).keys()
    assert "select" not in vars(selector)
    with clock:  # the clock can be entered again
        await clock.advance(1)


async def test_an_event_loop_without_a_selector_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Foreign:
        pass

    monkeypatch.setattr(asyncio, "get_running_loop", Foreign)
    with pytest.raises(RuntimeError, match="asyncio's selector event loop, got Foreign"):
        VirtualClock().__enter__()
