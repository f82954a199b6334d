"""Access to undocumented parts of aiormq.

Tested with aiormq 7.2.4 and pamqp 4.0.1, the versions that aio-pika 10.2.1 installs. No other
module of this package uses driver internals, except ``lenient_decoding``, which replaces decoders
of pamqp in the whole process.

Fallbacks if an attribute is missing in another version:

- ``publish_batch``: ``supports_batch_publish`` checks every attribute of the channel that it uses.
  If one is missing, the publisher calls ``basic_publish`` for each message.
- ``open_connection``: without ``write_queue``, a sender that waits for space in a full write queue
  when the connection closes fails only at its send timeout.
- ``max_frame_bytes``: without ``connection_tune``, it returns ``None``, and RabbitMQ's default
  applies.
- ``is_blocked``: if ``ready()`` never waits, a ping without a response closes the connection even
  while the broker blocks it.

``driver_logs_demoted`` exists because the driver logs each lost connection as a warning with a
traceback, and each failed attempt to connect as an error. qkit reports both itself.

``publish_batch`` exists for speed. ``basic_publish`` needs a lock, a timer and a write for each
message and returns when that message is confirmed, so a hundred concurrent messages need a hundred
tasks. One write for all of them takes less than half of the CPU time.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
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
    "driver_logs_demoted",
    "is_blocked",
    "max_frame_bytes",
    "open_connection",
    "publish_batch",
    "supports_batch_publish",
]

#: A write of at least this size is awaited until it reaches the socket.
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
    """Transport factory that can close the socket without a handshake with the broker."""

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
        """Close the socket immediately if it is open; unsent bytes are lost."""
        if self._writer is not None:
            self._writer.transport.abort()


_demoted: contextvars.ContextVar[bool] = contextvars.ContextVar("qkit_rabbitmq", default=False)


def _demote(record: logging.LogRecord) -> bool:
    if not _demoted.get():
        return True  # a connection of another library
    record.levelno, record.levelname = logging.DEBUG, "DEBUG"
    return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)


@contextmanager
def driver_logs_demoted() -> Generator[None, None, None]:
    """Log what the driver logs at ``DEBUG``, also in tasks that are created in this context."""
    for name in ("aiormq.connection", "aiormq.channel"):
        logging.getLogger(name).addFilter(_demote)  # no effect if it was added before
    token = _demoted.set(True)
    try:
        yield
    finally:
        _demoted.reset(token)


async def open_connection(connection: Connection) -> None:
    """Connect, and make sure that waiting senders wake up when the connection closes."""
    untyped: Any = connection
    await untyped.connect()
    queue: asyncio.Queue[Any] | None = getattr(untyped, "write_queue", None)
    if queue is not None:
        closing_future(connection).add_done_callback(functools.partial(_drain, queue))


def _drain(queue: asyncio.Queue[Any], _: object = None) -> None:
    """Empty the write queue of a closed connection, which the driver no longer reads.

    Senders that wait for space in the queue then continue and find their channel closed. Otherwise
    they would wait forever.
    """
    if not queue.empty():
        while not queue.empty():
            queue.get_nowait()
        asyncio.get_running_loop().call_soon(_drain, queue)  # senders may fill it again


def closing_future(resource: Connection | Channel) -> asyncio.Future[object]:
    """Return a future that is done, usually with an error, when the resource closes."""
    untyped: Any = resource
    future: asyncio.Future[object] = untyped.closing
    return future


def max_frame_bytes(connection: Connection | None) -> int | None:
    """Return the largest frame in bytes that the broker accepts, or ``None`` if unknown."""
    tune = getattr(connection, "connection_tune", None)
    return (tune and tune.frame_max) or None


def is_blocked(connection: Connection) -> bool:
    """Return whether the broker has blocked the connection because it lacks memory or disk."""
    ready = connection.ready()
    try:
        ready.send(None)  # ends immediately unless the connection is blocked
    except StopIteration:
        return False
    ready.close()
    return True


class OutgoingMessage(NamedTuple):
    """Message to publish.

    Attributes:
        queue: Name of the queue or topic, for errors.
        exchange: Exchange to publish to; empty for the default exchange.
        key: Routing key.
        properties: AMQP properties.
        body: Encoded body.
        mandatory: Whether it is an error if no queue receives the message; true by default.
    """

    queue: str
    exchange: str
    key: str
    properties: Basic.Properties
    body: bytes
    mandatory: bool = True

    @property
    def id(self) -> str:
        """Message id, by which the driver identifies a message that the broker returns."""
        return self.properties.message_id or ""


class _EncodedMessage(NamedTuple):
    position: int
    id: str
    content: bytes


def supports_batch_publish(channel: Channel) -> bool:
    """Return whether a channel has every attribute that ``publish_batch`` uses."""
    # Calling hasattr on the channel itself would evaluate its ``lock`` property.
    return all(name in vars(channel) or hasattr(type(channel), name) for name in CHANNEL_ATTRIBUTES)


async def publish_batch(
    channel: Channel, messages: Sequence[OutgoingMessage]
) -> list[BaseException | None]:
    """Publish messages and wait for confirmation; return the error or ``None`` for each.

    The ids of the messages must be unique, also among the unconfirmed messages of the channel.
    """
    failures: list[BaseException | None] = [None] * len(messages)
    answers: dict[int, asyncio.Future[Any]] = {}
    try:
        try:
            for group in _groups(channel, messages, failures):
                await _write(channel, group, answers)
        except DRIVER_ERRORS as error:
            for index, failure in enumerate(failures):
                if failure is None and index not in answers:
                    failures[index] = error
        if answers:
            await asyncio.wait(answers.values())
    finally:
        tags: dict[str, int] = channel.message_id_delivery_tag
        for message in messages:
            tags.pop(message.id, None)
        for answer in answers.values():
            answer.cancel()  # no effect on confirmations that have already arrived
    for index, answer in answers.items():
        failures[index] = asyncio.CancelledError() if answer.cancelled() else answer.exception()
    return failures


def _encode(channel: Channel, message: OutgoingMessage) -> bytes:
    if len(message.key) > 255:
        raise ValueError(f"the routing key has {len(message.key)} characters; AMQP allows 255")
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
) -> Iterator[list[_EncodedMessage]]:
    """Yield encoded messages in order, in groups of about ``BACKPRESSURE_BYTES``.

    Messages are encoded one group at a time. Encoding all of them first would need more memory and
    block the event loop.
    """
    group: list[_EncodedMessage] = []
    size = 0
    for index, message in enumerate(messages):
        try:
            content = _encode(channel, message)
        except DRIVER_ERRORS as error:  # AMQP cannot represent the message
            failures[index] = error
            continue
        group.append(_EncodedMessage(index, message.id, content))
        size += len(content)
        if size >= BACKPRESSURE_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


async def _write(
    channel: Channel, group: list[_EncodedMessage], answers: dict[int, asyncio.Future[Any]]
) -> None:
    """Pass a group to the driver's writer; add the futures of its confirmations to ``answers``."""
    untyped: Any = channel
    content = b"".join([item.content for item in group])
    async with channel.lock:
        before: int = untyped.delivery_tag
        for tag, item in enumerate(group, before + 1):
            answers[item.position] = untyped.confirmations[tag] = untyped.create_future()
            untyped.message_id_delivery_tag[item.id] = tag
        untyped.delivery_tag = before + len(group)
        written = untyped.create_future() if len(content) >= BACKPRESSURE_BYTES else None
        try:
            await untyped.write_queue.put(ChannelFrame(content, False, written))
        except BaseException:
            # The broker does not receive the group, so its delivery tags must be reused.
            untyped.delivery_tag = before
            for tag, item in enumerate(group, before + 1):
                untyped.confirmations.pop(tag, None)
                answers.pop(item.position).cancel()
            raise
        if written is not None:
            await asyncio.wait([written])  # an error is also set on the confirmations
