"""What a channel's topics and groups are called."""

from __future__ import annotations

from typing import Final

from qkit.backends.kafka.errors import BACKEND
from qkit.errors import ConfigError

__all__ = ["TopicNames"]

RETRY: Final = ".retry"
REMOVED: Final = "::removed"  # no group's name can hold a colon


class TopicNames:
    """Topics are named as their channels; groups after them, so that a person finds them.

    >>> names = TopicNames("staging.")
    >>> names.retry("orders"), names.group("orders", None), names.group("prices", "mail")
    ('orders.retry', 'staging.orders', 'staging.prices:mail')
    """

    def __init__(self, group_prefix: str = "") -> None:
        self._prefix = group_prefix

    def retry(self, queue: str) -> str:
        """The topic where a channel's messages wait for their time."""
        return queue + RETRY

    def group(self, queue: str, group: str | None) -> str:
        """The consumer group of a queue, or of a topic's group."""
        return self._prefix + queue + ("" if group is None else f":{group}")

    def markers(self, queue: str) -> str:
        """A group without members; its commit says how far markers of removed messages go."""
        return self._prefix + queue + REMOVED

    def groups(self, queue: str, known: list[str]) -> dict[str, str | None]:
        """The groups that receive from a channel, with their names there; a queue has one."""
        own = self.group(queue, None)
        found: dict[str, str | None] = {
            name: name[len(own) + 1 :]
            for name in known
            if name.startswith(f"{own}:") and not name.endswith(REMOVED)
        }
        return found or {own: None}

    def is_channel(self, topic: str) -> bool:
        """Whether a topic is a channel, and not the waiting room of one."""
        return not topic.endswith(RETRY)

    def check(self, queue: str) -> None:
        """Refuse a channel that would be the waiting room of another."""
        if not self.is_channel(queue):
            raise ConfigError(
                f"{queue!r}: on Kafka messages of {queue.removesuffix(RETRY)!r} wait in a topic of "
                "this name; choose one that does not end in '.retry'",
                backend=BACKEND,
                operation="declare",
                queue=queue,
            )
