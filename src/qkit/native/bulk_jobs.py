"""Bulk files of a job that a user named: one per queue, however often the job is run.

The name of such a bulk file holds the job's id and a digest of its queue. An older version named
the file after the job alone, so that a job counted once per directory; what it published still
counts for the queue that it was for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from hashlib import blake2b
from pathlib import Path
from typing import Final

from qkit.errors import StorageError
from qkit.native import bulk
from qkit.native.log.reader import Imported, imported

__all__ = ["commit_once", "job_name"]

logger = logging.getLogger("qkit.native")

_LONGEST: Final = 200 - 17  # characters of a job's id in a name: a dash and the digest follow


def job_name(job_id: str, queue: str) -> str:
    """Return the name of the bulk file that a job publishes to a queue.

    >>> job_name("load-1", "orders")
    'load-1-68fa178592e4669d'

    Raises:
        ConfigError: The id cannot be part of a file's name.
    """
    bulk.check_job(job_id)
    digest = blake2b(f"{queue}\0{job_id}".encode(), digest_size=8).hexdigest()
    return f"{job_id[:_LONGEST]}-{digest}"


def commit_once(
    path: str | os.PathLike[str],
    staged: str,
    job_id: str,
    queue: str,
    *,
    letters: str,
    parts: Collection[int] | None = None,
) -> bool:
    """Publish what was staged, unless this job was published to this queue before.

    Args:
        path: The native directory.
        staged: The name under which the parts were written; they are removed if they do not count.
        job_id: The job, as its user names it.
        queue: The queue that it publishes to.
        letters: The dead-letter queue of that queue, to which invalid rows go.
        parts: The parts that count; default: all.

    Returns:
        Whether the parts count. The log is read for the answer, so it takes time.
    """
    directory, name = Path(path), job_name(job_id, queue)
    with bulk.committing(directory):
        if _is_published(directory, name, job_id, {queue, letters}):
            bulk.abort(directory, staged)
            return False
        return bulk.publish(directory, staged, parts=parts, name=name)


def _is_published(path: Path, name: str, job_id: str, queues: set[str]) -> bool:
    """Whether the job waits in the inbox or is in the log; no other commit is under way.

    The inbox comes first: the engine removes a file after the log has it.
    """
    waiting = bulk.published_jobs(path)
    if name in waiting:
        return True
    if job_id in waiting:  # of an older version
        try:
            named = bulk.queues_of(path, job_id)
        except StorageError:
            if job_id in bulk.published_jobs(path):
                raise
            named = set[str]()  # the engine has just imported and removed it
        if named is None or named & queues:
            return True
    found = imported(path, {name, job_id})
    if name in found:
        return True
    old = found.get(job_id)
    return old is not None and _was_for(old, job_id, queues)


def _was_for(old: Imported, job_id: str, queues: set[str]) -> bool:
    if old.messages == 0:
        return False
    if not old.queues:
        logger.warning(
            "job %s was published by an older version of qkit, and the log no longer tells to "
            "which queue: nothing is published again. Use another job_id if it was another queue",
            job_id,
        )
        return True
    return bool(old.queues & queues)
