"""``Health`` of a service and ``ConsumerHealth`` of its consumers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from qkit.observability.connection_state import ConnectionState

__all__ = ["ConsumerHealth", "Health"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerHealth:
    """Health of one consumer.

    Attributes:
        channel: Name of the channel.
        group: Name of the consumer group.
        state: ``starting``, ``consuming``, ``standby``, ``paused``, ``reconnecting`` or
            ``stopped``. A consumer that backs off after ``Unavailable`` is ``paused``. An ordered
            consumer is on ``standby`` while another process consumes its queue, if the broker
            allows only one at a time.
        in_flight: Number of unsettled messages.
        last_poll_at: Time of the last fetch, in seconds since the epoch; ``None`` before the first.
        last_settle_at: Time of the last settlement, in seconds since the epoch; ``None`` before
            the first.
        failing: Text of the error if settlements have been failing for ten seconds, or if the
            broker rejects the subscription; otherwise ``None``.

    Example:
        >>> ConsumerHealth(
        ...     channel="orders", group="billing", state="consuming", in_flight=2,
        ...     last_poll_at=None, last_settle_at=None).failing is None
        True
    """

    channel: str
    group: str
    state: Literal["starting", "consuming", "standby", "paused", "reconnecting", "stopped"]
    in_flight: int
    last_poll_at: float | None
    last_settle_at: float | None
    failing: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Health of a service.

    Attributes:
        status: ``healthy`` if the service is running and connected, its event loop responds, every
            consumer is consuming, on standby or paused, and none is ``failing``.
        connection_state: State of the connection to the broker.
        durable: Whether confirmed messages survive a restart; ``None`` if the broker does not
            report it.
        breaker: State of the circuit breaker: ``closed``, ``open`` or ``half_open``.
        last_success_at: Time at which a message was last sent or settled, in seconds since the
            epoch; ``None`` before the first.
        last_error: Text of what makes the service unhealthy (a blocked event loop or a failing
            consumer), otherwise of the last connection error, if any.
        disconnected_at: Time at which the connection was lost, in seconds since the epoch; ``None``
            while connected.
        consumers: Health of each consumer.

    Example:
        >>> import asyncio
        >>> from qkit import QueueService, Settings
        >>> async def main() -> None:
        ...     async with QueueService(Settings(type="native")) as service:
        ...         print(service.health_check().status)
        >>> asyncio.run(main())
        healthy
    """

    status: Literal["healthy", "unhealthy"]
    connection_state: ConnectionState
    durable: bool | None
    breaker: str
    last_success_at: float | None = None
    last_error: str | None = None
    disconnected_at: float | None = None
    consumers: list[ConsumerHealth] = field(default_factory=list[ConsumerHealth])
