"""The log's directory, and every call it makes to the file system.

One place, so that permissions and symbolic links are dealt with once, and so that tests can put
a disk in its stead that loses power, fills up or fails.

    LOCK            held by the one process that owns the directory; its text is the owner's pid
    log/*.seg       the segments
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Final

from qkit.errors import LogLocked, StorageError

__all__ = ["Disk", "sync_path"]

# NONBLOCK: opening a pipe that somebody planted must fail, not wait. It means nothing to files.
_FLAGS: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Disk:
    """An open, locked directory.

    Files are made with 0600 and directories with 0700 whatever the umask; symbolic links are
    refused everywhere. Raises ``LogLocked``, or ``StorageError`` if the directory cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._open: list[int] = []  # to be closed, the lock last
        try:
            self._lock_fd = self._take_directory()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _refused(self.path, error) from error
            raise

    def _take_directory(self) -> int:
        missing = [made for made in self.path.parents if not made.exists()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for made in missing:
            sync_path(made.parent)
        parent = self._keep(os.open(self.path.parent, os.O_DIRECTORY | os.O_CLOEXEC))
        name = self.path.name or "."
        root = self._directory(name, parent)
        lock = self._lock(root)
        self._log = self._directory("log", root)
        os.fsync(root)
        return lock

    def _directory(self, name: str, parent: int) -> int:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
            made = True
        except FileExistsError:
            made = False
        fd = self._keep(os.open(name, os.O_DIRECTORY | _FLAGS, dir_fd=parent))
        # A directory of the user's own keeps its mode: it may hold other things. ``log`` is ours.
        if made or name == "log":
            os.fchmod(fd, 0o700)
        if made:
            os.fsync(parent)
        return fd

    def _lock(self, root: int) -> int:
        fd = os.open("LOCK", os.O_RDWR | os.O_CREAT | _FLAGS, 0o600, dir_fd=root)
        self._open.insert(0, fd)
        _own(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(fd, 32, 0).strip()
            pid = int(text) if text.isdigit() else None
            owner = "another process" if pid is None else f"process {pid}"
            locked = LogLocked(
                f"{self.path} is owned by {owner}: stop it, or connect to it",
                backend="native",
                operation="open",
            )
            locked.pid = pid
            raise locked from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        return fd

    def _keep(self, fd: int) -> int:
        self._open.append(fd)
        return fd

    def close(self) -> None:
        """Let the directory go; the lock last. The file ``LOCK`` stays: removing it would race."""
        while self._open:
            os.close(self._open.pop())

    # Files in ``log``

    def names(self) -> list[str]:
        """What is there, in no order.

        By a descriptor of its own: threads that list the same one share its place in the
        directory, and each would see a part.
        """
        fd = os.open(".", os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._log)
        try:
            return os.listdir(fd)  # noqa: PTH208  a path would be looked up anew
        finally:
            os.close(fd)

    def open(self, name: str) -> int:
        """Open a file for reading and writing."""
        try:
            fd = os.open(name, os.O_RDWR | _FLAGS, dir_fd=self._log)
        except OSError as error:
            raise _refused(self.path / "log" / name, error) from error
        try:
            _own(fd)
        except OSError as error:
            os.close(fd)
            raise _refused(self.path / "log" / name, error) from error
        return fd

    def create(self, name: str) -> int:
        """Make a file that must not exist yet."""
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=self._log)
        os.fchmod(fd, 0o600)
        return fd

    def size(self, fd: int) -> int:
        """How long the file is."""
        return os.fstat(fd).st_size

    def read(self, fd: int, length: int, offset: int) -> bytes:
        """Up to ``length`` bytes; fewer only at the end of the file."""
        data = os.pread(fd, length, offset)
        while 0 < len(data) < length:  # Linux gives at most 2 GiB at a time
            more = os.pread(fd, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        """Write at ``offset``, perhaps a part only; return how many bytes.

        With an offset and without ``O_APPEND``: after a failed write the place is known.
        """
        return os.pwrite(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        """Cut the file."""
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Return when the file's bytes and length are on the disk."""
        os.fdatasync(fd)

    def close_file(self, fd: int) -> None:
        """Close a file."""
        os.close(fd)

    def rename(self, old: str, new: str) -> None:
        """Put a file under another name, in place of what has it."""
        os.rename(old, new, src_dir_fd=self._log, dst_dir_fd=self._log)

    def link(self, old: str, new: str) -> None:
        """Give a file a second name."""
        os.link(old, new, src_dir_fd=self._log, dst_dir_fd=self._log, follow_symlinks=False)

    def unlink(self, name: str) -> None:
        """Remove a name."""
        os.unlink(name, dir_fd=self._log)

    def sync_directory(self) -> None:
        """Return when names made, changed and removed before are on the disk."""
        os.fsync(self._log)


def sync_path(directory: Path) -> None:
    """Return when the names in a directory are on the disk."""
    fd = os.open(directory, os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _own(fd: int) -> None:
    """Refuse what is no plain file; take away what others may do with it."""
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a plain file")
    if stat.S_IMODE(mode) != 0o600:
        os.fchmod(fd, 0o600)


def _refused(path: Path, error: OSError) -> StorageError:
    text = f"{path} cannot be used: {error}"
    # A link where a directory should be is ENOTDIR on Linux, not ELOOP.
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        text = f"{path}: a symbolic link, or no directory, in its place; give the real path"
    return StorageError(text, backend="native", operation="open", cause=error)
