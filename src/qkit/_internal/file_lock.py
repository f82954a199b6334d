"""Exclusive locks on files, which need POSIX."""

from __future__ import annotations

from qkit.errors import Unsupported

try:
    import fcntl
except ModuleNotFoundError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]  # mypy checks for a POSIX system

__all__ = ["lock_file", "require_file_locks"]


def require_file_locks() -> None:
    """Raise ``Unsupported`` if this system has no ``fcntl`` module."""
    if fcntl is None:
        raise Unsupported(
            "a native directory needs POSIX file locks (fcntl), as on Linux and macOS: keep the "
            "queues in memory (no path), or use a broker",
            backend="native",
        )


def lock_file(fd: int, *, wait: bool = True) -> None:
    """Lock an open file or directory exclusively, until it is closed.

    Args:
        fd: The descriptor.
        wait: Wait until the lock is free. Default: true.

    Raises:
        BlockingIOError: Another process has the lock, and ``wait`` is false.
        Unsupported: This system has no ``fcntl`` module.
    """
    require_file_locks()
    assert fcntl is not None
    fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
