"""Names of the keys of a queue or a topic's group, and the KEYS of each script."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

__all__ = ["MIN_LEVELS", "QUEUES", "QueueKeys"]

QUEUES: Final = "qkit:queues"  # the names of all queues; a channel's name cannot hold a colon
MIN_LEVELS: Final = 10  # priorities 0 to 9, unless a queue's max_priority is higher


class QueueKeys:
    """Key names of a queue, of a topic, or of one group of a topic.

    >>> QueueKeys.of("orders").plain_keys[:3]
    ('{orders}:meta', 'orders', '{orders}:in')
    >>> QueueKeys.of("prices").of_group("mail").ingress
    '{prices}:g.mail'
    """

    __slots__ = (
        "_base",
        "arrived",
        "declaration_keys",
        "due",
        "group",
        "group_names",
        "held_keys",
        "ingress",
        "lease",
        "lease_keys",
        "meta",
        "msg",
        "plain_keys",
        "queue",
    )

    def __init__(self, queue: str, group: str | None = None) -> None:
        tag = f"{{{queue}}}"
        base = tag if group is None else f"{tag}:g.{group}"
        self._base = base
        self.queue = queue
        self.group = group
        self.meta = f"{tag}:meta"
        self.group_names = f"{tag}:groups"
        self.ingress = queue if group is None else base
        self.arrived = f"{base}:in"
        self.due = f"{base}:due"
        self.lease = f"{base}:lease"
        self.msg = f"{base}:msg"
        self.held_keys = (self.lease, self.msg)
        self.lease_keys = (self.lease,)
        self.declaration_keys = (self.meta, self.ingress)
        self.plain_keys = (
            self.meta,
            self.ingress,
            self.arrived,
            f"{base}:p5",
            self.due,
            self.lease,
        )

    @staticmethod
    def of(queue: str) -> QueueKeys:
        """A queue, or a topic as a whole; other programs find it under its own name."""
        return _keys(queue)

    def of_group(self, group: str) -> QueueKeys:
        """What a group of this topic receives."""
        return QueueKeys(self.queue, group)

    @property
    def client(self) -> str:
        """Name of a consumer's connection on the server; ``stats`` counts consumers by it.

        >>> QueueKeys.of("prices").of_group("mail").client
        'qkit:prices:mail'
        """
        return f"qkit:{self.queue}" if self.group is None else f"qkit:{self.queue}:{self.group}"

    def part_keys(self, levels: int) -> tuple[str, ...]:
        """KEYS of the scripts on one part (see ``library.lua``).

        Args:
            levels: Number of priorities, from 0.
        """
        return _part_keys(self, levels)

    def whole_keys(self, levels: int, groups: tuple[str, ...]) -> tuple[str, ...]:
        """KEYS of the scripts on a whole queue or topic (see ``library.lua``).

        Args:
            levels: Number of priorities, from 0.
            groups: Names of groups.
        """
        return _whole_keys(self, levels, groups)

    def part(self, levels: int) -> tuple[str, ...]:
        """The keys of one part, in the order of ``library.lua``."""
        ready = [f"{self._base}:p{level}" for level in range(levels)]
        return self.ingress, self.arrived, self.due, self.lease, self.msg, *ready


# To build the names costs more than to look them up.
@lru_cache(maxsize=512)
def _keys(queue: str) -> QueueKeys:
    return QueueKeys(queue)


@lru_cache(maxsize=512)
def _part_keys(keys: QueueKeys, levels: int) -> tuple[str, ...]:
    return keys.meta, keys.queue, *keys.part(levels)


@lru_cache(maxsize=128)
def _whole_keys(keys: QueueKeys, levels: int, groups: tuple[str, ...]) -> tuple[str, ...]:
    names = [keys.meta, keys.queue, keys.group_names, *keys.part(levels)]
    for group in groups:
        names += keys.of_group(group).part(levels)
    return tuple(names)
