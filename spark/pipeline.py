"""A whole pipeline on the embedded engine: generate, publish, handle, archive, report, and check.

Spark generates events and publishes them at once. A worker process handles them with typed
handlers: some are refused, some fail and are retried. Meanwhile Spark archives the channel to
Parquet. In the end the dead letters are reported, and every total is compared with every other.
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
from pipeline_worker import REFUSED, SHAKY
from pyspark.sql import DataFrame, SparkSession

from qkit import Settings
from qkit.spark import write
from qkit.spark.job import count, parser, report_errors, session
from qkit.spark.publish import as_options
from qkit.spark.report import report_of
from qkit.spark.report_html import render_report

CHANNEL = "events"
PATIENCE = 300.0  # seconds without any progress after which it is given up


class Worker:
    """The process that handles events, and its latest totals."""

    def __init__(self, path: Path) -> None:
        script = Path(__file__).with_name("pipeline_worker.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(path)], stdout=subprocess.PIPE, text=True
        )
        self.totals = {"handled": 0, "cents": 0, "retried": 0, "dead_lettered": 0}
        self.ready = threading.Event()  # the channel exists
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
        """How many events it has done with; ends the pipeline if the process has ended."""
        if self._process.poll() is not None:
            raise SystemExit(f"error: the worker ended with {self._process.returncode}")
        return self.totals["handled"] + self.totals["dead_lettered"]

    def stop(self) -> None:
        """Let it end; its last line has the final totals."""
        self._process.terminate()
        self._reader.join(60)
        if self._process.wait(60):
            raise SystemExit(f"error: the worker ended with {self._process.returncode}")

    def kill(self) -> None:
        """Whatever became of it."""
        self._process.kill()
        self._process.wait()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the pipeline."""
    options = parser(__doc__ or "", "spark-submit spark/pipeline.py --count 1000000")
    options.add_argument("--count", type=count, default=1_000_000, help="how many events (1000000)")
    options.add_argument(
        "--directory",
        type=Path,
        help="a new one, where all of it lies and stays; else all but the report is removed",
    )
    options.add_argument(
        "--report", type=Path, metavar="FILE", help="the page; else report.html of the directory"
    )
    given = options.parse_args(arguments)
    with report_errors(), working(given.directory) as directory:
        report = given.report or (given.directory or Path()) / "report.html"
        report.parent.mkdir(parents=True, exist_ok=True)
        problems = run(given.count, directory, report)
    if problems:
        raise SystemExit(f"error: totals that do not agree: {', '.join(problems)}")
    print(f"every total agrees; the dead letters are in {report}")


@contextmanager
def working(directory: Path | None) -> Iterator[Path]:
    """That directory, which must be new; without one, one that is removed in the end."""
    if directory is None:
        with tempfile.TemporaryDirectory(
            prefix="qkit-pipeline-", ignore_cleanup_errors=True
        ) as new:
            yield Path(new)
    else:
        directory.mkdir(parents=True)
        yield directory


def run(count: int, directory: Path, output: Path) -> list[str]:
    """All of it; the names of totals that are wrong."""
    settings = Settings(type="native", path=directory / "data")
    options = {**as_options(settings), "channel": CHANNEL}
    worker = Worker(directory / "data")
    try:
        with session("qkit pipeline") as spark:
            with step("publish", count):
                # The archive begins first: from here on the log is kept for it.
                wait(worker.ready.is_set, lambda: worker.settled)
                query = start_archive(
                    spark,
                    {**options, "max_rows": "200000"},
                    str(directory / "archive"),
                    str(directory / "checkpoint"),
                    every="1 second",
                )
                wait(lambda: any((directory / "data").glob("readers/*")), lambda: worker.settled)
                written = write(
                    events(spark, count), CHANNEL, settings, key="customer", job_id="pipeline"
                )
            with step("handle", count):
                wait(lambda: worker.settled >= count, lambda: worker.settled, count)
            with step("archive", count):
                query.processAllAvailable()
                query.stop()
            with step("report", count // REFUSED):
                letters = spark.read.format("qkit").options(**options, dead_letters="true").load()
                report = report_of(letters, CHANNEL, datetime.now(UTC))
                output.write_text(render_report(report))
            archived = archive_totals(spark, directory / "archive")
        worker.stop()
    finally:
        worker.kill()
    refused = -(-count // REFUSED)
    shaky = len(range(7, count, SHAKY))
    refused_cents = sum(number % 1_000 for number in range(0, count, REFUSED))
    every_cent = archived["cents"]
    found = {
        "published": (written.messages or 0, count),
        "handled": (worker.totals["handled"], count - refused),
        "retried": (worker.totals["retried"], shaky),
        "dead-lettered": (worker.totals["dead_lettered"], refused),
        "reported": (report.total, refused),
        "archived": (archived["rows"], count),
        "archived ids": (archived["ids"], count),
        "cents archived": (every_cent, sum(number % 1_000 for number in range(count))),
        "cents handled": (worker.totals["cents"], every_cent - refused_cents),
    }
    for name, (actual, expected) in found.items():
        print(f"  {name:<16}{actual:>14,}{'' if actual == expected else f'  not {expected:,}'}")
    return [name for name, (actual, expected) in found.items() if actual != expected]


def events(spark: SparkSession, count: int) -> DataFrame:
    """What is published."""
    return spark.range(count).selectExpr(
        "id",
        "concat('customer-', id % 1000) as customer",
        "element_at(array('order', 'refund', 'visit'), int(id % 3) + 1) as kind",
        "int(id % 1000) as cents",
    )


def archive_totals(spark: SparkSession, archive: Path) -> dict[str, int]:
    """What the Parquet files say."""
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
    """Say what is done, and how long it took."""
    print(f"{name}: …", flush=True)
    started = time.monotonic()
    yield
    seconds = time.monotonic() - started
    print(f"{name}: {count:,} in {seconds:.1f} s, {count / seconds:,.0f}/s", flush=True)


def wait(condition: Callable[[], bool], progress: Callable[[], int], total: int = 0) -> None:
    """Until it is so, telling how much of ``total`` is done; gives up when nothing moves."""
    seen, since, said = progress(), time.monotonic(), time.monotonic()
    while not condition():
        now = time.monotonic()
        if progress() != seen:
            seen, since = progress(), now
        if now - since > PATIENCE:
            raise SystemExit(f"error: {seen:,} of {total:,}, and no more for {PATIENCE:.0f} s")
        if total and now - said >= 2:
            said = now
            print(f"  {seen:,} of {total:,} ({100 * seen // total} %)", flush=True)
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1:])
