"""Streams that read a log: the native log by positions, Kafka by offsets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from qkit import SyncQueueService
from qkit.errors import (
    StorageError,
)
from qkit.native.log.retention import release
from qkit.spark import broker_log, native_log
from qkit.spark.broker_log import BrokerLog
from qkit.spark.columns import Columns
from qkit.spark.native_log import NativeLog
from qkit.spark.options import Plan, parse_options
from qkit.spark.writer import BatchWriter
from tests.spark.channels import service_of


class TestBrokerLog:
    @pytest.mark.parametrize("options", ["kafka"], indirect=True)
    def test_a_log_is_read_by_offsets_and_can_be_replayed(self, options: dict[str, str]) -> None:
        plan = parse_options({**options, "partitions": "3"})
        with SyncQueueService(plan.settings) as service:
            for number in range(25):
                service.send(options["channel"], number, key=str(number), headers={"n": "x"})
            source = BrokerLog(plan)
            start = source.initial()
            first = source.latest(start, 10)
            second = source.latest(first, None)
            assert sum(second["offsets"].values()) == 25
            found = [self.found(plan, source, *ends) for ends in ((start, first), (first, second))]
            assert len(found[0]) == 10
            assert sorted(found[0] + found[1]) == list(range(25))
            assert self.found(plan, source, start, first) == found[0], (
                "the same offsets returned other messages"
            )
            source.limit_to_available()
            service.send(options["channel"], 25)
            assert source.latest(second, None) == second
            source.close()

    @pytest.mark.parametrize("options", ["kafka"], indirect=True)
    def test_offsets_that_the_log_no_longer_contains_are_an_error(
        self, options: dict[str, str]
    ) -> None:
        with service_of(options) as service:
            service.send_many(options["channel"], range(5))
            source = BrokerLog(parse_options(options))
            end = source.latest(source.initial(), None)
            beyond = {
                "offsets": {partition: offset + 1 for partition, offset in end["offsets"].items()}
            }
            with pytest.raises(StorageError, match="deleted and recreated"):
                source.latest(beyond, None)
            service.purge(options["channel"])
            with pytest.raises(StorageError, match="retention"):
                source.latest({"offsets": dict.fromkeys(end["offsets"], 0)}, None)
            source.close()

    def found(
        self, plan: Plan, source: BrokerLog, start: dict[str, Any], end: dict[str, Any]
    ) -> list[int]:
        return [
            json.loads(row["value"])
            for span in source.ranges(start, end)
            for batch in broker_log.read(plan, span)
            for row in batch.to_pylist()
        ]


class TestNativeLog:
    def test_the_log_is_retained_from_the_initial_offset_onwards(self, tmp_path: Path) -> None:
        options = {"channel": "orders", "type": "native", "path": str(tmp_path)}
        plan = parse_options(options)
        with service_of(options) as service:
            service.send_many("orders", range(5))
            source = NativeLog(plan)
            start = source.initial()
            assert [file.name for file in (tmp_path / "readers").iterdir()] == [start["reader"]]
            end = source.latest(start, 3)
            assert self.found(plan, source, start, end) == [0, 1, 2]
            service.send("other", 1)
            source.limit_to_available()
            service.send("orders", 5)
            remaining = source.latest(end, None)
            assert self.found(plan, source, end, remaining) == [3, 4]
            assert source.latest(remaining, None) == remaining
            json.dumps(remaining)
            again = NativeLog(plan)
            assert self.found(plan, again, end, remaining) == [3, 4]
            assert self.found(plan, again, remaining, again.latest(remaining, None)) == [5]
            source.commit(remaining)

    def found(
        self, plan: Any, source: NativeLog, start: dict[str, Any], end: dict[str, Any]
    ) -> list[int]:
        return [
            json.loads(row["value"])
            for log_range in source.ranges(start, end)
            for batch in native_log.read(plan, log_range)
            for row in batch.to_pylist()
        ]

    def test_a_position_that_was_not_retained_is_an_error(self, tmp_path: Path) -> None:
        options = {"channel": "orders", "type": "native", "path": str(tmp_path)}
        with service_of(options) as service:
            service.send("orders", 1)
        plan = parse_options(options)
        start = NativeLog(plan).initial()
        release(tmp_path, start["reader"])
        with pytest.raises(StorageError, match="retention"):
            NativeLog(plan).latest(start, None)

    def test_dead_letters_can_be_streamed(self, tmp_path: Path) -> None:
        options = {"channel": "orders", "type": "native", "path": str(tmp_path)}
        writer = BatchWriter(
            parse_options(
                {**options, "model": "tests.spark.models:Order", "on_invalid": "dead_letter"}
            ),
            Columns("row", ()),
        )
        batch = pa.RecordBatch.from_pylist([{"id": 1, "total": -1.0}])
        writer.commit([writer.write(iter([batch]))])
        plan = parse_options({**options, "dead_letters": "true"})
        source = NativeLog(plan)
        start = source.initial()
        end = source.latest(start, None)
        [row] = [
            row
            for log_range in source.ranges(start, end)
            for batch in native_log.read(plan, log_range)
            for row in batch.to_pylist()
        ]
        assert (row["reason"], row["channel"]) == ("Undecodable", "orders")
