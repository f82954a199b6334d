"""Bulk files: messages that another process writes beside the log and that the engine imports.

    inbox/.JOB/PART.seg     being written, by any number of tasks
    inbox/JOB/PART.seg      published, by one rename of the directory

A part is a sealed segment that declares each queue before its first message. The engine imports
each job exactly once, atomically. It never imports a second job with the same name.

Jobs are imported in commit order. That is the order of the modification times of their
directories, which ``commit`` sets. The batches of one Spark query are imported in the order of
their numbers, regardless of their times, because an older version did not set the time.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import time_ns
from typing import Final, NamedTuple, Self

from qkit._internal.file_lock import lock_file
from qkit._internal.ids import new_id
from qkit._internal.names import check_name
from qkit.errors import ConfigError, LogDamaged, StorageError
from qkit.native.log.disk import sync_path
from qkit.native.log.encode import encode_declare, encode_publish
from qkit.native.log.reader import not_shared
from qkit.native.log.record import Declare, Publish, decode
from qkit.native.log.segment import (
    FRAME_SIZE,
    HEADER_SIZE,
    WRITE_CHUNK_BYTES,
    Header,
    Scan,
    frame,
    read_header,
    scan,
    seal,
)

__all__ = [
    "BulkMessage",
    "BulkWriter",
    "abort",
    "check_bulk",
    "check_identity",
    "check_job",
    "commit",
    "committing",
    "completed_parts",
    "identity",
    "publish",
    "published_jobs",
    "queues_of",
    "read_bulk",
    "remove_job",
]

_JOB: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_ID: Final = "ID"  # name of the file with a directory's identity
_BATCH: Final = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})-[0-9]+")
_NUMBER: Final = re.compile(r"([0-9]+)")
_LOG_ID: Final = b"qkit-bulk-file\0\0"


class BulkMessage(NamedTuple):
    """Message of a bulk file, or declaration of a queue."""

    queue: str  # name of the queue
    content: bytes  # the record; its numbers are valid only in this file
    message: Publish | None  # ``None`` for a declaration
    config: Mapping[str, object]  # used if the queue does not exist


class BulkWriter:
    """Writer of one part of a job. Memory use does not grow with the number of messages.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     with BulkWriter(path, "load-1", 0) as part:
    ...         part.put("orders", b"{}", headers={"tenant": "acme"})
    ...     published = commit(path, "load-1")
    ...     [item.message.body for item in read_bulk(path, "load-1") if item.message]
    [b'{}']
    """

    def __init__(self, path: str | os.PathLike[str], job: str, part: int) -> None:
        directory = _staged(path, job)
        for made in (directory.parent, directory):
            _own_directory(made)
        self._path = directory / f"{part:08}.seg"
        self._header = Header(part, 0, _LOG_ID)
        self._temporary = directory / f"{part:08}.{os.getpid()}-{os.urandom(4).hex()}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._temporary, flags, 0o600)
        self._parts: list[bytes] = [self._header.pack()]
        self._offset = HEADER_SIZE
        self._written = 0
        self._queues: dict[str, int] = {}
        self.count: int = 0

    def declare(self, queue: str, config: Mapping[str, object] | None = None) -> int:
        """Declare a queue before its first message. Otherwise ``put`` declares it.

        Args:
            queue: Name of the queue.
            config: Fields of ``QueueConfig``, used if the queue does not exist. Default: none.

        Returns:
            The number of the queue in this part.
        """
        check_name(queue)
        number = self._queues[queue] = len(self._queues) + 1
        self._add(encode_declare(number, queue, config=dict(config or {})))
        return number

    def put(
        self,
        queue: str,
        body: bytes,
        *,
        priority: int = 5,
        headers: Mapping[str, str] | None = None,
        key: str | None = None,
        due: float = 0.0,
        expires: float = 0.0,
        at: float = 0.0,
        message_id: str | None = None,
    ) -> None:
        """Add a message. Times are wall times in seconds; 0 means none."""
        number = self._queues.get(queue) or self.declare(queue)
        self._add(
            encode_publish(
                number,
                self.count,
                new_id() if message_id is None else message_id,
                body,
                priority=priority,
                at=at,
                due=due,
                expires=expires,
                key=key,
                headers=dict(headers) if headers else None,
            )
        )
        self.count += 1

    def _add(self, content: bytes) -> None:
        self._offset = frame((content,), self._header.salt, self._offset, self._parts)
        if self._offset - self._written >= WRITE_CHUNK_BYTES:
            self._flush()

    def _flush(self) -> None:
        data = memoryview(b"".join(self._parts))
        self._parts = []
        self._written += len(data)
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        """Complete the part and sync it to disk. Idempotent.

        If several attempts of a task write the same part, the last one to finish replaces the
        others.
        """
        if self._fd < 0:
            return
        self._offset = frame((seal(),), self._header.salt, self._offset, self._parts)
        self._flush()
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        self._temporary.rename(self._path)
        sync_path(self._path.parent)

    def abort(self) -> None:
        """Delete the part. Does nothing after ``close`` or another ``abort``."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self.abort()


def completed_parts(path: str | os.PathLike[str], job: str) -> set[int]:
    """Return the numbers of the complete parts of a job that is not published yet."""
    return {int(part.stem) for part in _staged(path, job).glob("*.seg")}


def commit(
    path: str | os.PathLike[str],
    job: str,
    *,
    parts: Collection[int] | None = None,
    name: str | None = None,
) -> bool:
    """Publish a job by one rename. Committing a published or imported job is not an error.

    Args:
        path: Directory of the native engine.
        job: Name under which the parts were written.
        parts: Numbers of the parts to publish; other parts, left by repeated tasks, are deleted.
            Default: all.
        name: Name under which the job is published. If several runs with different ``job`` names
            use the same ``name``, only one of them is published. Default: ``job``.

    Returns:
        Whether this call published the job.
    """
    _staged(path, name or job)  # rejects an invalid name
    if not _staged(path, job).exists():
        return False
    with committing(path):
        return publish(path, job, parts=parts, name=name)


@contextmanager
def committing(path: str | os.PathLike[str]) -> Generator[None]:
    """Hold the inbox lock, so that no other process commits at the same time."""
    fd = os.open(Path(path) / "inbox", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        lock_file(fd)
        yield
    finally:
        os.close(fd)


def publish(
    path: str | os.PathLike[str],
    job: str,
    *,
    parts: Collection[int] | None = None,
    name: str | None = None,
) -> bool:
    """Publish a job as ``commit`` does. Call this inside ``committing``."""
    staged, published = _staged(path, job), _staged(path, name or job).with_name(name or job)
    if not staged.exists():
        return False
    for temporary in staged.glob("*.tmp"):  # left by aborted attempts
        temporary.unlink()
    for part in staged.glob("*.seg"):
        if parts is not None and int(part.stem) not in parts:
            part.unlink()
    if published.exists():
        shutil.rmtree(staged)
        return False
    # Jobs are ordered by this time, so it must be later than the time of every published job, even
    # if the clock was set back.
    at = max(time_ns(), 1 + max(_committed(staged.parent).values(), default=0))
    os.utime(staged, ns=(at, at))
    sync_path(staged)
    staged.rename(published)
    sync_path(published.parent)
    return True


def abort(path: str | os.PathLike[str], job: str) -> None:
    """Delete all parts of a job that is not published."""
    shutil.rmtree(_staged(path, job), ignore_errors=True)


def _staged(path: str | os.PathLike[str], job: str) -> Path:
    return Path(path) / "inbox" / f".{check_job(job)}"


def check_job(job: str) -> str:
    """Return the job name; raise ``ConfigError`` if it is not valid as a file name."""
    if not _JOB.fullmatch(job):
        raise ConfigError(f"a job name must be 1–200 characters of A-Za-z0-9._-, got {job!r}")
    return job


def _own_directory(path: Path) -> None:
    """Create a directory that only its owner can access; reject a symbolic link."""
    if path.parent.name != "inbox":
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        sync_path(path.parent)
    try:
        fd = os.open(path, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(
            f"{path} is a symbolic link or not a directory: remove it",
            backend="native",
            operation="inbox",
            cause=error,
        ) from error
    try:
        os.fchmod(fd, 0o700)
    finally:
        os.close(fd)


# For writers on several machines


def identity(path: str | os.PathLike[str]) -> str:
    """Return the random identity of a directory; create it, and the directory, if missing.

    A directory with the same path on another machine has another identity. Other processes compare
    the identity with ``check_identity``.
    """
    directory = Path(path)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    while (known := _identity(directory)) is None:
        temporary = directory / f"{_ID}.{os.getpid()}-{os.urandom(4).hex()}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o600), "w") as file:
            file.write(os.urandom(16).hex())
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another process was faster
            (directory / _ID).hardlink_to(temporary)
        temporary.unlink()
        sync_path(directory)
    return known


def check_identity(path: str | os.PathLike[str], known: str) -> None:
    """Raise ``StorageError`` unless the ``identity`` of the directory is ``known``."""
    if _identity(Path(path)) != known:
        raise not_shared(path)


def _identity(directory: Path) -> str | None:
    try:
        fd = os.open(directory / _ID, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(fd) as file:
        return file.read()


# For the engine


def published_jobs(path: Path) -> list[str]:
    """Return the names of the published jobs that are still in the inbox, in commit order."""
    inbox = path / "inbox"
    if inbox.is_symlink() or not inbox.is_dir():
        return []
    committed = _committed(inbox)
    latest: dict[str, int] = {}  # latest commit time by query, to keep batches in order
    order: dict[str, tuple[int, list[str | int]]] = {}
    for name in sorted(committed, key=_by_number):
        batch = _BATCH.fullmatch(name)
        query = batch[1] if batch else name
        at = latest[query] = max(committed[name], latest.get(query, 0))
        order[name] = at, _by_number(name)
    return sorted(order, key=order.__getitem__)


def _committed(inbox: Path) -> dict[str, int]:
    """Return the commit time of each published job, in nanoseconds since the epoch."""
    found: dict[str, int] = {}
    for entry in inbox.iterdir():
        if _JOB.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            with suppress(FileNotFoundError):  # the engine has just removed the job
                found[entry.name] = entry.stat().st_mtime_ns
    return found


def _by_number(name: str) -> list[str | int]:
    """Return a sort key that compares the numbers in a name by value."""
    return [int(part) if at % 2 else part for at, part in enumerate(_NUMBER.split(name))]


def _parts(path: str | os.PathLike[str], job: str) -> list[Path]:
    """Return the parts of a published job, in the order of their numbers."""
    files = (Path(path) / "inbox" / job).glob("*.seg")
    return sorted(files, key=lambda file: _by_number(file.name))


def read_bulk(path: str | os.PathLike[str], job: str) -> Iterator[BulkMessage]:
    """Yield the declarations and messages of a job. Raises ``LogDamaged`` for a damaged part."""
    for part in _parts(path, job):
        yield from _read_part(part)


def check_bulk(path: Path, job: str) -> None:
    """Check the parts of a job before anything is imported; raise ``LogDamaged`` for damage."""
    for part in _parts(path, job):
        _intact(part)


def queues_of(path: Path, job: str) -> set[str] | None:
    """Return the queues that a published job declares; ``None`` if a header is damaged."""
    names: set[str] = set()
    for part in _parts(path, job):
        data, found = _scanned(part)
        if found is None:
            return None
        for offset in found.offsets:
            record = decode(_content(data, offset))
            if isinstance(record, Declare):
                names.add(record.name)
    return names


def _intact(part: Path) -> tuple[bytes, Scan]:
    data, found = _scanned(part)
    if found is None or found.holes or found.torn or not found.sealed:
        raise LogDamaged(
            f"the bulk file {part.parent.name}/{part.name} is damaged: write it again",
            backend="native",
            operation="inbox",
        )
    return data, found


def _scanned(part: Path) -> tuple[bytes, Scan | None]:
    try:
        fd = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(
            f"{part.name} cannot be read: {error}", backend="native", operation="inbox", cause=error
        ) from error
    with os.fdopen(fd, "rb") as file:
        data = file.read()
    header = read_header(data, int(part.stem))[0] if part.stem.isdigit() else None
    return data, None if header is None else scan(data, header.salt)


def _content(data: bytes, offset: int) -> bytes:
    length = int.from_bytes(data[offset : offset + 4], "little")
    return data[offset + FRAME_SIZE : offset + FRAME_SIZE + length]


def _read_part(part: Path) -> Iterator[BulkMessage]:
    data, found = _intact(part)
    queues: dict[int, Declare] = {}
    for offset in found.offsets:
        content = _content(data, offset)
        record = decode(content)
        if isinstance(record, Declare):
            queues[record.queue] = record
            yield BulkMessage(record.name, content, None, record.config)
        elif isinstance(record, Publish):
            queue = queues[record.queue]
            yield BulkMessage(queue.name, content, record, queue.config)


def remove_job(path: Path, job: str) -> None:
    """Delete the files of a published job."""
    shutil.rmtree(path / "inbox" / job, ignore_errors=True)
