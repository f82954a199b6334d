"""Leases outlive a blocked event loop: a thread renews them while the loop does not answer.

In the owner's own process a blocked loop blocks the expiry of leases too; a client's leases run on
in another process. The thread has a connection of its own, because the loop's cannot be written
from outside. While the loop answers, the thread renews nothing: a consumer that lets its lease go
in a living loop loses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
import time
from pathlib import Path
from typing import Final

from qkit.backends.socket import wire
from qkit.backends.socket.address import connect
from qkit.logs import logger

__all__ = ["Renewals"]

# Consumers renew three times in a lease, so a loop may block with two thirds of one left. Looking
# six times, and waiting a sixth for the loop's answer, leaves another third.
LOOKS_PER_LEASE: Final = 6


class Renewals:
    """The thread of one connection; it starts with the first lease and sleeps while none is held.

    ``add`` names dicts of receipt to lease, which the loop changes; a receipt that the owner has
    settled meanwhile is no lease to it, so renewing cannot bring anything back.
    """

    def __init__(self, path: Path, session: int) -> None:
        self._path = path
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._held: dict[int, dict[int, float]] = {}
        self._holding = threading.Event()
        self._closed = threading.Event()
        self._answer = threading.Event()
        self._thread: threading.Thread | None = None
        self._connection: socket.socket | None = None

    # In the loop

    def add(self, number: int, leases: dict[int, float]) -> None:
        """Keep the leases of this subscription."""
        self._held[number] = leases
        if self._thread is None and self._connection is None:
            self._connect()  # now: an owner that is busy when it is needed will have accepted it

    def remove(self, number: int) -> None:
        """It was left, or broke."""
        self._held.pop(number, None)

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
            self._hang_up()

    # In the thread

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._holding.wait()
                look = self._look()
                if look == math.inf:
                    self._holding.clear()
                    if self._look() < math.inf:  # one came just before that
                        self._holding.set()
                elif self._answers(look):
                    self._closed.wait(look)
                else:
                    self._keep_while_blocked()
        except RuntimeError:
            pass  # the loop was closed, and with it everything that was held
        finally:
            self._hang_up()

    def _look(self) -> float:
        """How often to look, in seconds: for ever if there are no leases that end."""
        leases = [lease for _, _, lease in self._leases()]
        return min(leases, default=math.inf) / LOOKS_PER_LEASE

    def _leases(self) -> list[tuple[int, int, float]]:
        # Copying a dict is one step to the loop's thread, so this needs no lock; a lock would
        # cost every message something.
        return [
            (number, receipt, lease)
            for number, leases in self._held.copy().items()
            for receipt, lease in leases.copy().items()
            if lease < math.inf
        ]

    def _answers(self, within: float) -> bool:
        self._answer.clear()
        self._loop.call_soon_threadsafe(self._answer.set)
        return self._closed.is_set() or self._answer.wait(within)

    def _keep_while_blocked(self) -> None:
        began = time.monotonic()
        while not self._closed.is_set():
            leases = self._leases()
            if not leases:
                break
            look = min(lease for _, _, lease in leases) / LOOKS_PER_LEASE
            self._renew(leases, look)
            if self._answer.wait(2 * look):
                break
        logger.warning(
            "the event loop did not answer for %.1f s; the leases of its messages were kept",
            time.monotonic() - began,
        )

    def _renew(self, leases: list[tuple[int, int, float]], timeout: float) -> None:
        connection = self._connection or self._connect()
        if connection is None:
            return
        try:
            connection.settimeout(timeout)
            body = wire.encode_renewals(self._session, leases)
            connection.sendall(wire.frame(wire.RENEW, 0, body))
        except OSError as error:
            self._hang_up()
            logger.warning("leases could not be renewed while the loop is blocked: %s", error)

    def _connect(self) -> socket.socket | None:
        try:
            self._connection = connect(self._path)
            self._connection.sendall(wire.MAGIC)
        except OSError as error:  # BackendUnavailable is one too
            self._hang_up()
            logger.warning("no connection for the renewal of leases: %s", error)
        return self._connection

    def _hang_up(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
            self._connection = None
