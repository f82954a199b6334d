"""Kafka backend: queues and topics with retries, delays and dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final

from qkit._internal.clock import Clock, SystemClock
from qkit._internal.logging import logger
from qkit._internal.tasks import run_to_completion
from qkit.backend import Capabilities, Delivery, QueueSpec, QueueStats, SubscriptionSpec
from qkit.backends.capability_matrix import MATRIX
from qkit.backends.common.errors import queue_full
from qkit.backends.kafka import codec, driver
from qkit.backends.kafka.admin import KafkaAdmin
from qkit.backends.kafka.cluster import Cluster, not_found
from qkit.backends.kafka.codec import DEAD_REASON, NO_ATTRIBUTES, RecordAttributes
from qkit.backends.kafka.connection import ConnectionParameters
from qkit.backends.kafka.driver import Partition
from qkit.backends.kafka.errors import BACKEND, translate_errors
from qkit.backends.kafka.fetched_message import FetchedMessage
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

FULL_RECHECK_SECONDS: Final = 0.3  # a full queue is checked twice, because commits lag behind acks
HEADERS_MARGIN_BYTES: Final = 128 << 10  # added to the body limit for headers and record framing
MAX_DEAD_LETTER_BYTES: Final = 1 << 30
RETRY_TOPIC_GROUP: Final = -1  # publish group of messages that go to the retry topic


class KafkaBackend:
    """Backend for Kafka 2.4 or later.

    Args:
        brokers: Broker addresses, ``host:port``, separated by commas.
        clock: Clock of the service; the system clock by default.
        partitions: Number of partitions of topics that this backend creates; 1 by default.
        replicas: Number of replicas of topics that this backend creates; 1 by default.
        group_prefix: Prefix of consumer group names; empty by default.
        batch_size: Settled messages per commit; by default offsets are committed as soon as
            possible.
        max_message_bytes: Largest body in bytes, 1 MiB by default. ``max.message.bytes`` of new
            topics is set accordingly.
        timeout: Seconds to wait for a response or for the confirmation of a send; 10 by default.
        session: Seconds without a heartbeat after which a consumer loses its partitions; 45 by
            default.
        heartbeat: Seconds between heartbeats of a consumer; 1 by default.
        sasl_mechanism: SASL mechanism; no authentication by default.
        sasl_username: SASL user name.
        sasl_password: SASL password.
        tls: Whether to use TLS; implied if a TLS file is set.
        tls_ca_file: PEM file of trusted CA certificates; those of the system by default.
        tls_cert_file: PEM file of the client certificate; none by default.
        tls_key_file: PEM file of its private key; not needed if ``tls_cert_file`` contains the key.

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
        """Connect to the cluster.

        Raises:
            BackendUnavailable: No broker responds in time.
        """
        await self._cluster.connect()
        self._publisher.enable()

    async def declare(self, spec: QueueSpec) -> None:
        """Create the topic unless it exists; an existing topic is not changed.

        Raises:
            ConfigError: Kafka does not accept the name, the replicas or the configuration.
            QueueNotFound: The topic does not exist and ``passive`` is set.
        """
        self._names.check(spec.name)
        if spec.passive:
            if not await self._cluster.count_partitions(spec.name):
                raise not_found(spec.name, "declare")
        else:
            # A dead-letter topic has one partition, because its oldest messages are dropped first
            # and Kafka keeps order only within a partition. It is limited by count, so it has no
            # retention time. It accepts records of up to 1 GiB, because a dead letter that cannot
            # be stored would block its channel.
            partitions = 1 if spec.drop_oldest else self._partitions
            overrides: dict[str, str] = {}
            if spec.drop_oldest:
                overrides = {"retention.ms": "-1", "max.message.bytes": str(MAX_DEAD_LETTER_BYTES)}
            await self._create(spec.name, partitions, spec.replicas, overrides)
        self._specs[spec.name] = spec

    async def _create(
        self, topic: str, partitions: int, replicas: int, overrides: Mapping[str, str] | None = None
    ) -> None:
        replicas = max(replicas, self._replicas)
        max_bytes = self._max_message_bytes + HEADERS_MARGIN_BYTES
        config = {"max.message.bytes": str(max_bytes), **(overrides or {})}
        if replicas > 1:
            config["min.insync.replicas"] = str(replicas // 2 + 1)
        await self._cluster.create(topic, partitions, replicas, config)

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Append messages to the topic; return when all in-sync replicas have them.

        Raises:
            PartialSend: Some messages were not appended. The error holds the outcome of each.
            QueueNotFound: The topic does not exist.
        """
        return await self.publish_in_group(queue, None, envelopes)

    # PublishGroups

    def publish_group(self, queue: str, envelope: Envelope) -> int | None:
        """Return the partition of a message, or ``RETRY_TOPIC_GROUP`` for the retry topic.

        Return ``None`` while the number of partitions is unknown, and for a queue with
        ``max_depth``. Publishes to such a queue must not run concurrently, because each of them
        compares the depth with the limit.
        """
        partitions = self._cluster.last_known_partitions.get(queue)
        spec = self._specs.get(queue)
        if partitions is None or (spec is not None and spec.max_depth is not None):
            return None
        if not _is_plain(envelope) and self._needs_retry_topic(spec, envelope, self._clock.time()):
            return RETRY_TOPIC_GROUP
        key = None if envelope.key is None else codec.key_of(envelope)
        return self._publisher.choose_partition(queue, partitions, key, len(envelope.body))

    async def publish_in_group(
        self, queue: str, group: int | None, envelopes: Sequence[Envelope]
    ) -> list[Sent]:
        """Append messages of one publish group; for ``None``, choose a partition for each message.

        Raises:
            PartialSend: Some messages were not appended. The error holds the outcome of each.
            QueueNotFound: The topic does not exist.
        """
        spec = self._specs.get(queue)
        limited = spec is not None and spec.max_depth is not None
        if limited or not all(_is_plain(envelope) for envelope in envelopes):
            results = await self._publish_special(queue, spec, group, envelopes)
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

    async def _publish_special(
        self, queue: str, spec: QueueSpec | None, group: int | None, envelopes: Sequence[Envelope]
    ) -> list[RecordMetadata | QueueError]:
        """Publish messages of which at least one is not plain, or to a queue with a depth limit.

        A message is not plain if it is delayed, a dead letter, or for one group of a topic.
        """
        capacity = await self._capacity(queue, spec, len(envelopes))
        now = self._clock.time()
        direct: dict[int, OutgoingRecord] = {}
        for_retry: dict[int, OutgoingRecord] = {}
        for number, envelope in enumerate(envelopes[:capacity]):
            to_retry_topic = group == RETRY_TOPIC_GROUP
            if group is None:
                to_retry_topic = self._needs_retry_topic(spec, envelope, now)
            if to_retry_topic:
                for_retry[number] = retry_record(
                    envelope, 0, envelope.not_before, now, NO_ATTRIBUTES
                )
            else:
                direct[number] = OutgoingRecord(
                    *codec.encode(envelope, attributes=self._attributes(envelope)), group
                )
        results: dict[int, RecordMetadata | QueueError] = {}
        for topic, records in ((queue, direct), (self._names.retry(queue), for_retry)):
            if not records:
                continue
            if topic != queue:
                await self._ensure_retry_topic(queue)
            placed = await self._publisher.send(topic, list(records.values()))
            results.update(zip(records, placed, strict=True))
        if spec is not None and spec.drop_oldest and spec.max_depth is not None:
            try:
                await self._trim(queue, spec.max_depth, list(results.values()))
            except QueueError as error:  # do not raise: the caller would send the messages again
                logger.warning("%s: could not drop the oldest dead letters: %s", queue, error)
        return [
            results[number] if number in results else queue_full(BACKEND, queue, envelope.id)
            for number, envelope in enumerate(envelopes)
        ]

    def _needs_retry_topic(self, spec: QueueSpec | None, envelope: Envelope, now: float) -> bool:
        """Return whether a message goes to the retry topic: it is delayed or for one group only."""
        due = envelope.not_before
        return (due is not None and due > now) or self._is_for_one_group(spec, envelope)

    @staticmethod
    def _is_for_one_group(spec: QueueSpec | None, envelope: Envelope) -> bool:
        """Return whether a message of a topic is for one group only.

        Such a message goes to the retry topic, because other programs may read the topic itself.
        """
        if GROUP not in envelope.headers or DEAD_REASON in envelope.headers:
            return False  # in a dead letter, the header only records the group
        return spec is None or spec.broadcast

    def _attributes(self, envelope: Envelope) -> RecordAttributes:
        if DEAD_REASON not in envelope.headers:
            return NO_ATTRIBUTES
        found = (each.origin_of(envelope) for each in self._subscriptions)
        return RecordAttributes(
            origin=next((origin for origin in found if origin is not None), None)
        )

    async def _capacity(self, queue: str, spec: QueueSpec | None, count: int) -> int:
        """Return how many of ``count`` messages fit below the queue's ``max_depth``."""
        if spec is None or spec.max_depth is None or spec.drop_oldest:
            return count
        for wait in (FULL_RECHECK_SECONDS, None):
            capacity = spec.max_depth - (await self.stats(queue)).depth
            if capacity >= count or wait is None:
                return max(0, min(capacity, count))
            await asyncio.sleep(wait)
        raise AssertionError("unreachable: the last iteration returns")

    async def _trim(
        self, queue: str, limit: int, results: list[RecordMetadata | QueueError]
    ) -> None:
        """Drop the oldest dead letters beyond ``limit``; call the drop callbacks for each."""
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

    async def _ensure_retry_topic(self, queue: str) -> str:
        """Create the retry topic of a channel unless it exists; return its name."""
        retry = self._names.retry(queue)
        spec = self._specs.get(queue)
        if spec is None or not spec.passive:
            if not await self._cluster.count_partitions(queue):
                raise not_found(queue, "declare")
            await self._create(retry, TIERS, 1 if spec is None else spec.replicas)
        elif not await self._cluster.count_partitions(retry):
            raise ConfigError(
                f"delays and retries need the topic {retry!r}, which does not exist, and "
                "declare='passive' does not create it: start a service with declare='create' once, "
                f"or create the topic with {TIERS} partitions",
                backend=self.name,
                operation="declare",
                queue=queue,
            )
        if await self._cluster.partitions(retry, "declare") < TIERS:
            raise ConfigError(
                f"the topic {retry!r} has fewer than {TIERS} partitions: delete it and start a "
                "service with declare='create', which creates it again",
                backend=self.name,
                operation="declare",
                queue=queue,
            )
        return retry

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[KafkaSubscription]:
        """Open a subscription to a queue, or to a topic as a group, which is created if needed.

        Raises:
            QueueNotFound: The topic does not exist.
            ConfigError: The retry topic is missing or has too few partitions.
        """
        return self._subscription(spec)

    @asynccontextmanager
    async def _subscription(
        self, spec: SubscriptionSpec
    ) -> AsyncGenerator[KafkaSubscription, None]:
        with translate_errors("subscribe", spec.queue):
            if not await self._cluster.count_partitions(spec.queue):
                raise not_found(spec.queue, "subscribe")
            subscription = KafkaSubscription(
                self._parameters,
                self._cluster,
                self._publisher,
                spec,
                group=self._names.group(spec.queue, spec.group if spec.broadcast else None),
                retry=await self._ensure_retry_topic(spec.queue),
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
        """Check that a broker responds.

        Raises:
            BackendUnavailable: No broker responds in time.
        """
        await self._cluster.ping()

    async def aclose(self) -> None:
        """Close all subscriptions and disconnect; idempotent."""
        for subscription in list(self._subscriptions):
            await subscription.leave()
        await self._publisher.aclose()
        await self._reader.aclose()
        await self._cluster.aclose()

    # Log

    async def bounds(self, queue: str) -> dict[int, tuple[int, int]]:
        """Return the first offset of each partition and the offset after its last record."""
        first = await self._cluster.offsets(queue, driver.EARLIEST)
        after = await self._cluster.offsets(queue, driver.LATEST)
        return {partition: (first[partition], after[partition]) for partition in sorted(first)}

    async def read_range(
        self, queue: str, partition: int, first: int, last: int
    ) -> list[tuple[int, Envelope]]:
        """Return messages of a partition with their offsets, from ``first`` to before ``last``.

        Markers are left out; the removed messages that they hide are not.
        """
        found = await self._reader.read({Partition(queue, partition): (first, last)}, "read")
        messages: list[tuple[int, Envelope]] = []
        for item in found:
            envelope, attributes = codec.decode(item)
            if attributes.removed is None:
                messages.append((item.offset, envelope))
        return messages

    # Admin

    # DeliveryDetails

    def consumer_group(self, queue: str, group: str | None) -> str:
        """Return the id of the consumer group of a queue, or of a group of a topic."""
        return self._names.group(queue, group)

    def delivery_attributes(self, delivery: Delivery) -> dict[str, str | int]:
        """Return the partition and the offset of a delivery."""
        message = delivery.receipt
        if not isinstance(message, FetchedMessage):
            return {}
        return {
            "messaging.destination.partition.id": str(message.partition.partition),
            "messaging.kafka.offset": message.offset,
        }

    async def queues(self) -> list[str]:
        """Return the names of all topics except retry topics and Kafka's internal topics."""
        return sorted(name for name in await self._cluster.topics() if self._names.is_channel(name))

    async def stats(self, queue: str) -> QueueStats:
        """Return the statistics of a queue; those of a topic are summed over its groups."""
        return await self._admin.stats(queue)

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        """Return up to ``limit`` messages, oldest first, delayed ones last."""
        return await self._admin.peek(queue, limit)

    async def purge(self, queue: str) -> int:
        """Delete every message that is not in flight in this process; return how many."""
        return await self._admin.purge(queue)

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Remove one message for each id; return how many were found."""
        return await self._admin.remove(queue, ids)

    async def delete(self, queue: str) -> None:
        """Delete the topic with its messages, its retry topic and its consumer groups."""
        await self._admin.delete(queue)

    # DroppedLetterSource. Not DeadLetterSource: Kafka does not remove expired messages, so the
    # service receives them and dead-letters them itself.

    def on_dropped_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter dropped from a full dead-letter queue."""
        self._drop_callbacks.append(callback)


def from_settings(settings: Settings, clock: Clock) -> KafkaBackend:
    """Return the backend that the settings describe, not yet connected.

    Args:
        settings: Settings of type ``kafka``; ``url`` must be set.
        clock: Clock of the service.
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
    """Return whether a message needs neither the retry topic nor record attributes."""
    if envelope.not_before is not None:
        return False
    headers = envelope.headers
    return not headers or (GROUP not in headers and DEAD_REASON not in headers)
