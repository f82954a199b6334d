"""Waiting for the owner of a directory to import committed bulk files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, cast

from qkit._internal.names import check_name
from qkit.errors import (
    BackendUnavailable,
    ConfigError,
    InvalidName,
    LogDamaged,
    QueueError,
    StorageError,
)
from qkit.native.bulk import published_jobs, queues_of, read_bulk
from qkit.native.catalogue import ALL_FIELDS
from qkit.native.config import QueueConfig

__all__ = ["wait_for_import"]

POLL_SECONDS: Final = 0.05
CHECK_AFTER_SECONDS: Final = 2.0  # time without progress until the files are checked
GIVE_UP_AFTER_SECONDS: Final = 60.0  # time without progress until the wait fails


async def wait_for_import(path: Path, queues: Collection[str] | None = None) -> list[QueueError]:
    """Wait until all bulk files that are committed now are in the log.

    Args:
        path: Directory of the native engine. A process must own it.
        queues: Queues that the caller needs. If the import makes no progress, files of other
            queues are ignored. Default: wait for every file that can be imported.

    Returns:
        The errors of the files that were ignored because they cannot be imported.

    Raises:
        BackendUnavailable: The import made no progress for ``GIVE_UP_AFTER_SECONDS``.
        LogDamaged: A file that may contain messages of ``queues`` is damaged.
        ConfigError: A file of ``queues`` declares an invalid configuration.
        InvalidName: A file of ``queues`` declares a queue with an invalid name.
    """
    faults: list[QueueError] = []
    waiting, state, since, checked = set(published_jobs(path)), None, time.monotonic(), False
    while waiting := waiting & set(published_jobs(path)):
        now, seen = time.monotonic(), (len(waiting), _log_bytes(path))
        if seen != state:
            state, since = seen, now
        elif now - since >= CHECK_AFTER_SECONDS and not checked:
            ignored = await asyncio.to_thread(_ignored, path, waiting, queues)
            waiting -= ignored.keys()
            faults += [error for error in ignored.values() if error is not None]
            checked = True
        elif now - since >= GIVE_UP_AFTER_SECONDS:
            raise BackendUnavailable(
                f"{len(waiting)} bulk files in {path / 'inbox'} were not imported: no progress for "
                f"{GIVE_UP_AFTER_SECONDS:g} s; check the log messages of the process that owns the "
                "directory",
                backend="native",
                operation="read",
            )
        await asyncio.sleep(POLL_SECONDS)
    return faults


def _log_bytes(path: Path) -> int:
    """Return the size of the log in bytes, which grows while a bulk file is imported."""
    total = 0
    for file in (path / "log").glob("*.seg"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # compaction has just replaced it
            continue
    return total


def _ignored(
    path: Path, jobs: Collection[str], queues: Collection[str] | None
) -> dict[str, QueueError | None]:
    """Return the jobs to ignore, each with its error if it cannot be imported."""
    found: dict[str, QueueError | None] = {}
    for job in jobs:
        try:
            fault = _fault(path, job)
            named = queues_of(path, job)
        except StorageError:  # the owner has just imported and removed the file
            continue
        needed = queues is not None and (named is None or not named.isdisjoint(queues))
        if fault is not None and needed:
            raise fault
        if fault is not None or (queues is not None and not needed):
            found[job] = fault
    return found


def _fault(path: Path, job: str) -> QueueError | None:
    """Return the error in a job's files that prevents the import; ``None`` if there is none."""
    try:
        for item in read_bulk(path, job):
            if item.message is None:
                check_name(item.queue)
                fields = {name: value for name, value in item.config.items() if name in ALL_FIELDS}
                QueueConfig(**cast("dict[str, Any]", fields))
    except (LogDamaged, InvalidName, ConfigError) as error:
        return error
    return None
