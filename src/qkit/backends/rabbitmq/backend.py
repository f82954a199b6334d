"""RabbitMQ backend with classic queues, or with quorum queues replicated to several nodes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from aiormq import exceptions
from pamqp.commands import Basic

from qkit._internal.clock import Clock, SystemClock
from qkit._internal.tasks import run_to_completion
from qkit.backend import Capabilities, QueueSpec, SubscriptionSpec
from qkit.backends.capability_matrix import MATRIX
from qkit.backends.common.errors import queue_full
from qkit.backends.rabbitmq import codec
from qkit.backends.rabbitmq.active_lock import ActiveLocks
from qkit.backends.rabbitmq.admin import RabbitMQAdmin
from qkit.backends.rabbitmq.codec import DEFAULT_FRAME_BYTES, DEFAULT_PRIORITY
from qkit.backends.rabbitmq.connection import ConnectionParameters, ReconnectingConnection
from qkit.backends.rabbitmq.delay import MAX_DELAY_SECONDS, DelayCascade
from qkit.backends.rabbitmq.errors import BACKEND, translate_errors
from qkit.backends.rabbitmq.management import ManagementAPI
from qkit.backends.rabbitmq.ordered_subscription import OrderedSubscription
from qkit.backends.rabbitmq.publisher import OutgoingMessage, Publisher
from qkit.backends.rabbitmq.queue_reader import QueueReader
from qkit.backends.rabbitmq.subscription import RabbitSubscription
from qkit.backends.rabbitmq.topology import Topology, group_queue
from qkit.errors import (
    ConfigError,
    InvalidHeader,
    PartialSend,
    QueueError,
    QueueNotFound,
)
from qkit.message import GROUP, DeadLetter, Envelope, Sent
from qkit.settings.model import Settings

__all__ = ["RabbitMQBackend", "from_settings"]

#: First version whose quorum queues dead-letter expired messages without loss.
MIN_VERSION = (3, 10)


def from_settings(settings: Settings, clock: Clock) -> RabbitMQBackend:
    """Return the backend that the settings describe, not yet connected.

    Args:
        settings: Settings of type ``rabbitmq``; ``url`` must be set.
        clock: Clock of the service.
    """
    assert settings.url is not None
    letters = settings.dead_letter
    return RabbitMQBackend(
        settings.url.get_secret_value(),
        clock=clock,
        replicas=settings.replicas,
        timeout=settings.send_timeout,
        dead_letter_suffix=settings.dead_letter_name("") if letters.enabled else None,
        listed_suffix=settings.dead_letter_name(""),
        dead_letter_max_size=letters.max_size,
        tls_ca_file=settings.tls_ca_file,
        tls_cert_file=settings.tls_cert_file,
        tls_key_file=settings.tls_key_file,
        management_url=(
            None if settings.management_url is None else settings.management_url.get_secret_value()
        ),
    )


class RabbitMQBackend(RabbitMQAdmin):
    """Backend for RabbitMQ 3.10 or later.

    Args:
        url: AMQP URL of the broker.
        clock: Clock of the service; the system clock by default.
        replicas: Number of nodes that store each queue; 1 by default.
        quorum: Whether to use quorum queues; by default only if ``replicas`` is above 1.
        timeout: Seconds to wait for a response from the broker; 10 by default.
        dead_letter_suffix: Suffix of dead-letter queue names, ``.dlq`` by default; ``None`` if the
            service does not use dead letters.
        listed_suffix: Suffix of dead-letter queue names, even if the service does not use them;
            ``dead_letter_suffix`` by default, or ``.dlq`` if that is ``None``.
        dead_letter_max_size: Maximum number of messages in the dead-letter queue of a channel that
            disables dead letters; 10,000 by default. Only the broker dead-letters messages there.
        tls_ca_file: PEM file of trusted CA certificates; those of the system by default.
        tls_cert_file: PEM file of the client certificate; none by default.
        tls_key_file: PEM file of its private key; not needed if ``tls_cert_file`` contains the key.
        management_url: URL of the management plugin, which lists queues; none by default.

    >>> backend = RabbitMQBackend("amqp://guest:guest@localhost:5672/")
    >>> backend.capabilities.supports("priority")
    True
    """

    name: str = BACKEND
    peek_affects_queue: bool = True  # see PeekReporting
    capabilities: Capabilities = MATRIX["rabbitmq-classic"]

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        replicas: int = 1,
        quorum: bool | None = None,
        timeout: float = 10.0,
        dead_letter_suffix: str | None = ".dlq",
        listed_suffix: str | None = None,
        dead_letter_max_size: int = 10_000,
        tls_ca_file: str | Path | None = None,
        tls_cert_file: str | Path | None = None,
        tls_key_file: str | Path | None = None,
        management_url: str | None = None,
    ) -> None:
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._quorum = replicas > 1 if quorum is None else quorum
        if self._quorum:
            self.capabilities = MATRIX["rabbitmq-quorum"]
        parameters = ConnectionParameters(
            url,
            timeout=timeout,
            tls_ca_file=tls_ca_file,
            tls_cert_file=tls_cert_file,
            tls_key_file=tls_key_file,
        )
        self._management: ManagementAPI | None = None
        if management_url is not None:
            context = parameters.tls_context() if parameters.secure else None
            self._management = ManagementAPI(management_url, url, timeout=timeout, context=context)
        self._sending = ReconnectingConnection(parameters, "sending")
        self._consuming = ReconnectingConnection(parameters, "consuming")
        self._reading = ReconnectingConnection(parameters, "reading")
        self._active_locks = ActiveLocks(self._consuming)
        self._publisher = Publisher(self._sending)
        self._letters_suffix = listed_suffix or dead_letter_suffix or ".dlq"
        self._reader = QueueReader(
            self._reading, self._publisher, quorum=self._quorum, counts_reads=self._counts_reads
        )
        self._topology = Topology(
            quorum=self._quorum,
            replicas=replicas,
            dead_letter_suffix=dead_letter_suffix,
            dead_letter_max_size=dead_letter_max_size,
        )
        self._cascade = DelayCascade(self._topology)
        self._bound: set[str] = set()  # passively declared queues and topics bound to the cascade
        self._specs: dict[str, QueueSpec] = {}
        self._groups: dict[str, set[str]] = {}  # known groups of each topic
        self._drop_callbacks: list[Callable[[DeadLetter], None]] = []

    # Backend

    async def start(self) -> None:
        """Connect to the broker.

        Raises:
            BackendUnavailable: The broker does not respond in time.
            ConfigError: The broker is older than RabbitMQ 3.10.
        """
        with translate_errors("start"):
            connection = await self._consuming.connect()
            self._sending.enable()
            self._reading.enable()
            self._publisher.enable()
        version = str(connection.server_properties.get("version", ""))
        if _version(version) < MIN_VERSION:
            await self.aclose()
            raise ConfigError(
                f"RabbitMQ {version} is not supported: upgrade it to 3.10 or later",
                backend=self.name,
                operation="start",
            )

    async def declare(self, spec: QueueSpec) -> None:
        """Create the queue or topic unless it exists.

        A queue that exists with other arguments is used as it is.

        Raises:
            ConfigError: The existing queue does not support what ``spec`` requires, or ``spec``
                asks for more replicas than this backend has.
            QueueNotFound: The queue does not exist and ``passive`` is set.
        """
        known = self._specs.get(spec.name)
        if known is not None and known.broadcast is not spec.broadcast:
            kinds = ("a topic", "a queue") if known.broadcast else ("a queue", "a topic")
            raise ConfigError(
                f"{spec.name!r} was declared as {kinds[0]} and cannot be declared as {kinds[1]}: "
                "use another name",
                backend=self.name,
                operation="declare",
                queue=spec.name,
            )
        if spec.replicas > self._topology.replicas:
            raise ConfigError(
                f"the queue needs replicas={spec.replicas}, but this backend has "
                f"replicas={self._topology.replicas}: increase replicas in the settings",
                backend=self.name,
                operation="declare",
                queue=spec.name,
            )
        with translate_errors("declare", spec.name):
            if spec.passive:
                await self._check_exists(spec)
            else:
                await self._topology.declare(self._consuming, spec)
        limit = self._topology.max_length(spec.name) if spec.drop_oldest else None
        self._specs[spec.name] = spec if limit is None else replace(spec, max_depth=limit)

    async def _check_exists(self, spec: QueueSpec) -> None:
        async with self._consuming.control() as channel:
            if spec.broadcast:
                await channel.exchange_declare(spec.name, passive=True)
            else:
                await channel.queue_declare(spec.name, passive=True)

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Publish messages in order; return when the broker has confirmed all of them.

        Raises:
            PartialSend: Some messages were not accepted. The error holds the outcome of each.
        """
        spec = self._specs.get(queue)
        capacity = len(envelopes)
        if spec is not None and spec.max_depth is not None:
            capacity = await self._capacity(spec, len(envelopes))
        delayed = [item for item in envelopes if item.not_before is not None]
        for target in {_target(queue, spec, item) for item in delayed}:
            await self._prepare_delays(target, spec)
        now = self._clock.time()
        outgoing: list[OutgoingMessage] = []
        invalid: dict[int, QueueError] = {}
        for index, item in enumerate(envelopes[:capacity]):
            try:
                outgoing.append(self._outgoing(queue, spec, item, now))
            except InvalidHeader as error:  # the other messages are still sent
                invalid[index] = error
        errors = await self._publisher.publish(outgoing) if outgoing else []
        for index, failure in invalid.items():
            errors.insert(index, failure)
        if not any(errors) and capacity == len(envelopes):
            return [Sent(item.id) for item in envelopes]
        if any(isinstance(error, QueueNotFound) for error in errors):
            self._topology.invalidate()
            self._invalidate_delays()
        results: list[Sent | QueueError] = [
            error or Sent(item.id) for item, error in zip(envelopes, errors, strict=False)
        ]
        results += [queue_full(BACKEND, queue, item.id) for item in envelopes[capacity:]]
        raise PartialSend.of(results, backend=self.name, queue=queue)

    def _outgoing(
        self, queue: str, spec: QueueSpec | None, envelope: Envelope, now: float
    ) -> OutgoingMessage:
        """Return a message with its exchange and routing key.

        It goes to its queue, its topic or one group of the topic. A delayed message goes to the
        delay cascade first.
        """
        topic = spec is not None and spec.broadcast
        target = _target(queue, spec, envelope)
        if target != queue:
            headers = dict(envelope.headers)
            del headers[GROUP]
            envelope, topic = replace(envelope, headers=headers), False
        delay = 0.0 if envelope.not_before is None else envelope.not_before - now
        # A delayed message has no AMQP expiration, which would make it leave the cascade early.
        properties = codec.encode(
            envelope,
            now=now,
            priority=None if self._quorum else DEFAULT_PRIORITY,
            expire=delay <= 0 and target in self._topology.expiring,
            due=envelope.not_before if delay > MAX_DELAY_SECONDS else None,
            frame=self._sending.frame if envelope.headers else DEFAULT_FRAME_BYTES,
        )
        if delay > 0:
            exchange, key = self._cascade.route(target, delay)
            return OutgoingMessage(target, exchange, key, properties, envelope.body)
        exchange = target if topic else ""
        return OutgoingMessage(
            target, exchange, target, properties, envelope.body, mandatory=not topic
        )

    async def _check_delays(self, queue: str, spec: QueueSpec | None) -> None:
        """Check that the delay cascade exists; declare it if it is missing and may be declared.

        Raises:
            ConfigError: The spec is passive and the cascade is missing or may not be bound.
        """
        if spec is None or not spec.passive:
            try:
                with translate_errors("subscribe", queue):
                    async with self._consuming.control() as channel:
                        await self._cascade.check(channel)
                return
            except QueueNotFound:
                pass
        await self._prepare_delays(queue, spec)

    async def _prepare_delays(self, queue: str, spec: QueueSpec | None) -> None:
        """Declare the delay cascade; if ``spec`` is passive, check it and bind the target to it.

        Raises:
            ConfigError: The spec is passive and the cascade is missing or may not be bound.
        """
        passive = spec is not None and spec.passive
        if self._cascade.ready and (not passive or queue in self._bound):
            return
        with translate_errors("publish", queue):
            async with self._consuming.control() as channel:
                if not passive:
                    await self._cascade.declare(channel)
                    return
                try:
                    await self._cascade.check(channel)
                    # The queue may have been created by another program, without this binding.
                    topic = spec is not None and spec.broadcast and queue == spec.name
                    await self._topology.bind_delays(channel, queue, topic=topic)
                except (
                    exceptions.ChannelNotFoundEntity,
                    exceptions.ChannelAccessRefused,
                ) as error:
                    raise _delays_unavailable(queue, error) from error
                self._cascade.ready = True
                self._bound.add(queue)

    async def _republish(
        self, queue: str, envelope: Envelope, properties: Basic.Properties, delay: float
    ) -> None:
        """Publish a copy of a message, with a delay in seconds; return when it is confirmed."""
        exchange, key = "", queue
        if delay > 0:
            await self._prepare_delays(queue, self._specs.get(queue.partition(":")[0]))
            exchange, key = self._cascade.route(queue, delay)
        outgoing = OutgoingMessage(queue, exchange, key, properties, envelope.body)
        (error,) = await self._publisher.publish([outgoing])
        if error is not None:
            if isinstance(error, QueueNotFound):
                self._invalidate_delays()
            raise error

    def _invalidate_delays(self) -> None:
        """Make the next use check the delay cascade and its bindings again."""
        self._cascade.ready = False
        self._bound.clear()

    async def _capacity(self, spec: QueueSpec, count: int) -> int:
        """Return how many of ``count`` messages fit below the queue's ``max_depth``.

        In a full dead-letter queue, make space: drop the oldest dead letters and call the drop
        callbacks for each.
        """
        assert spec.max_depth is not None
        if spec.broadcast:
            return count
        depth = (await self._count(spec.name, "publish")).depth
        free = max(0, spec.max_depth - depth)
        if not spec.drop_oldest:
            return min(count, free)
        for envelope in await self._take_oldest(spec.name, count - free):
            letter = DeadLetter.from_envelope(envelope, channel=spec.name)
            for callback in self._drop_callbacks:
                callback(letter)
        return count

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[RabbitSubscription]:
        """Open a subscription to a queue, or to a topic as a group, which is created if needed.

        Raises:
            QueueNotFound: The queue or topic does not exist.
            ConfigError: Retries need the delay cascade, which is missing or may not be bound; or
                the subscription is ordered and the user may not create its lock.
        """
        return self._subscription(spec)

    @asynccontextmanager
    async def _subscription(
        self, spec: SubscriptionSpec
    ) -> AsyncGenerator[RabbitSubscription, None]:
        declared = self._specs.get(spec.queue)
        with translate_errors("subscribe", spec.queue):
            queue = spec.queue
            if spec.broadcast:
                queue = await self._join(declared or QueueSpec(name=queue, broadcast=True), spec)
            if spec.needs_delay:
                await self._check_delays(queue, declared)
            subscription = self._new_subscription(spec, queue)
            try:
                await subscription.open()
            except BaseException:
                await subscription.leave()
                raise
        try:
            yield subscription
        finally:
            await run_to_completion(subscription.leave())  # returns messages in flight to the queue

    def _new_subscription(self, spec: SubscriptionSpec, queue: str) -> RabbitSubscription:
        if spec.ordered:
            return OrderedSubscription(
                self._consuming,
                spec,
                queue,
                clock=self._clock,
                republish=self._republish,
                copies=self._quorum,
                locks=self._active_locks,
            )
        return RabbitSubscription(
            self._consuming,
            spec,
            queue,
            clock=self._clock,
            republish=self._republish,
            copies=self._quorum,
        )

    async def _join(self, topic: QueueSpec, spec: SubscriptionSpec) -> str:
        """Declare the queue of a topic's group; return its name."""
        queue = group_queue(topic.name, spec.group)
        async with self._consuming.control() as channel:
            if topic.passive:
                await channel.queue_declare(queue, passive=True)
            else:
                await channel.exchange_declare(topic.name, passive=True)
        if not topic.passive:
            await self._topology.declare_group(self._consuming, topic, spec.group)
        self._groups.setdefault(topic.name, set()).add(spec.group)
        return queue

    async def ping(self) -> None:
        """Check that the broker responds.

        Raises:
            BackendUnavailable: The broker does not respond in time.
        """
        self._sending.ping_soon()
        self._reading.ping_soon()
        await self._consuming.ping()

    async def aclose(self) -> None:
        """Close the channels, then the connections; idempotent."""
        await self._publisher.aclose()
        await self._sending.aclose()
        await self._reading.aclose()
        await self._consuming.aclose()

    # DroppedLetterSource. Not DeadLetterSource: RabbitMQ does not report the messages that it
    # dead-letters, and the service dead-letters the expired messages that it receives itself.

    def on_dropped_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter that this process drops from a full queue."""
        self._drop_callbacks.append(callback)


def _version(text: str) -> tuple[int, ...]:
    parts = text.split(".")
    return tuple(int(part) for part in parts[:2] if part.isdigit())


def _target(queue: str, spec: QueueSpec | None, envelope: Envelope) -> str:
    """Return the destination of a message: its queue, its topic, or the queue of one group."""
    group = envelope.headers.get(GROUP) if spec is not None and spec.broadcast else None
    return queue if group is None else group_queue(queue, group)


def _delays_unavailable(queue: str, error: Exception) -> ConfigError:
    return ConfigError(
        "delays and retries need qkit.delay, which does not exist in this vhost or which the user "
        "may not bind, and declare='passive' does not create it: start a service with "
        "declare='create' once, or set retry.mode='inline' and send messages without a delay",
        backend=BACKEND,
        operation="delay",
        queue=queue,
        cause=error,
    )
