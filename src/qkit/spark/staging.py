"""A stream of a channel whose broker forgets what it delivered: staged first, acknowledged then.

    stage/00000012.arrow      a stage, by its number; with .tmp behind while it is written

Messages are claimed, written to a stage, synced and only then acknowledged; Spark's offsets are
numbers of stages. Whoever is killed, and when: what was acknowledged is in a stage, and a stage is
removed only when Spark will not ask for it again.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any, Final, NamedTuple

import pyarrow as pa

from qkit.errors import ConfigError, StorageError
from qkit.message import Envelope
from qkit.native.log.disk import sync_path
from qkit.spark import rows
from qkit.spark.options import Plan
from qkit.spark.stage_consumer import PREFETCH, StageConsumer

__all__ = ["StageFile", "StagingArea", "read"]

DEFAULT_MAX_ROWS: Final = 100_000  # of a batch
STAGES_PER_TASK: Final = 10
LOCK_TIMEOUT_SECONDS: Final = 10.0  # for a stream that was just stopped to release its lock


_TOKEN: Final = "qkit-stage"


class StageFile(NamedTuple):
    """A stage for a task to read, and the random text in it: tasks compare it."""

    path: str
    token: str | None


class StagingArea:
    """Fills stages and hands them out; lives in the driver's process as long as the stream."""

    def __init__(self, plan: Plan) -> None:
        if plan.stage is None:
            raise ConfigError(
                f"a stream of {plan.settings.type} needs option('stage', directory): its messages "
                "are kept there until Spark has done with them. All executors must see it, and it "
                "is this stream's alone"
            )
        self._plan = plan
        self._directory = Path(plan.stage)
        self._consumer: StageConsumer | None = None
        self._budget: int | None = None  # for who asks for what is there now, and no more
        self._lock: int | None = None

    def initial(self) -> dict[str, Any]:
        """Where a new stream begins: before what an earlier one staged and Spark never saw."""
        self._own()
        staged = self._staged()
        return {"stage": staged[0] - 1 if staged else 0}

    def limit_to_available(self) -> None:
        """Take no more than what is there now."""
        self._own()
        self._budget = self._get_consumer().depth()

    def latest(self, start: Mapping[str, Any], limit: int | None) -> dict[str, Any]:
        """Stage what there is; what was staged before and never handed out goes first.

        It may have been acknowledged just before a crash, so nowhere else is it any more.
        """
        self._own()
        done = int(start["stage"])
        self._remove(done)
        staged = self._staged()
        if staged:
            return {"stage": staged[-1]}
        return {"stage": self._fill(done, limit or DEFAULT_MAX_ROWS)}

    def _fill(self, number: int, wanted: int) -> int:
        """Stage what waits, up to ``wanted`` messages; the number of the last stage."""
        if self._budget is not None:
            wanted = min(wanted, self._budget)
        while wanted > 0:
            count = self._get_consumer().take(wanted, partial(self._write, number + 1))
            number += bool(count)
            if self._budget is not None:
                self._budget = self._budget - count if count else 0
            if count < min(wanted, PREFETCH):  # what comes from now on is of the next batch
                break
            wanted -= count
        return number

    def ranges(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[list[StageFile]]:
        """The files of the stages between, as tasks are to read them."""
        files = [
            self._file(number) for number in range(int(start["stage"]) + 1, int(end["stage"]) + 1)
        ]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise StorageError(
                f"{missing[0]} is missing in {self._directory}: the checkpoint belongs to another "
                "stage directory, or files were removed",
                operation="read",
                queue=self._plan.channel,
            )
        found = [StageFile(str(file), _token_of(file)) for file in files]
        return [found[at : at + STAGES_PER_TASK] for at in range(0, len(found), STAGES_PER_TASK)]

    def commit(self, end: Mapping[str, Any]) -> None:
        """Spark will not ask for these again."""
        self._remove(int(end["stage"]))

    def close(self) -> None:
        """Let go of the broker and the directory; idempotent."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # The directory

    def _own(self) -> None:
        """Take the directory for this process; one whose stream was stopped may take a while."""
        if self._lock is not None:
            return
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(fd)
                    raise ConfigError(
                        f"another stream uses the stage {self._directory}: give each its own"
                    ) from None
                time.sleep(0.05)
        self._lock = fd
        for left in self._directory.glob("*.tmp"):
            left.unlink()

    def _file(self, number: int) -> Path:
        return self._directory / f"{number:08}.arrow"

    def _staged(self) -> list[int]:
        return sorted(int(file.stem) for file in self._directory.glob("*.arrow"))

    def _remove(self, upto: int) -> None:
        for number in self._staged():
            if number <= upto:
                self._file(number).unlink()

    def _write(self, number: int, found: Sequence[Envelope]) -> None:
        """Write a stage; it is on the disk under its name when this returns."""
        file = self._file(number)
        temporary = file.with_suffix(".arrow.tmp")
        batches = list(rows.batches(found, self._plan))
        schema = batches[0].schema.with_metadata({_TOKEN: os.urandom(16).hex()})
        with temporary.open("wb") as raw:
            os.fchmod(raw.fileno(), 0o600)
            with pa.ipc.new_file(raw, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch.replace_schema_metadata(schema.metadata))
            raw.flush()
            os.fsync(raw.fileno())
        temporary.rename(file)
        sync_path(self._directory)

    def _get_consumer(self) -> StageConsumer:
        if self._consumer is None:
            self._consumer = StageConsumer(self._plan)
        return self._consumer


def read(files: Sequence[StageFile]) -> Iterator[pa.RecordBatch]:
    """In a task: the rows of some stages.

    Raises ``StorageError`` if a file is not the one that the driver wrote.
    """
    for file, token in files:
        if not Path(file).exists() or _token_of(Path(file)) != token:
            raise StorageError(
                f"{file} on {gethostname()} is not the file that the driver wrote: the stage must "
                "be on a file system that all executors share, under the same path",
                operation="read",
            )
        with pa.OSFile(file) as raw, pa.ipc.open_file(raw) as reader:
            for at in range(reader.num_record_batches):
                yield reader.get_batch(at).replace_schema_metadata(None)


def _token_of(file: Path) -> str | None:
    """The random text in a stage; ``None`` in one of an older version."""
    with pa.OSFile(str(file)) as raw, pa.ipc.open_file(raw) as reader:
        token = (reader.schema.metadata or {}).get(_TOKEN.encode())
    return None if token is None else token.decode()
