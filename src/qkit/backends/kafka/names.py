"""Names of the topics and consumer groups of a channel."""

from __future__ import annotations

from typing import Final

from qkit.backends.kafka.errors import BACKEND
from qkit.errors import ConfigError

__all__ = ["TopicNames"]

RETRY: Final = ".retry"
REMOVED: Final = "::removed"  # cannot be a group of a topic: a group name contains no colon


class TopicNames:
    """Names of topics and consumer groups, derived from the name of a channel.

    Args:
        group_prefix: Prefix of all consumer group names; empty by default.

    >>> names = TopicNames("staging.")
    >>> names.retry("orders"), names.group("orders", None), names.group("prices", "mail")
    ('orders.retry', 'staging.orders', 'staging.prices:mail')
    """

    def __init__(self, group_prefix: str = "") -> None:
        self._prefix = group_prefix

    def retry(self, queue: str) -> str:
        """Return the name of a channel's retry topic, for delayed and retried messages."""
        return queue + RETRY

    def group(self, queue: str, group: str | None) -> str:
        """Return the consumer group id of a queue (``group=None``) or of a topic's group."""
        return self._prefix + queue + ("" if group is None else f":{group}")

    def markers(self, queue: str) -> str:
        """Return the id of the marker group, whose commit is the offset after the last marker.

        A marker is a record that hides a removed message. The group has no members.
        """
        return self._prefix + queue + REMOVED

    def groups(self, queue: str, known: list[str]) -> dict[str, str | None]:
        """Return the consumer groups in ``known`` that belong to a channel.

        The keys are group ids. The values are the group names of a topic. If no group of a topic is
        known, the only entry is the group of the queue, with the value ``None``.
        """
        own = self.group(queue, None)
        found: dict[str, str | None] = {
            name: name[len(own) + 1 :]
            for name in known
            if name.startswith(f"{own}:") and not name.endswith(REMOVED)
        }
        return found or {own: None}

    def is_channel(self, topic: str) -> bool:
        """Return whether a Kafka topic is a channel and not a retry topic."""
        return not topic.endswith(RETRY)

    def check(self, queue: str) -> None:
        """Check that the name of a channel does not collide with a retry topic.

        Raises:
            ConfigError: The name ends in ``.retry``.
        """
        if not self.is_channel(queue):
            raise ConfigError(
                f"{queue!r} is the name of the retry topic of {queue.removesuffix(RETRY)!r} on "
                "Kafka: choose a name that does not end in '.retry'",
                backend=BACKEND,
                operation="declare",
                queue=queue,
            )
