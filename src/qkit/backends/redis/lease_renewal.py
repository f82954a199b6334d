"""Lease renewal for a Redis subscription while the event loop is blocked."""

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
    """Lease renewal thread of one subscription.

    Args:
        parameters: Parameters of the thread's connection.
        keys: Keys of the subscription's queue or group.
        lease: Length of every lease in seconds.
        held: Dict of the subscription, with the tokens of held deliveries as keys; the loop's
            thread modifies it.
    """

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

    def shortest_lease(self) -> float:
        """Return the length of a lease in seconds; infinity if none is held."""
        return self._lease if self._held else math.inf

    def renew(self, timeout: float) -> None:
        """Renew all leases with one script call; a failure is logged and not raised.

        Args:
            timeout: Seconds to wait for the server, at least 0.05; set when connecting.
        """
        milliseconds = round(self._lease * 1000)
        arguments: list[CommandArgument] = []
        for token in self._held.copy():
            arguments += [token, milliseconds]
        script_keys = self._keys.lease_keys
        try:
            if self._client is None:
                self._client = self._connect(timeout)
            self._client.execute_command(  # type: ignore[no-untyped-call]  # redis-py is partly untyped
                "EVAL", lifecycle.EXTEND.source, len(script_keys), *script_keys, *arguments
            )
        except DRIVER_ERRORS as error:
            self.disconnect()
            logger.warning("could not renew leases while the event loop is blocked: %s", error)

    def _connect(self, timeout: float) -> redis.Redis:
        return redis.Redis.from_url(  # pyright: ignore[reportUnknownMemberType]  # redis-py is partly untyped
            self._parameters.url,
            single_connection_client=True,
            socket_timeout=max(0.05, timeout),
            retry=Retry(NoBackoff(), 0),
            **self._parameters.options(),
        )

    def disconnect(self) -> None:
        """Close the renewal connection."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(*DRIVER_ERRORS):
                client.close()
