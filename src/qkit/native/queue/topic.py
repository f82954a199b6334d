"""``Topic``: each group receives its own copy of every message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import fields

from qkit.backend import QueueStats
from qkit.message import GROUP, Envelope
from qkit.native.config import QueueConfig
from qkit.native.queue.queue import Queue

__all__ = ["Topic"]


class Topic:
    """Topic with a queue for each group; the queues share the bodies of their messages.

    Args:
        name: Name of the topic.
        config: Configuration of the topic and all its groups.
        new_group: Creates the queue of a group.
        number: Number of the topic in the log; 0 in memory.
    """

    __slots__ = ("_new_group", "config", "groups", "name", "number")

    def __init__(
        self,
        name: str,
        config: QueueConfig,
        new_group: Callable[[Topic, str], Queue],
        number: int = 0,
    ) -> None:
        self.name: str = name
        self.config: QueueConfig = config
        self.number: int = number
        self.groups: dict[str, Queue] = {}
        self._new_group = new_group

    def group(self, name: str) -> Queue:
        """Return the queue of a group; create it on first use.

        A group receives only messages that are sent after it was created.
        """
        actor = self.groups.get(name)
        if actor is None:
            actor = self.groups[name] = self._new_group(self, name)
        return actor

    def reconfigure(self, config: QueueConfig) -> None:
        """Apply a new configuration to all groups."""
        self.config = config
        for actor in self.groups.values():
            actor.reconfigure(config)

    def put(
        self,
        now: float,
        id: str,
        body: bytes,
        headers: dict[str, str] | None = None,
        key: str | None = None,
        priority: int | None = None,
        due: float | None = None,
        expires: float | None = None,
    ) -> None:
        """Add a message to every group, or only to the group in its ``qkit-group`` header.

        Either every group receives its copy or none does. So a full group blocks the whole topic.
        """
        actors, headers = self.targets(headers)
        for actor in actors:
            actor.state.check(id, priority)
        for actor in actors:
            actor.put(now, id, body, headers, key, priority, due, expires)

    def targets(
        self, headers: dict[str, str] | None
    ) -> tuple[Sequence[Queue], dict[str, str] | None]:
        """Return the queues that receive a message with these headers, and the headers to store."""
        if headers is None or GROUP not in headers:
            return list(self.groups.values()), headers
        # This is a replayed dead letter. Create its group if it is missing, because the letter
        # itself will be deleted.
        remaining = {name: value for name, value in headers.items() if name != GROUP}
        return [self.group(headers[GROUP])], remaining

    def reserve(
        self, id: str, headers: dict[str, str] | None, priority: int | None
    ) -> tuple[Sequence[Queue], dict[str, str] | None]:
        """Reserve capacity in every queue that receives the message; see ``Queue.reserve``."""
        queues, headers = self.targets(headers)
        for at, queue in enumerate(queues):
            try:
                queue.state.reserve(id, priority)
            except BaseException:
                for other in queues[:at]:
                    other.state.unreserve()
                raise
        return queues, headers

    async def wait_for_capacity(self, timeout: float | None) -> None:
        """Wait until every group has capacity, at most ``timeout`` seconds.

        A sender waits for one full group after another, each time at the end of the group's wait
        list.
        """
        waited = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while (actor := self._without_capacity(waited)) is not None:
                    await actor.wait_for_capacity(None)
                    # Pass the wake-up on: the message is put only when all groups have capacity.
                    actor.wake_capacity_waiters()
                    waited = True

    def _without_capacity(self, waited: bool) -> Queue | None:
        for actor in self.groups.values():
            if actor.lost is None and (actor.state.full if waited else actor.capacity_reserved):
                return actor
        return None

    def wake_capacity_waiters(self) -> None:
        """Wake senders that wait for capacity in any group."""
        for actor in self.groups.values():
            actor.wake_capacity_waiters()

    @property
    def consumers(self) -> int:
        """Number of consumers in all groups."""
        return sum(queue.consumers for queue in self.groups.values())

    @property
    def backlog(self) -> int:
        """Largest backlog of any group."""
        return max((actor.backlog for actor in self.groups.values()), default=0)

    def close(self, reason: str) -> None:
        """Close every group."""
        for actor in self.groups.values():
            actor.close(reason)

    def stats(self) -> QueueStats:
        """Return the figures of all groups: sums, the average wait and the highest age."""
        figures = [actor.stats() for actor in self.groups.values()]
        if not figures:
            return QueueStats(queue=self.name, depth=0, in_flight=0, scheduled=0, consumers=0)
        waited = sum(actor.state.waited for actor in self.groups.values())
        delivered = sum(actor.state.first_claimed for actor in self.groups.values())
        ages = [item.oldest_message_age_secs for item in figures]
        summed = {
            item.name: sum(getattr(figure, item.name) for figure in figures)
            for item in fields(QueueStats)
            if item.name not in {"queue", "avg_wait_time_ms", "oldest_message_age_secs"}
        }
        return QueueStats(
            queue=self.name,
            avg_wait_time_ms=1000 * waited / delivered if delivered else None,
            oldest_message_age_secs=max((age for age in ages if age is not None), default=None),
            **summed,
        )

    async def browse(self, limit: int) -> list[Envelope]:
        """Return the next messages, group by group, each with its group in a header."""
        found: list[Envelope] = []
        for name, actor in tuple(self.groups.items()):
            for envelope in await actor.browse(limit - len(found)):
                envelope.headers[GROUP] = name
                found.append(envelope)
        return found
