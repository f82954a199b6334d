"""Streams of brokers that forget, by stages."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from qkit.errors import (
    ConfigError,
    StorageError,
)
from qkit.spark import staging
from qkit.spark.options import plan_of
from qkit.spark.staging import StagingArea
from qkit.spark.stream_reader import StreamReader
from tests.spark.channels import BROKERS, rows, service_of, values


class TestStage:
    @pytest.mark.parametrize("options", BROKERS, indirect=True)
    def test_batches_are_staged_acknowledged_and_removed_when_spark_is_done(
        self, options: dict[str, str], tmp_path: Path
    ) -> None:
        directory = tmp_path / "stage"
        with service_of(options) as service:
            service.send_many(options["channel"], range(25), headers={"tenant": "acme"}, key="k")
            source = StagingArea(plan_of({**options, "stage": str(directory), "consume": "true"}))
            start = source.initial()
            first = source.latest(start, 10)
            assert values(rows(source.ranges(start, first))) == list(range(10))
            assert len(list(directory.iterdir())) == 1
            # Spark asks again for the same batch after a crash.
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
    def test_what_a_crash_left_comes_first_with_or_without_a_checkpoint(
        self, options: dict[str, str], tmp_path: Path
    ) -> None:
        plan = plan_of({**options, "stage": str(tmp_path / "stage")})
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
            anew = StagingArea(plan)
            assert anew.initial() == start, "before what nobody has seen"
            after = anew.latest(end, None)
            assert values(rows(anew.ranges(end, after))) == [5]
            with pytest.raises(StorageError, match="is missing"):
                anew.ranges(start, after)
            anew.close()

    @pytest.mark.parametrize("options", ["redis"], indirect=True)
    def test_a_stream_of_what_is_there_now_takes_no_more(
        self, options: dict[str, str], tmp_path: Path
    ) -> None:
        with service_of(options) as service:
            service.send_many(options["channel"], range(5))
            source = StagingArea(plan_of({**options, "stage": str(tmp_path / "stage")}))
            start = source.initial()
            source.limit_to_available()
            service.send_many(options["channel"], range(5, 10))
            end = source.latest(start, None)
            assert values(rows(source.ranges(start, end))) == list(range(5))
            assert source.latest(end, None) == end
            source.close()

    @pytest.mark.parametrize("options", ["redis"], indirect=True)
    def test_messages_that_never_cease_do_not_keep_a_batch_open(
        self, options: dict[str, str], tmp_path: Path
    ) -> None:
        over = threading.Event()

        def trickle() -> None:
            with service_of(options) as service:
                while not over.wait(0.03):
                    service.send(options["channel"], 1)

        with service_of(options) as service:
            service.send(options["channel"], 1)
        sending = threading.Thread(target=trickle)
        source = StagingArea(plan_of({**options, "stage": str(tmp_path / "stage")}))
        start = source.initial()
        sending.start()
        try:
            first = source.latest(start, None)  # or never
            assert 0 < len(rows(source.ranges(start, first))) < 1_000
            assert source.latest(first, None) != first
        finally:
            over.set()
            sending.join()
            source.close()

    def test_it_needs_a_directory_and_has_it_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        redis = {"channel": "orders", "type": "redis", "mode": "list", "url": "redis://x:1/0"}
        with pytest.raises(ConfigError, match="option\\('stage'"):
            StreamReader(plan_of(redis))
        monkeypatch.setattr(staging, "LOCK_TIMEOUT_SECONDS", 0.1)
        plan = plan_of({**redis, "stage": str(tmp_path / "stage")})
        first = StagingArea(plan)
        first.initial()
        with pytest.raises(ConfigError, match="another stream"):
            StagingArea(plan).initial()
        first.close()
