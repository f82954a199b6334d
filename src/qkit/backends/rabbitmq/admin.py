"""Looking into queues and emptying them, with what AMQP alone offers.

AMQP can count a queue's ready messages and consumers, and fetch messages. It has no list of queues,
so this is about those that the service declared or names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from aiormq import Channel
from aiormq.abc import DeliveredMessage

from qkit.backend import QueueSpec, QueueStats
from qkit.backends.rabbitmq import codec
from qkit.backends.rabbitmq.connection import ReconnectingConnection
from qkit.backends.rabbitmq.delay import DelayCascade
from qkit.backends.rabbitmq.errors import translate_errors
from qkit.backends.rabbitmq.publisher import OutgoingMessage, Publisher
from qkit.backends.rabbitmq.topology import DELAY, group_queue
from qkit.errors import QueueNotFound
from qkit.message import GROUP, Envelope

__all__ = ["RabbitMQAdmin"]

#: Messages in a quorum queue up to which it is read whole, which keeps its order.
MAX_FULL_READ: Final = 1_000


class RabbitMQAdmin:
    """The ``Admin`` part of the backend."""

    _consuming: ReconnectingConnection
    _publisher: Publisher
    _cascade: DelayCascade
    _quorum: bool
    _specs: dict[str, QueueSpec]
    _groups: dict[str, set[str]]

    async def queues(self) -> list[str]:
        """The queues and topics that this service declared: AMQP has no list of all."""
        return sorted(self._specs)

    async def stats(self, queue: str) -> QueueStats:
        """How many messages are ready, and how many consumers there are.

        A topic's are the sums of the groups that this service knows. AMQP does not tell what
        consumers hold.
        """
        parts = [await self._count(name, "stats") for name in await self._queues_of(queue, "stats")]
        return QueueStats(
            queue=queue,
            depth=sum(part.depth for part in parts),
            consumers=sum(part.consumers or 0 for part in parts),
        )

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        """The next messages; while it looks, nobody else gets them.

        A classic queue is as it was afterwards. In a quorum queue, which counts every look as a
        delivery, copies take the places of what was seen, at the end of the queue.
        """
        found: list[Envelope] = []
        for name in await self._queues_of(queue, "peek"):
            group = name.partition(":")[2]
            for message in await self._look(name, limit - len(found)):
                facts = message.header.properties
                envelope = codec.decode(facts, message.body)
                envelope = codec.as_dead_letter(envelope, facts, ignored=DELAY)
                if group:
                    envelope.headers[GROUP] = group
                found.append(envelope)
        return found

    async def purge(self, queue: str) -> int:
        """Delete every message that no consumer holds, delayed ones too; return how many."""
        gone = 0
        for name in await self._queues_of(queue, "purge"):
            async with translate_errors("purge", queue), self._consuming.control() as channel:
                gone += (await channel.queue_purge(name)).message_count or 0
            gone += await self._remove_delayed(name)
        if self._is_topic(queue):
            gone += await self._remove_delayed(queue)
        return gone

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Delete these messages unless a consumer holds them; return how many were there.

        Delayed ones are not looked for.
        """
        wanted = Counter(ids)
        gone = 0
        for name in await self._queues_of(queue, "remove"):
            async with translate_errors("remove", queue), self._consuming.own_channel() as channel:
                kept: list[DeliveredMessage] = []
                while wanted.total() and (message := await _get(channel, name)) is not None:
                    id = codec.message_id(message.header.properties, message.body)
                    if wanted[id]:
                        wanted[id] -= 1
                        gone += 1
                        await channel.basic_ack(message.delivery_tag or 0, wait=False)
                    else:
                        kept.append(message)
                await self._put_back(channel, name, kept)
        return gone

    async def delete(self, queue: str) -> None:
        """Delete the queue, or the topic with the groups that are known, and all that is in it."""
        names = await self._queues_of(queue, "delete")
        topic = self._is_topic(queue)
        for name in names:
            async with translate_errors("delete", queue), self._consuming.control() as channel:
                await channel.queue_delete(name)
            await self._remove_delayed(name)
        if topic:
            async with translate_errors("delete", queue), self._consuming.control() as channel:
                await channel.exchange_delete(queue)
            await self._remove_delayed(queue)
        self._specs.pop(queue, None)
        self._groups.pop(queue, None)

    # What it is made of

    def _is_topic(self, queue: str) -> bool:
        spec = self._specs.get(queue)
        return spec is not None and spec.broadcast

    async def _queues_of(self, queue: str, operation: str) -> list[str]:
        """The queue itself, or those of a topic's groups; raises if there is no such thing."""
        async with translate_errors(operation, queue), self._consuming.control() as channel:
            if not self._is_topic(queue):
                await channel.queue_declare(queue, passive=True)
                return [queue]
            await channel.exchange_declare(queue, passive=True)
        return [group_queue(queue, group) for group in sorted(self._groups.get(queue, ()))]

    async def _count(self, name: str, operation: str) -> QueueStats:
        async with translate_errors(operation, name), self._consuming.control() as channel:
            answer = await channel.queue_declare(name, passive=True)
        return QueueStats(
            queue=name, depth=answer.message_count or 0, consumers=answer.consumer_count
        )

    async def _look(self, name: str, limit: int) -> list[DeliveredMessage]:
        async with translate_errors("peek", name), self._consuming.own_channel() as channel:
            many = limit
            if self._counts(name):
                depth = (await channel.queue_declare(name, passive=True)).message_count or 0
                many = max(limit, depth if depth <= MAX_FULL_READ else 0)
            found: list[DeliveredMessage] = []
            while len(found) < many and (message := await _get(channel, name)) is not None:
                found.append(message)
            await self._put_back(channel, name, found)
        return found[:limit]

    def _counts(self, name: str) -> bool:
        """Whether looking would be charged; nobody asks for the attempts of dead letters."""
        spec = self._specs.get(name)
        return self._quorum and not (spec is not None and spec.drop_oldest)

    async def _put_back(
        self, channel: Channel, name: str, messages: Sequence[DeliveredMessage]
    ) -> None:
        """Closing the channel puts everything in its old place, and a quorum queue counts it."""
        if not self._counts(name) or not messages:
            return
        copies: list[OutgoingMessage] = []
        for message in messages:
            facts = message.header.properties
            envelope = codec.decode(facts, message.body)
            attempts = envelope.attempt + codec.deliveries(facts)
            frame = self._consuming.frame
            again = codec.encode_again(envelope, facts, attempts=attempts, frame=frame)
            copies.append(OutgoingMessage(name, "", name, again, message.body))
        errors = await self._publisher.publish(copies)
        for message, error in zip(messages, errors, strict=True):
            if error is None:
                await channel.basic_ack(message.delivery_tag or 0, wait=False)

    async def _take_oldest(self, name: str, count: int) -> list[Envelope]:
        """Fetch and delete; what is at the head of a queue of dead letters is the oldest."""
        taken: list[Envelope] = []
        if count > 0:
            async with translate_errors("publish", name), self._consuming.own_channel() as channel:
                while len(taken) < count and (message := await _get(channel, name)) is not None:
                    facts = message.header.properties
                    envelope = codec.decode(facts, message.body)
                    taken.append(codec.as_dead_letter(envelope, facts, ignored=DELAY))
                    await channel.basic_ack(message.delivery_tag or 0, wait=False)
        return taken

    async def _remove_delayed(self, name: str) -> int:
        """Take delayed messages out of the cascade, if there is one."""
        try:
            async with translate_errors("purge", name):
                return await self._cascade.remove_delayed(self._consuming, name)
        except QueueNotFound:
            return 0


async def _get(channel: Channel, name: str) -> DeliveredMessage | None:
    message = await channel.basic_get(name)
    return None if message.delivery_tag is None else message
