"""``Wiring``: the objects that the parts of one service share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from qkit._internal.clock import Clock
from qkit.backend import Backend, DeliveryDetails
from qkit.handlers.channel import Middleware
from qkit.handlers.registry import Registry
from qkit.handlers.route import RouteTable
from qkit.observability.connection_state import ConnectionTracker
from qkit.observability.events import Events
from qkit.observability.metrics import Counters
from qkit.observability.telemetry import Telemetry, server_of
from qkit.settings.model import Settings

__all__ = ["Wiring"]


@dataclass(frozen=True, slots=True)
class Wiring:
    """The shared objects of a service, passed to its producer, consumers and administration.

    Attributes:
        backend: The backend.
        settings: The settings of the service.
        clock: The source of time.
        registry: The declared channels and handlers.
        counters: The counters of all channels.
        events: The listeners.
        routes: The routes of the channels.
        connection: The state of the connection.
        telemetry: Traces and metrics.
    """

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
        """Return the wiring of a service, creating the objects that are not given.

        Args:
            backend: The backend.
            settings: The settings of the service.
            clock: The source of time.
            registry: The declared channels and handlers. Default: none.
            counters: The counters of all channels. Default: new counters.
            events: The listeners. Default: none.
            middleware: Functions wrapped around every handler call, the first outermost.
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
            telemetry=Telemetry(
                backend.name,
                server_of(settings.url.get_secret_value() if settings.url is not None else None),
                backend if isinstance(backend, DeliveryDetails) else None,
            ),
        )
