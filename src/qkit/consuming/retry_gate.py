"""``RetryGate``: when an inline retry may begin."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["RetryGate"]


class RetryGate:
    """Gate that the inline retries of one session pass before each attempt.

    Attributes:
        ended: Set when the session ends: no attempt begins any more.
        open: Set while handlers may be started, and when the session ends.
    """

    def __init__(self) -> None:
        self.ended: asyncio.Event = asyncio.Event()
        self.open: asyncio.Event = asyncio.Event()
        self.open.set()

    def end(self) -> None:
        """End every wait: no attempt begins any more."""
        self.ended.set()
        self.open.set()

    def change(self, *, active: bool) -> None:
        """Let attempts begin, or hold them back until the next change."""
        if active or self.ended.is_set():
            self.open.set()
        else:
            self.open.clear()

    async def wait(self, delay: float, thread: asyncio.Future[object] | None) -> bool:
        """Wait until the next attempt may begin.

        Args:
            delay: Seconds to wait at least.
            thread: The thread of the failed attempt, which may still run after a timeout. A slot
                has one thread, so the next attempt waits for it.

        Returns:
            False if no attempt may begin, because the session ends.
        """
        try:
            async with asyncio.timeout(delay):
                await self.ended.wait()
        except TimeoutError:
            pass
        if thread is not None and not thread.done():
            ended = asyncio.ensure_future(self.ended.wait())
            either: set[asyncio.Future[Any]] = {thread, ended}
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                ended.cancel()
        while not self.open.is_set():
            await self.open.wait()
        return not self.ended.is_set()
