"""``Wiring``: the objects that the parts of one service share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from qkit._internal.clock import Clock
from qkit.backend import Backend
from qkit.handlers.channel import Middleware
from qkit.handlers.registry import Registry
from qkit.handlers.route import RouteTable
from qkit.observability.connection_state import ConnectionTracker
from qkit.observability.events import Events
from qkit.observability.metrics import Counters
from qkit.observability.telemetry import Telemetry
from qkit.settings.model import Settings

__all__ = ["Wiring"]


@dataclass(frozen=True, slots=True)
class Wiring:
    """One of each for a service; its producer, consumers and administration all get this."""

    backend: Backend
    settings: Settings
    clock: Clock
    registry: Registry
    counters: Counters
    events: Events
    routes: RouteTable
    connection: ConnectionTracker
    telemetry: Telemetry

    @classmethod
    def build(
        cls,
        backend: Backend,
        settings: Settings,
        clock: Clock,
        *,
        registry: Registry | None = None,
        counters: Counters | None = None,
        events: Events | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> Self:
        """Create what is not given.

        Args:
            backend: The backend.
            settings: The settings of the service.
            clock: Tells the time.
            registry: Channels and handlers; empty if left out.
            counters: Counters of all channels; new if left out.
            events: Listeners; none if left out.
            middleware: Wrapped around every handler, the first outermost.
        """
        if registry is None:
            registry = Registry(queues=bool(backend.capabilities.queues))
        counters = Counters() if counters is None else counters
        events = Events() if events is None else events
        return cls(
            backend=backend,
            settings=settings,
            clock=clock,
            registry=registry,
            counters=counters,
            events=events,
            routes=RouteTable(settings, backend, registry, counters, middleware),
            connection=ConnectionTracker(events, clock, backend.name),
            telemetry=Telemetry(backend.name),
        )
