"""Bulk files of jobs with a user-defined id: each job is published to a queue at most once.

The name of such a bulk file contains the job id and a digest of the queue and the job id. An older
version named the file after the job alone, so that a job could be published only once per
directory. A file of that version still counts as published to its queue.
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

logger: logging.Logger = logging.getLogger("qkit.native")

_MAX_ID_CHARACTERS: Final = 200 - 17  # of the job id in a file name; a dash and the digest follow


def job_name(job_id: str, queue: str) -> str:
    """Return the name of a job's bulk file for a queue.

    >>> job_name("load-1", "orders")
    'load-1-68fa178592e4669d'

    Raises:
        ConfigError: The id contains characters that a file name must not have.
    """
    bulk.check_job(job_id)
    digest = blake2b(f"{queue}\0{job_id}".encode(), digest_size=8).hexdigest()
    return f"{job_id[:_MAX_ID_CHARACTERS]}-{digest}"


def commit_once(
    path: str | os.PathLike[str],
    staged: str,
    job_id: str,
    queue: str,
    *,
    letters: str,
    parts: Collection[int] | None = None,
) -> bool:
    """Publish the staged parts, unless the job was already published to this queue.

    Reads the whole log, so it can be slow.

    Args:
        path: Directory of the native engine.
        staged: Name under which the parts were written. They are removed if they are not published.
        job_id: User-defined id of the job.
        queue: Queue to publish to.
        letters: Dead-letter queue of ``queue``, which receives invalid rows.
        parts: Numbers of the parts to publish. Default: all.

    Returns:
        Whether the parts were published.
    """
    directory, name = Path(path), job_name(job_id, queue)
    with bulk.committing(directory):
        if _is_published(directory, name, job_id, {queue, letters}):
            bulk.abort(directory, staged)
            return False
        return bulk.publish(directory, staged, parts=parts, name=name)


def _is_published(path: Path, name: str, job_id: str, queues: set[str]) -> bool:
    """Return whether the job is in the inbox or in the log. Call this inside ``committing``.

    The inbox is checked first, because the engine removes a file only after writing its messages
    to the log.
    """
    waiting = bulk.published_jobs(path)
    if name in waiting:
        return True
    if job_id in waiting:  # written by an older version
        try:
            named = bulk.queues_of(path, job_id)
        except StorageError:
            if job_id in bulk.published_jobs(path):
                raise
            named = set[str]()  # the engine has just imported and removed the file
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
            "job %s was published by an older version of qkit, and the log no longer contains "
            "its queue, so it is not published again: to publish it to a different queue, use "
            "another job_id",
            job_id,
        )
        return True
    return bool(old.queues & queues)
