"""Segments that readers outside the engine still need: compaction does not touch them.

    readers/NAME    {"segment": the first that is still wanted, "until": when that ends}

Both sides hold a lock on ``log/`` for a moment: a reader while it says what it wants, compaction
while it looks and exchanges segments. So nothing vanishes that a reader has asked for.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, cast

from qkit.errors import ConfigError
from qkit.native.log.disk import sync_path

__all__ = ["is_retained", "release", "retain", "retention_lock"]

logger = logging.getLogger("qkit.native")

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,100}")


def retain(path: Path, name: str, segment: int, *, until: float) -> None:
    """Retain ``segment`` and all later ones as they are, up to a wall time.

    When this returns no exchange of them is under way, and none begins. Again moves the border,
    or the time.
    """
    with _locked(path):
        directory = path / "readers"
        if not directory.exists():
            directory.mkdir(mode=0o700)
            sync_path(path)
        temporary = directory / f"{_checked(name)}.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump({"segment": segment, "until": until}, file)
            file.flush()
            os.fsync(fd)
        temporary.rename(directory / name)
        sync_path(directory)


def is_retained(path: Path, name: str) -> bool:
    """Return whether the log is still retained for a reader: it renewed in time."""
    return (path / "readers" / _checked(name)).exists()


def release(path: Path, name: str) -> None:
    """Retain nothing for this reader any more."""
    (path / "readers" / _checked(name)).unlink(missing_ok=True)


@contextmanager
def retention_lock(path: Path) -> Generator[int | None]:
    """The first segment that must stay as it is, ``None`` if all may go, while this lasts."""
    if not (path / "log").exists():  # a disk in memory has no readers outside
        yield None
        return
    with _locked(path):
        yield _border(path / "readers", time.time())


def _border(directory: Path, now: float) -> int | None:
    wanted: list[int] = []
    if directory.is_symlink() or not directory.is_dir():
        return None
    for file in directory.iterdir():
        if not _NAME.fullmatch(file.name):
            continue
        try:
            told = cast("dict[str, float]", json.loads(file.read_text()))
            segment, until = int(told["segment"]), float(told["until"])
        except (OSError, ValueError, KeyError, TypeError):
            logger.warning("readers/%s cannot be read: nothing is taken out of the log", file.name)
            segment, until = 0, now
        if until < now:
            logger.warning("the reader %s stayed away: the log is no longer kept", file.name)
            with suppress(OSError):
                file.unlink()
        else:
            wanted.append(segment)
    return min(wanted, default=None)


@contextmanager
def _locked(path: Path) -> Generator[None]:
    fd = os.open(path / "log", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"a reader is named by 1–100 characters of A-Za-z0-9_-, not {name!r}")
    return name
