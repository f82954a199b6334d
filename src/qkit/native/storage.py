"""The directory of a durable engine: opened, recovered, kept tidy and closed.

LOCK      the owner's, see ``disk.py``
log/      the segments, see ``segment.py``
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from qkit.clock import Clock, SystemClock
from qkit.errors import Damage
from qkit.native.journal import Journal
from qkit.native.log import SEGMENT_BYTES, Fsync, Log
from qkit.native.replay import Replay

__all__ = ["Fsync", "Storage"]

_T = TypeVar("_T")


class Storage:
    """What lies under a durable engine. Blocking work is done in threads."""

    journal: Journal

    def __init__(
        self,
        path: Path,
        *,
        clock: Clock,
        fsync: Fsync = "always",
        fsync_interval: float = 1.0,
        memory_limit: int = 64 << 20,
        segment_bytes: int = SEGMENT_BYTES,
        repair: bool = False,
    ) -> None:
        self.path = path
        self._clock = clock
        self._limit = memory_limit
        self.log = Log.open(
            path,
            fsync=fsync,
            fsync_interval=fsync_interval,
            segment_bytes=segment_bytes,
            repair=repair,
            # Virtual time knows nothing of threads: it would pass while they write.
            inline=not isinstance(clock, SystemClock),
        )

    @property
    def damage(self) -> list[Damage]:
        """What recovery found that was no record."""
        return self.log.damage

    async def recover(self) -> Replay:
        """Read the log and begin to write to it. If that fails the directory is let go."""
        try:
            replay = await self._in_thread(self._replay)
        except BaseException:
            await self.log.close()
            raise
        self.log.start()
        self.journal = Journal(self.log, self._clock, replay)
        return replay

    def _replay(self) -> Replay:
        replay = Replay(limit=self._limit)
        replay.read(self.log.recover())
        return replay

    async def _in_thread(self, function: Callable[[], _T]) -> _T:
        if self.log.inline:
            return function()
        work = asyncio.ensure_future(asyncio.to_thread(function))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])  # it must not go on in files that are closed
            raise

    def start(self, engine: object) -> None:
        """The engine has taken over what was recovered."""

    async def close(self) -> None:
        """Write what is pending and let the directory go."""
        await self.log.close()
