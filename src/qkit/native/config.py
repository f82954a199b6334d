"""Configuration of a queue or topic of the native engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from qkit.backend import Balance
from qkit.errors import ConfigError

__all__ = ["Balance", "QueueConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """Configuration of a queue or topic of the native engine.

    Attributes:
        broadcast: Whether the channel is a topic. Default: false.
        max_depth: Maximum number of messages in the queue. Default: 100,000.
        max_priority: Highest priority that a message may have, at most 255. Default: 9.
        max_deliveries: Number of deliveries after which a ``nack`` or an expired lease
            dead-letters the message. ``None``: no limit. Default: 4.
        ack_deadline: Length of a lease in seconds. Default: 30.
        dead_letter: Name of the dead-letter queue. ``None`` (the default): failed messages are
            dropped and counted.
        dead_letter_max_depth: ``max_depth`` of the dead-letter queue. Default: 10,000.
        drop_oldest: Drop the oldest message of a full queue instead of rejecting a new one.
            Default: false.
        backoff: Seconds before the first redelivery after a ``nack``; doubles with each further
            one. Default: 0.
        max_backoff: Upper limit of ``backoff`` in seconds. Default: 60.
        balance: Which of several waiting consumers receives a message: ``"round_robin"`` (the
            longest waiting; the default), ``"least_busy"`` (the one with the fewest messages in
            flight) or ``"random"``.

    Example:
        >>> QueueConfig(max_depth=1000, ack_deadline=60).max_deliveries
        4
    """

    broadcast: bool = False
    max_depth: int = 100_000
    max_priority: int = 9
    max_deliveries: int | None = 4
    ack_deadline: float = 30.0
    dead_letter: str | None = None
    dead_letter_max_depth: int = 10_000
    drop_oldest: bool = False
    backoff: float = 0.0
    max_backoff: float = 60.0
    balance: Balance = "round_robin"

    def __post_init__(self) -> None:
        if self.max_depth < 1 or self.dead_letter_max_depth < 1:
            raise ConfigError(
                "max_depth and dead_letter_max_depth must be at least 1, "
                f"got {self.max_depth} and {self.dead_letter_max_depth}"
            )
        if not 0 <= self.max_priority <= 255:
            raise ConfigError(f"max_priority must be 0–255, got {self.max_priority}")
        if self.max_deliveries is not None and self.max_deliveries < 1:
            raise ConfigError(
                f"max_deliveries must be at least 1 (max_retries at least 0), "
                f"got {self.max_deliveries}"
            )
        if not self.ack_deadline > 0:
            raise ConfigError(f"ack_deadline must be greater than 0, got {self.ack_deadline}")
        if not (self.backoff >= 0 and self.max_backoff >= 0):
            raise ConfigError(
                "backoff and max_backoff must be at least 0 seconds, "
                f"got {self.backoff} and {self.max_backoff}"
            )
        if self.balance not in get_args(Balance):
            choices = ", ".join(get_args(Balance))
            raise ConfigError(f"balance must be one of {choices}, got {self.balance!r}")

    def delay_after(self, attempt: int) -> float:
        """Return the delay before the redelivery that follows a failed attempt.

        Args:
            attempt: Number of the failed attempt, counted from 1.

        Returns:
            The delay in seconds.

        Example:
            >>> QueueConfig(backoff=0.5).delay_after(3)
            2.0
        """
        return float(min(self.backoff * 2 ** min(attempt - 1, 64), self.max_backoff))
