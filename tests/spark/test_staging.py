"""Streams that read a broker without a log through staging files."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from qkit.errors import (
    ConfigError,
    StorageError,
)
from qkit.spark import staging
from qkit.spark.options import parse_options
from qkit.spark.staging import StagingArea
from qkit.spark.stream_reader import StreamReader
from tests.spark.channels import BROKERS, rows, service_of, values


class TestStage:
    @pytest.mark.parametrize("options", BROKERS, indirect=True)
    def test_batches_are_staged_and_removed_after_the_commit(
        self, options: dict[str, str], tmp_path: Path
    ) -> None:
        directory = tmp_path / "stage"
        with service_of(options) as service:
            service.send_many(options["channel"], range(25), headers={"tenant": "acme"}, key="k")
            source = StagingArea(
                parse_options({**options, "stage": str(directory), "consume": "true"})
            )
            start = source.initial()
            first = source.latest(start, 10)
            assert values(rows(source.ranges(start, first))) == list(range(10))
            assert len(list(directory.iterdir())) == 1
            # After a crash, Spark reads the same batch again.
            assert values(rows(source.ranges(start, first))) == list(range(10))
            second = source.latest(first, None)
            found = rows(source.ranges(first, second))
            assert values(found) == list(range(10, 25))
            assert dict(found[0]["headers"]) == {"tenant": "acme"}
            assert (found[0]["key"], found[0]["attempt"]) == ("k", 1)
            source.commit(second)
            assert list(directory.iterdir()) == []
            assert source.latest(second, None) == second
            source.close()

    @pytest.mark.parametrize("options", ["redis"], indirect=True)
    def test_stages_left_by_a_crash_are_read_first_with_or_without_a_checkpoint(
        self, options: dict[str, str], tmp_path: Path
    ) -> None:
        plan = parse_options({**options, "stage": str(tmp_path / "stage")})
        with service_of(options) as service:
            service.send_many(options["channel"], range(5))
            crashed = StagingArea(plan)
            start = crashed.initial()
            end = crashed.latest(start, None)
            assert service.stats(options["channel"]).depth == 0
            crashed.close()
            (tmp_path / "stage" / "00000009.arrow.tmp").write_bytes(b"cut short")
            service.send(options["channel"], 5)
            again = StagingArea(plan)
            assert again.latest(start, None) == end
            assert values(rows(again.ranges(start, end))) == list(range(5))
            again.close()
            restarted = StagingArea(plan)
            assert restarted.initial() == start, "a new stream starts before the leftover files"
            after = restarted.latest(end, None)
            assert values(rows(restarted.ranges(end, after))) == [5]
            with pytest.raises(StorageError, match="is missing"):
                restarted.ranges(start, after)
            restarted.close()

    @pytest.mark.parametrize("options", ["redis"], indirect=True)
    def test_a_stream_of_available_messages_reads_no_later_messages(
        self, options: dict[str, str], tmp_path: Path
    ) -> None:
        with service_of(options) as service:
            service.send_many(options["channel"], range(5))
            source = StagingArea(parse_options({**options, "stage": str(tmp_path / "stage")}))
            start = source.initial()
            source.limit_to_available()
            service.send_many(options["channel"], range(5, 10))
            end = source.latest(start, None)
            assert values(rows(source.ranges(start, end))) == list(range(5))
            assert source.latest(end, None) == end
            source.close()

    @pytest.mark.parametrize("options", ["redis"], indirect=True)
    def test_a_constant_flow_of_messages_does_not_keep_a_batch_open(
        self, options: dict[str, str], tmp_path: Path
    ) -> None:
        stopped = threading.Event()

        def trickle() -> None:
            with service_of(options) as service:
                while not stopped.wait(0.03):
                    service.send(options["channel"], 1)

        with service_of(options) as service:
            service.send(options["channel"], 1)
        sender = threading.Thread(target=trickle)
        source = StagingArea(parse_options({**options, "stage": str(tmp_path / "stage")}))
        start = source.initial()
        sender.start()
        try:
            first = source.latest(start, None)  # must return although messages keep arriving
            assert 0 < len(rows(source.ranges(start, first))) < 1_000
            assert source.latest(first, None) != first
        finally:
            stopped.set()
            sender.join()
            source.close()

    def test_a_stage_directory_is_required_and_exclusive(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        redis = {"channel": "orders", "type": "redis", "mode": "list", "url": "redis://x:1/0"}
        with pytest.raises(ConfigError, match="option\\('stage'"):
            StreamReader(parse_options(redis))
        monkeypatch.setattr(staging, "LOCK_TIMEOUT_SECONDS", 0.1)
        plan = parse_options({**redis, "stage": str(tmp_path / "stage")})
        first = StagingArea(plan)
        first.initial()
        with pytest.raises(ConfigError, match="another stream"):
            StagingArea(plan).initial()
        first.close()
