"""Confirmed publishing: many messages in flight on one channel, each with its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiormq import Channel, exceptions

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
    interrupted,
    to_queue_error,
    translate_errors,
)
from qkit.errors import BackendUnavailable, QueueError

__all__ = ["OutgoingMessage", "Publisher"]


class Publisher:
    """Publishes on one channel at a time.

    The driver tells returned messages apart by their id, so no two with one id are in flight on a
    channel. A publish that was given up may still be answered: its channel takes no more.
    """

    def __init__(self, connection: ReconnectingConnection) -> None:
        self._connection = connection
        self._current: _PublishChannel | None = None
        self._opening = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()

    async def publish(self, messages: Sequence[OutgoingMessage]) -> list[QueueError | None]:
        """Each message's error, or ``None`` once the broker has confirmed it."""
        current = self._current
        if current is None or current.channel.is_closed:
            async with translate_errors("publish", messages[0].queue):
                current = await self._open()
        current.users += 1
        try:
            return await current.publish(messages)
        except asyncio.CancelledError:
            if self._current is current:
                self._current = None
            raise
        finally:
            current.users -= 1
            if current is not self._current and not current.users:
                self._close_soon(current)

    async def _open(self) -> _PublishChannel:
        async with self._opening:
            current = self._current
            if current is None or current.channel.is_closed:
                current = self._current = _PublishChannel(
                    await self._connection.channel(confirms=True)
                )
            return current

    def _close_soon(self, current: _PublishChannel) -> None:
        task = asyncio.create_task(close(current.channel), name="qkit rabbitmq close")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Close the channel once it has nothing more to do."""
        current, self._current = self._current, None
        if current is not None:
            await close(current.channel)
        while self._closing:
            await asyncio.wait(self._closing)


class _PublishChannel:
    """A channel with confirms, and the ids of the messages in flight on it."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.users = 0
        self._ids: dict[str, asyncio.Event | None] = {}
        self._batch_publish = supports_batch_publish(channel)

    async def publish(self, messages: Sequence[OutgoingMessage]) -> list[QueueError | None]:
        """Each message's error, or ``None``; one whose id is in flight waits for the other."""
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
                self._landed(id)
        return [
            None if failure is None else _error(failure, message)
            for failure, message in zip(failures, messages, strict=True)
        ]

    async def _publish_one(self, message: OutgoingMessage) -> QueueError | None:
        while message.id in self._ids:
            others = self._ids[message.id] = self._ids[message.id] or asyncio.Event()
            await others.wait()
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
            if not interrupted():
                raise
            return _error(error, message)
        finally:
            self._landed(message.id)
        return None

    def _landed(self, id: str) -> None:
        waiting = self._ids.pop(id)
        if waiting is not None:
            waiting.set()


def _error(error: BaseException, message: OutgoingMessage) -> QueueError:
    """A channel that is closed fails all in flight: only what it names is to blame."""
    if isinstance(error, exceptions.ChannelClosed) and not _blames(str(error), message):
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


def _blames(said: str, message: OutgoingMessage) -> bool:
    exchange = message.exchange or "amq.default"
    return f"'{exchange}'" in said or f"message size {len(message.body)} " in said
