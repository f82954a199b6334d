"""In-memory disk that simulates power loss, a full disk, short writes and failed syncs.

``journal`` records every call. ``lose_power(when, …)`` returns a new disk with contents that are
possible if the power fails right after the call ``journal[when - 1]``: all synced data, and any
subset of the other data. Writes are torn at multiples of ``SECTOR``. If a later sector was written
and an earlier one was not, the earlier one contains zeros, noise, or bytes of another file.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

from qkit.native.log.disk import Disk

__all__ = ["SECTOR", "Call", "Mode", "SimulatedDisk"]

SECTOR = 64  # bytes; much smaller than a real one, so that small records are torn too
Mode = Literal["all", "none", "prefix", "subset"]


@dataclass
class Call:
    """Disk call, or a note that the test added (``kind='note'``)."""

    kind: str
    file: int = 0
    name: str = ""
    other: str = ""
    offset: int = 0
    data: bytes = b""
    note: object = None


@dataclass
class _File:
    data: bytearray = field(default_factory=bytearray)


class SimulatedDisk(Disk):
    """In-memory ``Disk``; ``capacity`` is the total size in bytes, ``None`` means unlimited."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.path = Path("simulated")
        self.journal: list[Call] = []
        self.capacity: int | None = None
        self.short: int | None = None  # maximum bytes per write
        self.fail: dict[str, OSError] = {}  # errors of the next call, by kind; each is raised once
        self.syncs = 0  # number of syncs, including failed ones
        self._files: list[_File] = []
        self._names: dict[str, int] = {}
        for name, data in (files or {}).items():
            self._names[name] = len(self._files)
            self._files.append(_File(bytearray(data)))
        self._begin = dict(self._names), [bytes(file.data) for file in self._files]

    def note(self, note: object) -> None:
        """Add a note to the journal."""
        self.journal.append(Call("note", note=note))

    def files(self) -> dict[str, bytes]:
        """Return the current contents of all files."""
        return {name: bytes(self._files[file].data) for name, file in self._names.items()}

    def _meet(self, kind: str) -> None:
        if kind in self.fail:
            raise self.fail.pop(kind)

    # Disk methods; the descriptor of a file is its index in ``_files``

    def close(self) -> None:
        pass

    def names(self) -> list[str]:
        return list(self._names)

    def open(self, name: str) -> int:
        return self._names[name]

    def create(self, name: str) -> int:
        self._meet("create")
        assert name not in self._names
        file = self._names[name] = len(self._files)
        self._files.append(_File())
        self.journal.append(Call("create", file=file, name=name))
        return file

    def size(self, fd: int) -> int:
        return len(self._files[fd].data)

    def read(self, fd: int, length: int, offset: int) -> bytes:
        return bytes(self._files[fd].data[offset : offset + length])

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        self._meet("write")
        data = bytes(data)
        if self.short is not None:
            data = data[: self.short]
        file = self._files[fd].data
        if self.capacity is not None:
            named = {fd, *self._names.values()}  # removed files take no space
            used = sum(len(self._files[other].data) for other in named) - len(file)
            room = max(0, self.capacity - used - offset)
            if not data[:room]:
                raise OSError(errno.ENOSPC, "No space left on device")
            data = data[:room]
        file.extend(bytes(max(0, offset - len(file))))
        file[offset : offset + len(data)] = data
        self.journal.append(Call("write", file=fd, offset=offset, data=data))
        return len(data)

    def truncate(self, fd: int, size: int) -> None:
        self._meet("truncate")
        _truncate(self._files[fd].data, size)
        self.journal.append(Call("truncate", file=fd, offset=size))

    def sync(self, fd: int) -> None:
        self.syncs += 1
        failed = "sync" in self.fail
        self.journal.append(Call("sync_failed" if failed else "sync", file=fd))
        self._meet("sync")

    def close_file(self, fd: int) -> None:
        pass

    def rename(self, old: str, new: str) -> None:
        self._meet("rename")
        file = self._names[new] = self._names.pop(old)
        self.journal.append(Call("rename", file=file, name=new, other=old))

    def link(self, old: str, new: str) -> None:
        file = self._names[new] = self._names[old]
        self.journal.append(Call("create", file=file, name=new))

    def unlink(self, name: str) -> None:
        file = self._names.pop(name)
        self.journal.append(Call("unlink", file=file, name=name))

    def sync_directory(self) -> None:
        self._meet("sync_directory")
        self.journal.append(Call("sync_directory"))

    # Crashes

    def kill(self, when: int) -> SimulatedDisk:
        """Return the disk as it is if the process is killed after ``when`` calls: complete."""
        disk = SimulatedDisk()
        disk.journal = self.journal[:when]
        disk._begin = self._begin
        disk._names = dict(self._begin[0])
        disk._files = [_File(bytearray(data)) for data in self._begin[1]]
        disk._files += [_File() for _ in self._files[len(disk._files) :]]
        for call in disk.journal:
            if call.kind in ("write", "truncate"):
                _apply(disk._files[call.file].data, call)
            elif call.kind in ("create", "rename", "unlink"):
                _name(disk._names, call)
        return disk

    def lose_power(self, when: int, random: Random, mode: Mode) -> SimulatedDisk:
        """Return the disk as it may be if the power fails after ``when`` calls.

        ``mode`` selects which unsynced calls survive; ``all`` is the same as killing the process,
        except that data of a failed sync is lost.
        """
        names = dict(self._begin[0])
        count = len(self._files)
        durable = [bytearray(data) for data in self._begin[1]]
        durable += [bytearray() for _ in range(count - len(durable))]
        waiting: list[list[Call]] = [[] for _ in range(count)]
        naming: list[Call] = []
        for call in self.journal[:when]:
            if call.kind in ("write", "truncate"):
                waiting[call.file].append(call)
            elif call.kind == "sync":
                for done in waiting[call.file]:
                    _apply(durable[call.file], done)
                waiting[call.file].clear()
            elif call.kind == "sync_failed":
                # As on Linux: the pages are readable and clean, but never reach the disk.
                waiting[call.file].clear()
            elif call.kind in ("create", "rename", "unlink"):
                naming.append(call)
            elif call.kind == "sync_directory":
                for done in naming:
                    _name(names, done)
                naming.clear()
        for call in _some(naming, random, mode):
            _name(names, call)
        for file, calls in enumerate(waiting):
            _survive(durable, file, calls, random, mode)
        return SimulatedDisk({name: bytes(durable[file]) for name, file in names.items()})


def _truncate(data: bytearray, size: int) -> None:
    del data[size:]
    data.extend(bytes(size - len(data)))


def _apply(data: bytearray, call: Call) -> None:
    if call.kind == "truncate":
        _truncate(data, call.offset)
    else:
        data.extend(bytes(max(0, call.offset - len(data))))
        data[call.offset : call.offset + len(call.data)] = call.data


def _name(names: dict[str, int], call: Call) -> None:
    if call.kind == "unlink":
        names.pop(call.name, None)
    else:
        names[call.name] = call.file
        if names.get(call.other) == call.file:
            del names[call.other]


def _some(calls: list[Call], random: Random, mode: Mode) -> list[Call]:
    if mode == "all":
        return calls
    if mode == "none":
        return []
    if mode == "prefix":
        return calls[: random.randint(0, len(calls))]
    share = random.choice((0.1, 0.5, 0.9))
    return [call for call in calls if random.random() < share]


def _survive(
    durable: list[bytearray], file: int, calls: list[Call], random: Random, mode: Mode
) -> None:
    """Apply the unsynced calls of one file that survive a power loss."""
    data = durable[file]
    pieces: list[Call] = []
    for call in calls:
        if call.kind == "truncate":
            pieces.append(call)
        position = 0
        while position < len(call.data):
            at = call.offset + position
            step = SECTOR - at % SECTOR
            part = call.data[position : position + step]
            pieces.append(Call("write", file=file, offset=at, data=part))
            position += step
    before = len(data)
    end = max((piece.offset + len(piece.data) for piece in pieces), default=before)
    chosen = _some(pieces, random, mode)
    if mode == "subset" and random.random() < 0.3:
        # The new length was written before the data.
        chosen.insert(0, Call("write", file=file, offset=end, data=b""))
    covered: set[int] = set()
    for piece in chosen:
        _apply(data, piece)
        covered.update(range(piece.offset, piece.offset + len(piece.data)))
    fill = random.choice(("zeros", "noise", "stale"))
    if mode == "subset" and fill != "zeros":
        stale = durable[random.randrange(len(durable))]
        for at in range(before, len(data)):
            if at not in covered:
                old = stale[at] if at < len(stale) else 0
                data[at] = random.randrange(256) if fill == "noise" else old
