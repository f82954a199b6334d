"""The RabbitMQ backend: classic queues, or quorum queues with copies on several nodes."""

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
from qkit.backends.rabbitmq.admin import RabbitMQAdmin
from qkit.backends.rabbitmq.codec import FRAME, USUAL_PRIORITY
from qkit.backends.rabbitmq.connection import ConnectionParameters, ReconnectingConnection
from qkit.backends.rabbitmq.delay import LONGEST, DelayCascade
from qkit.backends.rabbitmq.errors import BACKEND, translate_errors
from qkit.backends.rabbitmq.publisher import OutgoingMessage, Publisher
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

#: The first version in which messages of a quorum queue expire without being lost.
MIN_VERSION = (3, 10)


def from_settings(settings: Settings, clock: Clock) -> RabbitMQBackend:
    """Build the backend that the settings describe; it is not started.

    Args:
        settings: Validated settings of type ``rabbitmq``.
        clock: Source of time.
    """
    assert settings.url is not None
    letters = settings.dead_letter
    return RabbitMQBackend(
        settings.url.get_secret_value(),
        clock=clock,
        replicas=settings.replicas,
        timeout=settings.send_timeout,
        dead_letter_suffix=settings.dead_letter_name("") if letters.enabled else None,
        dead_letter_max_size=letters.max_size,
        tls_ca_file=settings.tls_ca_file,
        tls_cert_file=settings.tls_cert_file,
        tls_key_file=settings.tls_key_file,
    )


class RabbitMQBackend(RabbitMQAdmin):
    """The whole boundary on RabbitMQ 3.10 or later.

    With ``replicas`` above 1 every queue is a quorum queue on so many nodes. ``quorum`` asks for
    one also with a single copy. ``dead_letter_suffix`` and ``dead_letter_max_size`` describe the
    dead-letter queues that the settings give to all queues; a suffix of ``None`` means none.

    >>> backend = RabbitMQBackend("amqp://guest:guest@localhost:5672/")
    >>> backend.capabilities.supports("priority")
    True
    """

    name: str = BACKEND
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
        dead_letter_max_size: int = 10_000,
        tls_ca_file: str | Path | None = None,
        tls_cert_file: str | Path | None = None,
        tls_key_file: str | Path | None = None,
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
        self._sending = ReconnectingConnection(parameters, "sending")
        self._consuming = ReconnectingConnection(parameters, "consuming")
        self._publisher = Publisher(self._sending)
        self._topology = Topology(
            quorum=self._quorum,
            replicas=replicas,
            dead_letter_suffix=dead_letter_suffix,
            dead_letter_max_size=dead_letter_max_size,
        )
        self._cascade = DelayCascade(self._topology)
        self._bound: set[str] = set()  # what others made, where delayed messages now come out
        self._specs: dict[str, QueueSpec] = {}
        self._groups: dict[str, set[str]] = {}  # of topics, as far as this service knows them
        self._drop_callbacks: list[Callable[[DeadLetter], None]] = []

    # Backend

    async def start(self) -> None:
        """Connect, or raise ``BackendUnavailable``; ``ConfigError`` if the broker is too old."""
        with translate_errors("start"):
            connection = await self._consuming.connect()
            self._sending.enable()
            self._publisher.enable()
        version = str(connection.server_properties.get("version", ""))
        if _version(version) < MIN_VERSION:
            await self.aclose()
            raise ConfigError(
                f"qkit needs RabbitMQ 3.10 or later and this is {version}",
                backend=self.name,
                operation="start",
            )

    async def declare(self, spec: QueueSpec) -> None:
        """Make sure the queue exists; one that exists with other arguments is used as it is.

        Raises ``ConfigError`` when it exists and cannot do what the spec asks for, and with
        ``passive`` ``QueueNotFound`` when it does not exist.
        """
        known = self._specs.get(spec.name)
        if known is not None and known.broadcast is not spec.broadcast:
            kinds = ("a topic", "a queue") if known.broadcast else ("a queue", "a topic")
            raise ConfigError(
                f"{spec.name!r} was declared as {kinds[0]} and now as {kinds[1]}",
                backend=self.name,
                operation="declare",
                queue=spec.name,
            )
        if spec.replicas > self._topology.replicas:
            raise ConfigError(
                f"{spec.replicas} copies were asked for and this backend keeps "
                f"{self._topology.replicas}: set replicas in the settings",
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
        """Hand messages over in order; what was not accepted is in ``PartialSend``."""
        spec = self._specs.get(queue)
        fitting = len(envelopes)
        if spec is not None and spec.max_depth is not None:
            fitting = await self._room(spec, len(envelopes))
        delayed = [item for item in envelopes if item.not_before is not None]
        for target in {_target(queue, spec, item) for item in delayed}:
            await self._prepare_delays(target, spec)
        now = self._clock.time()
        outgoing: list[OutgoingMessage] = []
        refused: dict[int, QueueError] = {}
        for at, item in enumerate(envelopes[:fitting]):
            try:
                outgoing.append(self._outgoing(queue, spec, item, now))
            except InvalidHeader as invalid:  # the others have nothing to do with it
                refused[at] = invalid
        errors = await self._publisher.publish(outgoing) if outgoing else []
        for at, error in refused.items():
            errors.insert(at, error)
        if not any(errors) and fitting == len(envelopes):
            return [Sent(item.id) for item in envelopes]
        if any(isinstance(error, QueueNotFound) for error in errors):
            self._topology.forget()
            self._forget_delays()
        results: list[Sent | QueueError] = [
            error or Sent(item.id) for item, error in zip(envelopes, errors, strict=False)
        ]
        results += [queue_full(BACKEND, queue, item.id) for item in envelopes[fitting:]]
        raise PartialSend.of(results, backend=self.name, queue=queue)

    def _outgoing(
        self, queue: str, spec: QueueSpec | None, envelope: Envelope, now: float
    ) -> OutgoingMessage:
        """Where a message goes: to its queue, to a topic or one of its groups, or to wait first."""
        topic = spec is not None and spec.broadcast
        target = _target(queue, spec, envelope)
        if target != queue:
            headers = dict(envelope.headers)
            del headers[GROUP]
            envelope, topic = replace(envelope, headers=headers), False
        delay = 0.0 if envelope.not_before is None else envelope.not_before - now
        # Not in the cascade: a message that expires there would leave it early.
        facts = codec.encode(
            envelope,
            now=now,
            priority=None if self._quorum else USUAL_PRIORITY,
            expire=delay <= 0 and target in self._topology.expiring,
            due=envelope.not_before if delay > LONGEST else None,
            frame=self._sending.frame if envelope.headers else FRAME,
        )
        if delay > 0:
            exchange, key = self._cascade.route(target, delay)
            return OutgoingMessage(target, exchange, key, facts, envelope.body)
        exchange = target if topic else ""
        return OutgoingMessage(target, exchange, target, facts, envelope.body, mandatory=not topic)

    async def _check_delays(self, queue: str, spec: QueueSpec | None) -> None:
        """Raise ``ConfigError`` if retries could not wait on this broker."""
        if spec is None or not spec.passive:
            try:
                with translate_errors("subscribe", queue):
                    async with self._consuming.control() as channel:
                        await self._cascade.check(channel)
                return
            except QueueNotFound:
                pass  # it is declared now, or the reason why not is raised
        await self._prepare_delays(queue, spec)

    async def _prepare_delays(self, queue: str, spec: QueueSpec | None) -> None:
        """The cascade, and that what leaves it finds its queue or topic."""
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
                    # Somebody else made the queue, perhaps for programs that know no delays.
                    topic = spec is not None and spec.broadcast and queue == spec.name
                    await self._topology.bind_delays(channel, queue, topic=topic)
                except (
                    exceptions.ChannelNotFoundEntity,
                    exceptions.ChannelAccessRefused,
                ) as error:
                    raise _no_delays(queue, error) from error
                self._cascade.ready = True
                self._bound.add(queue)

    async def _republish(
        self, queue: str, envelope: Envelope, facts: Basic.Properties, delay: float
    ) -> None:
        """Publish a copy of a message to the queue it came from; return once it is confirmed."""
        exchange, key = "", queue
        if delay > 0:
            await self._prepare_delays(queue, self._specs.get(queue.partition(":")[0]))
            exchange, key = self._cascade.route(queue, delay)
        outgoing = OutgoingMessage(queue, exchange, key, facts, envelope.body)
        (error,) = await self._publisher.publish([outgoing])
        if error is not None:
            if isinstance(error, QueueNotFound):
                self._forget_delays()
            raise error

    def _forget_delays(self) -> None:
        """Check the cascade and its bindings again: a part of them is gone."""
        self._cascade.ready = False
        self._bound.clear()

    async def _room(self, spec: QueueSpec, wanted: int) -> int:
        """How many messages fit; in the dead letters the oldest make room, and are told of."""
        assert spec.max_depth is not None
        if spec.broadcast:
            return wanted
        depth = (await self._count(spec.name, "publish")).depth
        free = max(0, spec.max_depth - depth)
        if not spec.drop_oldest:
            return min(wanted, free)
        for envelope in await self._take_oldest(spec.name, wanted - free):
            letter = DeadLetter.from_envelope(envelope, channel=spec.name)
            for callback in self._drop_callbacks:
                callback(letter)
        return wanted

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[RabbitSubscription]:
        """Consume a queue, or a topic's group, which is declared by this."""
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
            subscription = RabbitSubscription(
                self._consuming,
                spec,
                queue,
                clock=self._clock,
                republish=self._republish,
                copies=self._quorum,
            )
            try:
                await subscription.open()
            except BaseException:
                await subscription.leave()
                raise
        try:
            yield subscription
        finally:
            await run_to_completion(subscription.leave())  # what is held must go back

    async def _join(self, topic: QueueSpec, spec: SubscriptionSpec) -> str:
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
        """Raise ``BackendUnavailable`` unless the broker answers."""
        self._sending.ping_soon()
        await self._consuming.ping()

    async def aclose(self) -> None:
        """Close channels, then connections; idempotent."""
        await self._publisher.aclose()
        await self._sending.aclose()
        await self._consuming.aclose()

    # DroppedLetterSource; not DeadLetterSource: an expired message is delivered, and the service
    # writes its dead letter. What the broker itself takes out of a queue is reported to no one.

    def on_dropped_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter that this service pushed out by another."""
        self._drop_callbacks.append(callback)


def _version(text: str) -> tuple[int, ...]:
    parts = text.split(".")
    return tuple(int(part) for part in parts[:2] if part.isdigit())


def _target(queue: str, spec: QueueSpec | None, envelope: Envelope) -> str:
    """Where a message is meant for: its queue, its topic, or one group of that."""
    group = envelope.headers.get(GROUP) if spec is not None and spec.broadcast else None
    return queue if group is None else group_queue(queue, group)


def _no_delays(queue: str, error: Exception) -> ConfigError:
    return ConfigError(
        "delays and retries need qkit.delay, which this vhost does not have, or to which the queue "
        "may not be bound, and declare='passive' creates nothing: start a service with "
        "declare='create' once, or set retry.mode='inline' and send without a delay",
        backend=BACKEND,
        operation="delay",
        queue=queue,
        cause=error,
    )
