"""Leases outlive a blocked event loop: a thread renews them while the loop does not answer.

The server's clock runs on while a handler blocks the loop. The thread has a connection of its own,
because the loop's cannot be used from outside. While the loop answers, the thread renews nothing: a
consumer that lets its lease go in a living loop loses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from qkit.backends.redis import scripts
from qkit.backends.redis.connection import Address
from qkit.backends.redis.place import Place
from qkit.logs import logger

__all__ = ["Renewals"]

# Consumers renew three times in a lease, so a loop may block with two thirds of one left. Looking
# six times, and waiting a sixth for the loop's answer, leaves another third.
LOOKS_PER_LEASE: Final = 6


class Renewals:
    """The thread of one subscription; it starts with the first lease and sleeps while none is held.

    ``held`` is the subscription's own dict, which the loop changes: copying a dict is one step to
    the loop's thread, so this needs no lock. A token that was settled meanwhile is no lease to the
    server, so renewing cannot bring anything back.
    """

    def __init__(
        self, address: Address, place: Place, lease: float, held: dict[str, float]
    ) -> None:
        self._address = address
        self._place = place
        self._lease = lease
        self._held = held
        self._loop = asyncio.get_running_loop()
        self._holding = threading.Event()
        self._closed = threading.Event()
        self._answer = threading.Event()
        self._thread: threading.Thread | None = None
        self._client: redis.Redis | None = None

    # In the loop

    def wake(self) -> None:
        """There are leases."""
        if not self._holding.is_set():
            self._holding.set()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="qkit redis lease renewal", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """Let the thread end; it does not hold up anybody."""
        self._closed.set()
        self._answer.set()
        self._holding.set()

    # In the thread

    def _run(self) -> None:
        look = self._lease / LOOKS_PER_LEASE
        try:
            while not self._closed.is_set():
                self._holding.wait()
                if not self._held:
                    self._holding.clear()
                    if self._held:  # one came just before that
                        self._holding.set()
                elif self._answers(look):
                    self._closed.wait(look)
                else:
                    self._keep_while_blocked(look)
        except RuntimeError:
            pass  # the loop was closed, and with it everything that was held
        finally:
            self._hang_up()

    def _answers(self, within: float) -> bool:
        self._answer.clear()
        self._loop.call_soon_threadsafe(self._answer.set)
        return self._closed.is_set() or self._answer.wait(within)

    def _keep_while_blocked(self, look: float) -> None:
        began = time.monotonic()
        while self._held and not self._closed.is_set():
            self._renew()
            if self._answer.wait(2 * look):
                break
        logger.warning(
            "the event loop did not answer for %.1f s; the leases of its messages were kept",
            time.monotonic() - began,
        )

    def _renew(self) -> None:
        milliseconds = round(self._lease * 1000)
        arguments: list[Any] = []
        for token in self._held.copy():
            arguments += [token, milliseconds]
        keys = self._place.keys
        try:
            if self._client is None:
                self._client = self._connect()
            self._client.execute_command(  # type: ignore[no-untyped-call]  # theirs
                "EVAL", scripts.EXTEND.source, len(keys), *keys, self._place.base, *arguments
            )
        except (redis.RedisError, OSError) as error:
            self._hang_up()
            logger.warning("leases could not be renewed while the loop is blocked: %s", error)

    def _connect(self) -> redis.Redis:
        return redis.Redis.from_url(  # pyright: ignore[reportUnknownMemberType]  # theirs
            self._address.url,
            single_connection_client=True,
            socket_timeout=max(0.05, self._lease / LOOKS_PER_LEASE),
            retry=Retry(NoBackoff(), 0),
            **self._address.options(),
        )

    def _hang_up(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(redis.RedisError, OSError):
                client.close()
