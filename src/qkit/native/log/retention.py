"""Retention of segments that other processes still read; compaction does not change them.

    readers/NAME    {"segment": first segment to retain, "until": wall time of expiry}

A reader locks ``log/`` while it writes its file. Compaction locks it while it reads these files
and replaces segments. So no segment that a reader has retained is replaced.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, cast

from qkit._internal.file_lock import lock_file
from qkit.errors import ConfigError
from qkit.native.log.disk import sync_path

__all__ = ["is_retained", "release", "retain", "retention_lock"]

logger: logging.Logger = logging.getLogger("qkit.native")

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,100}")


def retain(path: Path, name: str, segment: int, *, until: float) -> None:
    """Retain ``segment`` and all later segments unchanged until the wall time ``until``.

    When this returns, none of them is being replaced. Call this again to change the segment or the
    time.
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
    """Return whether segments are retained for a reader.

    False once compaction has found that the reader did not renew its retention in time.
    """
    return (path / "readers" / _checked(name)).exists()


def release(path: Path, name: str) -> None:
    """End the retention for a reader."""
    (path / "readers" / _checked(name)).unlink(missing_ok=True)


@contextmanager
def retention_lock(path: Path) -> Generator[int | None]:
    """Hold the retention lock; yield the number of the first retained segment, or ``None``."""
    if not (path / "log").exists():  # an in-memory disk, which other processes cannot read
        yield None
        return
    with _locked(path):
        yield _border(path / "readers", time.time())


def _border(directory: Path, now: float) -> int | None:
    retained: list[int] = []
    if directory.is_symlink() or not directory.is_dir():
        return None
    for file in directory.iterdir():
        if not _NAME.fullmatch(file.name):
            continue
        try:
            fields = cast("dict[str, float]", json.loads(file.read_text()))
            segment, until = int(fields["segment"]), float(fields["until"])
        except (OSError, ValueError, KeyError, TypeError):
            logger.warning(
                "readers/%s cannot be read, so the log is not compacted: remove the file if its "
                "reader is gone",
                file.name,
            )
            segment, until = 0, now
        if until < now:
            logger.warning(
                "reader %s did not renew its retention in time: the log is no longer retained for "
                "it",
                file.name,
            )
            with suppress(OSError):
                file.unlink()
        else:
            retained.append(segment)
    return min(retained, default=None)


@contextmanager
def _locked(path: Path) -> Generator[None]:
    fd = os.open(path / "log", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        lock_file(fd)
        yield
    finally:
        os.close(fd)


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"a reader name must be 1–100 characters of A-Za-z0-9_-, got {name!r}")
    return name
