"""``Route``: a channel combined with the settings and the backend's capabilities.

A feature that the backend lacks is rejected here, before anything is declared or sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from qkit._internal.retry import Backoff
from qkit.backend import Backend, Balance, ConsumerBalancing, QueueSpec
from qkit.codec.codec import Codec
from qkit.errors import ConfigError, Unsupported
from qkit.handlers.channel import Channel, Middleware
from qkit.handlers.registry import Handler, Registry
from qkit.handlers.retry_policy import RetryPolicy
from qkit.observability.metrics import ChannelCounters, Counters
from qkit.settings.model import RetrySettings, Settings

__all__ = ["Route", "RouteTable"]

MAX_PREFETCH = 1_000
MAX_PRIORITY = 255
MAX_ROUTES = 20_000  # bounds the memory of a service whose channel names come from data

# The capability that each explicit option of a channel needs, and the advice if it is missing.
_REQUIRED_CAPABILITY = {
    "broadcast": ("topics", "use a queue, or a backend with topics"),
    "ordered": ("key_order", "remove ordered=True, or use a backend that keeps order per key"),
    "prefetch": ("prefetch", "omit prefetch"),
    "max_priority": ("priority", "omit max_priority, and use one channel per priority"),
    "ack_deadline": ("lease", "omit ack_deadline: this broker has no leases"),
    "ttl": ("ttl", "omit ttl"),
    "dead_letter": ("dead_letters", "set dead_letter=False"),
}


@dataclass(slots=True)
class Route:
    """A channel with everything that sending to it and consuming from it needs.

    Attributes:
        name: The name of the channel.
        queue: Its name on the broker, with the prefix.
        backend: The name of the backend.
        broadcast: Whether it is a topic.
        ordered: Whether messages with the same key are handled in order.
        ttl: The default TTL in seconds, or ``None``.
        max_priority: The highest priority that a send may have; ``None`` without priorities.
        can_delay: Whether the backend supports delays.
        can_expire: Whether the backend supports TTLs.
        codec: Encodes and decodes bodies.
        policy: The retry rules.
        middleware: Middleware of the service and of the channel, the first outermost.
        ack_deadline: Length of a lease in seconds; ``None`` without leases.
        prefetch: The prefetch of the channel's options, or ``None``.
        dead_letter: The dead-letter queue, or ``None``.
        spec: The declaration of the queue for the backend.
        counters: The counters of the channel.
        declared: Whether the queue has been declared on the broker.
        last_declaration: The last declaration that was resolved to this route. Resolving the same
            declaration again is skipped, because it adds nothing.
    """

    name: str
    queue: str
    backend: str
    broadcast: bool
    ordered: bool
    ttl: float | None
    max_priority: int | None
    can_delay: bool
    can_expire: bool
    codec: Codec[object]
    policy: RetryPolicy
    middleware: tuple[Middleware, ...]
    ack_deadline: float | None
    prefetch: int | None
    dead_letter: QueueSpec | None
    spec: QueueSpec
    counters: ChannelCounters
    declared: bool = False
    last_declaration: Channel[object] | None = None


class RouteTable:
    """Routes of a service, each built when its channel is first used.

    Args:
        settings: The settings of the service.
        backend: The backend.
        registry: The declared channels and handlers.
        counters: The counters of all channels.
        middleware: Middleware of the service.

    Attributes:
        queues: The routes that are queues, by channel: the targets of ``send``.
    """

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        registry: Registry,
        counters: Counters,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        self._settings = settings
        self._can = backend.capabilities
        self._balances: frozenset[Balance] = (
            backend.balances if isinstance(backend, ConsumerBalancing) else frozenset()
        )
        self._registry = registry
        self._counters = counters
        self._middleware = tuple(middleware)
        self._backend = backend.name
        self._routes: dict[str, Route] = {}
        self.queues: dict[str, Route] = {}

    def get(self, name: str) -> Route | None:
        """Return the route of a channel, or ``None`` if it has not been built."""
        return self._routes.get(name)

    def known(self) -> list[Route]:
        """Return all routes built so far."""
        return list(self._routes.values())

    def resolve(self, channel: Channel[object]) -> Route:
        """Return the route of a channel, built from all its declarations.

        Raises:
            ConfigError: Declarations contradict each other, or the service uses too many channels.
            Unsupported: The backend lacks a feature that the channel needs.
        """
        route = self._routes.get(channel.name)
        if route is None and len(self._routes) >= MAX_ROUTES:
            self._counters.refused += 1
            raise ConfigError(
                f"this service already uses {MAX_ROUTES} channels, the maximum: use fixed channel "
                "names, and put variable data in the body or a header",
                queue=channel.name,
            )
        if route is None or route.last_declaration is not channel:
            known = self._registry.channels.get(channel.name)
            declared = self._registry.declare(channel)
            if route is None or declared is not known:  # the declaration added something
                route = self._routes[channel.name] = self._build(declared)
                self.queues.pop(channel.name, None)
                if not route.broadcast:
                    self.queues[channel.name] = route
            route.last_declaration = channel
        return route

    def codec(self, body_type: object) -> Codec[object]:
        """Return a codec with the compression and size limit of the settings."""
        return Codec(
            cast("type[object] | None", body_type),
            compression=self._settings.compression,
            max_bytes=self._settings.max_message_bytes,
        )

    def prefetch(self, route: Route, handler: Handler) -> int:
        """Return how many deliveries a handler's consumer may hold.

        Raises:
            ConfigError: The prefetch is too small for all concurrent calls.
        """
        metadata = handler.metadata
        needed = metadata.concurrency * (metadata.batch_size or 1)
        chosen = route.prefetch or self._settings.prefetch
        if chosen is None:
            chosen = max(self._settings.effective_prefetch, needed)
        if needed > chosen or needed > MAX_PREFETCH:
            raise ConfigError(
                f"{handler.name}: concurrency × batch_size = {needed} messages at once, but "
                f"prefetch is {min(chosen, MAX_PREFETCH)}; raise prefetch (up to {MAX_PREFETCH}) "
                "or lower concurrency",
                queue=route.name,
            )
        return chosen

    def check_handler(self, route: Route, handler: Handler) -> None:
        """Raise for a handler whose options contradict the channel or need a missing feature."""
        batch = handler.metadata.batch_size is not None
        if batch and not self._can.batch:
            raise self._unsupported(route.name, "batch_size", "handle one message per call")
        if batch and route.ordered:
            raise ConfigError(
                f"{handler.name}: ordered=True handles one message of a key at a time and cannot "
                "be combined with batch_size; remove one of them",
                queue=route.name,
            )
        if batch and route.middleware:
            raise ConfigError(
                f"{handler.name}: middleware wraps a single message and cannot be combined with "
                "batch_size; remove one of them",
                queue=route.name,
            )

    def check_settings(self) -> None:
        """Raise ``ConfigError`` for a service-wide setting that the backend does not support."""
        if self._settings.replicas > 1 and not self._can.replicas:
            raise ConfigError(
                f"replicas={self._settings.replicas}: this {self._backend} backend does not "
                "support replicas; set replicas=1, or use a backend that does",
                backend=self._backend,
                operation="start",
            )

    def _build(self, channel: Channel[object]) -> Route:
        settings, options, name = self._settings, channel.options, channel.name
        for option, (capability, advice) in _REQUIRED_CAPABILITY.items():
            if options.get(option) and not self._can.supports(capability):
                raise self._unsupported(name, option, advice)
        balance = options.get("balance")
        if balance not in (None, "round_robin") and balance not in self._balances:
            raise self._unsupported(
                name, f"balance={balance!r}", "omit balance for round-robin delivery"
            )
        ordered = options.get("ordered", False)
        own = self._own_dead_letter_spec(name)
        topic = options.get("broadcast", False) or not self._can.queues
        broadcast = topic and own is None
        retry = settings.retry
        if (own_retry := options.get("retry")) is not None:
            retry = retry.model_copy(update=own_retry.model_dump(exclude_unset=True))
        policy = self._policy(channel, retry, inline=ordered or not self._can.delay)
        lease = options.get("ack_deadline", settings.ack_deadline) if self._can.lease else None
        handled = self._registry.handles(name)
        letters = self._dead_letter_spec(channel)
        return Route(
            name=name,
            queue=settings.broker_name(name),
            backend=self._backend,
            broadcast=broadcast,
            ordered=ordered,
            ttl=options.get("ttl"),
            max_priority=self._send_limit(channel),
            can_delay=bool(self._can.delay),
            can_expire=bool(self._can.ttl),
            codec=self.codec(self._registry.body_type(name)),
            policy=policy,
            middleware=(*self._middleware, *options.get("middleware", ())),
            ack_deadline=lease,
            prefetch=options.get("prefetch"),
            dead_letter=letters,
            spec=own
            or QueueSpec(
                name=settings.broker_name(name),
                broadcast=broadcast,
                dead_letter=letters.name if letters else None,
                max_priority=options.get("max_priority"),
                max_depth=options.get("max_depth"),
                max_deliveries=policy.max_attempts if handled else None,
                ack_deadline=lease if handled else None,
                balance=balance if handled else None,
                replicas=settings.replicas,
                passive=settings.declare == "passive",
                consumed=handled,
            ),
            counters=self._counters.for_channel(name),
        )

    def _send_limit(self, channel: Channel[object]) -> int | None:
        """Return the highest priority that a send may have; ``None`` without priorities.

        In a native directory the owner's settings apply, which this process may not have. It
        therefore checks only the absolute maximum, and the owner checks the rest.
        """
        if not self._can.priority:
            return None
        default = MAX_PRIORITY if self._settings.path is not None else self._settings.max_priority
        return channel.options.get("max_priority", default)

    def _policy(
        self, channel: Channel[object], retry: RetrySettings, *, inline: bool
    ) -> RetryPolicy:
        return RetryPolicy(
            max_attempts=retry.max_attempts if retry.enabled else 1,
            backoff=Backoff(
                initial=retry.initial_delay,
                multiplier=retry.multiplier,
                maximum=retry.max_delay,
                jitter=retry.jitter,
            ),
            mode="inline" if inline else retry.mode,
            retry_on=tuple(channel.options.get("retry_on", (Exception,))),
            dead_on=tuple(channel.options.get("dead_on", ())),
        )

    def _dead_letter_spec(self, channel: Channel[object]) -> QueueSpec | None:
        """Return the dead-letter queue of a channel, or ``None``.

        A dead-letter queue itself has none.
        """
        wanted = channel.options.get("dead_letter", self._settings.dead_letter.enabled)
        if not wanted or not self._can.dead_letters or self._own_dead_letter_spec(channel.name):
            return None
        return self._dead_letter_queue_spec(self._settings.dead_letter_name(channel.name))

    def _own_dead_letter_spec(self, name: str) -> QueueSpec | None:
        """Return the declaration of ``name`` if it is a dead-letter queue, else ``None``."""
        suffix = self._settings.dead_letter_name("")
        return (
            self._dead_letter_queue_spec(name) if name.endswith(suffix) and name != suffix else None
        )

    def _dead_letter_queue_spec(self, name: str) -> QueueSpec:
        return QueueSpec(
            name=self._settings.broker_name(name),
            max_depth=self._settings.dead_letter.max_size,
            drop_oldest=True,
            replicas=self._settings.replicas,
            passive=self._settings.declare == "passive",
        )

    def _unsupported(self, channel: str, option: str, advice: str) -> Unsupported:
        return Unsupported(
            f"channel {channel!r} uses {option}, which {self._backend} does not support; {advice}",
            backend=self._backend,
            operation="start",
            queue=channel,
        )
