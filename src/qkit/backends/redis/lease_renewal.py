"""The leases of a subscription to Redis, renewed by a thread while the loop is blocked."""

from __future__ import annotations

import contextlib
import math

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from qkit._internal.logging import logger
from qkit.backends.common.lease_renewal_thread import LeaseRenewal
from qkit.backends.redis.connection import ConnectionParameters
from qkit.backends.redis.driver import CommandArgument
from qkit.backends.redis.errors import DRIVER_ERRORS
from qkit.backends.redis.keys import QueueKeys
from qkit.backends.redis.scripts import lifecycle

__all__ = ["RedisLeaseRenewal"]


class RedisLeaseRenewal(LeaseRenewal):
    """``held`` is the subscription's own dict of tokens; all its leases have one length."""

    def __init__(
        self,
        parameters: ConnectionParameters,
        keys: QueueKeys,
        lease: float,
        held: dict[str, float],
    ) -> None:
        super().__init__()
        self._parameters = parameters
        self._keys = keys
        self._lease = lease
        self._held = held
        self._client: redis.Redis | None = None

    def shortest(self) -> float:
        """The lease, if anything is held."""
        return self._lease if self._held else math.inf

    def renew(self, timeout: float) -> None:
        """One script for all of them."""
        milliseconds = round(self._lease * 1000)
        arguments: list[CommandArgument] = []
        for token in self._held.copy():
            arguments += [token, milliseconds]
        script_keys = self._keys.lease_keys
        try:
            if self._client is None:
                self._client = self._connect(timeout)
            self._client.execute_command(  # type: ignore[no-untyped-call]  # theirs
                "EVAL", lifecycle.EXTEND.source, len(script_keys), *script_keys, *arguments
            )
        except DRIVER_ERRORS as error:
            self.hang_up()
            logger.warning("leases could not be renewed while the loop is blocked: %s", error)

    def _connect(self, timeout: float) -> redis.Redis:
        return redis.Redis.from_url(  # pyright: ignore[reportUnknownMemberType]  # theirs
            self._parameters.url,
            single_connection_client=True,
            socket_timeout=max(0.05, timeout),
            retry=Retry(NoBackoff(), 0),
            **self._parameters.options(),
        )

    def hang_up(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(*DRIVER_ERRORS):
                client.close()
