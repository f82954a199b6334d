"""Confirmed publishing: many messages in flight on one channel, each with its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiormq import Channel, exceptions

from qkit.backends.rabbitmq.connection import Link, close
from qkit.backends.rabbitmq.driver import LARGE, Outgoing, can_write_together, publish_together
from qkit.backends.rabbitmq.errors import (
    BACKEND,
    DRIVER_ERRORS,
    error_of,
    interrupted,
    translated,
)
from qkit.errors import BackendUnavailable, QueueError

__all__ = ["Outgoing", "Publisher"]


class Publisher:
    """Publishes on one channel at a time.

    The driver tells returned messages apart by their id, so no two with one id are in flight on a
    channel. A publish that was given up may still be answered: its channel takes no more.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._line: _Line | None = None
        self._opening = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()

    async def publish(self, messages: Sequence[Outgoing]) -> list[QueueError | None]:
        """Each message's error, or ``None`` once the broker has confirmed it."""
        line = self._line
        if line is None or line.channel.is_closed:
            async with translated("publish", messages[0].queue):
                line = await self._open()
        line.users += 1
        try:
            return await line.publish(messages)
        except asyncio.CancelledError:
            if self._line is line:
                self._line = None
            raise
        finally:
            line.users -= 1
            if line is not self._line and not line.users:
                self._close_soon(line)

    async def _open(self) -> _Line:
        async with self._opening:
            line = self._line
            if line is None or line.channel.is_closed:
                line = self._line = _Line(await self._link.channel(confirms=True))
            return line

    def _close_soon(self, line: _Line) -> None:
        task = asyncio.create_task(close(line.channel), name="qkit rabbitmq close")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Close the channel once it has nothing more to do."""
        line, self._line = self._line, None
        if line is not None:
            await close(line.channel)
        while self._closing:
            await asyncio.wait(self._closing)


class _Line:
    """A channel, and what is in flight on it."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.users = 0
        self._ids: dict[str, asyncio.Event | None] = {}
        self._together = can_write_together(channel)

    async def publish(self, messages: Sequence[Outgoing]) -> list[QueueError | None]:
        """Each message's error, or ``None``; one whose id is in flight waits for the other."""
        if len(messages) == 1:
            return [await self._publish_one(messages[0])]
        ids = {message.id for message in messages}
        if not self._together or len(ids) < len(messages) or not ids.isdisjoint(self._ids):
            return await asyncio.gather(*map(self._publish_one, messages))
        self._ids.update(dict.fromkeys(ids))
        try:
            failures = await publish_together(self.channel, messages)
        finally:
            for id in ids:
                self._landed(id)
        return [
            None if failure is None else _error(failure, message)
            for failure, message in zip(failures, messages, strict=True)
        ]

    async def _publish_one(self, message: Outgoing) -> QueueError | None:
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
                wait=len(message.body) >= LARGE,
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


def _error(error: BaseException, message: Outgoing) -> QueueError:
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
    found = error_of(error, "publish", message.queue)
    found.message_id = message.properties.message_id
    return found


def _blames(said: str, message: Outgoing) -> bool:
    exchange = message.exchange or "amq.default"
    return f"'{exchange}'" in said or f"message size {len(message.body)} " in said
