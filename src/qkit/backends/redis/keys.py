"""Where a queue, or a topic's group, lies among the keys of the server."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Place"]


class Place(NamedTuple):
    """The keys and the first argument of every script.

    >>> Place.of("orders").keys
    ('{orders}:meta', 'orders')
    >>> Place.of("prices").of_group("mail").ingress
    '{prices}:g.mail'
    """

    queue: str
    base: str
    ingress: str
    group: str | None = None

    @classmethod
    def of(cls, queue: str) -> Place:
        """A queue, or a topic as a whole; other programs find it under its own name."""
        return cls(queue, f"{{{queue}}}", queue)

    def of_group(self, group: str) -> Place:
        """What a group of this topic receives."""
        base = f"{self.base}:g.{group}"
        return Place(self.queue, base, base, group)

    @property
    def client(self) -> str:
        """How a consumer's connection is called on the server, which counts consumers by that.

        >>> Place.of("prices").of_group("mail").client
        'qkit:prices:mail'
        """
        return f"qkit:{self.queue}" if self.group is None else f"qkit:{self.queue}:{self.group}"

    @property
    def keys(self) -> tuple[str, str]:
        """The declaration and the ingress list."""
        return f"{{{self.queue}}}:meta", self.ingress
