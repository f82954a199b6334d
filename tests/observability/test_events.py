"""Events: who hears what, and that no listener can do harm."""

from __future__ import annotations

import asyncio
import logging

import pytest

from qkit.observability.events import Event, Events, Reconnected, ShutDown
from qkit.testing.clock import VirtualClock


def test_a_listener_hears_its_event_and_no_other() -> None:
    events, heard = Events(), list[Event]()
    events.on("shutdown", heard.append)
    events.emit(Reconnected(1.0))
    events.emit(ShutDown(2))
    assert heard == [ShutDown(2)]


def test_listeners_are_called_in_the_order_they_came() -> None:
    events, heard = Events(), list[str]()
    for name in "abc":
        events.on("shutdown", lambda _, name=name: heard.append(name))
    events.emit(ShutDown(0))
    assert heard == ["a", "b", "c"]


def test_an_unknown_event_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no event 'stop': choose from state_change, reconnected"):
        Events().on("stop", print)  # type: ignore[arg-type]


def test_a_listener_that_fails_is_logged_and_stops_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events, heard = Events(), list[Event]()

    def broken(event: ShutDown) -> None:
        raise ValueError("no")

    events.on("shutdown", broken)
    events.on("shutdown", heard.append)
    events.emit(ShutDown(0))
    assert heard == [ShutDown(0)]
    assert caplog.records[0].getMessage() == "a listener of ShutDown failed"
    assert caplog.records[0].levelno == logging.ERROR
    assert caplog.records[0].exc_info is not None


def test_a_listener_may_add_listeners() -> None:
    events, heard = Events(), list[str]()

    def again(_: ShutDown) -> None:
        heard.append("x")
        events.on("shutdown", again)

    events.on("shutdown", again)
    events.emit(ShutDown(0))
    assert heard == ["x"]
    events.emit(ShutDown(0))
    assert heard == ["x"] * 3


async def test_coroutine_listeners_run_without_holding_anybody_up(
    virtual_clock: VirtualClock,
) -> None:
    events, heard = Events(), list[Event]()

    async def slow(event: ShutDown) -> None:
        await asyncio.sleep(3)
        heard.append(event)

    events.on("shutdown", slow)
    events.emit(ShutDown(0))
    assert heard == []
    await events.drain(5)
    assert heard == [ShutDown(0)]


async def test_a_coroutine_listener_that_fails_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events = Events()

    async def broken(event: ShutDown) -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    events.on("shutdown", broken)
    events.emit(ShutDown(0))
    await events.drain(1)
    assert [record.getMessage() for record in caplog.records] == ["a listener of ShutDown failed"]


async def test_draining_waits_only_so_long_for_listeners(virtual_clock: VirtualClock) -> None:
    events, ended = Events(), list[str]()

    async def stuck(event: ShutDown) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    events.on("shutdown", stuck)
    events.emit(ShutDown(0))
    started = virtual_clock.monotonic()
    await events.drain(5)
    assert ended == ["cancelled"]
    assert virtual_clock.monotonic() - started == pytest.approx(5)
    await events.drain(5)  # nothing is left to wait for
    assert virtual_clock.monotonic() - started == pytest.approx(5)
