"""The socket's file: where it lies, how it comes to be there and how it is reached.

A socket's address holds 108 bytes and directories may be deeper, so on Linux both sides reach the
file through a descriptor of its directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Generator
from pathlib import Path
from typing import Final, NamedTuple

from qkit.errors import BackendUnavailable, ConfigError

__all__ = ["Listening", "connect", "listen", "remove_socket"]

BACKLOG: Final = 512
FULL: Final = frozenset({errno.EAGAIN, errno.EWOULDBLOCK})


class Listening(NamedTuple):
    """A listening socket, and the number of its file."""

    socket: socket.socket
    inode: int


def listen(path: Path) -> Listening:
    """A listening socket at ``path`` that only this user can reach.

    It appears there by a rename once it listens and has its permissions: nobody meets one that is
    not ready, and a file that a killed owner left is replaced in one step. An ``umask`` would do
    the same for the whole process, all its threads included. Raises ``ConfigError`` if something
    else is in the way.
    """
    with _directory(path) as (directory, beginning):
        _check_free(path, directory)
        name = f".{path.name}.{os.getpid()}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)  # a process of this number was killed here
            listener.bind(beginning + name)
            os.chmod(name, 0o600, dir_fd=directory)
            inode = os.stat(name, dir_fd=directory).st_ino
            listener.listen(BACKLOG)
            os.rename(name, path.name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            listener.close()
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=directory)
            raise
        return Listening(listener, inode)


def connect(path: Path) -> socket.socket:
    """A connection to whoever listens at ``path``; ``BackendUnavailable`` if nobody does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)  # such a connect succeeds or fails at once
        with _directory(path) as (directory, beginning):
            mode = os.stat(path.name, dir_fd=directory, follow_symlinks=False).st_mode
            if not stat.S_ISSOCK(mode):
                raise BackendUnavailable(
                    f"{path} is not the socket of a native directory", backend="native"
                )
            connection.connect(beginning + path.name)
    except OSError as error:
        connection.close()
        if isinstance(error, BackendUnavailable):
            raise
        busy = error.errno in FULL
        raise BackendUnavailable(
            f"the owner of {path.parent} {'has too many callers' if busy else 'does not answer'}",
            backend="native",
        ) from error
    except BaseException:
        connection.close()
        raise
    return connection


def remove_socket(path: Path, inode: int) -> None:
    """Take the file away, unless another owner has put its own there."""
    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_ino == inode:
            path.unlink()


def _check_free(path: Path, directory: int) -> None:
    try:
        mode = os.stat(path.name, dir_fd=directory, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "no socket"
        raise ConfigError(
            f"{path} is {what}, and the directory's socket belongs there: remove it",
            backend="native",
        )


@contextlib.contextmanager
def _directory(path: Path) -> Generator[tuple[int, str], None, None]:
    """A descriptor of the file's directory, and what to write before the file's name."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        through = f"/proc/self/fd/{descriptor}/"
        yield descriptor, through if os.path.isdir(through) else f"{path.parent}/"  # noqa: PTH112
    finally:
        os.close(descriptor)
