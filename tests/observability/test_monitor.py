"""Monitor of the connection and of the event loop."""

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


class MonitoredBackend:
    """Backend with its connection tracker and monitor."""

    def __init__(self, clock: VirtualClock) -> None:
        self.backend = FaultyBackend(clock)
        self.connection = ConnectionTracker(Events(), clock, self.backend.name)
        self.connection.transition_to(ConnectionState.CONNECTED)
        self.monitor = Monitor(self.backend, self.connection, clock)

    @property
    def state(self) -> str:
        return str(self.connection.state)


@pytest_asyncio.fixture
async def monitored(virtual_clock: VirtualClock) -> AsyncIterator[MonitoredBackend]:
    monitored = MonitoredBackend(virtual_clock)
    await monitored.backend.start()
    monitored.monitor.start()
    await asyncio.sleep(0)
    yield monitored
    await monitored.monitor.stop()
    await monitored.backend.aclose()


async def test_an_outage_and_its_end_change_the_connection_state(
    monitored: MonitoredBackend, virtual_clock: VirtualClock
) -> None:
    for fault in (BackendUnavailable("connection refused"), BLACK_HOLE, OSError("untranslated")):
        monitored.backend.always("ping", fault)
        await virtual_clock.advance(2 * PING_INTERVAL_SECONDS)
        assert monitored.state == "disconnected"
        monitored.backend.heal("ping")
        await virtual_clock.advance(2 * PING_INTERVAL_SECONDS)
        assert monitored.state == "connected"


async def test_a_stopped_monitor_does_not_ping(
    monitored: MonitoredBackend, virtual_clock: VirtualClock
) -> None:
    await virtual_clock.advance(3 * PING_INTERVAL_SECONDS)
    pings = monitored.backend.count("ping")
    assert pings >= 2
    await monitored.monitor.stop()
    await monitored.monitor.stop()
    await virtual_clock.advance(3 * PING_INTERVAL_SECONDS)
    assert monitored.backend.count("ping") == pings
    assert monitored.monitor.seconds_since_last_run == 0.0


async def test_a_blocked_event_loop_shows_in_the_seconds_since_the_last_run(
    monitored: MonitoredBackend, virtual_clock: VirtualClock
) -> None:
    await virtual_clock.advance(5 * PING_INTERVAL_SECONDS)
    assert monitored.monitor.seconds_since_last_run <= PING_INTERVAL_SECONDS
    now = virtual_clock.monotonic()
    blocked = Monitor(monitored.backend, monitored.connection, virtual_clock)
    assert blocked.seconds_since_last_run == 0.0, "expected 0 before the start"
    blocked._last_run_at = now - 7.0
    assert blocked.seconds_since_last_run == 7.0
