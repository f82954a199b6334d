"""Looks after the connection and the event loop, so that health is true while nothing is sent."""

from __future__ import annotations

import asyncio

from qkit._internal.clock import Clock
from qkit._internal.tasks import cancel_and_wait
from qkit.backend import Backend
from qkit.observability.connection_state import ConnectionTracker

__all__ = ["Monitor"]

PING_INTERVAL_SECONDS = 2.0


class Monitor:
    """Asks the broker now and then whether it is there, from ``start`` to ``stop``."""

    def __init__(self, backend: Backend, connection: ConnectionTracker, clock: Clock) -> None:
        self._backend = backend
        self._connection = connection
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._turned_at: float | None = None

    @property
    def seconds_since_last_run(self) -> float:
        """Seconds since it last had its turn; many, and the loop is blocked. For any thread."""
        turned_at = self._turned_at
        return 0.0 if turned_at is None else self._clock.monotonic() - turned_at

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._watch(PING_INTERVAL_SECONDS), name="qkit monitor")

    async def stop(self) -> None:
        """End."""
        if self._task is not None:
            await cancel_and_wait([self._task])
            self._turned_at = None

    async def _watch(self, every: float) -> None:
        while True:
            self._turned_at = self._clock.monotonic()
            await asyncio.sleep(every)
            self._turned_at = self._clock.monotonic()
            try:
                async with asyncio.timeout(every):
                    await self._backend.ping()
            except Exception as error:  # whatever it is, the watch must go on
                self._connection.record_failure(error)
            else:
                self._connection.record_success()
