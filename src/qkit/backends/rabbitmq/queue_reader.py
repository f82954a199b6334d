"""Reading of ready messages for administration, on its own connection.

Closing the channel returns the messages that were read to their places. A quorum queue counts that
as a delivery, which matters unless the messages are dead letters or their consumer is ordered.
Such a queue is rotated instead: every message is replaced with a copy at the end, which keeps the
order.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from aiormq import Channel, exceptions
from aiormq.abc import DeliveredMessage

from qkit._internal.tasks import run_to_completion
from qkit.backends.rabbitmq import codec
from qkit.backends.rabbitmq.connection import ReconnectingConnection
from qkit.backends.rabbitmq.errors import BACKEND, translate_errors
from qkit.backends.rabbitmq.publisher import OutgoingMessage, Publisher
from qkit.backends.rabbitmq.topology import active_queue
from qkit.errors import Unsupported
from qkit.message import Envelope

__all__ = ["QueueReader", "get"]

#: Largest depth at which a quorum queue is rotated. A larger one is not read, because rotating a
#: part of it would change the order.
MAX_ROTATED_DEPTH: Final = 1_000
#: Largest number of body bytes that a read of up to ``MAX_LIMITED_COUNT`` messages returns. A read
#: of more messages, for example to replay all dead letters, must be complete.
MAX_READ_BYTES: Final = 16 << 20
MAX_LIMITED_COUNT: Final = 1_000
ROTATED_AT_ONCE: Final = 50  # messages in memory while a queue is rotated
BYTES_AT_ONCE: Final = 4 << 20
RETURN_CHECKS: Final = 50
RETURN_CHECK_SECONDS: Final = 0.02


class QueueReader:
    """Reader of the ready messages of queues.

    Args:
        connection: Connection for reading, which no consumer uses.
        publisher: Publisher of the copies.
        quorum: Whether the queues are quorum queues.
        counts_reads: Returns whether reading a queue counts as a delivery that matters.
    """

    def __init__(
        self,
        connection: ReconnectingConnection,
        publisher: Publisher,
        *,
        quorum: bool,
        counts_reads: Callable[[str], bool],
    ) -> None:
        self._connection = connection
        self._publisher = publisher
        self._quorum = quorum
        self._counts_reads = counts_reads

    async def read(self, name: str, limit: int) -> list[tuple[DeliveredMessage, Envelope]]:
        """Return up to ``limit`` messages; consumers do not receive them during the call.

        Fewer are returned if their bodies exceed ``MAX_READ_BYTES``, but at least one.

        Raises:
            QueueNotFound: The queue does not exist.
            Unsupported: The queue cannot be read without changing it.
        """
        found = _Found(limit)
        with translate_errors("peek", name):
            if await self._has_ordered_consumer(name):
                raise Unsupported(
                    f"the ordered consumer of {name!r} would receive later messages while earlier "
                    "ones are read: pause it, then read the queue",
                    backend=BACKEND,
                    operation="peek",
                    queue=name,
                )
            if self._counts_reads(name):
                await run_to_completion(self._rotate(name, found))
            else:
                async with self._channel(name) as channel:
                    while found.wants_more and (message := await get(channel, name)) is not None:
                        found.add(message)
        return found.messages

    @asynccontextmanager
    async def _channel(self, name: str) -> AsyncGenerator[Channel, None]:
        """Open a channel; on exit, close it and wait until its messages are in the queue again.

        A quorum queue counts a channel that has fetched messages as a consumer, until some time
        after the broker has confirmed that the channel is closed.
        """
        before = await self._count_consumers(name) if self._quorum else 0
        async with self._connection.own_channel() as channel:
            yield channel
        if self._quorum:
            for _ in range(RETURN_CHECKS):
                if await self._count_consumers(name) <= before:
                    break
                await asyncio.sleep(RETURN_CHECK_SECONDS)

    async def _count_consumers(self, name: str) -> int:
        async with self._connection.control() as channel:
            return (await channel.queue_declare(name, passive=True)).consumer_count or 0

    async def _has_ordered_consumer(self, name: str) -> bool:
        try:
            async with self._connection.own_channel() as channel:
                await channel.queue_declare(active_queue(name), passive=True)
        except exceptions.ChannelLockedResource:
            return True
        except exceptions.ChannelNotFoundEntity:
            return False
        return True

    async def _rotate(self, name: str, found: _Found) -> None:
        async with self._connection.own_channel() as channel:
            depth = (await channel.queue_declare(name, passive=True)).message_count or 0
            if depth > MAX_ROTATED_DEPTH:
                raise Unsupported(
                    f"a quorum queue with more than {MAX_ROTATED_DEPTH:,} messages cannot be read "
                    f"without changing their order or their attempts, and {name!r} has {depth:,}: "
                    "consume some of them first",
                    backend=BACKEND,
                    operation="peek",
                    queue=name,
                )
            copied: set[str | None] = set()
            while depth > 0:
                batch: list[DeliveredMessage] = []
                while len(batch) < min(depth, ROTATED_AT_ONCE) and _size(batch) < BYTES_AT_ONCE:
                    message = await get(channel, name)
                    if message is None or message.header.properties.message_id in copied:
                        depth = 0  # consumers have taken the rest
                        break
                    batch.append(message)
                    if found.wants_more:
                        found.add(message)
                copied |= await self._replace(channel, name, batch)
                depth -= len(batch)

    async def _replace(
        self, channel: Channel, name: str, messages: Sequence[DeliveredMessage]
    ) -> set[str | None]:
        """Replace messages with copies that have the same number of attempts; return their ids."""
        copies: list[OutgoingMessage] = []
        for message in messages:
            properties = message.header.properties
            envelope = codec.decode(properties, message.body)
            attempts = envelope.attempt + codec.deliveries(properties)
            copy = codec.encode_copy(
                envelope, properties, attempts=attempts, frame=self._connection.frame
            )
            copy.expiration = properties.expiration
            copies.append(OutgoingMessage(name, "", name, copy, message.body))
        errors = await self._publisher.publish(copies) if copies else []
        for message, error in zip(messages, errors, strict=True):
            if error is None:
                await channel.basic_ack(message.delivery_tag or 0, wait=False)
        return {copy.properties.message_id for copy in copies}

    async def remove(self, name: str, wanted: Counter[str]) -> int:
        """Delete one message for each id and remove it from ``wanted``; return how many.

        Raises:
            QueueNotFound: The queue does not exist.
        """
        removed = 0
        ids = _ListedIds()
        with translate_errors("remove", name):
            async with self._channel(name) as channel:
                kept: list[DeliveredMessage] = []
                while wanted.total() and (message := await get(channel, name)) is not None:
                    id = ids.next(message)
                    if wanted[id]:
                        wanted[id] -= 1
                        removed += 1
                        await channel.basic_ack(message.delivery_tag or 0, wait=False)
                    elif self._counts_reads(name):
                        kept.append(message)
                await self._replace(channel, name, kept)
        return removed


class _Found:
    """Messages that were read so far, up to a number and a size."""

    def __init__(self, limit: int) -> None:
        self.messages: list[tuple[DeliveredMessage, Envelope]] = []
        self._limit = limit
        self._bytes = 0
        self._ids = _ListedIds()

    @property
    def wants_more(self) -> bool:
        if self._limit <= MAX_LIMITED_COUNT and self._bytes >= MAX_READ_BYTES:
            return False
        return len(self.messages) < self._limit

    def add(self, message: DeliveredMessage) -> None:
        envelope = codec.decode(message.header.properties, message.body)
        envelope.id = self._ids.next(message)
        self.messages.append((message, envelope))
        self._bytes += len(message.body)


class _ListedIds:
    """Ids of messages that are read from the head of a queue.

    Identical foreign messages without an id are numbered, so that each has its own.
    """

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def next(self, message: DeliveredMessage) -> str:
        properties = message.header.properties
        id = codec.listed_id(properties, message.body)
        if not properties.message_id:
            self._seen[id] += 1
            if self._seen[id] > 1:
                return f"{id}-{self._seen[id]}"
        return id


def _size(messages: Sequence[DeliveredMessage]) -> int:
    return sum(len(message.body) for message in messages)


async def get(channel: Channel, name: str) -> DeliveredMessage | None:
    """Fetch the next message of a queue; return ``None`` if the queue is empty."""
    message = await channel.basic_get(name)
    return None if message.delivery_tag is None else message
