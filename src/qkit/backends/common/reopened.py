"""One resource for all callers, made again after it was lost."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from qkit._internal.tasks import cancel_and_wait, retrieve_exception
from qkit.errors import BackendUnavailable, QueueError

__all__ = ["Reopened"]

T = TypeVar("T")


class Reopened(Generic[T]):
    """A connection, channel or client that the first caller opens, for all.

    It is made in a task of its own: a caller that is cancelled does not end the attempt for the
    others. A lost one is replaced and not closed.

    Args:
        make: Makes the resource. It must limit its own time, and leave nothing open when it fails.
        is_lost: Tells whether a resource cannot be used any more.
        close: Closes a resource, lost or not.
        backend: Name of the backend, for errors and the task.

    Attributes:
        value: The resource, which may be lost; ``None`` if there is none. A caller on a hot path
            tests it and calls ``get`` only if it cannot be used.
        is_open: Whether callers may make it.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[T]],
        is_lost: Callable[[T], bool],
        close: Callable[[T], Awaitable[None]],
        *,
        backend: str,
    ) -> None:
        self._make = make
        self._is_lost = is_lost
        self._close = close
        self._backend = backend
        self._making: asyncio.Task[None] | None = None
        self.value: T | None = None
        self.is_open = False

    def open(self) -> None:
        """Allow callers to make the resource."""
        self.is_open = True

    async def get(self) -> T:
        """Return the resource; make it if there is none or it is lost.

        Raises what ``make`` raised, to every caller that waits for it.
        """
        while self.value is None or self._is_lost(self.value):
            if not self.is_open:
                raise self._unavailable("not connected: start the backend first")
            if self._making is None:
                self._making = asyncio.create_task(
                    self._run(), name=f"qkit {self._backend} connect"
                )
                self._making.add_done_callback(retrieve_exception)
            making = self._making
            await asyncio.wait({making})
            if making.cancelled() or not self.is_open:
                raise self._unavailable("the connection was closed while it was opened")
            error = making.exception()
            if error is not None:
                # The callers add their own facts to an error of ours.
                raise copy.copy(error) if isinstance(error, QueueError) else error
            if self.value is not None:
                break  # even if it is lost already: using it fails, and trying again is delayed
        return self.value

    def forget(self, value: T | None) -> None:
        """Make another one for the next caller, unless that was done; ``value`` is not closed."""
        if self.value is value:
            self.value = None

    async def aclose(self) -> None:
        """End an attempt, close the resource and refuse callers until ``open``; idempotent."""
        self.is_open = False
        if self._making is not None:
            await cancel_and_wait([self._making])
        value, self.value = self.value, None
        if value is not None:
            await self._close(value)

    async def _run(self) -> None:
        try:
            self.value = await self._make()
        finally:
            self._making = None

    def _unavailable(self, text: str) -> BackendUnavailable:
        return BackendUnavailable(text, backend=self._backend, operation="connect")
