"""Thread that renews leases while the event loop is blocked.

A lease on the server expires even if a handler blocks the event loop, which normally renews it. The
thread has its own connection, because the loop's connection cannot be used from another thread.
While the loop responds, the thread renews nothing, so a lease that the consumer stops renewing
still expires.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from abc import ABC, abstractmethod
from typing import Final

from qkit._internal.logging import logger

__all__ = ["LeaseRenewal"]

# Consumers renew three times per lease, so at least two thirds of a lease remain when the loop
# blocks. The thread checks every sixth of a lease and waits up to a sixth for the loop to respond,
# which leaves a third for the renewal itself.
CHECKS_PER_LEASE: Final = 6


class LeaseRenewal(ABC):
    """Lease renewal thread of one connection.

    The thread starts with the first lease and sleeps while no lease is held. A subclass lists the
    leases and renews them. It reads dicts that the loop's thread modifies, and copies each of them
    first. Copying a dict is atomic, so no lock is needed; a lock would slow down every message.
    Renewing the lease of a delivery that has just been settled has no effect on the server.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._has_leases = threading.Event()
        self._closed = threading.Event()
        self._response = threading.Event()
        self._thread: threading.Thread | None = None

    # Implemented by subclasses; called in the thread

    @abstractmethod
    def shortest_lease(self) -> float:
        """Return the length of the shortest lease held, in seconds; infinity if none is held."""

    @abstractmethod
    def renew(self, timeout: float) -> None:
        """Renew every lease; log a failure instead of raising it, because the next check retries.

        Args:
            timeout: Seconds that the renewal may take.
        """

    @abstractmethod
    def disconnect(self) -> None:
        """Close the thread's connection."""

    # Called in the loop

    def wake(self) -> None:
        """Start or wake the thread; call this after a lease was acquired."""
        if not self._has_leases.is_set():
            self._has_leases.set()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="qkit lease renewal", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Tell the thread to end, without waiting for it."""
        self._closed.set()
        self._response.set()
        self._has_leases.set()
        if self._thread is None:
            self.disconnect()

    # Run in the thread

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._has_leases.wait()
                interval = self.shortest_lease() / CHECKS_PER_LEASE
                if interval == math.inf:
                    self._has_leases.clear()
                    if self.shortest_lease() < math.inf:  # added just before ``clear``
                        self._has_leases.set()
                elif self._loop_responds(interval):
                    self._closed.wait(interval)
                else:
                    self._renew_while_blocked()
        except RuntimeError:
            pass  # the loop is closed, so no consumer is running
        finally:
            self.disconnect()

    def _loop_responds(self, within: float) -> bool:
        self._response.clear()
        self._loop.call_soon_threadsafe(self._response.set)
        return self._closed.is_set() or self._response.wait(within)

    def _renew_while_blocked(self) -> None:
        began = time.monotonic()
        while not self._closed.is_set():
            interval = self.shortest_lease() / CHECKS_PER_LEASE
            if interval == math.inf:
                break
            self.renew(interval)
            if self._response.wait(2 * interval):
                break
        logger.warning(
            "the event loop was blocked for at least %.1f s; a thread renewed the leases meanwhile",
            time.monotonic() - began,
        )
