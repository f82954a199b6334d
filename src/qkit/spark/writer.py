"""Writers for DataFrames: tasks encode and send rows, the driver publishes or aborts the job.

Spark creates the writer on the driver and pickles it to each task. The process that calls
``commit`` or ``abort`` receives a pickled copy of a batch writer; for a stream, it creates a new
writer from the same options for each batch. State that they share is therefore set in
``__init__``, derived from the options, or returned in the commit messages of the tasks.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from qkit._internal.ids import new_id
from qkit._internal.logging import logger
from qkit.errors import InvalidBody, QueueError, StorageError
from qkit.handlers.route import Route
from qkit.message import Envelope
from qkit.native import bulk
from qkit.native.bulk_jobs import commit_once, job_name
from qkit.spark.columns import Columns
from qkit.spark.options import Plan
from qkit.spark.row_encoder import RowEncoder, is_row_error, message_ids, preview
from qkit.spark.sinks import (
    ATTEMPTS_PER_PARTITION,
    BrokerSink,
    BulkSink,
    Sink,
    is_bulk,
    native_path,
)
from qkit.spark.task_sender import TaskSender

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["BatchWriter", "StreamWriter", "Task", "TaskResult"]

SEND_BATCH_SIZE: Final = 500
STAGED_PREFIX: Final = "spark-"  # start of the names of unpublished bulk files
STALE_AFTER_SECONDS: Final = 7 * 86_400.0  # age at which files of a killed driver are removed
_BATCH_ID_PROPERTY: Final = "streaming.sql.batchId"
_QUERY_ID_PROPERTY: Final = "sql.streaming.queryId"


@dataclass(slots=True)
class TaskResult(WriterCommitMessage):
    """Commit message of a task: its job, the part it wrote, and its counts."""

    job: str
    staged: str
    part: int
    rows: int
    dead_letters: int
    unheard: int = 0  # messages of Redis pub/sub that no subscriber received


class _Writer:
    """Base class of the batch and stream writers."""

    def __init__(self, plan: Plan, columns: Columns) -> None:
        self._plan = plan
        self._columns = columns
        self._started = time.time()
        # Fail on the driver if the tasks would fail: both calls validate the plan.
        route = TaskSender(plan.settings).route(plan.channel, broadcast=plan.broadcast)
        RowEncoder(plan, columns, route)
        self._queue = route.queue
        self._identity: str | None = None  # identity of the native directory, which tasks verify
        if is_bulk(plan):
            path = native_path(plan)
            if plan.job_id is not None:
                job_name(plan.job_id, route.queue)
            self._identity = bulk.identity(path)

    def _write(self, batches: Iterator[pa.RecordBatch], job: str, staged: str) -> TaskResult:
        context = TaskContext.get()
        partition, attempt = (
            (0, 0) if context is None else (context.partitionId(), context.attemptNumber())
        )
        part = partition * ATTEMPTS_PER_PARTITION + attempt % ATTEMPTS_PER_PARTITION
        sender = TaskSender(self._plan.settings)
        route = sender.route(self._plan.channel, broadcast=self._plan.broadcast)
        encoder = RowEncoder(self._plan, self._columns, route)
        sink = self.sink(sender, route, staged, part)
        task = Task(self._plan, self._columns, encoder, sink, partition)
        try:
            task.run(batches, message_ids(job, partition, self._started))
            sink.finish()
        except BaseException:
            sink.abort()
            raise
        return TaskResult(job, staged, part, task.rows, task.dead_letters, sender.unheard)

    def sink(self, sender: TaskSender, route: Route, staged: str, part: int) -> Sink:
        """Return the sink for the messages of one task."""
        if self._identity is not None:
            bulk.check_identity(native_path(self._plan), self._identity)
            return BulkSink(self._plan, route, staged, part)
        return BrokerSink(self._plan, sender, route)

    def _publish(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        results = _results(messages)
        if not results:
            return
        rows, job = sum(task.rows for task in results), results[0].job
        letters, skipped = sum(task.dead_letters for task in results), 0
        if is_bulk(self._plan) and not self._publish_parts(results):
            letters, skipped = 0, rows
            logger.warning(
                "%s: %d rows were not written: job %s was already published",
                self._plan.channel,
                rows,
                job,
            )
        report = {
            "job": job,
            "messages": rows - letters - skipped,
            "dead_letters": letters,
            "skipped": skipped,
            "unheard": sum(task.unheard for task in results),
        }
        logger.info(
            "%s: wrote %d messages and %d dead letters of job %s",
            self._plan.channel,
            report["messages"],
            letters,
            job,
        )
        if self._plan.report is not None:
            Path(self._plan.report).write_text(json.dumps(report))
        self._check_unheard(sum(task.unheard for task in results), rows - letters)

    def _publish_parts(self, results: Sequence[TaskResult]) -> bool:
        """Publish the parts of the tasks; return false if the job was already published."""
        path, plan = Path(native_path(self._plan)), self._plan
        job, staged, parts = results[0].job, results[0].staged, {task.part for task in results}
        missing = parts - bulk.completed_parts(path, staged)
        if missing:
            raise StorageError(
                f"{len(missing)} of {len(parts)} parts are missing in {path}/inbox, so nothing was "
                "published: the executors and the driver must share the directory",
                backend="native",
                operation="send",
                queue=plan.channel,
            )
        if job == plan.job_id:
            letters = plan.settings.broker_name(plan.dead_letter_name)
            published = commit_once(path, staged, job, self._queue, letters=letters, parts=parts)
        else:
            published = bulk.commit(path, staged, parts=parts, name=job)
        _remove_stale_parts(path / "inbox")
        return published

    def _check_unheard(self, unheard: int, messages: int) -> None:
        """Fail or warn (``on_unheard``) if messages had no subscriber on Redis pub/sub."""
        if not unheard:
            return
        text = (
            f"{unheard} of {messages} messages had no subscriber and are lost: Redis pub/sub "
            "stores no messages. Start the subscribers first, or write with mode='list'"
        )
        if self._plan.on_unheard == "fail":
            raise QueueError(
                f"{text}; option('on_unheard', 'warn') only logs and counts them",
                backend="redis",
                operation="send",
                queue=self._plan.channel,
            )
        logger.warning("%s: %s", self._plan.channel, text)

    def _abort(self, messages: Sequence[WriterCommitMessage | None], staged: str) -> None:
        """Remove the unpublished parts.

        ``staged`` is a glob pattern for their names, used if no task returned the exact name.
        """
        results = _results(messages)
        if is_bulk(self._plan):
            path = native_path(self._plan)
            pattern = f".{results[0].staged if results else staged}"
            for directory in (Path(path) / "inbox").glob(pattern):
                bulk.abort(path, directory.name.removeprefix("."))
        else:
            sent = sum(task.rows for task in results)
            logger.error(
                "%s: the write failed. Completed tasks sent %d messages; failed tasks may have "
                "sent more, see their errors",
                self._plan.channel,
                sent,
            )


class BatchWriter(_Writer, DataSourceArrowWriter):
    """Writer for ``df.write``; on native, either all rows are published or none."""

    def __init__(self, plan: Plan, columns: Columns) -> None:
        super().__init__(plan, columns)
        self._staged = STAGED_PREFIX + new_id()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        """Encode and send the rows of one partition; runs in a task."""
        return self._write(iterator, self._plan.job_id or self._staged, self._staged)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Publish the job; runs on the driver after all tasks succeeded."""
        self._publish(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Discard the job; runs on the driver after a task or ``commit`` failed."""
        self._abort(messages, self._staged)


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Writer for ``df.writeStream``; on native, a repeated batch is published only once.

    A hash of ``options`` marks the parts of this stream, so that ``abort`` finds them even if no
    task returned a commit message.
    """

    def __init__(self, plan: Plan, columns: Columns, options: Mapping[str, str]) -> None:
        super().__init__(plan, columns)
        text = repr(sorted(options.items())).encode()
        self._stream_prefix = STAGED_PREFIX + blake2b(text, digest_size=8).hexdigest()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        """Encode and send the rows of one partition of a batch; runs in a task."""
        context = TaskContext.get()
        assert context is not None, "write was called outside a Spark task"
        query = context.getLocalProperty(_QUERY_ID_PROPERTY)
        batch = context.getLocalProperty(_BATCH_ID_PROPERTY)
        job = f"{query}-{batch}"
        return self._write(iterator, job, f"{self._stream_prefix}-{job}")

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's name
        """Publish the batch; runs on the driver after all its tasks succeeded."""
        self._publish(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's name
        """Discard the batch; runs on the driver after a task or ``commit`` failed."""
        self._abort(messages, f"{self._stream_prefix}-*-{batchId}")


class Task:
    """Encoder and sender of one partition; memory use does not grow with the number of rows."""

    def __init__(
        self, plan: Plan, columns: Columns, encoder: RowEncoder, sink: Sink, partition: int
    ) -> None:
        self._plan = plan
        self._columns = columns
        self._encoder = encoder
        self._sink = sink
        self._partition = partition
        self._sent = 0
        self.rows: int = 0
        self.dead_letters: int = 0

    def run(self, batches: Iterator[pa.RecordBatch], ids: Iterator[str]) -> None:
        """Encode and send every row, in order.

        Raises:
            InvalidBody: A row is invalid and ``on_invalid`` is ``fail``.
        """
        encode, is_fatal = self._encoder.envelope, self._plan.on_invalid == "fail"
        for batch in batches:
            group: list[Envelope] = []
            letters: list[Envelope] = []
            for body, options in self._columns.rows(batch):
                id = next(ids)
                try:
                    group.append(encode(id, body, options))
                except Exception as error:
                    if not is_row_error(error):
                        raise
                    if is_fatal:
                        self._send(group)
                        raise self._invalid_row(preview(body, options), error) from error
                    letters.append(self._encoder.dead_letter(id, body, options, error))
                self.rows += 1
                if len(group) == SEND_BATCH_SIZE:
                    self._send(group)
                    group = []
            self._send(group)
            if letters:
                self._sink.dead_letter(letters)
                self.dead_letters += len(letters)

    def _send(self, group: list[Envelope]) -> None:
        if group:
            self._sink.send(group)
            self._sent += len(group)

    def _invalid_row(self, row: str, error: Exception) -> InvalidBody:
        sent = (
            f"{self._sent} rows of this partition were sent before it"
            if self._sink.sends_are_final
            else "nothing was published"
        )
        return InvalidBody(
            f"row {self.rows} of partition {self._partition} is invalid: {error}\n"
            f"the row: {row}\n{sent}; option('on_invalid', 'dead_letter') sends invalid rows to "
            "the dead-letter queue",
            queue=self._plan.channel,
        )


def _results(messages: Sequence[WriterCommitMessage | None]) -> list[TaskResult]:
    """Return the results of the tasks that succeeded."""
    return [message for message in messages if isinstance(message, TaskResult)]


def _remove_stale_parts(directory: Path) -> None:
    """Remove old unpublished parts left by killed drivers."""
    for part in directory.glob(f".{STAGED_PREFIX}*"):
        try:
            if time.time() - part.stat().st_mtime > STALE_AFTER_SECONDS:
                shutil.rmtree(part)
        except FileNotFoundError:  # another driver removes it at the same time
            continue
