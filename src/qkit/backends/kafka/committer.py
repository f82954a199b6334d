"""Offset commits, combined so that only one is in flight at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from qkit._internal.logging import logger
from qkit.backends.kafka.driver import Partition
from qkit.backends.kafka.errors import DRIVER_ERRORS
from qkit.backends.kafka.offsets import CommittedOffset, OffsetTracker

__all__ = ["OffsetCommitter"]

COMMIT_INTERVAL_SECONDS: Final = 0.05
COMMIT_RETRY_SECONDS: Final = 0.5
BATCH_COMMIT_SECONDS: Final = 1.0  # an incomplete batch is committed after this time


class OffsetCommitter:
    """Committer of the offsets that one consumer has settled.

    Args:
        group: Id of the consumer group, for log messages.
        trackers: Trackers of the assigned partitions; the group membership updates this mapping.
        stable: Event that is set while no rebalance is in progress. Kafka rejects commits during a
            rebalance.
        batch_size: Settled messages per commit; ``None`` commits as soon as possible.
        commit: Sends offsets to the group coordinator.
        on_commit: Called after every commit, with its error or ``None``.
    """

    def __init__(
        self,
        group: str,
        trackers: Mapping[Partition, OffsetTracker],
        stable: asyncio.Event,
        *,
        batch_size: int | None,
        commit: Callable[[dict[Partition, CommittedOffset]], Awaitable[None]],
        on_commit: Callable[[Exception | None], None],
    ) -> None:
        self._group = group
        self._trackers = trackers
        self._stable = stable
        self._batch_size = batch_size
        self._write = commit
        self._on_commit = on_commit
        self._requested = asyncio.Event()
        self._settled_count = 0  # messages settled since the last commit
        self._batch_timer: asyncio.TimerHandle | None = None
        self._closed = False

    def settled(self) -> None:
        """Record that a message was settled; request a commit when a batch is complete.

        A batch is complete after ``batch_size`` messages, when no message is in flight, or after
        ``BATCH_COMMIT_SECONDS``. Without ``batch_size``, every message completes a batch.
        """
        self._settled_count += 1
        if (
            self._batch_size is None
            or self._settled_count >= self._batch_size
            or not any(tracker.held for tracker in self._trackers.values())
        ):
            self.request()
        elif self._batch_timer is None:
            loop = asyncio.get_running_loop()
            self._batch_timer = loop.call_later(BATCH_COMMIT_SECONDS, self.request)

    def request(self) -> None:
        """Make ``run`` commit as soon as possible."""
        self._requested.set()

    async def run(self) -> None:
        """Commit on request, at most every ``COMMIT_INTERVAL_SECONDS``; retry a failed commit."""
        while True:
            await self._requested.wait()
            await self._stable.wait()
            self._requested.clear()
            committed = await self.commit()
            if not committed:
                self.request()
            await asyncio.sleep(COMMIT_INTERVAL_SECONDS if committed else COMMIT_RETRY_SECONDS)

    async def commit(self) -> bool:
        """Commit the offsets that have changed; return false if the commit failed."""
        self._cancel_timer()
        self._settled_count = 0
        changed: dict[Partition, CommittedOffset] = {}
        for partition, tracker in self._trackers.items():
            if (unsaved := tracker.unsaved()) is not None:
                changed[partition] = unsaved
        if not changed or self._closed:
            return True
        try:
            await self._write(changed)
        except DRIVER_ERRORS as error:
            # The trackers keep the settled offsets. Their messages are delivered again only if this
            # process dies before a later commit succeeds.
            logger.info("%s: could not commit offsets; retrying: %r", self._group, error)
            self._on_commit(error)
            return False
        self._on_commit(None)
        for partition, saved in changed.items():
            if partition in self._trackers:
                self._trackers[partition].saved = saved
        return True

    def close(self) -> None:
        """Disable further commits; idempotent."""
        self._closed = True
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._batch_timer is not None:
            self._batch_timer.cancel()
            self._batch_timer = None
