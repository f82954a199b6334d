"""``Disk``: the directory of the log, and all file-system calls for it.

Permissions and symbolic links are handled only here, and tests can replace the disk with one that
loses power, fills up or fails.

    LOCK            locked by the process that owns the directory; contains its pid
    log/*.seg       the segments
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

from qkit._internal.file_lock import lock_file, require_file_locks
from qkit.errors import LogLocked, StorageError

__all__ = ["Disk", "sync_path"]

# O_NONBLOCK: opening a named pipe that was planted here must not block. Regular files are not
# affected.
# Without these flags the module can still be imported; ``Disk`` then raises ``Unsupported``.
_FLAGS: Final = (
    getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
)


class Disk:
    """Open, locked directory of a log.

    Files are created with mode 0600 and directories with 0700, regardless of the umask. Symbolic
    links are rejected everywhere.

    Args:
        path: Directory to open; created if missing.

    Raises:
        LogLocked: Another process has the directory open.
        StorageError: The directory cannot be used.
        Unsupported: This system has no POSIX file locks.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        require_file_locks()
        self.path: Path = Path(path)
        self._open: list[int] = []  # descriptors; closed in reverse order, so the lock last
        try:
            self._lock_fd = self._open_directory()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _storage_error(self.path, error) from error
            raise

    def _open_directory(self) -> int:
        missing = [parent for parent in self.path.parents if not parent.exists()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for created in missing:
            sync_path(created.parent)
        parent = self._keep(os.open(self.path.parent, os.O_DIRECTORY | os.O_CLOEXEC))
        name = self.path.name or "."
        root = self._directory(name, parent)
        self._check_user(root, self.path)
        lock = self._lock(root)
        self._log = self._directory("log", root)
        os.fsync(root)
        return lock

    def _directory(self, name: str, parent: int) -> int:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
            created = True
        except FileExistsError:
            created = False
        fd = self._keep(os.open(name, os.O_DIRECTORY | _FLAGS, dir_fd=parent))
        # An existing directory of the user keeps its mode, because it may contain other files.
        # Only ``log`` always belongs to qkit.
        if created or name == "log":
            os.fchmod(fd, 0o700)
        if created:
            os.fsync(parent)
        return fd

    def _lock(self, root: int) -> int:
        fd = os.open("LOCK", os.O_RDWR | os.O_CREAT | _FLAGS, 0o600, dir_fd=root)
        self._open.insert(0, fd)
        self._check_user(fd, self.path / "LOCK")
        if os.fstat(fd).st_nlink > 1:
            # A process that opens it by the other name could keep the directory locked.
            raise StorageError(
                f"{self.path / 'LOCK'} has several hard links: remove it, and check who made them",
                backend="native",
                operation="open",
            )
        _make_private(fd)
        try:
            lock_file(fd, wait=False)
        except BlockingIOError:
            text = os.pread(fd, 32, 0).strip()
            pid = int(text) if text.isdigit() else None
            owner = "another process" if pid is None else f"process {pid}"
            locked = LogLocked(
                f"{self.path} is owned by {owner}: stop that process, or connect to it",
                backend="native",
                operation="open",
            )
            locked.pid = pid
            raise locked from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        return fd

    def _check_user(self, fd: int, path: Path) -> None:
        """Raise ``StorageError`` if another user owns a file, who could replace its contents.

        Root may own it, as with mounted volumes.
        """
        user = os.fstat(fd).st_uid
        if user not in (os.geteuid(), 0):
            raise StorageError(
                f"{path} belongs to user {user}, and this process runs as user {os.geteuid()}: "
                "run qkit as that user, or change the owner of the directory",
                backend="native",
                operation="open",
            )

    def _keep(self, fd: int) -> int:
        self._open.append(fd)
        return fd

    def close(self) -> None:
        """Close the directory, the lock last.

        ``LOCK`` is not removed, because another process may be about to lock it.
        """
        while self._open:
            os.close(self._open.pop())

    # Files in ``log``

    def names(self) -> list[str]:
        """Return the names of all files, in arbitrary order.

        Opens a new descriptor each time. Threads that list through the same descriptor share its
        position, so each would see only some of the names.
        """
        fd = os.open(".", os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._log)
        try:
            return os.listdir(fd)  # noqa: PTH208  a path would be resolved again
        finally:
            os.close(fd)

    def open(self, name: str) -> int:
        """Open a file for reading and writing."""
        try:
            fd = os.open(name, os.O_RDWR | _FLAGS, dir_fd=self._log)
        except OSError as error:
            raise _storage_error(self.path / "log" / name, error) from error
        try:
            _make_private(fd)
        except OSError as error:
            os.close(fd)
            raise _storage_error(self.path / "log" / name, error) from error
        return fd

    def create(self, name: str) -> int:
        """Create a file for reading and writing; fail if it exists."""
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=self._log)
        os.fchmod(fd, 0o600)
        return fd

    def size(self, fd: int) -> int:
        """Return the size of a file in bytes."""
        return os.fstat(fd).st_size

    def read(self, fd: int, length: int, offset: int) -> bytes:
        """Return up to ``length`` bytes; fewer only at the end of the file."""
        data = os.pread(fd, length, offset)
        while 0 < len(data) < length:  # Linux returns at most 2 GiB at a time
            more = os.pread(fd, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        """Write at ``offset``; return the number of bytes written, which may be fewer.

        Files are not opened with ``O_APPEND``, so the position is known after a failed write.
        """
        return os.pwrite(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        """Truncate a file to ``size`` bytes."""
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Sync the content and size of a file to disk."""
        os.fdatasync(fd)

    def close_file(self, fd: int) -> None:
        """Close a file."""
        os.close(fd)

    def rename(self, old: str, new: str) -> None:
        """Rename a file, replacing any file that has the new name."""
        os.rename(old, new, src_dir_fd=self._log, dst_dir_fd=self._log)

    def link(self, old: str, new: str) -> None:
        """Create a hard link to a file."""
        os.link(old, new, src_dir_fd=self._log, dst_dir_fd=self._log, follow_symlinks=False)

    def unlink(self, name: str) -> None:
        """Delete a file."""
        os.unlink(name, dir_fd=self._log)

    def sync_directory(self) -> None:
        """Sync created, renamed and deleted file names to disk."""
        os.fsync(self._log)


def sync_path(directory: Path) -> None:
    """Sync the file names in a directory to disk."""
    fd = os.open(directory, os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _make_private(fd: int) -> None:
    """Set the mode of a file to 0600; raise ``OSError`` if it is not a regular file."""
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file")
    if stat.S_IMODE(mode) != 0o600:
        os.fchmod(fd, 0o600)


def _storage_error(path: Path, error: OSError) -> StorageError:
    text = f"{path} cannot be used: {error}"
    # If a directory is expected and the path is a link, Linux returns ENOTDIR, not ELOOP.
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        text = f"{path} is a symbolic link or not a directory: use the real path"
    return StorageError(text, backend="native", operation="open", cause=error)
