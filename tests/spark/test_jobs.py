"""Spark jobs, run in this process, with Python and with ``spark-submit``, and on a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession

from qkit import Settings, SyncQueueService
from qkit._internal.ids import new_id
from qkit.spark.columns import Columns
from qkit.spark.options import parse_options
from qkit.spark.report import report_of
from qkit.spark.writer import BatchWriter
from tests.spark.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

JOBS = ["publish_files", "archive", "dead_letter_report", "replay", "pipeline"]
SPARK_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
}


def run(command: list[str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def execute(job: str, *arguments: str) -> str:
    """Run a job with Python and return its output.

    Raises:
        SystemExit: The job failed; its errors were printed.
    """
    return output_of([sys.executable, f"spark/{job}.py", *arguments])


def submit(job: str, *arguments: str) -> str:
    """Run a job with ``spark-submit``; otherwise the same as ``execute``."""
    settings = [
        word for name, value in SPARK_SETTINGS.items() for word in ("--conf", f"{name}={value}")
    ]
    script = Path(sys.executable).with_name("spark-submit")
    return output_of(
        [str(script), "--master", "local[2]", *settings, f"spark/{job}.py", *arguments]
    )


def output_of(command: list[str]) -> str:
    done = run(command)
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        raise SystemExit(done.returncode)
    return done.stdout


def test_every_job_has_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "spark")  # spark-submit does the same
    for job in JOBS:
        with pytest.raises(SystemExit) as exited:
            import_module(f"spark.{job}").main(["--help"])
        assert exited.value.code == 0
        assert f"spark-submit spark/{job}.py" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "type=missing"], "error: "),
        (["--set", "missing"], "expected name=value"),
        (["--limit", "0"], "at least 1"),
        (["--rate", "0"], "above 0"),
    ],
)
def test_invalid_arguments_are_reported_before_spark_starts(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    replay = import_module("spark.replay")
    monkeypatch.setattr(replay, "session", lambda name: pytest.fail("Spark was started"))
    with pytest.raises(SystemExit) as exited:
        replay.main(["--channel", "orders", *arguments])
    assert exited.value.code == 2
    assert message in capsys.readouterr().err


def test_json_and_csv_files_are_loaded(spark: SparkSession, tmp_path: Path) -> None:
    load = import_module("spark.publish_files").load
    (tmp_path / "a.json").write_text('{"id": 1, "total": 2.5}\n{"id": 2, "total": 3}\n')
    (tmp_path / "a.csv").write_text("id,total\n1,2.5\n2,3\n")
    expected = [{"id": 1, "total": 2.5}, {"id": 2, "total": 3.0}]
    for file_format in ("json", "csv"):
        for schema in (None, "id long, total double"):
            found = load(spark, [str(tmp_path / f"a.{file_format}")], file_format, schema).collect()
            assert [row.asDict() for row in found] == expected


def test_replay_does_not_exceed_its_rate(tmp_path: Path) -> None:
    settings = Settings(type="native", path=tmp_path)
    plan = parse_options(
        {
            "channel": "orders",
            "path": str(tmp_path),
            "model": "tests.spark.models:Order",
            "on_invalid": "dead_letter",
        }
    )
    writer = BatchWriter(plan, Columns("row", ()))
    bad = pa.RecordBatch.from_pylist([{"id": number, "total": -1.0} for number in range(5)])
    writer.commit([writer.write(iter([bad]))])
    with SyncQueueService(settings) as service:
        deadline = time.monotonic() + 30
        while not (letters := service.dead_letters("orders").list()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    ids = [letter.message_id for letter in letters]
    started = time.monotonic()
    assert import_module("spark.replay").replay(settings, "orders", ids, rate=2.0) == 5
    assert time.monotonic() - started >= 2.0, "the rate of two dead letters per second was exceeded"
    with SyncQueueService(settings) as service:
        assert service.dead_letters("orders").list() == []
        assert service.stats("orders").depth == 5


Submit = Callable[..., str]


@pytest.fixture(params=["main", pytest.param("spark-submit", marks=pytest.mark.full)])
def submitted(
    request: pytest.FixtureRequest,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Submit:
    """Function that runs a job in this session or in a new process and returns its output."""
    if request.param != "main":
        return submit if request.param == "spark-submit" else execute

    def call(job: str, *arguments: str) -> str:
        module = import_module(f"spark.{job}")
        monkeypatch.setattr(module, "session", lambda name: nullcontext(spark))
        module.main(list(arguments))
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize(
    "submitted", ["main", pytest.param("python", marks=pytest.mark.full)], indirect=True
)
def test_a_failure_in_spark_is_reported_without_stack_traces(
    submitted: Submit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    orders = pa.table({"id": [1, 2], "total": [1.0, -1.0]})
    pyarrow.parquet.write_table(orders, tmp_path / "orders.parquet")
    with pytest.raises(SystemExit) as exited:
        submitted(
            "publish_files",
            *[str(tmp_path / "orders.parquet"), "--channel", "orders"],
            *["--set", f"path={tmp_path / 'data'}", "--model", "tests.spark.models:Order"],
        )
    assert exited.value.code == 1
    output = capsys.readouterr().err
    assert "error: row 1 of partition 0 is invalid" in output
    assert 'the row: {"id":2,"total":-1.0}' in output
    assert "Traceback" not in output
    assert "\tat " not in output, "the output contains a Java stack trace"


def test_files_are_published_archived_reported_and_replayed(
    submitted: Submit,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = ["--channel", "orders", "--set", "type=native", "--set", f"path={tmp_path / 'data'}"]
    orders = pa.table(
        {"id": list(range(100)), "total": [-1.0 if n % 10 == 3 else float(n) for n in range(100)]}
    )
    pyarrow.parquet.write_table(orders, tmp_path / "orders.parquet")
    output = submitted(
        "publish_files",
        str(tmp_path / "orders.parquet"),
        *data,
        *["--model", "tests.spark.models:Order", "--on-invalid", "dead_letter"],
        *["--job-id", "load-1"],
    )
    assert "90 messages to orders, 10 dead letters" in output
    page, counts = tmp_path / "report.html", tmp_path / "report.json"
    archive = tmp_path / "archive"
    output = submitted(  # no engine has opened the directory yet, so this imports the bulk files
        "archive",
        *data,
        *["--output", str(archive), "--checkpoint", str(tmp_path / "checkpoint")],
        *["--by", "hour", "--once"],
    )
    assert "90 messages of orders archived" in output
    output = submitted("dead_letter_report", *data, "--output", str(page), "--json", str(counts))
    assert "10 dead letters of orders" in output
    report = json.loads(counts.read_text())
    assert (report["total"], report["reasons"]) == (10, {"Undecodable": 10})
    assert "Undecodable" in page.read_text()
    output = submitted(
        "replay", *data, "--where", "string(value) like '%\"id\":3,%'", "--rate", "1000"
    )
    assert "1 dead letters of orders replayed" in output
    submitted(
        "archive",
        *data,
        *["--output", str(archive), "--checkpoint", str(tmp_path / "checkpoint")],
        *["--by", "hour", "--once"],
    )
    found = pyarrow.parquet.read_table(archive)
    assert len(found) == 91
    assert {"date", "hour"} <= set(found.column_names)
    replay = import_module("spark.replay")
    monkeypatch.setattr(replay, "session", lambda name: nullcontext(spark))
    replay.main([*data, "--reason", "Undecodable", "--error", "InvalidBody", "--dry-run"])
    replay.main([*data, "--limit", "2", "--dry-run"])
    assert capsys.readouterr().out.splitlines() == [
        "9 dead letters of orders match",
        "2 dead letters of orders match",
    ]


def test_dead_letters_are_counted_in_utc_with_any_body(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = spark.sql(
        "select * from values"
        " ('1', X'FF41', 'Undecodable', cast(null as string), cast(null as string), 1,"
        "  timestamp'2026-11-16 08:59:59Z'),"
        " ('2', X'41', 'MaxRetriesExceeded', 'KeyError', 'id', 3, timestamp'2026-11-16 10:00:00Z'),"
        " ('3', X'42', 'MaxRetriesExceeded', 'KeyError', 'no', 3, timestamp'2026-11-16 10:59:59Z')"
        " as letters(id, value, reason, error_type, error, attempts, last_failed_at)"
    )
    monkeypatch.setenv("TZ", "Asia/Kathmandu")  # UTC+05:45
    time.tzset()
    try:
        report = report_of(letters, "orders", datetime(2026, 11, 16, 12, tzinfo=UTC))
    finally:
        monkeypatch.undo()
        time.tzset()
    hours = [datetime(2026, 11, 16, hour, tzinfo=UTC) for hour in (8, 10)]
    assert report.by_hour == [(hours[0], 1), (hours[1], 2)]
    assert (report.total, report.first) == (3, hours[0].replace(minute=59, second=59))
    assert report.by_reason == [("MaxRetriesExceeded", 2), ("Undecodable", 1)]
    assert report.by_error == [("KeyError", 2), ("(none)", 1)]
    assert report.by_attempts == [("3 attempts", 2), ("1 attempt", 1)]
    assert report.examples == [("3", "KeyError", "no", "B"), ("1", "(none)", "", "\ufffdA")]


@pytest.mark.full  # the test above runs the same jobs one by one
def test_the_pipeline_checks_its_totals(
    submitted: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "spark")
    directory = tmp_path / "new"
    output = submitted("pipeline", "--count", "3000", "--directory", str(directory))
    assert "all totals agree" in output
    assert "<h1>events</h1>" in (directory / "report.html").read_text()


@pytest.mark.full  # starts a master and two workers, each a JVM
def test_executors_in_other_processes_survive_a_killed_worker(
    redis_list: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    native = {"channel": "orders", "type": "native", "path": str(tmp_path / "data")}
    redis = redis_list(f"spark-{new_id()}")
    done = run(
        [
            *[sys.executable, "-m", "tests.spark.on_a_cluster"],
            *[json.dumps(native), json.dumps(redis), str(tmp_path)],
        ],
        tmp_path,
    )
    with SyncQueueService(parse_options(redis).settings) as service:
        service.delete(redis["channel"])
    assert done.returncode == 0, done.stderr[-3_000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {mark.name for mark in tmp_path.glob("mark-*")} == {"mark-native", "mark-redis"}
    # Native writes and reads are exactly once; Redis is at least once.
    assert found["native read"] == found["native streamed"] == [1_000, 1_000]
    for name in ("redis read", "redis streamed"):
        number, different = found[name]
        assert different == 1_000
        assert number >= 1_000
    assert list((tmp_path / "data" / "inbox").iterdir()) == [], "the killed worker left files"
    assert found["relative read"] == [5, 100]
    assert (tmp_path / "relative" / "data" / "log").is_dir()
