"""How a queue of the native engine behaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from qkit.backend import Balance
from qkit.errors import ConfigError

__all__ = ["Balance", "QueueConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """How a queue or topic of the engine behaves.

    ``max_deliveries`` is the limit when leases expire or consumers ``nack`` (``None``: no limit);
    ``dead_letter`` names the queue for what reached it (``None``: it is dropped and counted).
    ``backoff`` is the delay before the first redelivery after a ``nack``; it doubles with each
    one up to ``max_backoff``. ``balance`` says which of several waiting consumers gets a message:
    the one that has waited longest, the one that holds least, or any.
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
            raise ConfigError("max_depth is at least 1")
        if not 0 <= self.max_priority <= 255:
            raise ConfigError(f"max_priority is 0–255, not {self.max_priority}")
        if self.max_deliveries is not None and self.max_deliveries < 1:
            raise ConfigError("a message is delivered at least once: max_retries is 0 or more")
        if not self.ack_deadline > 0:
            raise ConfigError("ack_deadline is more than 0 seconds")
        if not (self.backoff >= 0 and self.max_backoff >= 0):
            raise ConfigError("backoff and max_backoff are 0 or more seconds")
        if self.balance not in get_args(Balance):
            raise ConfigError(f"balance is {', '.join(get_args(Balance))}, not {self.balance!r}")

    def delay_after(self, attempt: int) -> float:
        """The delay before the redelivery that follows ``attempt``.

        >>> QueueConfig(backoff=0.5).delay_after(3)
        2.0
        """
        return float(min(self.backoff * 2 ** min(attempt - 1, 64), self.max_backoff))
