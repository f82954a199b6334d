"""What qkit uses of aiormq beyond its documented calls.

Tested with aiormq 7.2.4 and pamqp 4.0.1, the versions that aio-pika 10.2.1 installs. No other
module of this package uses driver internals, except ``lenient_decoding``, which replaces decoders
of pamqp for the whole process.

Where another version differs:

- Batch publish: ``supports_batch_publish`` looks for every attribute that ``publish_batch`` uses.
  If one is missing, the publisher calls ``basic_publish`` for each message.
- ``open_connection``: without ``write_queue`` a sender that waits for room in it when the
  connection closes gets its error from the send timeout.
- ``max_frame_bytes``: without ``connection_tune`` it is ``None`` and RabbitMQ's default applies.
- ``is_blocked``: if ``ready()`` never waits, a ping that is not answered closes the connection
  also while the broker blocks it.

Batch publish exists for speed. ``basic_publish`` takes a lock, a timer and a write for each message
and returns when that message is confirmed, so a hundred messages at once are a hundred tasks. One
write for all of them takes less than half of the CPU time.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from aiormq import Channel, Connection
from aiormq.abc import ChannelFrame
from aiormq.connection import TCPTransportFactory, TLSTransportFactory, TransportFactory
from pamqp import frame
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader
from yarl import URL

from qkit.backends.rabbitmq.errors import DRIVER_ERRORS

__all__ = [
    "BACKPRESSURE_BYTES",
    "AbortableTransport",
    "OutgoingMessage",
    "closing_future",
    "is_blocked",
    "max_frame_bytes",
    "open_connection",
    "publish_batch",
    "supports_batch_publish",
]

#: A write of this size waits until the socket has taken it.
BACKPRESSURE_BYTES: Final = 1 << 16
#: Attributes of a channel that ``publish_batch`` uses.
CHANNEL_ATTRIBUTES: Final = (
    "confirmations",
    "create_future",
    "delivery_tag",
    "lock",
    "max_content_size",
    "message_id_delivery_tag",
    "number",
    "write_queue",
)


class AbortableTransport(TransportFactory):
    """Opens the socket and keeps it, so that a connection can be cut without the peer."""

    def __init__(self, *, secure: bool) -> None:
        self._inner = TLSTransportFactory() if secure else TCPTransportFactory()
        self._writer: asyncio.StreamWriter | None = None

    async def create(
        self, url: URL, **options: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open the socket; called by the driver."""
        reader, self._writer = await self._inner.create(url, **options)
        return reader, self._writer

    def abort(self) -> None:
        """Close the socket at once, if it is open; unsent bytes are lost."""
        if self._writer is not None:
            self._writer.transport.abort()


async def open_connection(connection: Connection) -> None:
    """Connect, and see to it that no sender waits for ever once the connection is closed."""
    untyped: Any = connection
    await untyped.connect()
    queue: asyncio.Queue[Any] | None = getattr(untyped, "write_queue", None)
    if queue is not None:
        closing_future(connection).add_done_callback(functools.partial(_empty, queue))


def _empty(queue: asyncio.Queue[Any], _: object = None) -> None:
    """Empty the write queue of a closed connection, which has no reader any more.

    Senders that wait for room in it go on and find their channel closed. The driver leaves them
    waiting for ever.
    """
    if not queue.empty():
        while not queue.empty():
            queue.get_nowait()
        asyncio.get_running_loop().call_soon(_empty, queue)  # more may wait than had room


def closing_future(resource: Connection | Channel) -> asyncio.Future[object]:
    """Return a future that is done, usually with an error, when the resource is closed."""
    untyped: Any = resource
    future: asyncio.Future[object] = untyped.closing
    return future


def max_frame_bytes(connection: Connection | None) -> int | None:
    """Return the largest frame that the broker accepts, or ``None`` while it is unknown."""
    tune = getattr(connection, "connection_tune", None)
    return (tune and tune.frame_max) or None


def is_blocked(connection: Connection) -> bool:
    """Whether the broker has said that it reads nothing more from here: it lacks memory."""
    ready = connection.ready()
    try:
        ready.send(None)  # it returns at once, or waits
    except StopIteration:
        return False
    ready.close()
    return True


class OutgoingMessage(NamedTuple):
    """A message to publish; ``mandatory`` asks for an error when no queue takes it."""

    queue: str
    exchange: str
    key: str
    properties: Basic.Properties
    body: bytes
    mandatory: bool = True

    @property
    def id(self) -> str:
        """By which the driver knows it when it is returned."""
        return self.properties.message_id or ""


class _Packed(NamedTuple):
    at: int
    id: str
    content: bytes


def supports_batch_publish(channel: Channel) -> bool:
    """Whether a channel of this version has every attribute that ``publish_batch`` uses."""
    # Not by hasattr: that would ask the channel for its lock.
    return all(name in vars(channel) or hasattr(type(channel), name) for name in CHANNEL_ATTRIBUTES)


async def publish_batch(
    channel: Channel, messages: Sequence[OutgoingMessage]
) -> list[BaseException | None]:
    """What went wrong with each message, or ``None`` once the broker has confirmed it.

    No two of them have the same id, nor the id of one that is in flight on this channel.
    """
    failures: list[BaseException | None] = [None] * len(messages)
    answers: dict[int, asyncio.Future[Any]] = {}
    try:
        try:
            for group in _groups(channel, messages, failures):
                await _write(channel, group, answers)
        except DRIVER_ERRORS as error:
            for at, failure in enumerate(failures):
                if failure is None and at not in answers:
                    failures[at] = error
        if answers:
            await asyncio.wait(answers.values())
    finally:
        tags: dict[str, int] = channel.message_id_delivery_tag
        for message in messages:
            tags.pop(message.id, None)
        for answer in answers.values():
            answer.cancel()  # whoever gave up wants none; the others have theirs
    for at, answer in answers.items():
        failures[at] = asyncio.CancelledError() if answer.cancelled() else answer.exception()
    return failures


def _pack(channel: Channel, message: OutgoingMessage) -> bytes:
    if len(message.key) > 255:
        raise ValueError("a routing key has at most 255 bytes")
    command = Basic.Publish(
        exchange=message.exchange, routing_key=message.key, mandatory=message.mandatory
    )
    head = ContentHeader(properties=message.properties, body_size=len(message.body))
    size: int = channel.max_content_size
    parts = [message.body[at : at + size] for at in range(0, len(message.body), size)]
    frames: list[Basic.Publish | ContentHeader | ContentBody] = [command, head]
    frames += map(ContentBody, parts)
    return b"".join([frame.marshal(item, channel.number) for item in frames])


def _groups(
    channel: Channel, messages: Sequence[OutgoingMessage], failures: list[BaseException | None]
) -> Iterator[list[_Packed]]:
    """In order, and each but the last so large that its end waits for the socket.

    Packed one after the other: all at once they would fill the memory and hold up the loop.
    """
    group: list[_Packed] = []
    size = 0
    for at, message in enumerate(messages):
        try:
            content = _pack(channel, message)
        except DRIVER_ERRORS as error:  # something in it that AMQP cannot carry
            failures[at] = error
            continue
        group.append(_Packed(at, message.id, content))
        size += len(content)
        if size >= BACKPRESSURE_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


async def _write(
    channel: Channel, group: list[_Packed], answers: dict[int, asyncio.Future[Any]]
) -> None:
    """Hand a group to the driver's writer, and note what will be answered."""
    untyped: Any = channel
    content = b"".join([item.content for item in group])
    async with channel.lock:
        before: int = untyped.delivery_tag
        for tag, item in enumerate(group, before + 1):
            answers[item.at] = untyped.confirmations[tag] = untyped.create_future()
            untyped.message_id_delivery_tag[item.id] = tag
        untyped.delivery_tag = before + len(group)
        taken = untyped.create_future() if len(content) >= BACKPRESSURE_BYTES else None
        try:
            await untyped.write_queue.put(ChannelFrame(content, False, taken))
        except BaseException:
            # The broker will not see them, and counts on from where it was.
            untyped.delivery_tag = before
            for tag, item in enumerate(group, before + 1):
                untyped.confirmations.pop(tag, None)
                answers.pop(item.at).cancel()
            raise
        if taken is not None:
            await asyncio.wait([taken])  # how it ended is in the answers too
