"""The jobs, by ``spark-submit``; the pipeline; and executors in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from qkit import SyncQueueService
from qkit.message import new_id
from qkit.spark.options import plan_of
from tests.spark.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

JOBS = ["publish_files", "archive", "dead_letter_report", "replay", "pipeline"]
QUIET = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
}


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def submit(job: str, *arguments: str) -> str:
    """What a job prints."""
    settings = [word for name, value in QUIET.items() for word in ("--conf", f"{name}={value}")]
    script = Path(sys.executable).with_name("spark-submit")
    done = run([str(script), "--master", "local[2]", *settings, f"spark/{job}.py", *arguments])
    assert done.returncode == 0, done.stderr[-3_000:]
    return done.stdout


@pytest.mark.parametrize("job", JOBS)
def test_every_job_tells_how_it_is_used(job: str) -> None:
    done = run([sys.executable, f"spark/{job}.py", "--help"])
    assert done.returncode == 0, done.stderr
    assert f"spark-submit spark/{job}.py" in done.stdout


def test_what_is_wrong_is_said_in_a_line(tmp_path: Path) -> None:
    done = run([sys.executable, "spark/replay.py", "--channel", "orders", "--set", "type=nobody"])
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr


def test_files_are_published_archived_reported_and_replayed(tmp_path: Path) -> None:
    data = ["--channel", "orders", "--set", "type=native", "--set", f"path={tmp_path / 'data'}"]
    orders = pa.table(
        {"id": list(range(100)), "total": [-1.0 if n % 10 == 3 else float(n) for n in range(100)]}
    )
    pyarrow.parquet.write_table(orders, tmp_path / "orders.parquet")
    said = submit(
        "publish_files",
        str(tmp_path / "orders.parquet"),
        *data,
        *["--model", "tests.spark.models:Order", "--on-invalid", "dead_letter"],
        *["--job-id", "load-1"],
    )
    assert "90 messages to orders, 10 dead letters" in said
    page, counts = tmp_path / "report.html", tmp_path / "report.json"
    said = submit("dead_letter_report", *data, "--output", str(page), "--json", str(counts))
    assert "10 dead letters of orders" in said
    told = json.loads(counts.read_text())
    assert (told["total"], told["reasons"]) == (10, {"Undecodable": 10})
    assert "Undecodable" in page.read_text()
    said = submit("replay", *data, "--where", "string(value) like '%\"id\":3,%'", "--rate", "1000")
    assert "1 dead letters of orders replayed" in said
    said = submit("replay", *data, "--reason", "Undecodable", "--dry-run")
    assert "9 dead letters of orders match" in said
    archive = tmp_path / "archive"
    submit(
        "archive",
        *data,
        *["--output", str(archive), "--checkpoint", str(tmp_path / "checkpoint")],
        *["--by", "hour", "--once"],
    )
    found = pyarrow.parquet.read_table(archive)
    assert len(found) == 91
    assert {"date", "hour"} <= set(found.column_names)


def test_the_pipeline_checks_its_own_totals(tmp_path: Path) -> None:
    said = submit("pipeline", "--count", "3000", "--directory", str(tmp_path))
    assert "every total agrees" in said
    assert (tmp_path / "report.html").exists()


def test_executors_may_be_processes_of_their_own(
    redis_list: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    native = {"channel": "orders", "type": "native", "path": str(tmp_path / "data")}
    redis = redis_list(f"spark-{new_id()}")
    done = run(
        [
            *[sys.executable, "-m", "tests.spark.on_a_cluster"],
            *[json.dumps(native), json.dumps(redis), str(tmp_path)],
        ]
    )
    with SyncQueueService(plan_of(redis).settings) as service:
        service.delete(redis["channel"])
    assert done.returncode == 0, done.stderr[-3_000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "native read": 1_000,
        "redis read": 1_000,
        "native streamed": 1_000,
        "redis streamed": 1_000,
    }
