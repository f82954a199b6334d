"""Consumers that are registered with a queue by name, and their prefetch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from qkit.errors import ConfigError, ConsumerNotFound

__all__ = ["DEFAULT_PREFETCH", "MAX_PREFETCH", "Consumer", "Consumers"]

DEFAULT_PREFETCH = 10
MAX_PREFETCH = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """Consumer of a queue, as listed by ``Engine.consumers``.

    Attributes:
        consumer: Name of the consumer.
        prefetch: Number of unsettled messages that it may hold.
        in_flight: Number of unsettled messages that it holds.
        group: Group of the consumer; ``None`` unless it consumes a topic.
    """

    consumer: str
    prefetch: int
    in_flight: int
    group: str | None = None


class Consumers:
    """Registered consumers of one queue, including those that wait for free prefetch.

    Args:
        queue: Name of the queue.
        busy: Returns how many messages a consumer holds.
    """

    __slots__ = ("_busy", "_prefetch", "_queue", "_waiting")

    def __init__(self, queue: str, busy: Callable[[str], int]) -> None:
        self._queue = queue
        self._busy = busy
        self._prefetch: dict[str, int] = {}
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    def __contains__(self, consumer: object) -> bool:
        return consumer in self._prefetch

    def register(self, consumer: str, prefetch: int) -> bool:
        """Add a consumer, or change its prefetch; return whether it is new."""
        if not isinstance(prefetch, int) or not 1 <= prefetch <= MAX_PREFETCH:
            raise ConfigError(
                f"prefetch must be an integer in 1–{MAX_PREFETCH}, got {prefetch!r}",
                backend="native",
                operation="register",
                queue=self._queue,
            )
        new = consumer not in self._prefetch
        self._prefetch[consumer] = prefetch
        self.wake_unblocked()
        return new

    def unregister(self, consumer: str) -> None:
        """Remove a consumer, and wake its waiting calls."""
        self.prefetch(consumer, "unregister")
        del self._prefetch[consumer]
        self.wake_unblocked()

    def prefetch(self, consumer: str, operation: str) -> int:
        """Return the prefetch of a consumer; raise ``ConsumerNotFound`` if not registered."""
        found = self._prefetch.get(consumer)
        if found is None:
            raise ConsumerNotFound(
                f"no consumer {consumer!r} on this queue: register it first",
                backend="native",
                operation=operation,
                queue=self._queue,
            )
        return found

    def has_capacity(self, consumer: str) -> bool:
        """Return whether a consumer may take another message.

        Raises ``ConsumerNotFound`` if it is not registered.
        """
        return self._busy(consumer) < self.prefetch(consumer, "consume")

    def listed(self, group: str | None) -> list[Consumer]:
        """Return all registered consumers with their prefetch and messages in flight."""
        return [
            Consumer(consumer=name, prefetch=limit, in_flight=self._busy(name), group=group)
            for name, limit in self._prefetch.items()
        ]

    async def wait(self, consumer: str) -> None:
        """Wait until a consumer may take another message, or is no longer registered."""
        entry = consumer, asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        try:
            await entry[1]
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    def wake_unblocked(self) -> None:
        """Wake waiting consumers that have capacity now, or are no longer registered."""
        for name, waiter in self._waiting:
            if not waiter.done() and (name not in self._prefetch or self.has_capacity(name)):
                waiter.set_result(None)

    def close(self) -> None:
        """Wake all waiting consumers."""
        for _, waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
