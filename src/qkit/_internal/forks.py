"""Notification of objects about the fork of a child process, where they cannot work."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

__all__ = ["ForkAware", "ForkSafeLock", "in_child", "watch_forks"]


class ForkAware(Protocol):
    """Object that is notified in a child process."""

    def after_fork(self) -> None:
        """Record that this is a copy in a child process.

        Called in the child, before ``os.fork`` returns there. The threads and the event loop of the
        object do not run in the child, and a lock may have been held by one of these threads.
        """
        ...


def in_child(callback: Callable[[], None]) -> None:
    """Call ``callback`` in every forked child process; do nothing if the system cannot fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=callback)


_watching: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def watch_forks(item: ForkAware) -> None:
    """Call ``item.after_fork`` in every forked child process, as long as ``item`` exists."""
    _watching.add(item)


def _notify() -> None:
    for item in list(_watching):
        item.after_fork()


in_child(_notify)


class ForkSafeLock:
    """Lock that is free in a child process, even if a thread of the parent held it at the fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        watch_forks(self)

    def after_fork(self) -> None:
        """Replace the lock by a free one."""
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        """Acquire the lock."""
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        """Release the lock."""
        self._lock.release()
