"""Publisher with confirms: many unconfirmed messages on one channel, each with its own outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiormq import Channel, exceptions

from qkit.backends.common.reopened import Reopened
from qkit.backends.rabbitmq.connection import ReconnectingConnection, close
from qkit.backends.rabbitmq.driver import (
    BACKPRESSURE_BYTES,
    OutgoingMessage,
    publish_batch,
    supports_batch_publish,
)
from qkit.backends.rabbitmq.errors import (
    BACKEND,
    DRIVER_ERRORS,
    cancelled_by_driver,
    to_queue_error,
    translate_errors,
)
from qkit.errors import BackendUnavailable, QueueError

__all__ = ["OutgoingMessage", "Publisher"]


class Publisher:
    """Publisher of messages on one shared channel.

    The driver identifies a returned message by its id, so messages with the same id are published
    one after another. The broker may still respond to a cancelled publish, so the channel is then
    replaced.
    """

    def __init__(self, connection: ReconnectingConnection) -> None:
        self._connection = connection
        self._shared = Reopened(
            self._open_channel,
            lambda current: current.channel.is_closed,
            lambda current: close(current.channel),
            backend=BACKEND,
        )
        self._closing: set[asyncio.Task[None]] = set()

    def enable(self) -> None:
        """Allow ``publish`` to open the channel."""
        self._shared.open()

    async def publish(self, messages: Sequence[OutgoingMessage]) -> list[QueueError | None]:
        """Publish messages and wait for confirmation; return the error or ``None`` for each.

        Raises:
            BackendUnavailable: No channel could be opened.
            LifecycleError: The connection was enabled in another event loop.
        """
        if self._connection.loop is not asyncio.get_running_loop():
            self._connection.check_loop()
        current = self._shared.value
        if current is None or current.channel.is_closed:
            with translate_errors("publish", messages[0].queue):
                current = await self._shared.get()
        current.users += 1
        try:
            return await current.publish(messages)
        except asyncio.CancelledError:
            self._shared.forget(current)
            raise
        finally:
            current.users -= 1
            if current is not self._shared.value and not current.users:
                self._close_soon(current)

    async def _open_channel(self) -> _PublishChannel:
        return _PublishChannel(await self._connection.channel(confirms=True))

    def _close_soon(self, current: _PublishChannel) -> None:
        task = asyncio.create_task(close(current.channel), name="qkit rabbitmq close")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Close the channel, and wait until replaced channels are closed; idempotent."""
        await self._shared.aclose()
        while self._closing:
            await asyncio.wait(self._closing)


class _PublishChannel:
    """Channel with confirms, and the ids of its unconfirmed messages."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.users = 0  # running ``publish`` calls
        # Ids of unconfirmed messages; the value is an event if another message waits for the id.
        self._ids: dict[str, asyncio.Event | None] = {}
        self._batch_publish = supports_batch_publish(channel)

    async def publish(self, messages: Sequence[OutgoingMessage]) -> list[QueueError | None]:
        """Publish messages and wait for confirmation; return the error or ``None`` for each.

        A message waits while another message with the same id is unconfirmed.
        """
        if len(messages) == 1:
            return [await self._publish_one(messages[0])]
        ids = {message.id for message in messages}
        if not self._batch_publish or len(ids) < len(messages) or not ids.isdisjoint(self._ids):
            return await asyncio.gather(*map(self._publish_one, messages))
        self._ids.update(dict.fromkeys(ids))
        try:
            failures = await publish_batch(self.channel, messages)
        finally:
            for id in ids:
                self._release_id(id)
        return [
            None if failure is None else _error(failure, message)
            for failure, message in zip(failures, messages, strict=True)
        ]

    async def _publish_one(self, message: OutgoingMessage) -> QueueError | None:
        while message.id in self._ids:
            confirmed = self._ids[message.id] = self._ids[message.id] or asyncio.Event()
            await confirmed.wait()
        self._ids[message.id] = None
        try:
            await self.channel.basic_publish(
                message.body,
                exchange=message.exchange,
                routing_key=message.key,
                properties=message.properties,
                mandatory=message.mandatory,
                wait=len(message.body) >= BACKPRESSURE_BYTES,
            )
        except DRIVER_ERRORS as error:
            return _error(error, message)
        except asyncio.CancelledError as error:
            if not cancelled_by_driver():
                raise
            return _error(error, message)
        finally:
            self._release_id(message.id)
        return None

    def _release_id(self, id: str) -> None:
        event = self._ids.pop(id)
        if event is not None:
            event.set()


def _error(error: BaseException, message: OutgoingMessage) -> QueueError:
    """Convert a driver error to the error of a message.

    When the broker closes a channel, all unconfirmed messages fail, but the reason applies only to
    one of them. The others get ``BackendUnavailable``.
    """
    if isinstance(error, exceptions.ChannelClosed) and not _is_about(str(error), message):
        return BackendUnavailable(
            "the channel was closed before RabbitMQ confirmed the message",
            backend=BACKEND,
            operation="publish",
            queue=message.queue,
            message_id=message.properties.message_id,
            cause=error,
        )
    found = to_queue_error(error, "publish", message.queue)
    found.message_id = message.properties.message_id
    return found


def _is_about(text: str, message: OutgoingMessage) -> bool:
    exchange = message.exchange or "amq.default"
    return f"'{exchange}'" in text or f"message size {len(message.body)} " in text
