"""The Kafka backend: queues and topics in Kafka's log, with retries, delays and dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final

from qkit._internal.clock import Clock, SystemClock
from qkit._internal.logging import logger
from qkit._internal.tasks import run_to_completion
from qkit.backend import Capabilities, QueueSpec, QueueStats, SubscriptionSpec
from qkit.backends.capability_matrix import MATRIX
from qkit.backends.common.errors import queue_full
from qkit.backends.kafka import codec, driver
from qkit.backends.kafka.admin import KafkaAdmin
from qkit.backends.kafka.cluster import Cluster, not_found
from qkit.backends.kafka.codec import DEAD_REASON, NO_ATTRIBUTES, RecordAttributes
from qkit.backends.kafka.connection import ConnectionParameters
from qkit.backends.kafka.driver import Partition
from qkit.backends.kafka.errors import BACKEND, translate_errors
from qkit.backends.kafka.group import GroupTimeouts
from qkit.backends.kafka.names import TopicNames
from qkit.backends.kafka.publisher import OutgoingRecord, Publisher, RecordMetadata
from qkit.backends.kafka.reader import PartitionReader
from qkit.backends.kafka.retry_tiers import TIERS
from qkit.backends.kafka.retry_topic import retry_record
from qkit.backends.kafka.subscription import KafkaSubscription
from qkit.errors import ConfigError, PartialSend, QueueError
from qkit.message import GROUP, DeadLetter, Envelope, Sent
from qkit.settings.model import Settings

__all__ = ["KafkaBackend", "from_settings"]

FULL_RECHECK_SECONDS: Final = 0.3  # acks are committed in groups: a full queue is asked again
HEADERS_MARGIN_BYTES: Final = 128 << 10  # beside the body: headers, and the frame around them
MAX_DEAD_LETTER_BYTES: Final = 1 << 30
SET_ASIDE: Final = -1  # publish group of messages that go to the retry topic first


class KafkaBackend:
    """The whole boundary on Kafka 2.4 or later.

    ``partitions`` and ``replicas`` are those of the topics that it makes. ``session`` is how long a
    consumer that died keeps its partitions.

    >>> backend = KafkaBackend("localhost:9092", partitions=12)
    >>> backend.capabilities.supports("lease")
    False
    """

    name: str = BACKEND
    capabilities: Capabilities = MATRIX["kafka"]

    def __init__(
        self,
        brokers: str,
        *,
        clock: Clock | None = None,
        partitions: int = 1,
        replicas: int = 1,
        group_prefix: str = "",
        batch_size: int | None = None,
        max_message_bytes: int = 1 << 20,
        timeout: float = 10.0,
        session: float = 45.0,
        heartbeat: float = 1.0,
        sasl_mechanism: str | None = None,
        sasl_username: str | None = None,
        sasl_password: str | None = None,
        tls: bool = False,
        tls_ca_file: str | Path | None = None,
        tls_cert_file: str | Path | None = None,
        tls_key_file: str | Path | None = None,
    ) -> None:
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._parameters = ConnectionParameters(
            brokers,
            timeout=timeout,
            sasl_mechanism=sasl_mechanism,
            sasl_username=sasl_username,
            sasl_password=sasl_password,
            tls=tls,
            tls_ca_file=tls_ca_file,
            tls_cert_file=tls_cert_file,
            tls_key_file=tls_key_file,
        )
        self._timeouts = GroupTimeouts(session, heartbeat)
        self._names = TopicNames(group_prefix)
        self._partitions = partitions
        self._replicas = replicas
        self._batch = batch_size
        self._max_message_bytes = max_message_bytes
        self._specs: dict[str, QueueSpec] = {}
        self._subscriptions: set[KafkaSubscription] = set()
        self._cluster = Cluster(self._parameters)
        self._publisher = Publisher(self._parameters, self._cluster)
        self._reader = PartitionReader(self._parameters)
        self._admin = KafkaAdmin(
            self._cluster,
            self._reader,
            self._publisher,
            self._names,
            self._subscriptions,
            is_topic=lambda queue: queue in self._specs and self._specs[queue].broadcast,
        )
        self._drop_callbacks: list[Callable[[DeadLetter], None]] = []

    # Backend

    async def start(self) -> None:
        """Connect, or raise ``BackendUnavailable``."""
        await self._cluster.connect()
        self._publisher.enable()

    async def declare(self, spec: QueueSpec) -> None:
        """Make sure the topic exists; one that exists stays as it is.

        Raises ``ConfigError`` when Kafka cannot have such a topic, and with ``passive``
        ``QueueNotFound`` when it does not exist.
        """
        self._names.check(spec.name)
        if spec.passive:
            if not await self._cluster.look(spec.name):
                raise not_found(spec.name, "declare")
        else:
            # Of dead letters the oldest go first, and only one partition has an order. They are
            # limited by their number, so time does not delete them, and their topic takes whatever
            # another program could write: a letter that fits nowhere would hold up its channel.
            partitions = 1 if spec.drop_oldest else self._partitions
            more: dict[str, str] = {}
            if spec.drop_oldest:
                more = {"retention.ms": "-1", "max.message.bytes": str(MAX_DEAD_LETTER_BYTES)}
            await self._create(spec.name, partitions, spec.replicas, more)
        self._specs[spec.name] = spec

    async def _create(
        self, topic: str, partitions: int, replicas: int, more: Mapping[str, str] | None = None
    ) -> None:
        replicas = max(replicas, self._replicas)
        max_bytes = self._max_message_bytes + HEADERS_MARGIN_BYTES
        config = {"max.message.bytes": str(max_bytes), **(more or {})}
        if replicas > 1:
            config["min.insync.replicas"] = str(replicas // 2 + 1)
        await self._cluster.create(topic, partitions, replicas, config)

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Append messages, as many as can be; the others' errors are in ``PartialSend``."""
        return await self.publish_in_group(queue, None, envelopes)

    # PublishGroups

    def publish_group(self, queue: str, envelope: Envelope) -> int | None:
        """Return the partition of a message, and ``SET_ASIDE`` for the retry topic.

        ``None`` is the group of all messages while the topic is not known, and of a queue with a
        limit: each publish to it counts what the queue holds.
        """
        partitions = self._cluster.last_known_partitions.get(queue)
        spec = self._specs.get(queue)
        if partitions is None or (spec is not None and spec.max_depth is not None):
            return None
        if not _is_plain(envelope) and self._is_set_aside(spec, envelope, self._clock.time()):
            return SET_ASIDE
        key = None if envelope.key is None else codec.key_of(envelope)
        return self._publisher.choose_partition(queue, partitions, key, len(envelope.body))

    async def publish_in_group(
        self, queue: str, group: int | None, envelopes: Sequence[Envelope]
    ) -> list[Sent]:
        """Append messages to a partition, or set them aside; with ``None`` each as its own."""
        spec = self._specs.get(queue)
        limited = spec is not None and spec.max_depth is not None
        if limited or not all(_is_plain(envelope) for envelope in envelopes):
            results = await self._publish_with_care(queue, spec, group, envelopes)
        else:
            records = [OutgoingRecord(*codec.encode(envelope), group) for envelope in envelopes]
            results = await self._publisher.send(queue, records)
        if not any(isinstance(item, QueueError) for item in results):
            return [Sent(envelope.id) for envelope in envelopes]
        outcomes = [
            item if isinstance(item, QueueError) else Sent(envelope.id)
            for item, envelope in zip(results, envelopes, strict=True)
        ]
        raise PartialSend.of(outcomes, backend=self.name, queue=queue)

    async def _publish_with_care(
        self, queue: str, spec: QueueSpec | None, group: int | None, envelopes: Sequence[Envelope]
    ) -> list[RecordMetadata | QueueError]:
        """Delayed messages, those for one group, dead letters, and queues with a limit."""
        fitting = await self._fitting(queue, spec, len(envelopes))
        now = self._clock.time()
        direct: dict[int, OutgoingRecord] = {}
        aside: dict[int, OutgoingRecord] = {}
        for number, envelope in enumerate(envelopes[:fitting]):
            set_aside = group == SET_ASIDE
            if group is None:
                set_aside = self._is_set_aside(spec, envelope, now)
            if set_aside:
                aside[number] = retry_record(envelope, 0, envelope.not_before, now, NO_ATTRIBUTES)
            else:
                direct[number] = OutgoingRecord(
                    *codec.encode(envelope, attributes=self._attributes(envelope)), group
                )
        results: dict[int, RecordMetadata | QueueError] = {}
        for topic, records in ((queue, direct), (self._names.retry(queue), aside)):
            if not records:
                continue
            if topic != queue:
                await self._need_retry_topic(queue)
            placed = await self._publisher.send(topic, list(records.values()))
            results.update(zip(records, placed, strict=True))
        if spec is not None and spec.drop_oldest and spec.max_depth is not None:
            try:
                await self._trim(queue, spec.max_depth, list(results.values()))
            except QueueError as error:  # what was sent is there: nobody must send it again
                logger.warning("%s: holds more than it should: %s", queue, error)
        return [
            results[number] if number in results else queue_full(BACKEND, queue, envelope.id)
            for number, envelope in enumerate(envelopes)
        ]

    def _is_set_aside(self, spec: QueueSpec | None, envelope: Envelope, now: float) -> bool:
        """Whether a message goes to the retry topic: it is delayed, or for one group."""
        due = envelope.not_before
        return (due is not None and due > now) or self._for_one_group(spec, envelope)

    @staticmethod
    def _for_one_group(spec: QueueSpec | None, envelope: Envelope) -> bool:
        """A topic's message for one group lies beside the topic, where only qkit looks."""
        if GROUP not in envelope.headers or DEAD_REASON in envelope.headers:
            return False  # in a dead letter the header is a fact like the others
        return spec is None or spec.broadcast

    def _attributes(self, envelope: Envelope) -> RecordAttributes:
        if DEAD_REASON not in envelope.headers:
            return NO_ATTRIBUTES
        found = (each.origin_of(envelope) for each in self._subscriptions)
        return RecordAttributes(
            origin=next((origin for origin in found if origin is not None), None)
        )

    async def _fitting(self, queue: str, spec: QueueSpec | None, count: int) -> int:
        """How many more a queue takes that has a limit."""
        if spec is None or spec.max_depth is None or spec.drop_oldest:
            return count
        for wait in (FULL_RECHECK_SECONDS, None):
            room = spec.max_depth - (await self.stats(queue)).depth
            if room >= count or wait is None:
                return max(0, min(room, count))
            await asyncio.sleep(wait)
        raise AssertionError("the loop returns")

    async def _trim(
        self, queue: str, limit: int, results: list[RecordMetadata | QueueError]
    ) -> None:
        """Let the oldest dead letters go while there are too many, and tell of each."""
        placed = [item for item in results if isinstance(item, RecordMetadata)]
        if not placed:
            return
        last = max(placed, key=lambda item: item.offset)
        if last.offset + 1 - last.log_start <= limit:
            return
        for envelope in await self._admin.drop_oldest(queue, limit):
            letter = DeadLetter.from_envelope(envelope, channel=queue)
            for callback in self._drop_callbacks:
                callback(letter)

    async def _need_retry_topic(self, queue: str) -> str:
        """The topic beside a channel where its messages wait, made when it is first needed."""
        retry = self._names.retry(queue)
        spec = self._specs.get(queue)
        if spec is None or not spec.passive:
            if not await self._cluster.look(queue):
                raise not_found(queue, "declare")
            await self._create(retry, TIERS, 1 if spec is None else spec.replicas)
        elif not await self._cluster.look(retry):
            raise ConfigError(
                f"delays and retries need the topic {retry!r}, which does not exist, and "
                "declare='passive' creates nothing: start a service with declare='create' once, or "
                f"create it with {TIERS} partitions",
                backend=self.name,
                operation="declare",
                queue=queue,
            )
        if await self._cluster.partitions(retry, "declare") < TIERS:
            raise ConfigError(
                f"the topic {retry!r} has fewer than {TIERS} partitions, one for each power of two "
                "seconds: delete it, and qkit makes it anew",
                backend=self.name,
                operation="declare",
                queue=queue,
            )
        return retry

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[KafkaSubscription]:
        """Consume a queue, or a topic for a group, which is declared by this."""
        return self._subscription(spec)

    @asynccontextmanager
    async def _subscription(
        self, spec: SubscriptionSpec
    ) -> AsyncGenerator[KafkaSubscription, None]:
        with translate_errors("subscribe", spec.queue):
            if not await self._cluster.look(spec.queue):
                raise not_found(spec.queue, "subscribe")
            subscription = KafkaSubscription(
                self._parameters,
                self._cluster,
                self._publisher,
                spec,
                group=self._names.group(spec.queue, spec.group if spec.broadcast else None),
                retry=await self._need_retry_topic(spec.queue),
                timeouts=self._timeouts,
                batch=self._batch,
                clock=self._clock,
            )
            try:
                await subscription.open()
            except BaseException:
                await run_to_completion(subscription.leave())
                raise
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            try:
                await run_to_completion(subscription.leave())
            finally:
                self._subscriptions.discard(subscription)

    async def ping(self) -> None:
        """Raise ``BackendUnavailable`` unless a broker answers."""
        await self._cluster.ping()

    async def aclose(self) -> None:
        """Disconnect; idempotent."""
        for subscription in list(self._subscriptions):
            await subscription.leave()
        await self._publisher.aclose()
        await self._reader.aclose()
        await self._cluster.aclose()

    # Log

    async def bounds(self, queue: str) -> dict[int, tuple[int, int]]:
        """The first and the next offset of each partition."""
        first = await self._cluster.offsets(queue, driver.EARLIEST)
        after = await self._cluster.offsets(queue, driver.LATEST)
        return {partition: (first[partition], after[partition]) for partition in sorted(first)}

    async def read_range(
        self, queue: str, partition: int, first: int, last: int
    ) -> list[tuple[int, Envelope]]:
        """Messages by offset; a marker that hides another is none."""
        found = await self._reader.read({Partition(queue, partition): (first, last)}, "read")
        messages: list[tuple[int, Envelope]] = []
        for item in found:
            envelope, attributes = codec.decode(item)
            if attributes.removed is None:
                messages.append((item.offset, envelope))
        return messages

    # Admin

    async def queues(self) -> list[str]:
        """The names of all topics but Kafka's own, and those where messages wait."""
        return sorted(name for name in await self._cluster.topics() if self._names.is_channel(name))

    async def stats(self, queue: str) -> QueueStats:
        """The queue's figures now; a topic's are the sums of its groups'."""
        return await self._admin.stats(queue)

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        """The next messages: oldest first, delayed ones last."""
        return await self._admin.peek(queue, limit)

    async def purge(self, queue: str) -> int:
        """Delete every message that no consumer holds; return how many."""
        return await self._admin.purge(queue)

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Hide a message for each of these ids; return how many there were."""
        return await self._admin.remove(queue, ids)

    async def delete(self, queue: str) -> None:
        """Delete the topic with all that is in it or beside it."""
        await self._admin.delete(queue)

    # DroppedLetterSource; not DeadLetterSource: an expired message is delivered, and the service
    # writes its dead letter

    def on_dropped_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter that a full dead-letter queue pushed out."""
        self._drop_callbacks.append(callback)


def from_settings(settings: Settings, clock: Clock) -> KafkaBackend:
    """Build the backend that the settings describe; it is not connected yet.

    Args:
        settings: settings of type ``kafka``, which have a ``url``.
        clock: the clock of the service.
    """
    assert settings.url is not None
    password = settings.sasl_password
    return KafkaBackend(
        settings.url.get_secret_value(),
        clock=clock,
        partitions=settings.partitions,
        replicas=settings.replicas,
        group_prefix=settings.group_prefix,
        batch_size=settings.batch_size,
        max_message_bytes=settings.max_message_bytes,
        timeout=settings.send_timeout,
        sasl_mechanism=settings.sasl_mechanism,
        sasl_username=settings.sasl_username,
        sasl_password=None if password is None else password.get_secret_value(),
        tls=settings.tls,
        tls_ca_file=settings.tls_ca_file,
        tls_cert_file=settings.tls_cert_file,
        tls_key_file=settings.tls_key_file,
    )


def _is_plain(envelope: Envelope) -> bool:
    if envelope.not_before is not None:
        return False
    headers = envelope.headers
    return not headers or (GROUP not in headers and DEAD_REASON not in headers)
