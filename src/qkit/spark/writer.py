"""Writing a DataFrame: tasks make messages of Arrow batches, the driver publishes or aborts.

The writer is made on the driver and travels to each task by pickle. For a batch it travels to the
process in which Spark calls ``commit`` or ``abort`` as well; for a stream another is made there, of
the same options, for each batch. So what they share is decided when a writer is made, or follows
from the options, or comes back with the tasks' messages.
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
from qkit.spark.sinks import ATTEMPTS, BrokerSink, BulkSink, Sink, is_bulk, native_path
from qkit.spark.task_sender import TaskSender

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["BatchWriter", "StreamWriter", "Task", "TaskResult"]

SEND_BATCH_SIZE: Final = 500
STAGED: Final = "spark-"  # what bulk files are called while Spark's tasks write them
STALE_AFTER_SECONDS: Final = 7 * 86_400.0  # then a bulk file of a killed driver is removed
_BATCH: Final = "streaming.sql.batchId"
_QUERY: Final = "sql.streaming.queryId"


@dataclass(slots=True)
class TaskResult(WriterCommitMessage):
    """A task's message to the driver: its job, the staged part, and its counts."""

    job: str
    staged: str
    part: int
    rows: int
    dead_letters: int
    unheard: int = 0  # messages of Redis pub/sub that no subscriber received


class _Writer:
    """What batches and streams share."""

    def __init__(self, plan: Plan, columns: Columns) -> None:
        self._plan = plan
        self._columns = columns
        self._started = time.time()
        # Refuse on the driver what the tasks could not do.
        route = TaskSender(plan.settings).route(plan.channel, broadcast=plan.broadcast)
        RowEncoder(plan, columns, route)
        self._queue = route.queue
        self._identity: str | None = None  # of the native directory: tasks compare it
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
        part = partition * ATTEMPTS + attempt % ATTEMPTS
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
        """Where the messages of one task go."""
        if self._identity is not None:
            bulk.check_identity(native_path(self._plan), self._identity)
            return BulkSink(self._plan, route, staged, part)
        return BrokerSink(self._plan, sender, route)

    def _publish(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        done = _results(messages)
        if not done:
            return
        rows, job = sum(task.rows for task in done), done[0].job
        letters, skipped = sum(task.dead_letters for task in done), 0
        if is_bulk(self._plan) and not self._publish_parts(done):
            letters, skipped = 0, rows
            logger.warning(
                "%s: %d rows of job %s were not written: it was published before",
                self._plan.channel,
                rows,
                job,
            )
        report = {
            "job": job,
            "messages": rows - letters - skipped,
            "dead_letters": letters,
            "skipped": skipped,
            "unheard": sum(task.unheard for task in done),
        }
        logger.info(
            "%s: %d messages and %d dead letters of job %s",
            self._plan.channel,
            report["messages"],
            letters,
            job,
        )
        if self._plan.report is not None:
            Path(self._plan.report).write_text(json.dumps(report))
        self._check_heard(sum(task.unheard for task in done), rows - letters)

    def _publish_parts(self, done: Sequence[TaskResult]) -> bool:
        """Publish what the tasks wrote; whether it counts."""
        path, plan = Path(native_path(self._plan)), self._plan
        job, staged, parts = done[0].job, done[0].staged, {task.part for task in done}
        missing = parts - bulk.completed_parts(path, staged)
        if missing:
            raise StorageError(
                f"{len(missing)} of {len(parts)} parts that tasks have written are not in "
                f"{path}/inbox, and nothing was published: the executors must see the directory "
                "that the driver sees",
                backend="native",
                operation="send",
                queue=plan.channel,
            )
        if job == plan.job_id:
            letters = plan.settings.broker_name(plan.letters)
            counts = commit_once(path, staged, job, self._queue, letters=letters, parts=parts)
        else:
            counts = bulk.commit(path, staged, parts=parts, name=job)
        _sweep(path / "inbox")
        return counts

    def _check_heard(self, unheard: int, messages: int) -> None:
        """Redis pub/sub keeps nothing: what no subscriber received is lost."""
        if not unheard:
            return
        text = (
            f"{unheard} of {messages} messages had no subscriber and are lost: Redis pub/sub "
            "keeps nothing. Start the subscribers first, or write with mode='list'"
        )
        if self._plan.on_unheard == "fail":
            raise QueueError(
                f"{text}; option('on_unheard', 'warn') reports them and does not fail",
                backend="redis",
                operation="send",
                queue=self._plan.channel,
            )
        logger.warning("%s: %s", self._plan.channel, text)

    def _abort(self, messages: Sequence[WriterCommitMessage | None], staged: str) -> None:
        """``staged`` may hold a star, for when no task has told the name."""
        done = _results(messages)
        if is_bulk(self._plan):
            path = native_path(self._plan)
            for left in (Path(path) / "inbox").glob(f".{done[0].staged if done else staged}"):
                bulk.abort(path, left.name.removeprefix("."))
        else:
            sent = sum(task.rows for task in done)
            logger.error(
                "%s: the write failed after %d messages of complete tasks were sent; more of the "
                "others may have been, as their errors say",
                self._plan.channel,
                sent,
            )


class BatchWriter(_Writer, DataSourceArrowWriter):
    """``df.write``; on native all of it is published at once, or nothing."""

    def __init__(self, plan: Plan, columns: Columns) -> None:
        super().__init__(plan, columns)
        self._run = STAGED + new_id()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        """In a task: make messages of the rows and hand them over."""
        return self._write(iterator, self._plan.job_id or self._run, self._run)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver: all tasks are done."""
        self._publish(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver: a task failed for good, or ``commit`` did."""
        self._abort(messages, self._run)


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """``df.writeStream``; a batch that Spark repeats after a restart counts once on native.

    ``options`` tell its stages from those of other streams where no message does.
    """

    def __init__(self, plan: Plan, columns: Columns, options: Mapping[str, str]) -> None:
        super().__init__(plan, columns)
        text = repr(sorted(options.items())).encode()
        self._mark = STAGED + blake2b(text, digest_size=8).hexdigest()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        """In a task: make messages of the rows and hand them over."""
        context = TaskContext.get()
        assert context is not None, "Spark runs this in a task"
        job = f"{context.getLocalProperty(_QUERY)}-{context.getLocalProperty(_BATCH)}"
        return self._write(iterator, job, f"{self._mark}-{job}")

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's name
        """On the driver: all tasks of a batch are done."""
        self._publish(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's name
        """On the driver: a task failed for good, or ``commit`` did."""
        self._abort(messages, f"{self._mark}-*-{batchId}")


class Task:
    """The rows of one partition on their way; memory is flat in their number."""

    def __init__(
        self, plan: Plan, columns: Columns, encoder: RowEncoder, sink: Sink, partition: int
    ) -> None:
        self._plan = plan
        self._columns = columns
        self._encoder = encoder
        self._sink = sink
        self._partition = partition
        self._sent = 0
        self.rows = 0
        self.dead_letters = 0

    def run(self, batches: Iterator[pa.RecordBatch], numbers: Iterator[str]) -> None:
        """Send every row, in order."""
        make, is_fatal = self._encoder.envelope, self._plan.on_invalid == "fail"
        for batch in batches:
            group: list[Envelope] = []
            letters: list[Envelope] = []
            for body, options in self._columns.rows(batch):
                id = next(numbers)
                try:
                    group.append(make(id, body, options))
                except Exception as error:
                    if not is_row_error(error):
                        raise
                    if is_fatal:
                        self._send(group)
                        raise self._invalid(preview(body, options), error) from error
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

    def _invalid(self, row: str, error: Exception) -> InvalidBody:
        sent = (
            f"{self._sent} rows of this partition were sent before it"
            if self._sink.lasting
            else "nothing was published"
        )
        return InvalidBody(
            f"row {self.rows} of partition {self._partition} is no message: {error}\n"
            f"the row: {row}\n{sent}; option('on_invalid', 'dead_letter') sends such rows to the "
            "dead letters",
            queue=self._plan.channel,
        )


def _results(messages: Sequence[WriterCommitMessage | None]) -> list[TaskResult]:
    """Return the results of the tasks that completed."""
    return [message for message in messages if isinstance(message, TaskResult)]


def _sweep(directory: Path) -> None:
    """Remove what drivers that were killed left behind."""
    for left in directory.glob(f".{STAGED}*"):
        try:
            if time.time() - left.stat().st_mtime > STALE_AFTER_SECONDS:
                shutil.rmtree(left)
        except FileNotFoundError:  # another one sweeps too
            continue
