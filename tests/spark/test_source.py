"""Data source, called as Spark calls it on the driver, without a session."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StructType

from qkit.errors import ConfigError
from qkit.spark.source import QkitDataSource
from qkit.spark.writer import STALE_AFTER_SECONDS, TaskResult
from tests.spark.channels import service_of

ROWS = StructType.fromJson(
    {
        "type": "struct",
        "fields": [{"name": "id", "type": "long", "nullable": True, "metadata": {}}],
    }
)
REDIS = {"channel": "orders", "type": "redis", "mode": "list", "url": "redis://127.0.0.1:1/0"}


@pytest.fixture
def native(tmp_path: Path) -> dict[str, str]:
    return {"channel": "orders", "type": "native", "path": str(tmp_path / "data")}


def batch(*ids: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"id": id} for id in ids])


def test_the_columns_are_those_of_messages_or_of_dead_letters(native: dict[str, str]) -> None:
    messages = QkitDataSource(native)
    dead_letters = QkitDataSource({**native, "dead_letters": "true"})
    assert messages.schema().fieldNames()[:3] == ["id", "value", "headers"]
    assert "attempt" in messages.schema().fieldNames()
    assert "reason" in dead_letters.schema().fieldNames()
    for source in (messages, dead_letters):
        source.reader(source.schema())
        source.streamReader(source.schema())
        with pytest.raises(ConfigError, match="from_json"):
            source.reader(ROWS)


def test_a_stream_reader_is_limited_by_max_rows_and_pickles_without_its_source(
    native: dict[str, str],
) -> None:
    source = QkitDataSource({**native, "max_rows": "7", "starting": "latest"})
    with service_of(native) as service:
        service.send_many("orders", range(3))
        reader = source.streamReader(source.schema())
        assert reader.getDefaultReadLimit() == ReadMaxRows(7)
        start = reader.initialOffset()
        assert reader.partitions(start, start) == []
        assert reader.latestOffset(start, ReadAllAvailable()) == start, "older messages were read"
        service.send("orders", 3)
        end = reader.latestOffset(start, ReadAllAvailable())
        [partition] = reader.partitions(start, end)
        copy = type(reader).__new__(type(reader))
        copy.__dict__.update(reader.__getstate__())
        [found] = copy.read(partition)
        assert found.column("value").to_pylist() == [b"3"]
        reader.commit(end)
        reader.stop()
    unlimited = QkitDataSource(native)
    assert unlimited.streamReader(unlimited.schema()).getDefaultReadLimit() == ReadAllAvailable()


def test_a_channel_cannot_be_overwritten(native: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="append"):
        QkitDataSource(native).writer(ROWS, overwrite=True)


def test_a_write_is_reported_and_removes_stale_parts(
    native: dict[str, str], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    inbox = Path(native["path"]) / "inbox"
    for name, age in {".spark-old": STALE_AFTER_SECONDS + 60, ".spark-new": 0}.items():
        (inbox / name).mkdir(parents=True)
        os.utime(inbox / name, (time.time() - age,) * 2)
    writer = QkitDataSource({**native, "report": str(report)}).writer(ROWS, overwrite=False)
    result = writer.write(iter([batch(1, 2)]))
    writer.commit([result, None])
    assert json.loads(report.read_text()) == {
        "job": result.job, "messages": 2, "dead_letters": 0, "skipped": 0, "unheard": 0,
    }  # fmt: skip
    assert {item.name for item in inbox.iterdir()} == {".spark-new", result.job}
    report.unlink()
    writer.commit([None])
    assert not report.exists(), "a report was written although no task ran"


def test_an_aborted_batch_of_a_stream_removes_only_its_own_parts(native: dict[str, str]) -> None:
    inbox = Path(native["path"]) / "inbox"
    writer = QkitDataSource(native).streamWriter(ROWS, overwrite=False)
    prefix = writer._stream_prefix
    for name in (f".{prefix}-query-1", f".{prefix}-query-2", f".{prefix}-twin-1", ".spark-other-1"):
        (inbox / name).mkdir(parents=True)
    writer.abort([TaskResult("query-1", f"{prefix}-query-1", 0, 1, 0), None], 1)
    twin, other = inbox / f".{prefix}-twin-1", inbox / ".spark-other-1"
    assert twin.exists(), "the parts of another query with the same options were removed"
    writer.abort([None], 2)
    assert sorted(inbox.iterdir()) == sorted([twin, other])
    writer.commit([None], 3)


def test_an_aborted_write_to_a_broker_logs_how_many_messages_were_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = QkitDataSource(REDIS).writer(ROWS, overwrite=False)
    with caplog.at_level(logging.ERROR, logger="qkit"):
        writer.abort(
            [TaskResult("job", "staged", 0, 70, 0), TaskResult("job", "staged", 1, 7, 0), None]
        )
    assert "orders: the write failed. Completed tasks sent 77 messages" in caplog.text
