"""Background monitor of the connection and the event loop, for health checks."""

from __future__ import annotations

import asyncio

from qkit._internal.clock import Clock
from qkit._internal.tasks import cancel_and_wait
from qkit.backend import Backend
from qkit.observability.connection_state import ConnectionTracker

__all__ = ["Monitor"]

PING_INTERVAL_SECONDS = 2.0


class Monitor:
    """Background task that pings the broker periodically, from ``start`` to ``stop``."""

    def __init__(self, backend: Backend, connection: ConnectionTracker, clock: Clock) -> None:
        self._backend = backend
        self._connection = connection
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._last_run_at: float | None = None

    @property
    def seconds_since_last_run(self) -> float:
        """Seconds since the monitor last ran; a large value means that the event loop is blocked.

        May be read from any thread.
        """
        last_run_at = self._last_run_at
        return 0.0 if last_run_at is None else self._clock.monotonic() - last_run_at

    def start(self) -> None:
        """Start the background task."""
        self._task = asyncio.create_task(self._run(PING_INTERVAL_SECONDS), name="qkit monitor")

    async def stop(self) -> None:
        """Stop the background task."""
        if self._task is not None:
            await cancel_and_wait([self._task])
            self._last_run_at = None

    async def _run(self, interval: float) -> None:
        while True:
            self._last_run_at = self._clock.monotonic()
            await asyncio.sleep(interval)
            self._last_run_at = self._clock.monotonic()
            try:
                async with asyncio.timeout(interval):
                    await self._backend.ping()
            except Exception as error:  # the monitor must survive any error
                self._connection.record_failure(error)
            else:
                self._connection.record_success()
