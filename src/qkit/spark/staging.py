"""Stream source for a broker without a log: stages messages in files before it acks them.

    stage/00000012.arrow      a staging file, named by its number; ends in .tmp until it is complete

Messages are received, written to a staging file, synced, and only then acknowledged. Spark's
offsets are the numbers of these files. A crash at any point loses nothing: an acknowledged message
is in a staging file, and the file is removed only when Spark no longer needs it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import Any, Final, NamedTuple

import pyarrow as pa

from qkit._internal.file_lock import lock_file
from qkit.errors import ConfigError, StorageError
from qkit.message import Envelope
from qkit.native.log.disk import sync_path
from qkit.spark import rows
from qkit.spark.options import Plan
from qkit.spark.stage_consumer import PREFETCH, StageConsumer

__all__ = ["StageFile", "StagingArea", "read"]

DEFAULT_MAX_ROWS: Final = 100_000  # per batch
STAGES_PER_TASK: Final = 10
LOCK_TIMEOUT_SECONDS: Final = 10.0  # a stream that was just stopped may still hold the lock
_TOKEN_KEY: Final = "qkit-stage"


class StageFile(NamedTuple):
    """Path of a staging file, and the random token by which a task recognizes it."""

    path: str
    token: str | None


class StagingArea:
    """Source that consumes messages into staging files; runs on the driver for the whole stream."""

    def __init__(self, plan: Plan) -> None:
        if plan.stage is None:
            raise ConfigError(
                f"a stream from {plan.settings.type} needs option('stage', directory), which keeps "
                "messages until Spark has processed them. All executors must share the directory, "
                "and no other stream may use it"
            )
        self._plan = plan
        self._directory = Path(plan.stage)
        self._consumer: StageConsumer | None = None
        self._budget: int | None = None  # messages left to take; set by ``limit_to_available``
        self._lock: int | None = None

    def initial(self) -> dict[str, Any]:
        """Return the offset before the oldest staging file of an earlier stream, or 0."""
        self._lock_directory()
        staged = self._staged()
        return {"stage": staged[0] - 1 if staged else 0}

    def limit_to_available(self) -> None:
        """Limit the stream to the number of messages that are in the queue now."""
        self._lock_directory()
        self._budget = self._get_consumer().depth()

    def latest(self, start: Mapping[str, Any], limit: int | None) -> dict[str, Any]:
        """Return the end of the next batch: existing staging files, or else new ones.

        Files from before a crash come first, because their messages may be acknowledged and
        exist nowhere else.
        """
        self._lock_directory()
        done = int(start["stage"])
        self._remove(done)
        staged = self._staged()
        if staged:
            return {"stage": staged[-1]}
        return {"stage": self._fill(done, limit or DEFAULT_MAX_ROWS)}

    def _fill(self, number: int, wanted: int) -> int:
        """Stage up to ``wanted`` messages and return the number of the last file."""
        if self._budget is not None:
            wanted = min(wanted, self._budget)
        while wanted > 0:
            count = self._get_consumer().take(wanted, partial(self._write, number + 1))
            number += bool(count)
            if self._budget is not None:
                self._budget = self._budget - count if count else 0
            if count < min(wanted, PREFETCH):  # later messages belong to the next batch
                break
            wanted -= count
        return number

    def ranges(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[list[StageFile]]:
        """Return the staging files between two offsets, grouped for tasks."""
        files = [
            self._file(number) for number in range(int(start["stage"]) + 1, int(end["stage"]) + 1)
        ]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise StorageError(
                f"{missing[0]} is missing from {self._directory}: the checkpoint belongs to "
                "another staging directory, or files were deleted",
                operation="read",
                queue=self._plan.channel,
            )
        stages = [StageFile(str(file), _token_of(file)) for file in files]
        return [stages[at : at + STAGES_PER_TASK] for at in range(0, len(stages), STAGES_PER_TASK)]

    def commit(self, end: Mapping[str, Any]) -> None:
        """Remove the staging files up to ``end``."""
        self._remove(int(end["stage"]))

    def close(self) -> None:
        """Disconnect and unlock the directory; idempotent."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # The directory

    def _lock_directory(self) -> None:
        """Lock the directory, waiting for a stream that was just stopped."""
        if self._lock is not None:
            return
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
        while True:
            try:
                lock_file(fd, wait=False)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(fd)
                    raise ConfigError(
                        f"another stream uses the staging directory {self._directory}: use a "
                        "separate directory for each stream"
                    ) from None
                time.sleep(0.05)
        self._lock = fd
        for leftover in self._directory.glob("*.tmp"):
            leftover.unlink()

    def _file(self, number: int) -> Path:
        return self._directory / f"{number:08}.arrow"

    def _staged(self) -> list[int]:
        return sorted(int(file.stem) for file in self._directory.glob("*.arrow"))

    def _remove(self, upto: int) -> None:
        for number in self._staged():
            if number <= upto:
                self._file(number).unlink()

    def _write(self, number: int, envelopes: Sequence[Envelope]) -> None:
        """Write a staging file and sync it to disk."""
        file = self._file(number)
        temporary = file.with_suffix(".arrow.tmp")
        batches = list(rows.batches(envelopes, self._plan))
        schema = batches[0].schema.with_metadata({_TOKEN_KEY: os.urandom(16).hex()})
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
    """Yield the rows of the given staging files; runs in a task.

    Raises:
        StorageError: A file is missing, or is not the file that the driver wrote.
    """
    for file, token in files:
        if not Path(file).exists() or _token_of(Path(file)) != token:
            raise StorageError(
                f"{file} on {gethostname()} is not the file that the driver wrote: the staging "
                "directory must be on a file system that all executors share, under the same path",
                operation="read",
            )
        with pa.OSFile(file) as raw, pa.ipc.open_file(raw) as reader:
            for at in range(reader.num_record_batches):
                yield reader.get_batch(at).replace_schema_metadata(None)


def _token_of(file: Path) -> str | None:
    """Return the random token of a staging file; ``None`` if an older version wrote it."""
    with pa.OSFile(str(file)) as raw, pa.ipc.open_file(raw) as reader:
        token = (reader.schema.metadata or {}).get(_TOKEN_KEY.encode())
    return None if token is None else token.decode()
