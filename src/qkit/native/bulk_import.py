"""Wait until the owner of a directory has imported the bulk files that were committed before."""

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
CHECK_AFTER_SECONDS: Final = 2.0  # without progress: look whether a bulk file can be imported
GIVE_UP_AFTER_SECONDS: Final = 60.0  # without progress


async def wait_for_import(path: Path, queues: Collection[str] | None = None) -> list[QueueError]:
    """Wait until the bulk files that are committed now are in the log.

    Args:
        path: The native directory. A process must own it.
        queues: The queues that the caller needs. Files of other queues are not waited for if the
            import makes no progress. Default: every file that can be imported is waited for.

    Returns:
        The errors of the files that were ignored because they cannot be imported.

    Raises:
        BackendUnavailable: The files are not imported.
        LogDamaged: A file that may hold messages of ``queues`` is damaged.
        ConfigError: A file of ``queues`` declares what no queue can be; also ``InvalidName``.
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
                f"{len(waiting)} bulk files in {path / 'inbox'} were not imported within "
                f"{GIVE_UP_AFTER_SECONDS:g} s: look into the log of the process that owns the "
                "directory",
                backend="native",
                operation="read",
            )
        await asyncio.sleep(POLL_SECONDS)
    return faults


def _log_bytes(path: Path) -> int:
    """How much was written; it grows while a bulk file is imported."""
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
    """The jobs that need not be waited for, each with its error if it cannot be imported."""
    found: dict[str, QueueError | None] = {}
    for job in jobs:
        try:
            fault = _fault(path, job)
            named = queues_of(path, job)
        except StorageError:  # the owner has just imported and removed it
            continue
        needed = queues is not None and (named is None or not named.isdisjoint(queues))
        if fault is not None and needed:
            raise fault
        if fault is not None or (queues is not None and not needed):
            found[job] = fault
    return found


def _fault(path: Path, job: str) -> QueueError | None:
    """Why no owner can import a job, as far as the job alone tells."""
    try:
        for item in read_bulk(path, job):
            if item.message is None:
                check_name(item.queue)
                fields = {name: value for name, value in item.config.items() if name in ALL_FIELDS}
                QueueConfig(**cast("dict[str, Any]", fields))
    except (LogDamaged, InvalidName, ConfigError) as error:
        return error
    return None
