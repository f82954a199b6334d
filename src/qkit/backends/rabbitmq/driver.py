"""Many messages in one write on a channel with confirms, each with its own answer.

The driver's own ``basic_publish`` takes a lock, a timer and a write for each message and returns
when that one is confirmed, so a hundred at once are a hundred tasks: more than twice the CPU of all
this. What it notes about a message it keeps in the open, and the same is noted here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from aiormq import Channel
from aiormq.abc import ChannelFrame
from pamqp import frame
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from qkit.backends.rabbitmq.errors import DRIVER_ERRORS

__all__ = ["LARGE", "Outgoing", "can_write_together", "publish_together"]

LARGE: Final = 1 << 16  # so many bytes wait until the socket has taken them
NOTES: Final = (
    "confirmations",
    "create_future",
    "delivery_tag",
    "lock",
    "max_content_size",
    "message_id_delivery_tag",
    "number",
    "write_queue",
)


class Outgoing(NamedTuple):
    """A message on its way out; ``mandatory`` asks for an error when no queue takes it."""

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


def can_write_together(channel: Channel) -> bool:
    """Whether this driver keeps its notes where they are looked for here."""
    # Not by hasattr: that would ask the channel for its lock.
    return all(name in vars(channel) or hasattr(type(channel), name) for name in NOTES)


async def publish_together(
    channel: Channel, messages: Sequence[Outgoing]
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


def _pack(channel: Channel, message: Outgoing) -> bytes:
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
    channel: Channel, messages: Sequence[Outgoing], failures: list[BaseException | None]
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
        if size >= LARGE:
            yield group
            group, size = [], 0
    if group:
        yield group


async def _write(
    channel: Channel, group: list[_Packed], answers: dict[int, asyncio.Future[Any]]
) -> None:
    """Hand a group to the driver's writer, and note what will be answered."""
    driver: Any = channel  # its notes have no types
    content = b"".join([item.content for item in group])
    async with channel.lock:
        before: int = driver.delivery_tag
        for tag, item in enumerate(group, before + 1):
            answers[item.at] = driver.confirmations[tag] = driver.create_future()
            driver.message_id_delivery_tag[item.id] = tag
        driver.delivery_tag = before + len(group)
        taken = driver.create_future() if len(content) >= LARGE else None
        try:
            await driver.write_queue.put(ChannelFrame(content, False, taken))
        except BaseException:
            # The broker will not see them, and counts on from where it was.
            driver.delivery_tag = before
            for tag, item in enumerate(group, before + 1):
                driver.confirmations.pop(tag, None)
                answers.pop(item.at).cancel()
            raise
        if taken is not None:
            await asyncio.wait([taken])  # how it ended is in the answers too
