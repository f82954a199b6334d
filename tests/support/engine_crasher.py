"""Process that runs a workload on an engine until it is killed, and reports over a pipe.

For each line ``PATH SEED SEGMENT_BYTES MEMORY_LIMIT FSYNC`` on stdin, it forks a child and writes
the child's pid. The child writes a JSON list before and after each operation, in the format of
``tests.support.crash_model``.
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
from tests.support.workload import prepare, run_workload


def record(line: tuple[str | int | bool | None, ...]) -> None:
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
    await run_workload(engine, Random(int(seed)), record, seed, steps)
    await engine.aclose()


def main() -> None:
    if len(sys.argv) > 1:  # run without forking, for strace
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
