"""Process that appends to a log until it is killed, and reports over a pipe.

For each line with a directory and a seed on stdin, it forks a child and writes the child's pid. The
child writes ``i NUMBER`` before it appends a record and ``a NUMBER`` once the record is synced. It
does not wait for the sync of some records, so these have no ``a`` line.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
from random import Random

from qkit.native.log.log import Log

__all__ = ["content", "number"]


def content(number: int, size: int = 0) -> bytes:
    """Return a record with its number and ``size`` bytes that are derived from the number."""
    return b"\x01" + struct.pack("<I", number) + bytes((number * 7 + i) & 255 for i in range(size))


def number(record: bytes) -> int:
    """Return the number of a record; fail if the record is not what ``content`` returned."""
    (found,) = struct.unpack_from("<I", record, 1)
    assert record == content(found, len(record) - 5)
    return int(found)


async def work(path: str, seed: int) -> None:
    random = Random(seed)
    log = Log.open(path, segment_bytes=20_000)
    last = max((number(entry.content) for entry in log.recover()), default=0)
    log.start()

    async def sender() -> None:
        nonlocal last
        while True:
            last += 1
            record_number = last
            record = content(record_number, random.randrange(300))
            os.write(1, b"i %d\n" % record_number)
            if random.random() < 0.2:
                log.writer.append_nowait([record])
                await asyncio.sleep(0)
            else:
                await log.writer.append([record])
                os.write(1, b"a %d\n" % record_number)

    async def compactor() -> None:
        while True:
            await asyncio.sleep(0.002)
            for segment, _ in log.segments()[-2:]:
                contents = [entry.content for entry in log.entries(segment)]
                log.install(await asyncio.to_thread(log.rewrite, segment, contents))

    await asyncio.gather(*(sender() for _ in range(8)), compactor())


def main() -> None:
    for line in sys.stdin:
        path, seed = line.split()
        pid = os.fork()
        if pid == 0:
            asyncio.run(work(path, int(seed)))
        os.write(1, b"pid %d\n" % pid)
        os.waitpid(pid, 0)
        os.write(1, b"dead\n")


if __name__ == "__main__":
    main()
