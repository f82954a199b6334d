"""``BatchReader`` without a Spark session: a snapshot consumes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qkit.errors import (
    ConfigError,
    QueueNotFound,
    Unsupported,
)
from qkit.spark import batch_reader
from qkit.spark.batch_reader import BatchReader
from qkit.spark.options import parse_options
from tests.spark.channels import BROKERS, service_of, values


class TestSnapshot:
    @pytest.mark.parametrize("options", BROKERS, indirect=True)
    def test_a_snapshot_consumes_nothing(self, options: dict[str, str]) -> None:
        with service_of(options) as service:
            service.send_many(options["channel"], range(5))
            for _ in range(2):
                assert values(self.read_rows(options)) == list(range(5))
            assert values(self.read_rows({**options, "limit": "2"})) == [0, 1]
            assert self.read_rows({**options, "dead_letters": "true"}) == []
            assert service.stats(options["channel"]).depth == 5

    def read_rows(self, options: dict[str, str]) -> list[dict[str, Any]]:
        reader = BatchReader(parse_options(options))
        return [
            row
            for partition in reader.partitions()
            for batch in reader.read(partition)
            for row in batch.to_pylist()
        ]

    def test_too_many_messages_and_backends_without_storage_are_rejected(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(batch_reader, "MAX_ROWS", 3)
        options = {"channel": "orders", "path": str(tmp_path)}
        with service_of(options) as service:
            service.send_many("orders", range(4))
            with pytest.raises(ConfigError, match="more than 3 messages"):
                self.read_rows(options)
            assert len(self.read_rows({**options, "limit": "4"})) == 4
            with pytest.raises(QueueNotFound):
                self.read_rows({**options, "channel": "missing"})
        redis = {"channel": "orders", "type": "redis", "mode": "pubsub", "url": "redis://x:1/0"}
        with pytest.raises(Unsupported, match="as a stream"):
            self.read_rows(redis)
        with pytest.raises(ConfigError, match="set option"):
            BatchReader(parse_options({"channel": "orders"}))
