"""Redis key names of queues, topics and groups, and the KEYS of the scripts."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

__all__ = ["MIN_LEVELS", "QUEUES", "QueueKeys"]

QUEUES: Final = "qkit:queues"  # set of all queue names; channel names cannot contain a colon
MIN_LEVELS: Final = 10  # priorities 0 to 9; a queue with a higher max_priority has more levels


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
        "back",
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
        self.queue: str = queue
        self.group: str | None = group
        self.meta: str = f"{tag}:meta"
        self.group_names: str = f"{tag}:groups"
        self.ingress: str = queue if group is None else base
        self.arrived: str = f"{base}:in"
        self.due: str = f"{base}:due"
        self.lease: str = f"{base}:lease"
        self.msg: str = f"{base}:msg"
        self.back: str = f"{base}:back"
        self.held_keys: tuple[str, str] = (self.lease, self.msg)
        self.lease_keys: tuple[str] = (self.lease,)
        self.declaration_keys: tuple[str, str] = (self.meta, self.ingress)
        self.plain_keys: tuple[str, ...] = (
            self.meta,
            self.ingress,
            self.arrived,
            f"{base}:p5",
            self.due,
            self.lease,
            self.back,
        )

    @staticmethod
    def of(queue: str) -> QueueKeys:
        """Return the keys of a queue or of a whole topic."""
        return _keys(queue)

    def of_group(self, group: str) -> QueueKeys:
        """Return the keys of a group of this topic."""
        return QueueKeys(self.queue, group)

    @property
    def client(self) -> str:
        """Client name of a consumer's connection, which ``stats`` uses to count consumers.

        >>> QueueKeys.of("prices").of_group("mail").client
        'qkit:prices:mail'
        """
        return f"qkit:{self.queue}" if self.group is None else f"qkit:{self.queue}:{self.group}"

    def part_keys(self, levels: int) -> tuple[str, ...]:
        """Return the KEYS of the scripts that work on one part (see ``library.lua``).

        Args:
            levels: Number of priorities; the lowest is 0.
        """
        return _part_keys(self, levels)

    def whole_keys(self, levels: int, groups: tuple[str, ...]) -> tuple[str, ...]:
        """Return the KEYS of the scripts that work on a whole queue or topic.

        ``library.lua`` describes their order.

        Args:
            levels: Number of priorities; the lowest is 0.
            groups: Names of the topic's groups.
        """
        return _whole_keys(self, levels, groups)

    def part(self, levels: int) -> tuple[str, ...]:
        """Return the keys of one part in the order that ``library.lua`` expects."""
        base = self._base
        order = f"{base}:keys", self.back, f"{base}:free"
        ready = [f"{base}:p{level}" for level in range(levels)]
        return self.ingress, self.arrived, self.due, self.lease, self.msg, *order, *ready


# Cached because the names are needed for every call.
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
