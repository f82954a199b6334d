"""The leases that a client has of a directory's owner, renewed by a thread while the loop blocks.

In the owner's own process a blocked loop blocks the expiry of leases too; a client's leases run on
in another process.
"""

from __future__ import annotations

import contextlib
import math
import socket
from pathlib import Path

from qkit._internal.logging import logger
from qkit.backends.common.lease_renewal_thread import LeaseRenewal
from qkit.backends.native.socket import protocol
from qkit.backends.native.socket.unix_socket import connect

__all__ = ["ClientLeaseRenewal"]


class ClientLeaseRenewal(LeaseRenewal):
    """``add`` names dicts of receipt to lease, which the loop changes."""

    def __init__(self, path: Path, session: int) -> None:
        super().__init__()
        self._path = path
        self._session = session
        self._held: dict[int, dict[int, float]] = {}
        self._connection: socket.socket | None = None

    def add(self, number: int, leases: dict[int, float]) -> None:
        """Keep the leases of this subscription."""
        self._held[number] = leases
        if self._thread is None and self._connection is None:
            self._connect()  # now: an owner that is busy when it is needed will have accepted it

    def remove(self, number: int) -> None:
        """It was left, or broke."""
        self._held.pop(number, None)

    def shortest(self) -> float:
        """The shortest lease of all subscriptions."""
        return min((lease for _, _, lease in self._leases()), default=math.inf)

    def _leases(self) -> list[tuple[int, int, float]]:
        return [
            (number, receipt, lease)
            for number, leases in self._held.copy().items()
            for receipt, lease in leases.copy().items()
            if lease < math.inf
        ]

    def renew(self, timeout: float) -> None:
        """One frame for all of them."""
        connection = self._connection or self._connect()
        if connection is None:
            return
        try:
            connection.settimeout(timeout)
            body = protocol.encode_renewals(self._session, self._leases())
            connection.sendall(protocol.frame(protocol.RENEW, 0, body))
        except OSError as error:
            self.hang_up()
            logger.warning("leases could not be renewed while the loop is blocked: %s", error)

    def _connect(self) -> socket.socket | None:
        try:
            self._connection = connect(self._path)
            self._connection.sendall(protocol.MAGIC)
        except OSError as error:  # BackendUnavailable is one too
            self.hang_up()
            logger.warning("no connection for the renewal of leases: %s", error)
        return self._connection

    def hang_up(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
            self._connection = None
