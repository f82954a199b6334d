"""``Clock``: the source of monotonic time and wall time.

Within a process, qkit uses the event loop's monotonic clock, as ``asyncio.sleep`` and ``call_at``
do. On the wire and on disk, it writes wall time. Tests replace both clocks.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Source of monotonic time and wall time."""

    def monotonic(self) -> float:
        """Return monotonic time in seconds, equal to ``time()`` of the running event loop."""
        ...

    def time(self) -> float:
        """Return wall time in seconds since the epoch, for data that leaves the process."""
        ...


class SystemClock:
    """``Clock`` that reads the clocks of the operating system."""

    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)
