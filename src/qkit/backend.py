"""The boundary between qkit and whatever carries the messages.

A backend moves envelopes and knows nothing of handlers, retries or dead-letter policy; those live
once, above. It is small so that a backend is easy to write and hard to get wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Literal, Protocol, TypeVar, get_args, runtime_checkable

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
    "DroppedLetterSource",
    "ExtendMany",
    "Log",
    "LossReporting",
    "QueueSpec",
    "QueueStats",
    "SettlementReporting",
    "Subscription",
    "SubscriptionSpec",
    "Support",
    "UnheardReporting",
]

T = TypeVar("T")

Balance = Literal["round_robin", "least_busy", "random"]
"""Which of several waiting consumers gets a message: who waited longest, who holds least, any."""

BALANCES: frozenset[Balance] = frozenset(get_args(Balance))


class Support(StrEnum):
    """How a backend provides a feature."""

    NATIVE = "native"
    EMULATED = "emulated"
    UNSUPPORTED = "unsupported"

    def __bool__(self) -> bool:
        """Whether the feature works at all."""
        return self is not Support.UNSUPPORTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do. What it cannot is refused at start-up, never silently at run time.

    Every backend has ``queues``, which take each message to one consumer, but for those that only
    broadcast: there every channel is a topic, whatever it was declared as, and ``send`` is
    ``publish``. Its dead letters are kept in queues all the same.

    >>> Capabilities(priority=Support.NATIVE).supports("priority")
    True
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
        """Whether ``feature`` is native or emulated."""
        return bool(getattr(self, feature))

    def as_dict(self) -> dict[str, str]:
        """Every feature with its support, for people and pages."""
        return {item.name: str(getattr(self, item.name)) for item in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSpec:
    """A declaration of a queue or topic.

    A declaration makes sure that the queue exists. What it leaves at ``None`` stays as it is; what
    it names is set, and the last declaration wins. A service names ``max_deliveries``,
    ``ack_deadline`` and ``balance`` only for channels that it consumes, ``max_depth`` and
    ``max_priority`` only if the channel does. Never set: no limit of deliveries, and the backend's
    own defaults for the rest.

    Attributes:
        name: Name on the broker.
        broadcast: A topic: each message goes to every group.
        dead_letter: Queue for the dead letters of this one, ``None`` for none. The service declares
            that queue too, with ``drop_oldest`` and its own ``max_depth``. Set only if
            ``consumed``; otherwise it applies unless a consumer has set it.
        consumed: Whether the service that declares it also consumes it.
        again: The service has declared it before and only makes sure that it still exists: what
            exists stays as it is, because another service may have declared it since.
        max_priority: Highest priority that a send may have.
        max_depth: Messages that the queue holds before a send raises ``QueueFull``.
        drop_oldest: A dead-letter queue: when it is full, the oldest message is dropped.
        max_deliveries: Limit that a ``DeadLetterSource`` applies when a lease expires. Other
            backends ignore it: the service refuses what was delivered too often. Failures of
            handlers are counted above the boundary.
        ack_deadline: Lease in seconds.
        balance: Which of several waiting consumers gets a message. Other than ``round_robin`` it
            reaches only a backend that chooses among its waiting consumers itself.
        replicas: Copies that the broker must keep.
        passive: Create nothing; raise ``QueueNotFound`` if the queue does not exist.
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
    """A consumer's claim on a queue, or on its group's share of a topic.

    ``needs_delay`` says that failed messages are released with a delay. A backend that cannot delay
    them on this broker (something is missing and may not be created) raises ``ConfigError`` from
    ``subscribe``, so that the service does not start.
    """

    queue: str
    group: str
    consumer: str
    prefetch: int
    broadcast: bool = False
    ack_deadline: float | None = None
    needs_delay: bool = False


class Delivery:
    """One delivery of a message: its envelope, and the backend's receipt for settling it.

    ``lease`` is how many seconds the consumer has before the backend takes the message back,
    ``None`` where leases do not exist. ``release`` writes ``envelope.headers`` back, so facts
    about a failure travel with the message.
    """

    __slots__ = ("envelope", "lease", "queue", "receipt")

    def __init__(
        self, envelope: Envelope, queue: str, receipt: object, lease: float | None = None
    ) -> None:
        self.envelope = envelope
        self.queue = queue
        self.receipt = receipt
        self.lease = lease

    def receipt_of(self, kind: type[T], backend: str, operation: str) -> T:
        """Return the receipt; ``MessageNotFound`` if it is not of ``kind``: then it was settled."""
        receipt = self.receipt
        if not isinstance(receipt, kind):
            raise self.settled_before(backend, operation)
        return receipt

    def settled_before(self, backend: str, operation: str) -> MessageNotFound:
        """Return the error for settling this delivery a second time."""
        return MessageNotFound(
            "this delivery was settled before: settle each one once",
            backend=backend,
            operation=operation,
            queue=self.queue,
            message_id=self.envelope.id,
        )

    def __repr__(self) -> str:
        return f"<Delivery {self.envelope.id} of {self.queue}, attempt {self.envelope.attempt}>"


class Subscription(Protocol):
    """A live claim on a queue. Settling twice, or late, raises and never touches another's lease.

    When the subscription breaks, ``receive`` raises ``SubscriptionLost``; the consumer above opens
    a new one with backoff.
    """

    async def receive(self, limit: int) -> list[Delivery]:
        """Up to ``limit`` deliveries, at least one unless it was a safety wake-up.

        Parks until a message arrives. Safe to cancel at any moment: nothing is lost.
        """
        ...

    async def ack(self, delivery: Delivery) -> None:
        """The work is done: remove the message. ``AckDeadlineExceeded`` if the lease is lost."""
        ...

    async def release(
        self, delivery: Delivery, delay: float, *, count_attempt: bool = True
    ) -> None:
        """Give the message back, to be delivered again after ``delay`` seconds.

        Without ``count_attempt`` the next delivery has the same attempt number as this one.
        """
        ...

    async def extend(self, delivery: Delivery, seconds: float) -> None:
        """Move the end of the lease to ``seconds`` from now. ``Unsupported`` without leases."""
        ...

    async def stop(self) -> None:
        """Fetch no more; what was delivered can still be settled."""
        ...


@runtime_checkable
class AckMany(Protocol):
    """A subscription that acknowledges several deliveries for the price of one.

    Worth having where an ack is a round trip: handlers then go on while their acks are under way.
    """

    async def ack_many(self, deliveries: Sequence[Delivery]) -> list[QueueError | None]:
        """Acknowledge all of them; an error in the place of each that could not be."""
        ...


@runtime_checkable
class ConsumerBalancing(Protocol):
    """A backend that chooses among waiting consumers by ``QueueSpec.balance``.

    Without it, consumers of a queue take turns, as on any broker.
    """

    @property
    def balances(self) -> frozenset[Balance]:
        """The values of ``QueueSpec.balance`` that it follows."""
        ...


@runtime_checkable
class ExtendMany(Protocol):
    """A subscription that extends several leases for the price of one.

    Worth having where an extension is a round trip. Without it ``extend`` is called for each.
    """

    async def extend_many(
        self, deliveries: Sequence[Delivery], seconds: float
    ) -> list[QueueError | None]:
        """Extend all leases to ``seconds`` from now; an error in the place of each that is lost."""
        ...


@runtime_checkable
class LossReporting(Protocol):
    """A subscription that knows at once when what it delivered is no longer its own.

    Worth having where a loss shows in no call: a partition went to another consumer, a connection
    broke while nothing was received. The handlers of such deliveries are cancelled and nothing of
    them is settled, because somebody else has them, or will. A lost lease needs no report:
    ``extend`` tells of it.
    """

    def on_lost(self, callback: Callable[[Sequence[Delivery]], None]) -> None:
        """Call ``callback`` with deliveries that are lost, unsettled, each once."""
        ...


@runtime_checkable
class SettlementReporting(Protocol):
    """A subscription that settles some messages itself, where a failure shows in no call.

    It writes the dead letters of expired messages, or commits acknowledgements in the background,
    and tries again when that fails.
    """

    def on_settlement(self, callback: Callable[[str, Exception | None], None]) -> None:
        """Call ``callback`` with what was tried, and with its error or ``None`` once it is over."""
        ...


class Backend(Protocol):
    """Whatever carries messages. Errors of its driver become ``QueueError``s at this boundary."""

    name: str
    capabilities: Capabilities

    async def start(self) -> None:
        """Connect, or raise ``BackendUnavailable``."""
        ...

    async def declare(self, spec: QueueSpec) -> None:
        """Make sure the queue exists as described; idempotent."""
        ...

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Hand messages over; returns once the broker has confirmed every one.

        Raises ``PartialSend`` when some were accepted and others not; any other error means that
        none was confirmed.
        """
        ...

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[Subscription]:
        """A subscription for as long as the context lasts; leaving it gives back what is held."""
        ...

    async def ping(self) -> None:
        """Prove that the broker answers, or raise ``BackendUnavailable``."""
        ...

    async def aclose(self) -> None:
        """Disconnect; idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """A queue's figures; ``None`` where the backend does not know.

    ``depth`` counts messages ready for a consumer, ``in_flight`` those a consumer holds,
    ``scheduled`` those that wait for their time; ``dropped_total`` those a full dead-letter queue
    pushed out.
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
    """What a backend that can be administered offers beside ``Backend``.

    Every method raises ``QueueNotFound`` for a queue that does not exist.
    """

    async def queues(self) -> list[str]:
        """Names of all queues, or of those declared by this service where a broker cannot tell."""
        ...

    async def stats(self, queue: str) -> QueueStats:
        """The queue's figures now."""
        ...

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        """The next messages in the order of delivery, without consuming or leasing them."""
        ...

    async def purge(self, queue: str) -> int:
        """Delete every message that no consumer holds; return how many."""
        ...

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Delete a message for each of these ids unless a consumer holds it; return how many.

        Of several messages with one id the oldest goes: an id that is named twice takes two.
        """
        ...

    async def delete(self, queue: str) -> None:
        """Delete the queue with all that is in it."""
        ...


@runtime_checkable
class Log(Protocol):
    """A backend whose messages stay where they are when consumed: they can be read by offsets.

    A range of a partition says the same whenever it is read, as long as the broker keeps it.
    """

    async def bounds(self, queue: str) -> dict[int, tuple[int, int]]:
        """The first offset that is still there, and the next, of each partition."""
        ...

    async def read_range(
        self, queue: str, partition: int, first: int, last: int
    ) -> list[tuple[int, Envelope]]:
        """The messages from ``first`` up to, not including, ``last``, with their offsets."""
        ...


@runtime_checkable
class DeadLetterSource(Protocol):
    """A backend that writes dead letters of its own: a lease expired too often, a TTL ran out."""

    def on_dead_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter that the backend wrote by itself."""
        ...


@runtime_checkable
class DroppedLetterSource(Protocol):
    """A backend that can tell when a full dead-letter queue pushes out its oldest."""

    def on_dropped_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter that was pushed out."""
        ...


@runtime_checkable
class UnheardReporting(Protocol):
    """A backend that keeps no messages, and counts those that no subscriber received."""

    unheard: int
    """Messages that were published without a subscriber, since the backend was made."""
