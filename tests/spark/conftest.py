"""Fixtures of the Spark tests, which share one session because it takes seconds to start."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import qkit.spark
from qkit._internal.ids import new_id
from tests.spark.channels import service_of

ROOT = Path(__file__).parents[2]


def connector() -> str:
    """Return the paths of the Kafka connector's jars, separated by commas; empty if unavailable."""
    done = subprocess.run(
        [str(ROOT / "scripts" / "spark-jars")], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def session(master: str, **conf: str) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    # Executors must import the same qkit and test models as this process.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    builder = SparkSession.builder.master(master)
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
        "spark.ui.showConsoleProgress": "false",
        "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
        **conf,
    }.items():
        builder = builder.config(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PySpark's own warnings
        spark = builder.getOrCreate()
        spark.sparkContext.setLogLevel("OFF")
    qkit.spark.register(spark)
    return spark


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Spark session with two cores and two attempts per task."""
    spark = session("local[2,2]", **{"spark.jars": connector()})
    yield spark
    spark.stop()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Path of a native directory that does not exist yet."""
    return tmp_path / "data"


@pytest.fixture
def native(directory: Path) -> dict[str, str]:
    """Options of the native engine in ``directory``."""
    return {"type": "native", "path": str(directory)}


@pytest.fixture
def redis_list(redis_url: str) -> Callable[[str], dict[str, Any]]:
    """Function that returns the options of a channel on a Redis list."""
    return lambda channel: {"channel": channel, "type": "redis", "mode": "list", "url": redis_url}


@pytest.fixture
def options(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Options of a new channel on the requested backend; the channel is deleted afterwards."""
    kind = request.param
    chosen = {"channel": f"spark-{new_id()}", "type": kind}
    if kind == "native":
        chosen["path"] = str(tmp_path / "data")
    else:
        chosen["url"] = request.getfixturevalue(f"{kind}_url")
    if kind == "redis":
        chosen["mode"] = "list"
    with service_of(chosen) as service:
        yield chosen
        for name in (chosen["channel"], service.settings.dead_letter_name(chosen["channel"])):
            try:
                service.delete(name)
            except Exception:
                continue  # not every test creates both queues
