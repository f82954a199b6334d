"""Events and their listeners: order, errors, asynchronous listeners and drain."""

from __future__ import annotations

import asyncio
import logging

import pytest

from qkit.observability.events import Event, Events, Reconnected, ShutDown
from qkit.testing.clock import VirtualClock


def test_a_listener_receives_only_its_event() -> None:
    events, received = Events(), list[Event]()
    events.on("shutdown", received.append)
    events.emit(Reconnected(1.0))
    events.emit(ShutDown(2))
    assert received == [ShutDown(2)]


def test_listeners_are_called_in_the_order_of_registration() -> None:
    events, received = Events(), list[str]()
    for name in "abc":
        events.on("shutdown", lambda _, name=name: received.append(name))
    events.emit(ShutDown(0))
    assert received == ["a", "b", "c"]


def test_an_unknown_event_raises_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="unknown event 'stop': choose from state_change, reconnected"
    ):
        Events().on("stop", print)  # type: ignore[arg-type]


def test_a_failing_listener_is_logged_and_does_not_affect_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events, received = Events(), list[Event]()

    def broken(event: ShutDown) -> None:
        raise ValueError("no")

    events.on("shutdown", broken)
    events.on("shutdown", received.append)
    events.emit(ShutDown(0))
    assert received == [ShutDown(0)]
    assert caplog.records[0].getMessage() == "a listener of ShutDown failed"
    assert caplog.records[0].levelno == logging.ERROR
    assert caplog.records[0].exc_info is not None


def test_a_listener_may_register_a_listener() -> None:
    events, received = Events(), list[str]()

    def listener(_: ShutDown) -> None:
        received.append("x")
        events.on("shutdown", listener)

    events.on("shutdown", listener)
    events.emit(ShutDown(0))
    assert received == ["x"]
    events.emit(ShutDown(0))
    assert received == ["x"] * 3


async def test_an_asynchronous_listener_does_not_block_emit(
    virtual_clock: VirtualClock,
) -> None:
    events, received = Events(), list[Event]()

    async def slow(event: ShutDown) -> None:
        await asyncio.sleep(3)
        received.append(event)

    events.on("shutdown", slow)
    events.emit(ShutDown(0))
    assert received == []
    await events.drain(5)
    assert received == [ShutDown(0)]


async def test_a_failing_asynchronous_listener_is_logged(
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


async def test_drain_cancels_listeners_after_the_timeout(virtual_clock: VirtualClock) -> None:
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
    await events.drain(5)  # no listener is running
    assert virtual_clock.monotonic() - started == pytest.approx(5)
