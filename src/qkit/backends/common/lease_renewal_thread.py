"""Leases outlive a blocked event loop: a thread renews them while the loop does not answer.

Where leases run in another process, its clock goes on while a handler blocks the loop. The thread
has a connection of its own, because the loop's cannot be used from outside. While the loop answers,
the thread renews nothing: a consumer that lets its lease go in a living loop loses it.
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

# Consumers renew three times in a lease, so a loop may block with two thirds of one left. Looking
# six times, and waiting a sixth for the loop's answer, leaves another third.
LOOKS_PER_LEASE: Final = 6


class LeaseRenewal(ABC):
    """The thread of one connection; it starts with the first lease and sleeps while none is held.

    A backend says which leases there are and how to renew them. It reads dicts that the loop
    changes: copying one is a single step to the loop's thread, so no lock is needed, which would
    cost every message something. A lease that was settled meanwhile is none to the server any
    more, so renewing cannot bring anything back.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._holding = threading.Event()
        self._closed = threading.Event()
        self._answer = threading.Event()
        self._thread: threading.Thread | None = None

    # What a backend adds; all of it runs in the thread

    @abstractmethod
    def shortest(self) -> float:
        """The length of the shortest lease held now, in seconds; infinite if there is none."""

    @abstractmethod
    def renew(self, timeout: float) -> None:
        """Renew every lease; what fails is logged, for the next look tries again."""

    @abstractmethod
    def hang_up(self) -> None:
        """Close the thread's connection."""

    # In the loop

    def wake(self) -> None:
        """There are leases."""
        if not self._holding.is_set():
            self._holding.set()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="qkit lease renewal", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Let the thread end; it does not hold up anybody."""
        self._closed.set()
        self._answer.set()
        self._holding.set()
        if self._thread is None:
            self.hang_up()

    # In the thread

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._holding.wait()
                look = self.shortest() / LOOKS_PER_LEASE
                if look == math.inf:
                    self._holding.clear()
                    if self.shortest() < math.inf:  # one came just before that
                        self._holding.set()
                elif self._answers(look):
                    self._closed.wait(look)
                else:
                    self._keep_while_blocked()
        except RuntimeError:
            pass  # the loop was closed, and with it everything that was held
        finally:
            self.hang_up()

    def _answers(self, within: float) -> bool:
        self._answer.clear()
        self._loop.call_soon_threadsafe(self._answer.set)
        return self._closed.is_set() or self._answer.wait(within)

    def _keep_while_blocked(self) -> None:
        began = time.monotonic()
        while not self._closed.is_set():
            look = self.shortest() / LOOKS_PER_LEASE
            if look == math.inf:
                break
            self.renew(look)
            if self._answer.wait(2 * look):
                break
        logger.warning(
            "the event loop did not answer for %.1f s; the leases of its messages were kept",
            time.monotonic() - began,
        )
