"""Functions that listen on, connect to and remove the Unix socket of a native directory.

The address of a Unix socket is limited to 108 bytes, but paths may be longer. On Linux, both ends
therefore address the socket through a file descriptor of its directory.
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
FULL: Final = frozenset({errno.EAGAIN, errno.EWOULDBLOCK})  # from connect: the backlog is full


class Listening(NamedTuple):
    """Listening socket and the inode of its file."""

    socket: socket.socket
    inode: int


def listen(path: Path) -> Listening:
    """Listen on a socket at ``path`` that only the current user can connect to.

    The socket gets its permissions and starts to listen under a temporary name, and is then renamed
    to ``path``. No client can find a socket that is not ready, and the socket file of a killed
    owner is replaced atomically. The permissions are set with ``chmod`` because changing the
    umask would affect all threads of the process.

    Raises:
        ConfigError: ``path`` exists and is not a socket.
    """
    with _directory(path) as (directory, prefix):
        _check_free(path, directory)
        name = f".{path.name}.{os.getpid()}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)  # left by a killed process with the same pid
            listener.bind(prefix + name)
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
    """Connect to the owner that listens on ``path``.

    Raises:
        BackendUnavailable: ``path`` is not a socket, no process listens on it, or its backlog is
            full.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)  # a Unix socket connects immediately or fails
        with _directory(path) as (directory, prefix):
            mode = os.stat(path.name, dir_fd=directory, follow_symlinks=False).st_mode
            if not stat.S_ISSOCK(mode):
                raise BackendUnavailable(
                    f"{path} is not the socket of a native directory", backend="native"
                )
            connection.connect(prefix + path.name)
    except OSError as error:
        connection.close()
        if isinstance(error, BackendUnavailable):
            raise
        busy = error.errno in FULL
        raise BackendUnavailable(
            f"the owner of {path.parent} "
            + ("has too many pending connections" if busy else "does not respond"),
            backend="native",
        ) from error
    except BaseException:
        connection.close()
        raise
    return connection


def remove_socket(path: Path, inode: int) -> None:
    """Remove the socket file, unless another owner has replaced it."""
    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_ino == inode:
            path.unlink()


def _check_free(path: Path, directory: int) -> None:
    try:
        mode = os.stat(path.name, dir_fd=directory, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "not a socket"
        raise ConfigError(
            f"{path} is {what}, but qkit needs this path for its socket: remove it",
            backend="native",
        )


@contextlib.contextmanager
def _directory(path: Path) -> Generator[tuple[int, str], None, None]:
    """Open the parent of ``path``; yield its descriptor and a prefix for socket addresses in it."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        prefix = f"/proc/self/fd/{descriptor}/"
        yield descriptor, prefix if os.path.isdir(prefix) else f"{path.parent}/"  # noqa: PTH112
    finally:
        os.close(descriptor)
