"""Notification of objects that cannot be used in a forked child process."""

from __future__ import annotations

import os
from typing import Final, Protocol
from weakref import WeakSet

__all__ = ["Forkable", "watch_forks"]


class Forkable(Protocol):
    """Object that is told when it is in a forked child process."""

    def forked(self) -> None:
        """Make every later use raise ``LifecycleError``. Must neither wait nor raise."""
        ...


_watched: Final[WeakSet[Forkable]] = WeakSet()


def watch_forks(item: Forkable) -> None:
    """Call ``item.forked()`` in each forked child process, for as long as the object exists."""
    _watched.add(item)


def _forked() -> None:
    for item in tuple(_watched):
        item.forked()


if hasattr(os, "register_at_fork"):  # missing where processes cannot fork
    os.register_at_fork(after_in_child=_forked)
