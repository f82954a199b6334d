"""Bulk files: another process writes messages beside the log, the engine takes them in at once.

    inbox/.JOB/PART.seg     being written, by any number of tasks
    inbox/JOB/PART.seg      published, by one rename of the directory

A part is a sealed segment: declarations of the queues it names, then messages. The engine takes
each job in exactly once, all of it or nothing; a job of the same name is never taken again.

Jobs are imported in the order of their commits, which is the order of the modification times of
their directories: ``commit`` sets them. The batches of one Spark query are imported by their
numbers, whatever the times say: an older version noted no time at the commit.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import time_ns
from typing import Final, NamedTuple, Self

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
_ID: Final = "ID"  # the file of a directory's identity
_BATCH: Final = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})-[0-9]+")
_NUMBER: Final = re.compile(r"([0-9]+)")
_LOG_ID: Final = b"qkit-bulk-file\0\0"


class BulkMessage(NamedTuple):
    """A message of a bulk file and the name of its queue, or the declaration of a queue."""

    queue: str
    content: bytes  # its record, with numbers of the file's own
    message: Publish | None  # None: a declaration
    config: Mapping[str, object]  # of the queue, if it does not exist yet


class BulkWriter:
    """One part of a job. Its memory is flat in the number of messages.

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
        self.count = 0

    def declare(self, queue: str, config: Mapping[str, object] | None = None) -> int:
        """Say how a queue is to be made if it does not exist; fields are ``QueueConfig``'s.

        Before its first message, or not at all; the answer is its number in this part.
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
        """Add a message; times are wall times."""
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
        """Complete the part: it is on the disk when this returns. Again: nothing happens.

        Of several attempts at one part the last to finish counts.
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
        """Leave nothing of this part behind. Again, or after ``close``: nothing happens."""
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
    """The numbers of the parts that are complete, of a job that is not published yet."""
    return {int(part.stem) for part in _staged(path, job).glob("*.seg")}


def commit(
    path: str | os.PathLike[str],
    job: str,
    *,
    parts: Collection[int] | None = None,
    name: str | None = None,
) -> bool:
    """Publish a job by one rename; whether there was anything to publish.

    Of its parts only ``parts``, where a task that was tried twice may have left another; under
    ``name``, where each run of a job writes in a place of its own and only one run shall count.
    Again, also after the engine took it in, it is no error.
    """
    _staged(path, name or job)  # refuses a name that is none
    if not _staged(path, job).exists():
        return False
    with committing(path):
        return publish(path, job, parts=parts, name=name)


@contextmanager
def committing(path: str | os.PathLike[str]) -> Generator[None]:
    """Hold the lock of the inbox: commits follow one another while this lasts."""
    fd = os.open(Path(path) / "inbox", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
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
    """Do what ``commit`` does, for a caller that is ``committing``."""
    staged, published = _staged(path, job), _staged(path, name or job).with_name(name or job)
    if not staged.exists():
        return False
    for left in staged.glob("*.tmp"):  # of attempts that were given up
        left.unlink()
    for part in staged.glob("*.seg"):
        if parts is not None and int(part.stem) not in parts:
            part.unlink()
    if published.exists():
        shutil.rmtree(staged)
        return False
    # Later than every job that waits, also when the clock went back.
    at = max(time_ns(), 1 + max(_committed(staged.parent).values(), default=0))
    os.utime(staged, ns=(at, at))
    sync_path(staged)
    staged.rename(published)
    sync_path(published.parent)
    return True


def abort(path: str | os.PathLike[str], job: str) -> None:
    """Leave nothing of a job behind that was not published."""
    shutil.rmtree(_staged(path, job), ignore_errors=True)


def _staged(path: str | os.PathLike[str], job: str) -> Path:
    return Path(path) / "inbox" / f".{check_job(job)}"


def check_job(job: str) -> str:
    """Return the name of a job, or raise ``ConfigError`` if a file cannot have it."""
    if not _JOB.fullmatch(job):
        raise ConfigError(f"a job is named by 1–200 characters of A-Za-z0-9._-, not {job!r}")
    return job


def _own_directory(path: Path) -> None:
    """Make a directory that is its owner's alone; no link may stand in its place."""
    if path.parent.name != "inbox":
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        sync_path(path.parent)
    try:
        fd = os.open(path, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(
            f"{path} is no directory, or a link: remove it",
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
    """Return the random text that tells this directory from others of its name; make it if needed.

    The directory is made as well. Other processes compare it with ``check_identity``.
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
    """Raise ``StorageError`` unless this is the directory whose ``identity`` is ``known``."""
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
    """The jobs that were published and not removed yet, in the order of their commits."""
    inbox = path / "inbox"
    if inbox.is_symlink() or not inbox.is_dir():
        return []
    committed = _committed(inbox)
    latest: dict[str, int] = {}  # of each query, so far: no batch is before an earlier one
    order: dict[str, tuple[int, list[str | int]]] = {}
    for name in sorted(committed, key=_by_number):
        batch = _BATCH.fullmatch(name)
        query = batch[1] if batch else name
        at = latest[query] = max(committed[name], latest.get(query, 0))
        order[name] = at, _by_number(name)
    return sorted(order, key=order.__getitem__)


def _committed(inbox: Path) -> dict[str, int]:
    """The published jobs, each with the time of its commit in nanoseconds."""
    found: dict[str, int] = {}
    for entry in inbox.iterdir():
        if _JOB.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            with suppress(FileNotFoundError):  # the engine has just removed it
                found[entry.name] = entry.stat().st_mtime_ns
    return found


def _by_number(name: str) -> list[str | int]:
    """A key that sorts numbers in a name by their value: text and numbers alternate."""
    return [int(part) if at % 2 else part for at, part in enumerate(_NUMBER.split(name))]


def _parts(path: str | os.PathLike[str], job: str) -> list[Path]:
    """The parts of a published job by their numbers."""
    files = (Path(path) / "inbox" / job).glob("*.seg")
    return sorted(files, key=lambda file: _by_number(file.name))


def read_bulk(path: str | os.PathLike[str], job: str) -> Iterator[BulkMessage]:
    """The declarations and messages of a job. Raises ``LogDamaged`` if a part is not whole."""
    for part in _parts(path, job):
        yield from _read_part(part)


def check_bulk(path: Path, job: str) -> None:
    """Raise what reading a job would raise, before anything of it is taken in."""
    for part in _parts(path, job):
        _whole(part)


def queues_of(path: Path, job: str) -> set[str] | None:
    """The queues that a published job names, also one that is not whole; ``None``: unknown."""
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


def _whole(part: Path) -> tuple[bytes, Scan]:
    data, found = _scanned(part)
    if found is None or found.holes or found.torn or not found.sealed:
        raise LogDamaged(
            f"the bulk file {part.parent.name}/{part.name} is not whole: write it again",
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
    data, found = _whole(part)
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
    """Remove a published job."""
    shutil.rmtree(path / "inbox" / job, ignore_errors=True)
