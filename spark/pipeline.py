"""Run a complete pipeline on the native engine: generate, publish, handle, archive, report.

Spark generates events and publishes them in one job. A worker process handles them with typed
handlers: some events are rejected, some fail and are retried. Meanwhile, Spark archives the channel
to Parquet. Finally, the dead letters are reported, and all totals are compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from archive import start as start_archive
from pipeline_worker import FAIL_EVERY, REJECT_EVERY
from pyspark.sql import DataFrame, SparkSession

from qkit import Settings
from qkit.spark import write
from qkit.spark.job import count, parser, report_errors, session
from qkit.spark.publish import as_options
from qkit.spark.report import report_of
from qkit.spark.report_html import render_report

CHANNEL = "events"
STALL_TIMEOUT_SECONDS = 300.0  # time without progress before the pipeline gives up


class Worker:
    """Worker process that handles events, and its latest totals."""

    def __init__(self, path: Path) -> None:
        script = Path(__file__).with_name("pipeline_worker.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(path)], stdout=subprocess.PIPE, text=True
        )
        self.totals = {"handled": 0, "cents": 0, "retried": 0, "dead_lettered": 0}
        self.ready = threading.Event()  # set when the channel exists
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.totals = json.loads(line)
                self.ready.set()

    @property
    def settled(self) -> int:
        """Number of settled events; raises ``SystemExit`` if the worker process has exited."""
        if self._process.poll() is not None:
            raise SystemExit(f"error: the worker exited with code {self._process.returncode}")
        return self.totals["handled"] + self.totals["dead_lettered"]

    def stop(self) -> None:
        """Stop the worker and wait for its last line, which contains the final totals."""
        self._process.terminate()
        self._reader.join(60)
        if self._process.wait(60):
            raise SystemExit(f"error: the worker exited with code {self._process.returncode}")

    def kill(self) -> None:
        """Kill the worker if it is still running."""
        self._process.kill()
        self._process.wait()


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments, run the pipeline and check its totals."""
    options = parser(__doc__ or "", "spark-submit spark/pipeline.py --count 1000000")
    options.add_argument(
        "--count", type=count, default=1_000_000, help="number of events (default: 1000000)"
    )
    options.add_argument(
        "--directory",
        type=Path,
        help="new directory for all files, which are kept (default: a temporary directory)",
    )
    options.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="HTML file of the report (default: report.html in DIRECTORY or here)",
    )
    given = options.parse_args(arguments)
    with report_errors(), working_directory(given.directory) as directory:
        report = given.report or (given.directory or Path()) / "report.html"
        report.parent.mkdir(parents=True, exist_ok=True)
        problems = run(given.count, directory, report)
    if problems:
        raise SystemExit(f"error: wrong totals: {', '.join(problems)}")
    print(f"all totals agree; the report of the dead letters is in {report}")


@contextmanager
def working_directory(directory: Path | None) -> Iterator[Path]:
    """Create the given directory, which must not exist, or a temporary one if it is ``None``."""
    if directory is None:
        with tempfile.TemporaryDirectory(
            prefix="qkit-pipeline-", ignore_cleanup_errors=True
        ) as new:
            yield Path(new)
    else:
        directory.mkdir(parents=True)
        yield directory


def run(count: int, directory: Path, output: Path) -> list[str]:
    """Run the pipeline and return the names of the totals that are wrong."""
    settings = Settings(type="native", path=directory / "data")
    options = {**as_options(settings), "channel": CHANNEL}
    worker = Worker(directory / "data")
    try:
        with session("qkit pipeline") as spark:
            with step("publish", count):
                # Start the archive first, so that the log is retained for it from the beginning.
                wait_until(worker.ready.is_set, lambda: worker.settled)
                query = start_archive(
                    spark,
                    {**options, "max_rows": "200000"},
                    str(directory / "archive"),
                    str(directory / "checkpoint"),
                    every="1 second",
                )
                wait_until(
                    lambda: any((directory / "data").glob("readers/*")), lambda: worker.settled
                )
                written = write(
                    events(spark, count), CHANNEL, settings, key="customer", job_id="pipeline"
                )
            with step("handle", count):
                wait_until(lambda: worker.settled >= count, lambda: worker.settled, count)
            with step("archive", count):
                query.processAllAvailable()
                query.stop()
            with step("report", count // REJECT_EVERY):
                letters = spark.read.format("qkit").options(**options, dead_letters="true").load()
                report = report_of(letters, CHANNEL, datetime.now(UTC))
                output.write_text(render_report(report))
            archived = archive_totals(spark, directory / "archive")
        worker.stop()
    finally:
        worker.kill()
    rejected = -(-count // REJECT_EVERY)
    failing = len(range(7, count, FAIL_EVERY))
    rejected_cents = sum(number % 1_000 for number in range(0, count, REJECT_EVERY))
    archived_cents = archived["cents"]
    totals = {
        "published": (written.messages or 0, count),
        "handled": (worker.totals["handled"], count - rejected),
        "retried": (worker.totals["retried"], failing),
        "dead-lettered": (worker.totals["dead_lettered"], rejected),
        "reported": (report.total, rejected),
        "archived": (archived["rows"], count),
        "archived ids": (archived["ids"], count),
        "cents archived": (archived_cents, sum(number % 1_000 for number in range(count))),
        "cents handled": (worker.totals["cents"], archived_cents - rejected_cents),
    }
    for name, (actual, expected) in totals.items():
        wrong = "" if actual == expected else f"  expected {expected:,}"
        print(f"  {name:<16}{actual:>14,}{wrong}")
    return [name for name, (actual, expected) in totals.items() if actual != expected]


def events(spark: SparkSession, count: int) -> DataFrame:
    """Return ``count`` generated events."""
    return spark.range(count).selectExpr(
        "id",
        "concat('customer-', id % 1000) as customer",
        "element_at(array('order', 'refund', 'visit'), int(id % 3) + 1) as kind",
        "int(id % 1000) as cents",
    )


def archive_totals(spark: SparkSession, archive: Path) -> dict[str, int]:
    """Return the numbers of rows and distinct ids, and the total cents, in the archive."""
    body = "from_json(cast(value as string), 'id long, cents long') as body"
    row = (
        spark.read.parquet(str(archive))
        .selectExpr("id", body)
        .selectExpr("count(*)", "count(distinct body.id)", "sum(body.cents)")
        .collect()[0]
    )
    return {"rows": row[0], "ids": row[1], "cents": row[2]}


@contextmanager
def step(name: str, count: int) -> Iterator[None]:
    """Print the name of a step, and its duration and rate when it ends."""
    print(f"{name}: …", flush=True)
    started = time.monotonic()
    yield
    seconds = time.monotonic() - started
    print(f"{name}: {count:,} in {seconds:.1f} s, {count / seconds:,.0f}/s", flush=True)


def wait_until(condition: Callable[[], bool], progress: Callable[[], int], total: int = 0) -> None:
    """Wait until the condition holds and print the progress; exit if there is none for 300 s."""
    seen, since, printed = progress(), time.monotonic(), time.monotonic()
    while not condition():
        now = time.monotonic()
        if progress() != seen:
            seen, since = progress(), now
        if now - since > STALL_TIMEOUT_SECONDS:
            raise SystemExit(
                f"error: no progress for {STALL_TIMEOUT_SECONDS:.0f} s at {seen:,} of {total:,}"
            )
        if total and now - printed >= 2:
            printed = now
            print(f"  {seen:,} of {total:,} ({100 * seen // total} %)", flush=True)
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1:])
