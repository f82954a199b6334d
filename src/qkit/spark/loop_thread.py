"""An event loop in a thread, for calls from where there is none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Self, TypeVar

__all__ = ["LoopThread"]

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for a thread that has no loop; connections stay alive between calls."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="qkit-spark", daemon=True
        )
        self._thread.start()

    def call(self, work: Coroutine[object, object, T]) -> T:
        """Run it to its end and give its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
