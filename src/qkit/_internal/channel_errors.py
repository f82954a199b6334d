"""Channel names in errors of the backend, which knows only the names on the broker."""

from __future__ import annotations

from types import TracebackType

from qkit.errors import PartialSend, QueueError

__all__ = ["ChannelErrors", "name_channel"]


def name_channel(error: QueueError, channel: str) -> None:
    """Set the ``queue`` of an error, and of the errors that it contains, to a channel's name."""
    error.queue = channel
    if isinstance(error, PartialSend):
        for item in error.results:
            if isinstance(item, QueueError):
                item.queue = channel


class ChannelErrors:
    """Context manager that applies ``name_channel`` to a ``QueueError`` raised in it.

    Args:
        channel: Name of the channel, without the prefix.

    >>> with ChannelErrors("orders"):
    ...     raise QueueError("no such queue", queue="staging.orders")
    Traceback (most recent call last):
    qkit.errors.QueueError: no such queue [queue=orders]
    """

    __slots__ = ("_channel",)

    def __init__(self, channel: str) -> None:
        self._channel = channel

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(exc, QueueError):
            name_channel(exc, self._channel)
