"""Recovery of a log after a shutdown, a crash or a power loss."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from qkit.errors import Damage
from qkit.native.log.disk import Disk
from qkit.native.log.segment import (
    FRAME_SIZE,
    HEADER_SIZE,
    Header,
    Scan,
    damaged,
    name_of,
    number_of,
    read_header,
    scan,
    write_segment,
)
from qkit.native.log.tail import Position, Tail

__all__ = ["Entry", "Recovery"]


class Entry(NamedTuple):
    """Record of the log and its position."""

    position: Position
    content: bytes


class Recovery:
    """Recovery of a log in one pass over its segments, which keeps every valid record.

    - An invalid end of the last segment is truncated.
    - A hole in the last segment among records that were never synced is removed. The records after
      it are kept.
    - Any other hole raises ``LogDamaged``. With ``repair`` the segment is rewritten without the
      hole, and the damaged file is kept as ``….seg.damaged-N``.
    """

    def __init__(self, disk: Disk, *, repair: bool = False) -> None:
        self._disk = disk
        self._repair = repair
        self.damage: list[Damage] = []
        self.segments: list[int] = []
        self.log_id: bytes = b""
        self._highest = 0
        self._headers: dict[int, Header | None] | None = None
        self._active: tuple[Header, bytes, Scan] | None = None

    def inspect(self) -> dict[int, Header | None]:
        """Return the header of every segment; ``None`` if unreadable or from another log.

        No file is changed until all headers are known to have a supported format.
        """
        if self._headers is None:
            self._headers = self._read_headers()
        return self._headers

    def repair_sealed(self) -> set[int]:
        """Check every segment but the last, and rewrite those that are damaged.

        ``records`` reads no segment that a snapshot covers, but bodies are read from them later.

        Returns:
            The segments that lost records.
        """
        headers, lost = self.inspect(), set[int]()
        for number in self.segments[:-1]:
            before = len(self.damage)
            loaded = self._load(number, headers[number], last=False)
            if loaded is None:
                del headers[number]
            else:
                headers[number] = loaded[0]
            if any(item.kind == "damaged" for item in self.damage[before:]):
                lost.add(number)
        return lost

    def records(self, start: Position | None = None) -> Iterator[Entry]:
        """Yield every record from ``start`` on, in the order in which they were written."""
        headers = self.inspect()
        for number in list(self.segments):
            last = number == self.segments[-1]
            if start is not None and number < start[0] and not last:
                continue
            loaded = self._load(number, headers[number], last)
            if loaded is None:
                continue
            for entry in _entries(number, loaded[1], loaded[2]):
                if start is None or entry.position >= start:
                    yield entry
            if last:
                self._active = loaded

    def entries(self, number: int, *, growing: bool = False) -> Iterator[Entry]:
        """Yield the records of a sealed segment, or those written so far to a ``growing`` one.

        Raises:
            LogDamaged: A sealed segment is damaged.
        """
        data = self._read(number)
        header, _ = read_header(data, number)
        if header is None:
            raise damaged(f"the header of segment {number} cannot be read")
        found = scan(data, header.salt)
        damage = [] if growing else self._judge(number, found, last=False)
        if damage:
            details = "; ".join(map(str, damage))
            raise damaged(f"stored records cannot be read: {details}", damage)
        return _entries(number, data, found)

    def _read_headers(self) -> dict[int, Header | None]:
        names = self._disk.names()
        numbers = [found for found in map(number_of, names) if found is not None]
        self._highest = max((number for number, _ in numbers), default=0)
        self.segments = sorted(number for number, live in numbers if live)
        headers: dict[int, Header | None] = {}
        broken: list[tuple[int, list[int]]] = []
        for number in self.segments:
            headers[number], bad = read_header(self._read(number, HEADER_SIZE), number)
            broken.append((number, bad))
        ids = [header.log_id for header in headers.values() if header is not None]
        self.log_id = ids[0] if ids else os.urandom(16)
        for name in names:
            if name.endswith(".tmp"):  # left by an interrupted rotation or rewrite
                self._disk.unlink(name)
        for number, bad in broken:
            header = headers[number]
            if header is not None and header.log_id != self.log_id:
                headers[number] = None
            elif header is not None and bad:
                self._restore(header, bad)
        return headers

    def _read(self, number: int, length: int | None = None) -> bytes:
        fd = self._disk.open(name_of(number))
        try:
            size = self._disk.size(fd)
            return self._disk.read(fd, size if length is None else min(size, length), 0)
        finally:
            self._disk.close_file(fd)

    def _restore(self, header: Header, broken: list[int]) -> None:
        """Overwrite the broken copy of a header with the intact one."""
        half = HEADER_SIZE // 2
        fd = self._disk.open(name_of(header.number))
        try:
            if self._disk.size(fd) < HEADER_SIZE:
                return
            for start in broken:
                self._disk.write(fd, header.pack()[:half], start)
                self.damage.append(Damage("header", header.number, start, half))
            self._disk.sync(fd)
        finally:
            self._disk.close_file(fd)

    def _load(
        self, number: int, header: Header | None, last: bool
    ) -> tuple[Header, bytes, Scan] | None:
        data = self._read(number)
        if last and len(data) < HEADER_SIZE:  # cut short before any record was written
            self.damage.append(Damage("torn", number, 0, len(data)))
            self._disk.unlink(name_of(number))
            self.segments.remove(number)
            return None
        if header is None:
            words = "the header is unreadable or belongs to another log"
            self._lost([Damage("damaged", number, 0, len(data), words)])
            self._quarantine(number, keep=False)
            self.segments.remove(number)
            return None
        found = scan(data, header.salt)
        damage = self._judge(number, found, last)
        self._lost([item for item in damage if item.kind == "damaged"])
        self.damage += [item for item in damage if item.kind != "damaged"]
        if any(item.kind != "torn" for item in damage):
            header = self._rewrite(header, data, found, damage, sealed=not last or found.sealed)
            data = self._read(number)
            found = scan(data, header.salt)
        return header, data, found

    def _judge(self, number: int, found: Scan, last: bool) -> list[Damage]:
        damage: list[Damage] = []
        for offset, length in found.holes:
            stored = not last or offset < found.synced
            damage.append(Damage("damaged" if stored else "unsynced", number, offset, length))
        if found.torn:
            damage.append(Damage("torn" if last else "damaged", number, found.end, found.torn))
        if not last and not found.sealed:
            damage.append(Damage("damaged", number, found.end, 0, "the end is missing"))
        return damage

    def _lost(self, damage: list[Damage]) -> None:
        if damage and not self._repair:
            details = "; ".join(map(str, damage))
            raise damaged(
                f"stored records in {self._disk.path} cannot be read ({details}): restore the "
                "directory from a backup, or open it with repair=True, which keeps all intact "
                "records",
                damage,
            )
        self.damage += damage

    def _quarantine(self, number: int, *, keep: bool) -> None:
        """Rename a damaged file for inspection; with ``keep``, also keep it under its own name."""
        name, existing = name_of(number), set(self._disk.names())
        new_name = next(
            other
            for other in (f"{name}.damaged-{count}" for count in itertools.count(1))
            if other not in existing
        )
        if keep:
            self._disk.link(name, new_name)
        else:
            self._disk.rename(name, new_name)

    def _rewrite(
        self, header: Header, data: bytes, found: Scan, damage: Iterable[Damage], *, sealed: bool
    ) -> Header:
        if any(item.kind == "damaged" for item in damage):
            self._quarantine(header.number, keep=True)
        header = header._replace(generation=header.generation + 1)
        contents = (entry.content for entry in _entries(header.number, data, found))
        name, fd, _ = write_segment(self._disk, header, contents, sealed=sealed)
        try:
            self._disk.sync(fd)
        finally:
            self._disk.close_file(fd)
        self._disk.rename(name, name_of(header.number))
        self._disk.sync_directory()
        return header

    def tail(self, segment_bytes: int) -> Tail:
        """Return the tail to append to, after syncing all records that were read."""
        disk = self._disk
        tail = Tail(disk, self.log_id, self._highest, segment_bytes=segment_bytes)
        if self._active is not None:
            header, data, found = self._active
            fd = disk.open(name_of(header.number))
            disk.truncate(fd, found.end)
            # If the last owner was killed, these bytes may be only in the page cache, and after a
            # failed fsync the kernel treats them as clean. Writing the same bytes again makes the
            # sync effective.
            begin = found.synced if found.synced > HEADER_SIZE else HEADER_SIZE
            rest = memoryview(data)[begin : found.end]
            while rest:
                rest = rest[disk.write(fd, rest, found.end - len(rest)) :]
            disk.sync(fd)
            if found.sealed:  # the process ended before it created the next segment
                disk.close_file(fd)
            else:
                tail.resume(header, fd, found.end)
        disk.sync_directory()
        self._active = None
        return tail


def _entries(number: int, data: bytes, found: Scan) -> Iterator[Entry]:
    for offset in found.offsets:
        length = int.from_bytes(data[offset : offset + 4], "little")
        content = data[offset + FRAME_SIZE : offset + FRAME_SIZE + length]
        yield Entry((number, offset), content)
