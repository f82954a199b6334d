"""Lease renewal for a client whose event loop is blocked.

The leases of a client expire in the owner's process, even while the client is blocked. Consumers in
the owner's process need no such renewal, because a blocked loop there also delays lease expiry.
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
    """Lease renewal thread of one connection to the owner.

    Args:
        path: Path of the socket.
        session: Session number of the connection that holds the leases, from the owner's HELLO.
    """

    def __init__(self, path: Path, session: int) -> None:
        super().__init__()
        self._path = path
        self._session = session
        self._held: dict[int, dict[int, float]] = {}
        self._connection: socket.socket | None = None

    def add(self, number: int, leases: dict[int, float]) -> None:
        """Start renewing the leases of a subscription.

        Args:
            number: Number of the subscription.
            leases: Length of each lease in seconds, by receipt; the event loop modifies this dict.
        """
        self._held[number] = leases
        if self._thread is None and self._connection is None:
            self._connect()  # the owner may be too busy to accept a connection later

    def remove(self, number: int) -> None:
        """Stop renewing the leases of a subscription."""
        self._held.pop(number, None)

    def shortest_lease(self) -> float:
        """Return the length of the shortest lease in seconds; infinity if there is none."""
        return min((lease for _, _, lease in self._leases()), default=math.inf)

    def _leases(self) -> list[tuple[int, int, float]]:
        return [
            (number, receipt, lease)
            for number, leases in self._held.copy().items()
            for receipt, lease in leases.copy().items()
            if lease < math.inf
        ]

    def renew(self, timeout: float) -> None:
        """Renew all leases with one frame.

        Args:
            timeout: Seconds that sending the frame may take.
        """
        connection = self._connection or self._connect()
        if connection is None:
            return
        try:
            connection.settimeout(timeout)
            body = protocol.encode_renewals(self._session, self._leases())
            connection.sendall(protocol.frame(protocol.RENEW, 0, body))
        except OSError as error:
            self.disconnect()
            logger.warning("could not renew leases while the event loop is blocked: %s", error)

    def _connect(self) -> socket.socket | None:
        try:
            self._connection = connect(self._path)
            self._connection.sendall(protocol.MAGIC)
        except OSError as error:  # includes BackendUnavailable
            self.disconnect()
            logger.warning("could not connect to the owner to renew leases: %s", error)
        return self._connection

    def disconnect(self) -> None:
        """Close the renewal connection."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.close()
            self._connection = None
