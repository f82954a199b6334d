"""The leases of a subscription to Redis, renewed by a thread while the loop is blocked."""

from __future__ import annotations

import contextlib
import math

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from qkit._internal.logging import logger
from qkit.backends.common.lease_renewal_thread import LeaseRenewal
from qkit.backends.redis.connection import Address
from qkit.backends.redis.driver import Word
from qkit.backends.redis.errors import DRIVER_ERRORS
from qkit.backends.redis.keys import Place
from qkit.backends.redis.scripts import lifecycle

__all__ = ["Renewals"]


class Renewals(LeaseRenewal):
    """``held`` is the subscription's own dict of tokens; all its leases have one length."""

    def __init__(
        self, address: Address, place: Place, lease: float, held: dict[str, float]
    ) -> None:
        super().__init__()
        self._address = address
        self._place = place
        self._lease = lease
        self._held = held
        self._client: redis.Redis | None = None

    def shortest(self) -> float:
        """The lease, if anything is held."""
        return self._lease if self._held else math.inf

    def renew(self, timeout: float) -> None:
        """One script for all of them."""
        milliseconds = round(self._lease * 1000)
        told: list[Word] = []
        for token in self._held.copy():
            told += [token, milliseconds]
        keys = self._place.lease_keys
        try:
            if self._client is None:
                self._client = self._connect(timeout)
            self._client.execute_command(  # type: ignore[no-untyped-call]  # theirs
                "EVAL", lifecycle.EXTEND.source, len(keys), *keys, *told
            )
        except DRIVER_ERRORS as error:
            self.hang_up()
            logger.warning("leases could not be renewed while the loop is blocked: %s", error)

    def _connect(self, timeout: float) -> redis.Redis:
        return redis.Redis.from_url(  # pyright: ignore[reportUnknownMemberType]  # theirs
            self._address.url,
            single_connection_client=True,
            socket_timeout=max(0.05, timeout),
            retry=Retry(NoBackoff(), 0),
            **self._address.options(),
        )

    def hang_up(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(*DRIVER_ERRORS):
                client.close()
