"""The monitor: what it asks of the broker, and what it tells of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio

from qkit.errors import BackendUnavailable
from qkit.observability.connection_state import ConnectionState, ConnectionTracker
from qkit.observability.events import Events
from qkit.observability.monitor import PING_INTERVAL_SECONDS, Monitor
from qkit.testing.clock import VirtualClock
from tests.support.faulty import BLACK_HOLE, FaultyBackend


class Watched:
    """A connection that a monitor looks after."""

    def __init__(self, clock: VirtualClock) -> None:
        self.backend = FaultyBackend(clock)
        self.connection = ConnectionTracker(Events(), clock, self.backend.name)
        self.connection.transition_to(ConnectionState.CONNECTED)
        self.monitor = Monitor(self.backend, self.connection, clock)

    @property
    def state(self) -> str:
        return str(self.connection.state)


@pytest_asyncio.fixture
async def watched(virtual_clock: VirtualClock) -> AsyncIterator[Watched]:
    watched = Watched(virtual_clock)
    await watched.backend.start()
    watched.monitor.start()
    await asyncio.sleep(0)
    yield watched
    await watched.monitor.stop()
    await watched.backend.aclose()


async def test_it_hears_of_an_outage_and_of_its_end(
    watched: Watched, virtual_clock: VirtualClock
) -> None:
    for fault in (BackendUnavailable("gone"), BLACK_HOLE, OSError("not even ours")):
        watched.backend.always("ping", fault)
        await virtual_clock.advance(2 * PING_INTERVAL_SECONDS)
        assert watched.state == "disconnected"
        watched.backend.heal("ping")
        await virtual_clock.advance(2 * PING_INTERVAL_SECONDS)
        assert watched.state == "connected"


async def test_it_asks_no_more_once_it_was_stopped(
    watched: Watched, virtual_clock: VirtualClock
) -> None:
    await virtual_clock.advance(3 * PING_INTERVAL_SECONDS)
    asked = watched.backend.count("ping")
    assert asked >= 2
    await watched.monitor.stop()
    await watched.monitor.stop()
    await virtual_clock.advance(3 * PING_INTERVAL_SECONDS)
    assert watched.backend.count("ping") == asked
    assert watched.monitor.seconds_since_last_run == 0.0


async def test_a_loop_that_does_not_turn_is_seen(
    watched: Watched, virtual_clock: VirtualClock
) -> None:
    await virtual_clock.advance(5 * PING_INTERVAL_SECONDS)
    assert watched.monitor.seconds_since_last_run <= PING_INTERVAL_SECONDS
    now = virtual_clock.monotonic()
    blocked = Monitor(watched.backend, watched.connection, virtual_clock)
    assert blocked.seconds_since_last_run == 0.0, "not begun"
    blocked._turned_at = now - 7.0
    assert blocked.seconds_since_last_run == 7.0
