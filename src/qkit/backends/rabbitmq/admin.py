"""Administration over AMQP: statistics, peek, purge, remove and delete.

AMQP can count the ready messages and the consumers of a queue, and fetch messages. It cannot list
queues, so ``queues`` asks the management API if its URL is known, and otherwise returns the queues
that this service has declared.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

from qkit.backend import QueueSpec, QueueStats
from qkit.backends.rabbitmq import codec
from qkit.backends.rabbitmq.connection import ReconnectingConnection
from qkit.backends.rabbitmq.delay import DelayCascade
from qkit.backends.rabbitmq.errors import BACKEND, translate_errors
from qkit.backends.rabbitmq.management import ManagementAPI
from qkit.backends.rabbitmq.queue_reader import QueueReader, get
from qkit.backends.rabbitmq.topology import ACTIVE, DELAY, group_queue
from qkit.errors import QueueNotFound, Unsupported
from qkit.message import GROUP, Envelope

__all__ = ["RabbitMQAdmin"]

_CHANNEL: Final = re.compile(r"[A-Za-z0-9._-]+")
_OWN_NAMES: Final = (f"{DELAY}.", ACTIVE, "amq.")  # queues of qkit itself and of the broker


class RabbitMQAdmin:
    """Implementation of ``Admin`` for RabbitMQ; base class of the backend."""

    _consuming: ReconnectingConnection
    _management: ManagementAPI | None
    _reader: QueueReader
    _cascade: DelayCascade
    _quorum: bool
    _letters_suffix: str
    _specs: dict[str, QueueSpec]
    _groups: dict[str, set[str]]

    async def queues(self) -> list[str]:
        """Return the queues and topics of the vhost, sorted by name.

        Names that a channel cannot have are left out. Without the management API, only the queues
        and topics that this service has declared are known.

        Raises:
            Unsupported: There is no management API, and this service has declared no queue.
            BackendUnavailable: The management API does not respond.
            ConfigError: The management API rejects the login.
        """
        if self._management is None:
            if self._specs:
                return sorted(self._specs)
            raise Unsupported(
                "cannot list the queues, because AMQP does not: set management_url to the URL of "
                "RabbitMQ's management plugin (such as http://localhost:15672), or name the queues",
                backend=BACKEND,
                operation="queues",
            )
        names = set(self._specs)
        listed = set(await self._management.queues())
        for name in listed:
            channel, colon, group = name.partition(":")
            if not _CHANNEL.fullmatch(channel) or channel.startswith(_OWN_NAMES):
                continue
            if colon and channel not in listed:  # otherwise another program named its queue so
                self._groups.setdefault(channel, set()).add(group)
            names.add(channel)
        return sorted(names)

    async def stats(self, queue: str) -> QueueStats:
        """Return the number of ready messages and the number of consumers.

        For a topic, both are summed over the groups to which this service has subscribed. AMQP does
        not report messages in flight.
        """
        parts = [await self._count(name, "stats") for name in await self._queues_of(queue, "stats")]
        return QueueStats(
            queue=queue,
            depth=sum(part.depth for part in parts),
            consumers=sum(part.consumers or 0 for part in parts),
        )

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        """Return up to ``limit`` messages; consumers do not receive them during the call.

        Fewer are returned if their bodies exceed 16 MiB, but at least one. A queue is unchanged
        afterwards, except that the messages of a quorum queue are replaced with copies.

        Raises:
            QueueNotFound: The queue or topic does not exist.
            Unsupported: The queue is a quorum queue with more than 1,000 messages, which are not
                dead letters.
        """
        found: list[Envelope] = []
        for name in await self._queues_of(queue, "peek"):
            group = name.partition(":")[2]
            if len(found) == limit:
                break
            for message, envelope in await self._reader.read(name, limit - len(found)):
                letter = codec.as_dead_letter(envelope, message.header.properties, ignored=DELAY)
                if group:
                    letter.headers[GROUP] = group
                found.append(letter)
        return found

    async def purge(self, queue: str) -> int:
        """Delete all messages that are not in flight, including delayed ones; return how many."""
        purged = 0
        for name in await self._queues_of(queue, "purge"):
            with translate_errors("purge", queue):
                async with self._consuming.control() as channel:
                    purged += (await channel.queue_purge(name)).message_count or 0
            purged += await self._remove_delayed(name)
        if self._is_topic(queue):
            purged += await self._remove_delayed(queue)
        return purged

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Delete one message for each id; return how many were found.

        Only ready messages are searched, not delayed messages or messages in flight.
        """
        wanted = Counter(ids)
        names = await self._queues_of(queue, "remove")
        return sum([await self._reader.remove(name, wanted) for name in names])

    async def delete(self, queue: str) -> None:
        """Delete a queue, or a topic and its known groups, with all their messages."""
        names = await self._queues_of(queue, "delete")
        topic = self._is_topic(queue)
        for name in names:
            with translate_errors("delete", queue):
                async with self._consuming.control() as channel:
                    await channel.queue_delete(name)
            await self._remove_delayed(name)
        if topic:
            with translate_errors("delete", queue):
                async with self._consuming.control() as channel:
                    await channel.exchange_delete(queue)
            await self._remove_delayed(queue)
        self._specs.pop(queue, None)
        self._groups.pop(queue, None)

    # Helpers

    def _is_topic(self, queue: str) -> bool:
        spec = self._specs.get(queue)
        return queue in self._groups if spec is None else spec.broadcast

    async def _queues_of(self, queue: str, operation: str) -> list[str]:
        """Return the name of the queue itself, or of the queue of each known group of a topic.

        Raises:
            QueueNotFound: The queue or topic does not exist.
        """
        with translate_errors(operation, queue):
            async with self._consuming.control() as channel:
                if not self._is_topic(queue):
                    await channel.queue_declare(queue, passive=True)
                    return [queue]
                await channel.exchange_declare(queue, passive=True)
        return [group_queue(queue, group) for group in sorted(self._groups.get(queue, ()))]

    async def _count(self, name: str, operation: str) -> QueueStats:
        with translate_errors(operation, name):
            async with self._consuming.control() as channel:
                answer = await channel.queue_declare(name, passive=True)
        return QueueStats(
            queue=name, depth=answer.message_count or 0, consumers=answer.consumer_count
        )

    def _counts_reads(self, name: str) -> bool:
        """Return whether a read counts as a delivery that matters.

        Only quorum queues count reads, and the deliveries of a dead letter do not matter.
        """
        spec = self._specs.get(name)
        letters = spec.drop_oldest if spec is not None else name.endswith(self._letters_suffix)
        return self._quorum and not letters

    async def _take_oldest(self, name: str, count: int) -> list[Envelope]:
        """Remove and return up to ``count`` messages from the head of a dead-letter queue."""
        taken: list[Envelope] = []
        if count > 0:
            with translate_errors("publish", name):
                async with self._consuming.own_channel() as channel:
                    while len(taken) < count and (message := await get(channel, name)) is not None:
                        properties = message.header.properties
                        envelope = codec.decode(properties, message.body)
                        taken.append(codec.as_dead_letter(envelope, properties, ignored=DELAY))
                        await channel.basic_ack(message.delivery_tag or 0, wait=False)
        return taken

    async def _remove_delayed(self, name: str) -> int:
        """Remove the delayed messages of a queue or topic; return how many."""
        try:
            with translate_errors("purge", name):
                return await self._cascade.remove_delayed(self._consuming, name)
        except QueueNotFound:  # the vhost has no delay cascade
            return 0
