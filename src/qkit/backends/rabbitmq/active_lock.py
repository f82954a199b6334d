"""Lock of an ordered queue: an exclusive queue, which only one connection at a time can declare.

Quorum queues ignore exclusive consumers, and ``x-single-active-consumer`` cannot be added to an
existing queue. An exclusive queue works with both queue types, and the broker deletes it when it
closes the connection.
"""

from __future__ import annotations

import asyncio

from aiormq import exceptions

from qkit._internal.logging import logger
from qkit.backends.rabbitmq.connection import ReconnectingConnection
from qkit.backends.rabbitmq.errors import BACKEND, translate_errors
from qkit.backends.rabbitmq.topology import CLASSIC, active_queue
from qkit.errors import ConfigError, QueueError

__all__ = ["ActiveLocks"]


class ActiveLocks:
    """Locks that the subscriptions of one connection hold.

    The broker grants an exclusive queue to a connection. A second subscription on the same
    connection is refused here.

    Args:
        connection: Connection for consuming.
    """

    def __init__(self, connection: ReconnectingConnection) -> None:
        self._connection = connection
        self._holders: dict[str, object] = {}

    async def acquire(self, queue: str, holder: object) -> bool:
        """Try to lock a queue; return false if another subscription holds the lock.

        After an error or a cancellation the broker may have granted the lock, so the holder must
        call ``release`` in any case.

        Args:
            queue: Name of the queue on the broker.
            holder: The subscription.

        Raises:
            ConfigError: The user may not declare the exclusive queue.
        """
        if self._holders.setdefault(queue, holder) is not holder:
            return False
        name = active_queue(queue)
        try:
            async with (
                self._connection.own_channel() as channel,
                asyncio.timeout(self._connection.parameters.timeout),
            ):
                await channel.queue_declare(name, exclusive=True, arguments={**CLASSIC})
        except exceptions.ChannelLockedResource:
            del self._holders[queue]
            return False
        except exceptions.ChannelAccessRefused as error:
            raise ConfigError(
                f"ordered=True needs the exclusive queue {name!r}, which the user may not create: "
                "grant the user the configure permission for it, or omit ordered=True",
                backend=BACKEND,
                operation="subscribe",
                queue=queue,
                cause=error,
            ) from error
        return True

    async def release(self, queue: str, holder: object) -> None:
        """Unlock a queue if ``holder`` holds the lock; log an error instead of raising it."""
        if self._holders.get(queue) is not holder:
            return
        try:
            if self._connection.is_open:  # otherwise the broker has freed the lock
                with translate_errors("subscribe", queue):
                    async with self._connection.control() as channel:
                        await channel.queue_delete(active_queue(queue))
        except ConfigError:
            pass  # the user may not create it, or another connection holds it meanwhile
        except QueueError as error:
            logger.warning(
                "%s: could not delete %s, so other consumers may wait until this connection is "
                "closed: %s",
                queue,
                active_queue(queue),
                error,
            )
        finally:
            del self._holders[queue]
