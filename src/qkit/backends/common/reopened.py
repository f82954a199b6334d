"""Shared resource that is opened on demand and reopened after it was lost."""

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
    """Connection, channel or client that all callers share and the first caller opens.

    A separate task opens the resource, so that cancelling one caller does not cancel the attempt
    for the others. A lost resource is replaced without being closed.

    Args:
        make: Opens the resource. It must have its own timeout and leave nothing open if it fails.
        is_lost: Returns whether a resource is unusable.
        close: Closes a resource, lost or not.
        backend: Name of the backend, used in errors and in the name of the task.

    Attributes:
        value: The resource, possibly lost; ``None`` if it is not open. Code on a hot path uses it
            directly and calls ``get`` only if it is missing or lost.
        is_open: Whether ``get`` may open the resource.
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
        self.is_open: bool = False

    def open(self) -> None:
        """Allow ``get`` to open the resource."""
        self.is_open = True

    async def get(self) -> T:
        """Return the resource, after opening it if it is missing or lost.

        If ``make`` fails, its exception is raised in every waiting caller.

        Raises:
            BackendUnavailable: ``open`` was not called, or ``aclose`` was called meanwhile.
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
                raise self._unavailable("the backend was closed while it was connecting")
            error = making.exception()
            if error is not None:
                # Each caller adds its own context to a QueueError, so each gets a copy.
                raise copy.copy(error) if isinstance(error, QueueError) else error
            if self.value is not None:
                # It may be lost again by now. The caller then fails and retries with backoff.
                break
        return self.value

    def forget(self, value: T | None) -> None:
        """Discard ``value`` without closing it, unless it has already been replaced."""
        if self.value is value:
            self.value = None

    async def aclose(self) -> None:
        """Cancel an attempt in progress and close the resource; idempotent.

        ``get`` raises ``BackendUnavailable`` until ``open`` is called again.
        """
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
