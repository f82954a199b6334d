"""Time as an argument: the two clocks that qkit reads.

Inside a process qkit measures with the running loop's monotonic clock, the one ``asyncio.sleep``
and ``call_at`` use; on the wire and on disk it writes wall time. Tests replace both at once.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Where qkit reads the time. Waiting is asyncio's business and follows ``monotonic``."""

    def monotonic(self) -> float:
        """Seconds that never jump; equal to the running loop's ``time()``."""
        ...

    def time(self) -> float:
        """Seconds since the epoch, for whatever leaves the process."""
        ...


class SystemClock:
    """The machine's own clocks."""

    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)
