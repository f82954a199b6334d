"""Translation of a driver's errors into ``QueueError`` and its subclasses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from qkit.errors import QueueError

__all__ = ["ErrorTranslator"]


class ErrorTranslator:
    """Translator from the errors of one driver to ``QueueError``.

    Args:
        backend: Name of the backend, shown in the errors.
        drivers: Exception types that the driver may raise.
        meaning: Returns the class and the text of the ``QueueError`` for an exception.
        is_driver_cancellation: Returns whether the driver, and not a cancelled task, raised the
            current ``CancelledError``. By default a ``CancelledError`` is never translated.

    >>> translate_errors = ErrorTranslator("redis", (OSError,), lambda e: (QueueError, str(e)))
    >>> with translate_errors("publish", "orders"):
    ...     raise ConnectionResetError("reset by peer")
    Traceback (most recent call last):
    qkit.errors.QueueError: reset by peer [backend=redis operation=publish queue=orders]
    """

    __slots__ = ("_backend", "_drivers", "_is_driver_cancellation", "_meaning")

    def __init__(
        self,
        backend: str,
        drivers: tuple[type[BaseException], ...],
        meaning: Callable[[BaseException], tuple[type[QueueError], str]],
        *,
        is_driver_cancellation: Callable[[], bool] | None = None,
    ) -> None:
        self._backend = backend
        self._drivers = drivers
        self._meaning = meaning
        self._is_driver_cancellation = is_driver_cancellation

    def __call__(self, operation: str, queue: str | None = None) -> _Translation:
        """Return a context manager that translates the driver's errors.

        Use it with a plain ``with``, which may enclose ``await``. A ``QueueError`` is not changed.
        """
        return _Translation(self, operation, queue)

    def error(self, exc: BaseException, operation: str, queue: str | None = None) -> QueueError:
        """Return the ``QueueError`` for a driver error, with that error as its cause."""
        kind, text = self._meaning(exc)
        return kind(text, backend=self._backend, operation=operation, queue=queue, cause=exc)

    def translates(self, exc: BaseException) -> bool:
        """Return whether ``exc`` is a driver error that must be translated."""
        if isinstance(exc, asyncio.CancelledError):
            return self._is_driver_cancellation is not None and self._is_driver_cancellation()
        return isinstance(exc, self._drivers) and not isinstance(exc, QueueError)


class _Translation:
    __slots__ = ("_operation", "_queue", "_translator")

    def __init__(self, translator: ErrorTranslator, operation: str, queue: str | None) -> None:
        self._translator = translator
        self._operation = operation
        self._queue = queue

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is not None and self._translator.translates(exc):
            raise self._translator.error(exc, self._operation, self._queue) from exc
