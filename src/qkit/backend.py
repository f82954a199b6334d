"""The boundary between qkit and the brokers: ``Backend``, ``Subscription`` and optional protocols.

A backend moves envelopes. Handlers, retries and dead-letter policy are implemented once, above
this boundary. The boundary is small so that a backend is easy to write and hard to get wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Literal, Protocol, TypeVar, get_args, runtime_checkable

from qkit.errors import MessageNotFound, QueueError
from qkit.message import DeadLetter, Envelope, Sent

__all__ = [
    "AckMany",
    "Admin",
    "Backend",
    "Balance",
    "Capabilities",
    "ConsumerBalancing",
    "DeadLetterSource",
    "Delivery",
    "DeliveryDetails",
    "DroppedLetterSource",
    "DurabilityReporting",
    "ExtendMany",
    "Log",
    "LossReporting",
    "PeekReporting",
    "PublishGroups",
    "PublishNow",
    "QueueSpec",
    "QueueStats",
    "SettlementReporting",
    "StandbyReporting",
    "Subscription",
    "SubscriptionSpec",
    "Support",
    "UnheardReporting",
]

T = TypeVar("T")

Balance = Literal["round_robin", "least_busy", "random"]
"""Which waiting consumer gets a message: the longest waiting, the one with the fewest deliveries
in flight, or a random one."""

BALANCES: frozenset[Balance] = frozenset(get_args(Balance))


class Support(StrEnum):
    """How a backend provides a feature. Only ``UNSUPPORTED`` is false.

    Attributes:
        NATIVE: The broker provides the feature.
        EMULATED: qkit provides all or part of it.
        UNSUPPORTED: The feature is not available.

    Example:
        >>> bool(Support.EMULATED), bool(Support.UNSUPPORTED)
        (True, False)
    """

    NATIVE = "native"
    EMULATED = "emulated"
    UNSUPPORTED = "unsupported"

    def __bool__(self) -> bool:
        """Return whether the feature is available."""
        return self is not Support.UNSUPPORTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Features of a backend.

    A service that needs an unsupported feature fails at start-up, not at run time. Every feature
    except ``queues`` is ``Support.UNSUPPORTED`` by default.

    Attributes:
        queues: Each message goes to one consumer; ``Support.NATIVE`` by default. Without it every
            channel is a topic, even if it was not declared as one, and ``send`` acts as
            ``publish``. Dead letters are still stored in queues.
        durable: Confirmed messages survive a restart.
        redelivery: A message that its consumer did not settle is delivered again.
        counts_crashes: A delivery counts as an attempt even if the consumer crashes.
        lease: A delivery has a lease that expires and can be extended.
        priority: Messages with a higher priority are delivered first.
        delay: A message can be delivered after a delay.
        ttl: A message can expire.
        topics: Every group of a channel can receive its own copy of each message.
        key_order: An ordered consumer handles messages with the same key one after the other, in
            the order in which they were sent, within one service.
        key_lock: The same holds across all processes that consume the queue with ``ordered``.
        dead_letters: Messages that failed for good are stored with their error.
        prefetch: The number of unsettled deliveries of a consumer is limited.
        depth: The number of ready messages can be read.
        peek: Messages can be read without consuming them.
        purge: All messages of a queue can be deleted.
        delete: A queue can be deleted.
        position: A send returns how many messages are ahead.
        replicas: The broker can store several copies.
        batch: A handler can receive several messages in one call.

    Example:
        >>> capabilities = Capabilities(priority=Support.NATIVE)
        >>> capabilities.priority
        <Support.NATIVE: 'native'>
        >>> bool(capabilities.delay)
        False
    """

    queues: Support = Support.NATIVE
    durable: Support = Support.UNSUPPORTED
    redelivery: Support = Support.UNSUPPORTED
    counts_crashes: Support = Support.UNSUPPORTED
    lease: Support = Support.UNSUPPORTED
    priority: Support = Support.UNSUPPORTED
    delay: Support = Support.UNSUPPORTED
    ttl: Support = Support.UNSUPPORTED
    topics: Support = Support.UNSUPPORTED
    key_order: Support = Support.UNSUPPORTED
    key_lock: Support = Support.UNSUPPORTED
    dead_letters: Support = Support.UNSUPPORTED
    prefetch: Support = Support.UNSUPPORTED
    depth: Support = Support.UNSUPPORTED
    peek: Support = Support.UNSUPPORTED
    purge: Support = Support.UNSUPPORTED
    delete: Support = Support.UNSUPPORTED
    position: Support = Support.UNSUPPORTED
    replicas: Support = Support.UNSUPPORTED
    batch: Support = Support.UNSUPPORTED

    def supports(self, feature: str) -> bool:
        """Return whether a feature is native or emulated.

        Args:
            feature: Name of an attribute of this class.

        Returns:
            True unless the feature is unsupported.

        Example:
            >>> Capabilities(priority=Support.NATIVE).supports("priority")
            True
        """
        return bool(getattr(self, feature))

    def as_dict(self) -> dict[str, str]:
        """Return the support for each feature, by feature name.

        Example:
            >>> Capabilities(priority=Support.NATIVE).as_dict()["priority"]
            'native'
        """
        return {item.name: str(getattr(self, item.name)) for item in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSpec:
    """Declaration of a queue or topic.

    A declaration makes sure that the queue exists. Options that are ``None`` keep their value; the
    others are set, and the last declaration wins. A service sets ``max_deliveries``,
    ``ack_deadline`` and ``balance`` only for channels that it consumes, ``max_depth`` and
    ``max_priority`` only if the channel sets them. If no declaration sets ``max_deliveries``,
    deliveries are not limited; other options have the backend's defaults.

    Attributes:
        name: Name on the broker.
        broadcast: Declare a topic: each message goes to every group.
        dead_letter: Dead-letter queue of this queue, ``None`` for none. The service declares that
            queue too, with ``drop_oldest`` and its own ``max_depth``. If ``consumed`` is false,
            the value applies only if no consumer has set one.
        max_priority: Highest priority that a send may have.
        max_depth: Number of messages that the queue holds before a send raises ``QueueFull``.
        drop_oldest: Drop the oldest message when the queue is full, as dead-letter queues do.
        max_deliveries: Limit that a ``DeadLetterSource`` applies when a lease expires. Other
            backends ignore it: the service rejects messages that were delivered too often. Failed
            handler calls are counted above the boundary.
        ack_deadline: Length of a lease, in seconds.
        balance: Which waiting consumer gets a message. Values other than ``round_robin`` are
            passed only to a backend with ``ConsumerBalancing``.
        replicas: Number of copies that the broker must store.
        passive: Create nothing; raise ``QueueNotFound`` if the queue does not exist.
        consumed: Whether the declaring service also consumes the queue.
        again: The service has declared the queue before and only makes sure that it still exists.
            An existing queue is not changed, because another service may have declared it since.

    Example:
        >>> spec = QueueSpec(name="orders", dead_letter="orders.dlq", max_depth=1_000)
        >>> spec.replicas
        1
    """

    name: str
    broadcast: bool = False
    dead_letter: str | None = None
    max_priority: int | None = None
    max_depth: int | None = None
    drop_oldest: bool = False
    max_deliveries: int | None = None
    ack_deadline: float | None = None
    balance: Balance | None = None
    replicas: int = 1
    passive: bool = False
    consumed: bool = False
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionSpec:
    """Options of a subscription to a queue, or to a group's copy of a topic.

    Attributes:
        queue: Name of the queue or topic on the broker.
        group: Name of the consumer group.
        consumer: Name of the consumer.
        prefetch: Maximum number of unsettled deliveries.
        broadcast: Whether ``queue`` is a topic.
        ack_deadline: Length of a lease in seconds, ``None`` for the queue's own.
        needs_delay: Whether failed messages are released with a delay. If delays require something
            on the broker that is missing and that the backend may not create, ``subscribe`` raises
            ``ConfigError`` and the service does not start.
        ordered: Whether messages with the same key must be handled in order. A backend with
            ``key_lock`` delivers the messages of a key, in order, to one ordered subscription at a
            time: while a subscription holds a message of a key, no other receives that key.
            ``release`` without a delay puts a message back to its old place, at the latest when
            the subscription ends; the key is free once the subscription holds none of its messages.

    Example:
        >>> spec = SubscriptionSpec(queue="orders", group="billing", consumer="b1", prefetch=10)
        >>> spec.broadcast
        False
    """

    queue: str
    group: str
    consumer: str
    prefetch: int
    broadcast: bool = False
    ack_deadline: float | None = None
    needs_delay: bool = False
    ordered: bool = False


class Delivery:
    """One delivery of a message: its envelope, and the backend's receipt for settling it.

    ``Subscription.release`` stores ``envelope.headers`` with the message, so that the next
    delivery includes details of the failure.

    Args:
        envelope: The message.
        queue: Name of the queue on the broker.
        receipt: Value that identifies the delivery to its backend; ``None`` once it is settled.
        lease: Seconds until the lease expires, ``None`` if the backend has no leases.

    Example:
        >>> Delivery(Envelope("0190", b"{}", attempt=2), "orders", receipt=7, lease=30.0)
        <Delivery 0190 of orders, attempt 2>
    """

    __slots__ = ("envelope", "lease", "queue", "receipt")

    def __init__(
        self, envelope: Envelope, queue: str, receipt: object, lease: float | None = None
    ) -> None:
        self.envelope: Envelope = envelope
        self.queue: str = queue
        self.receipt: object = receipt
        self.lease: float | None = lease

    def receipt_of(self, kind: type[T], backend: str, operation: str) -> T:
        """Return the receipt as a value of a given type.

        Args:
            kind: Type of the backend's receipts.
            backend: Name of the backend, for the error.
            operation: Name of the operation, for the error.

        Returns:
            The receipt.

        Raises:
            MessageNotFound: The receipt has another type, so the delivery is already settled.

        Example:
            >>> delivery = Delivery(Envelope("0190", b"{}"), "orders", receipt=7)
            >>> delivery.receipt_of(int, "native", "ack")
            7
        """
        receipt = self.receipt
        if not isinstance(receipt, kind):
            raise self.settled_before(backend, operation)
        return receipt

    def settled_before(self, backend: str, operation: str) -> MessageNotFound:
        """Return the error for settling this delivery a second time.

        Args:
            backend: Name of the backend.
            operation: Name of the operation.

        Returns:
            The error, to be raised by the caller.

        Example:
            >>> delivery = Delivery(Envelope("0190", b"{}"), "orders", receipt=None)
            >>> delivery.settled_before("native", "ack").message
            'this delivery is already settled: settle each delivery once'
        """
        return MessageNotFound(
            "this delivery is already settled: settle each delivery once",
            backend=backend,
            operation=operation,
            queue=self.queue,
            message_id=self.envelope.id,
        )

    def __repr__(self) -> str:
        return f"<Delivery {self.envelope.id} of {self.queue}, attempt {self.envelope.attempt}>"


class Subscription(Protocol):
    """An open subscription: it receives the messages of a queue and settles them.

    Settling a delivery twice, or after its lease has expired, raises an error and never affects
    the lease of another consumer. When the subscription breaks, ``receive`` raises
    ``SubscriptionLost``, and the consumer opens a new one with backoff.

    Example:
        >>> import asyncio
        >>> from qkit.backends.native import NativeBackend
        >>> async def main() -> None:
        ...     backend = NativeBackend()
        ...     await backend.start()
        ...     await backend.declare(QueueSpec(name="orders"))
        ...     await backend.publish("orders", [Envelope("0190", b"{}")])
        ...     spec = SubscriptionSpec(queue="orders", group="g", consumer="c", prefetch=10)
        ...     async with backend.subscribe(spec) as subscription:
        ...         for delivery in await subscription.receive(limit=10):
        ...             print(delivery)
        ...             await subscription.ack(delivery)
        ...     await backend.aclose()
        >>> asyncio.run(main())
        <Delivery 0190 of orders, attempt 1>
    """

    async def receive(self, limit: int) -> list[Delivery]:
        """Wait for messages.

        The call can be cancelled at any time without losing a message.

        Args:
            limit: Maximum number of deliveries to return.

        Returns:
            At least one delivery; an empty list after ``stop`` or a periodic wake-up.

        Raises:
            SubscriptionLost: The subscription broke.

        Example:
            >>> async def receive(subscription: Subscription) -> list[str]:
            ...     return [delivery.envelope.id for delivery in await subscription.receive(10)]
        """
        ...

    async def ack(self, delivery: Delivery) -> None:
        """Remove a message that was handled.

        Args:
            delivery: A delivery of this subscription.

        Raises:
            AckDeadlineExceeded: The lease has expired.
            MessageNotFound: The delivery is already settled.

        Example:
            >>> async def ack_all(subscription: Subscription) -> None:
            ...     for delivery in await subscription.receive(10):
            ...         await subscription.ack(delivery)
        """
        ...

    async def release(
        self, delivery: Delivery, delay: float, *, count_attempt: bool = True
    ) -> None:
        """Return a message to the queue, to be delivered again.

        Args:
            delivery: A delivery of this subscription.
            delay: Seconds until the message may be delivered.
            count_attempt: Whether this delivery counts as an attempt. If not, the next delivery
                has the same attempt number.

        Raises:
            AckDeadlineExceeded: The lease has expired.
            MessageNotFound: The delivery is already settled.

        Example:
            >>> async def retry_in_a_minute(subscription: Subscription, failed: Delivery) -> None:
            ...     failed.envelope.headers["failed-on"] = "worker-1"
            ...     await subscription.release(failed, delay=60)
        """
        ...

    async def extend(self, delivery: Delivery, seconds: float) -> None:
        """Set the lease to end ``seconds`` from now.

        Args:
            delivery: A delivery of this subscription.
            seconds: New length of the lease.

        Raises:
            AckDeadlineExceeded: The lease has expired.
            Unsupported: The backend has no leases.

        Example:
            >>> async def extend_all(subscription: Subscription, held: list[Delivery]) -> None:
            ...     for delivery in held:
            ...         await subscription.extend(delivery, seconds=30)
        """
        ...

    async def stop(self) -> None:
        """Stop fetching. Deliveries that are in flight can still be settled.

        Example:
            >>> async def drain(subscription: Subscription, held: list[Delivery]) -> None:
            ...     await subscription.stop()
            ...     for delivery in held:
            ...         await subscription.ack(delivery)
        """
        ...


@runtime_checkable
class AckMany(Protocol):
    """A subscription that can acknowledge several deliveries in one call.

    Implement it if an ack is a round trip: handlers continue while their acks are in progress.
    Otherwise ``ack`` is called for each delivery.

    Example:
        >>> class BatchSubscription:
        ...     async def ack_many(self, deliveries):
        ...         return [None for _ in deliveries]
        >>> isinstance(BatchSubscription(), AckMany)
        True
    """

    async def ack_many(self, deliveries: Sequence[Delivery]) -> list[QueueError | None]:
        """Acknowledge several deliveries.

        Args:
            deliveries: Deliveries of this subscription.

        Returns:
            For each delivery, in order, ``None`` or the error.

        Example:
            >>> async def failed_acks(subscription: AckMany, held: list[Delivery]) -> int:
            ...     return sum(error is not None for error in await subscription.ack_many(held))
        """
        ...


@runtime_checkable
class ConsumerBalancing(Protocol):
    """A backend that chooses among waiting consumers by ``QueueSpec.balance``.

    With any other backend the broker decides, usually round-robin.

    Example:
        >>> from qkit.backends.native import NativeBackend
        >>> isinstance(NativeBackend(), ConsumerBalancing)
        True
    """

    @property
    def balances(self) -> frozenset[Balance]:
        """Supported values of ``QueueSpec.balance``.

        Example:
            >>> from qkit.backends.native import NativeBackend
            >>> sorted(NativeBackend().balances)
            ['least_busy', 'random', 'round_robin']
        """
        ...


@runtime_checkable
class ExtendMany(Protocol):
    """A subscription that can extend several leases in one call.

    Implement it if an extension is a round trip. Otherwise ``extend`` is called for each delivery.

    Example:
        >>> class BatchSubscription:
        ...     async def extend_many(self, deliveries, seconds):
        ...         return [None for _ in deliveries]
        >>> isinstance(BatchSubscription(), ExtendMany)
        True
    """

    async def extend_many(
        self, deliveries: Sequence[Delivery], seconds: float
    ) -> list[QueueError | None]:
        """Set several leases to end ``seconds`` from now.

        Args:
            deliveries: Deliveries of this subscription.
            seconds: New length of the leases.

        Returns:
            For each delivery, in order, ``None`` or the error of a lost lease.

        Example:
            >>> async def lost_leases(subscription: ExtendMany, held: list[Delivery]) -> int:
            ...     results = await subscription.extend_many(held, seconds=30)
            ...     return sum(error is not None for error in results)
        """
        ...


@runtime_checkable
class LossReporting(Protocol):
    """A subscription that reports deliveries that it has lost.

    Implement it if a loss is not visible as the error of a call: a partition was assigned to
    another consumer, or a connection broke while nothing was received. The handlers of lost
    deliveries are cancelled and the deliveries are not settled, because another consumer has the
    messages or will receive them.
    An expired lease needs no report, because ``extend`` raises an error.

    Example:
        >>> class PartitionSubscription:
        ...     def on_lost(self, callback):
        ...         self.callback = callback
        >>> isinstance(PartitionSubscription(), LossReporting)
        True
    """

    def on_lost(self, callback: Callable[[Sequence[Delivery]], None]) -> None:
        """Register a callback for lost deliveries.

        Args:
            callback: Called with unsettled deliveries that were lost, once for each of them.

        Example:
            >>> def print_losses(subscription: LossReporting) -> None:
            ...     subscription.on_lost(lambda deliveries: print(len(deliveries), "lost"))
        """
        ...


@runtime_checkable
class SettlementReporting(Protocol):
    """A subscription that settles some messages itself and reports failures.

    Implement it if the subscription writes the dead letters of expired messages, or commits
    acknowledgements in the background, and retries on failure. No call raises such a failure.

    Example:
        >>> class CommittingSubscription:
        ...     def on_settlement(self, callback):
        ...         self.callback = callback
        >>> isinstance(CommittingSubscription(), SettlementReporting)
        True
    """

    def on_settlement(self, callback: Callable[[str, Exception | None], None]) -> None:
        """Register a callback for the outcome of background settlements.

        Args:
            callback: Called with a description of the settlement and its error, and with ``None``
                once the settlement succeeds.

        Example:
            >>> def print_failures(subscription: SettlementReporting) -> None:
            ...     subscription.on_settlement(lambda what, error: print(what, error))
        """
        ...


@runtime_checkable
class StandbyReporting(Protocol):
    """A subscription that may wait until another one has ended.

    Implement it if only one ordered subscription of a queue can be active at a time. On standby
    ``receive`` waits. The consumer is healthy and ready meanwhile.

    Example:
        >>> class ExclusiveSubscription:
        ...     standby = True
        >>> isinstance(ExclusiveSubscription(), StandbyReporting)
        True
    """

    @property
    def standby(self) -> bool:
        """Whether another subscription is active, so that this one receives nothing.

        Example:
            >>> def is_active(subscription: StandbyReporting) -> bool:
            ...     return not subscription.standby
        """
        ...


@runtime_checkable
class DurabilityReporting(Protocol):
    """A backend whose broker can be configured to lose messages when it stops.

    Implement it if ``Capabilities.durable`` depends on the configuration of the server. Otherwise
    the capability alone decides.

    Example:
        >>> class ConfiguredBackend:
        ...     durable = None
        >>> isinstance(ConfiguredBackend(), DurabilityReporting)
        True
    """

    @property
    def durable(self) -> bool | None:
        """Whether confirmed messages survive a restart; ``None`` if the broker does not report it.

        Example:
            >>> def may_lose_messages(backend: DurabilityReporting) -> bool:
            ...     return backend.durable is not True
        """
        ...


class Backend(Protocol):
    """Adapter for a broker, or for the native engine.

    A backend translates the errors of its client library to ``QueueError``.

    Attributes:
        name: Name of the backend, for errors and logs.
        capabilities: Features of the backend.

    Example:
        >>> import asyncio
        >>> from qkit.backends.native import NativeBackend
        >>> async def main(backend: Backend) -> None:
        ...     await backend.start()
        ...     await backend.declare(QueueSpec(name="orders"))
        ...     sent = await backend.publish("orders", [Envelope("0190", b"{}")])
        ...     print(sent[0].message_id)
        ...     await backend.aclose()
        >>> asyncio.run(main(NativeBackend()))
        0190
    """

    name: str
    capabilities: Capabilities

    async def start(self) -> None:
        """Connect to the broker.

        Raises:
            BackendUnavailable: The broker cannot be reached.

        Example:
            >>> import asyncio
            >>> from qkit.backends.native import NativeBackend
            >>> asyncio.run(NativeBackend().start())
        """
        ...

    async def declare(self, spec: QueueSpec) -> None:
        """Make sure that a queue exists and has the given options.

        Declaring a queue again has no further effect.

        Args:
            spec: Name and options of the queue.

        Raises:
            ConfigError: The queue exists with options that cannot be changed.
            QueueNotFound: ``spec.passive`` is set and the queue does not exist.

        Example:
            >>> async def declare(backend: Backend) -> None:
            ...     await backend.declare(QueueSpec(name="orders", max_depth=1_000))
        """
        ...

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Publish messages, and return when the broker has confirmed all of them.

        Args:
            queue: Name of the queue or topic on the broker.
            envelopes: The messages, in order.

        Returns:
            The result of each message, in order.

        Raises:
            PartialSend: Only some messages were accepted. After any other error none was confirmed.

        Example:
            >>> async def publish(backend: Backend) -> str:
            ...     sent = await backend.publish("orders", [Envelope("0190", b"{}")])
            ...     return sent[0].message_id
        """
        ...

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[Subscription]:
        """Open a subscription.

        Args:
            spec: Queue, group and limits of the subscription.

        Returns:
            A context manager for the subscription. On exit, unsettled messages are released
            without counting an attempt.

        Raises:
            ConfigError: ``spec.needs_delay`` is set and the backend cannot delay messages here.
            QueueNotFound: The queue does not exist.

        Example:
            >>> async def consume(backend: Backend, spec: SubscriptionSpec) -> None:
            ...     async with backend.subscribe(spec) as subscription:
            ...         for delivery in await subscription.receive(limit=10):
            ...             await subscription.ack(delivery)
        """
        ...

    async def ping(self) -> None:
        """Check that the broker responds.

        Raises:
            BackendUnavailable: The broker does not respond.

        Example:
            >>> async def is_alive(backend: Backend) -> bool:
            ...     try:
            ...         await backend.ping()
            ...     except ConnectionError:  # the base of BackendUnavailable
            ...         return False
            ...     return True
        """
        ...

    async def aclose(self) -> None:
        """Disconnect. Closing a closed backend has no effect.

        Example:
            >>> import asyncio
            >>> from qkit.backends.native import NativeBackend
            >>> asyncio.run(NativeBackend().aclose())
        """
        ...


@runtime_checkable
class PublishNow(Protocol):
    """A backend that can often publish without waiting, because it is in the same process.

    Example:
        >>> class InProcessBackend:
        ...     def publish_now(self, queue, envelopes):
        ...         return None
        >>> isinstance(InProcessBackend(), PublishNow)
        True
    """

    def publish_now(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent] | None:
        """Publish messages if that needs no wait.

        Args:
            queue: Name of the queue or topic.
            envelopes: Messages to publish.

        Returns:
            One ``Sent`` for each envelope, in order. ``None`` if nothing was published and
            ``publish`` must be awaited instead, for example because the queue does not exist or
            the backend is closed.

        Raises:
            QueueError: As ``Backend.publish``.

        Example:
            >>> from qkit import Envelope
            >>> async def send(backend, envelope: Envelope) -> None:
            ...     if backend.publish_now("orders", [envelope]) is None:
            ...         await backend.publish("orders", [envelope])
        """
        ...


@runtime_checkable
class PublishGroups(Protocol):
    """A backend that publishes groups of a queue's messages independently.

    Implement it if parts of a queue fail independently, for example the partitions of a log. A part
    that does not respond then delays only its own messages. At most one publish per group is in
    progress; messages that are sent meanwhile wait for the next one. Without this protocol a queue
    is one group.

    Messages whose order matters must be in one group; otherwise a retried message could arrive
    after its successor. Use few groups, because each is kept as long as the service runs.

    Example:
        >>> class PartitionedBackend:
        ...     def publish_group(self, queue, envelope):
        ...         return hash(envelope.key) % 8
        ...     async def publish_in_group(self, queue, group, envelopes):
        ...         return [Sent(envelope.id) for envelope in envelopes]
        >>> isinstance(PartitionedBackend(), PublishGroups)
        True
    """

    def publish_group(self, queue: str, envelope: Envelope) -> Hashable:
        """Return the group of a message that is about to be sent.

        It is called for each message before each attempt, and must neither block nor raise.

        Args:
            queue: Name of the queue on the broker.
            envelope: The message.

        Returns:
            Any hashable value that identifies the group.

        Example:
            >>> def same_group(backend: PublishGroups, first: Envelope, second: Envelope) -> bool:
            ...     groups = {backend.publish_group("orders", item) for item in (first, second)}
            ...     return len(groups) == 1
        """
        ...

    async def publish_in_group(
        self,
        queue: str,
        group: Any,  # not Hashable: an implementation declares the type that it returned
        envelopes: Sequence[Envelope],
    ) -> list[Sent]:
        """Publish messages of one group, as ``Backend.publish`` does.

        Args:
            queue: Name of the queue on the broker.
            group: The value that ``publish_group`` returned for these messages.
            envelopes: The messages, in order.

        Returns:
            The result of each message, in order.

        Raises:
            PartialSend: Only some messages were accepted.

        Example:
            >>> async def publish(backend: PublishGroups, envelope: Envelope) -> list[Sent]:
            ...     group = backend.publish_group("orders", envelope)
            ...     return await backend.publish_in_group("orders", group, [envelope])
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """Statistics of a queue. A value is ``None`` if the backend does not report it.

    Attributes:
        queue: Name of the queue.
        depth: Messages that are ready for a consumer.
        in_flight: Messages that are delivered and not yet settled.
        scheduled: Messages whose delay has not passed.
        consumers: Subscribed consumers.
        published_total: Messages that were published.
        consumed_total: Messages that were delivered.
        acked_total: Messages that were acknowledged.
        nacked_total: Messages that were released after a failure.
        dead_lettered_total: Messages that became dead letters.
        dropped_total: Dead letters that were dropped because the queue was full.
        avg_wait_time_ms: Average time from the send to the delivery, in milliseconds.
        oldest_message_age_secs: Age of the oldest ready message, in seconds.

    Example:
        >>> stats = QueueStats(queue="orders", depth=3)
        >>> stats.depth, stats.consumers
        (3, None)
    """

    queue: str
    depth: int
    in_flight: int | None = None
    scheduled: int | None = None
    consumers: int | None = None
    published_total: int | None = None
    consumed_total: int | None = None
    acked_total: int | None = None
    nacked_total: int | None = None
    dead_lettered_total: int | None = None
    dropped_total: int | None = None
    avg_wait_time_ms: float | None = None
    oldest_message_age_secs: float | None = None


@runtime_checkable
class Admin(Protocol):
    """Administration of queues, which a backend offers in addition to ``Backend``.

    Every method that takes a queue raises ``QueueNotFound`` if it does not exist.

    Example:
        >>> from qkit.backends.native import NativeBackend
        >>> isinstance(NativeBackend(), Admin)
        True
    """

    async def queues(self) -> list[str]:
        """List the queues.

        Returns:
            The names of all queues, or only of those that this service has declared if the broker
            cannot list them.

        Example:
            >>> async def queue_count(admin: Admin) -> int:
            ...     return len(await admin.queues())
        """
        ...

    async def stats(self, queue: str) -> QueueStats:
        """Return the current statistics of a queue.

        Args:
            queue: Name of the queue on the broker.

        Returns:
            The statistics.

        Raises:
            QueueNotFound: The queue does not exist.

        Example:
            >>> async def is_empty(admin: Admin) -> bool:
            ...     return (await admin.stats("orders")).depth == 0
        """
        ...

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        """Return the next messages without consuming them.

        Args:
            queue: Name of the queue on the broker.
            limit: Maximum number of messages.

        Returns:
            The messages, in the order of delivery.

        Raises:
            QueueNotFound: The queue does not exist.

        Example:
            >>> async def next_ids(admin: Admin) -> list[str]:
            ...     return [envelope.id for envelope in await admin.peek("orders", limit=5)]
        """
        ...

    async def purge(self, queue: str) -> int:
        """Delete every message that is not in flight.

        Args:
            queue: Name of the queue on the broker.

        Returns:
            The number of deleted messages.

        Raises:
            QueueNotFound: The queue does not exist.

        Example:
            >>> async def purge(admin: Admin) -> None:
            ...     print(await admin.purge("orders"), "deleted")
        """
        ...

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Delete the messages with the given ids that are not in flight.

        If several messages have the same id, each occurrence of the id deletes one, the oldest
        first.

        Args:
            queue: Name of the queue on the broker.
            ids: Message ids.

        Returns:
            The number of deleted messages.

        Raises:
            QueueNotFound: The queue does not exist.

        Example:
            >>> async def remove(admin: Admin) -> bool:
            ...     return await admin.remove("orders", ["0190"]) == 1
        """
        ...

    async def delete(self, queue: str) -> None:
        """Delete a queue with all its messages.

        Args:
            queue: Name of the queue on the broker.

        Raises:
            QueueNotFound: The queue does not exist.

        Example:
            >>> async def delete(admin: Admin) -> None:
            ...     await admin.delete("orders")
        """
        ...


@runtime_checkable
class Log(Protocol):
    """A backend that keeps messages after they are consumed, so that they can be read by offset.

    Reading a range of a partition again returns the same messages, as long as the broker keeps
    them.

    Example:
        >>> class LogBackend:
        ...     async def bounds(self, queue):
        ...         return {0: (0, 100)}
        ...     async def read_range(self, queue, partition, first, last):
        ...         return []
        >>> isinstance(LogBackend(), Log)
        True
    """

    async def bounds(self, queue: str) -> dict[int, tuple[int, int]]:
        """Return the range of offsets of each partition.

        Args:
            queue: Name of the topic on the broker.

        Returns:
            By partition, the first offset that is still stored and the offset of the next message.

        Example:
            >>> async def stored(log: Log) -> int:
            ...     return sum(end - first for first, end in (await log.bounds("orders")).values())
        """
        ...

    async def read_range(
        self, queue: str, partition: int, first: int, last: int
    ) -> list[tuple[int, Envelope]]:
        """Return the messages of a range of offsets.

        Args:
            queue: Name of the topic on the broker.
            partition: Number of the partition.
            first: First offset of the range.
            last: End of the range, exclusive.

        Returns:
            The messages with their offsets.

        Example:
            >>> async def first_ten(log: Log) -> list[tuple[int, Envelope]]:
            ...     return await log.read_range("orders", partition=0, first=0, last=10)
        """
        ...


@runtime_checkable
class DeliveryDetails(Protocol):
    """A backend that tells more about a delivery, for traces.

    Implement it if the broker has consumer groups with names of their own, or partitions. Called
    only if the program records traces or metrics.

    Example:
        >>> class PartitionedBackend:
        ...     def consumer_group(self, queue, group): return queue
        ...     def delivery_attributes(self, delivery): return {}
        >>> isinstance(PartitionedBackend(), DeliveryDetails)
        True
    """

    def consumer_group(self, queue: str, group: str | None) -> str | None:
        """Return the name of a consumer group on the broker.

        Args:
            queue: Name of the queue or topic on the broker.
            group: Group of a topic; ``None`` for a queue.

        Returns:
            The name, or ``None`` if the broker has no such group.

        Example:
            >>> def name_of(backend: DeliveryDetails) -> str | None:
            ...     return backend.consumer_group("orders", None)
        """
        ...

    def delivery_attributes(self, delivery: Delivery) -> Mapping[str, str | int]:
        """Return attributes of a consumer span, by OpenTelemetry's names.

        Args:
            delivery: The delivery, which is not settled yet.

        Returns:
            The attributes.

        Example:
            >>> def names_of(backend: DeliveryDetails, delivery: Delivery) -> list[str]:
            ...     return sorted(backend.delivery_attributes(delivery))
        """
        ...


@runtime_checkable
class DeadLetterSource(Protocol):
    """A backend that writes dead letters itself, when a lease expires too often or a TTL passes.

    Example:
        >>> from qkit.backends.native import NativeBackend
        >>> isinstance(NativeBackend(), DeadLetterSource)
        True
    """

    def on_dead_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Register a callback for dead letters that the backend writes itself.

        Args:
            callback: Called with each dead letter.

        Example:
            >>> from qkit.backends.native import NativeBackend
            >>> NativeBackend().on_dead_letter(lambda letter: print(letter.reason))
        """
        ...


@runtime_checkable
class DroppedLetterSource(Protocol):
    """A backend that reports dead letters that were dropped because their queue was full.

    Example:
        >>> from qkit.backends.native import NativeBackend
        >>> isinstance(NativeBackend(), DroppedLetterSource)
        True
    """

    def on_dropped_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Register a callback for dropped dead letters.

        Args:
            callback: Called with each dead letter that was dropped.

        Example:
            >>> from qkit.backends.native import NativeBackend
            >>> NativeBackend().on_dropped_letter(lambda letter: print(letter.message_id))
        """
        ...


@runtime_checkable
class PeekReporting(Protocol):
    """A backend whose ``peek`` affects the queue that it reads.

    Implement it if ``peek`` receives messages and returns them, so that it hides them from
    consumers meanwhile, marks them as redelivered or may change their order. The web app then
    requires the token for changes to show messages.

    Example:
        >>> class ReceivingBackend:
        ...     peek_affects_queue = True
        >>> isinstance(ReceivingBackend(), PeekReporting)
        True
    """

    @property
    def peek_affects_queue(self) -> bool:
        """Whether ``peek`` affects the queue.

        Example:
            >>> def needs_permission(backend: PeekReporting) -> bool:
            ...     return backend.peek_affects_queue
        """
        ...


@runtime_checkable
class UnheardReporting(Protocol):
    """A backend that stores no messages, and counts those that no subscriber received.

    Attributes:
        unheard: Messages that were published without a subscriber, since the backend was created.

    Example:
        >>> class BroadcastBackend:
        ...     unheard = 0
        >>> isinstance(BroadcastBackend(), UnheardReporting)
        True
    """

    unheard: int
