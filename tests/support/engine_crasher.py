"""A process that lives in an engine until it is killed, and tells its parent over a pipe.

One interpreter is started; for each line ``PATH SEED SEGMENT_BYTES MEMORY_LIMIT FSYNC`` on its
input it forks a child, writes the child's pid, and the child writes a JSON list before and after
each thing that it does, as ``tests.support.books`` wants them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from random import Random
from typing import cast

from qkit.native.storage.storage import Fsync
from tests.support.engines import open_engine
from tests.support.history import live, prepare


def tell(line: tuple[str | int | bool | None, ...]) -> None:
    os.write(1, json.dumps(line).encode() + b"\n")


async def work(path: str, seed: str, segment_bytes: str, memory_limit: str, fsync: str) -> None:
    engine = await open_engine(
        Path(path),
        segment_bytes=int(segment_bytes),
        memory_limit=int(memory_limit),
        fsync=cast("Fsync", fsync),
    )
    await prepare(engine)
    steps = int(os.environ.get("QKIT_CRASHER_STEPS", "1000000"))
    await live(engine, Random(int(seed)), tell, seed, steps)
    await engine.aclose()


def main() -> None:
    if len(sys.argv) > 1:  # by itself, without a fork: for strace
        asyncio.run(work(*sys.argv[1:]))
        return
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            asyncio.run(work(*line.split()))
            os._exit(0)
        os.write(1, json.dumps(["pid", pid]).encode() + b"\n")
        os.waitpid(pid, 0)
        os.write(1, b'["dead"]\n')


if __name__ == "__main__":
    main()
