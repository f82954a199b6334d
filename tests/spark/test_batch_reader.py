"""``spark.read``, without a session: a look consumes nothing."""

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
from qkit.spark.options import plan_of
from tests.spark.channels import BROKERS, service_of, values


class TestSnapshot:
    @pytest.mark.parametrize("options", BROKERS, indirect=True)
    def test_a_look_consumes_nothing(self, options: dict[str, str]) -> None:
        with service_of(options) as service:
            service.send_many(options["channel"], range(5))
            for _ in range(2):
                assert values(self.found(options)) == list(range(5))
            assert values(self.found({**options, "limit": "2"})) == [0, 1]
            assert self.found({**options, "dead_letters": "true"}) == []
            assert service.stats(options["channel"]).depth == 5

    def found(self, options: dict[str, str]) -> list[dict[str, Any]]:
        reader = BatchReader(plan_of(options))
        return [
            row
            for piece in reader.partitions()
            for batch in reader.read(piece)
            for row in batch.to_pylist()
        ]

    def test_what_has_no_end_and_what_keeps_nothing_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(batch_reader, "MAX_ROWS", 3)
        options = {"channel": "orders", "path": str(tmp_path)}
        with service_of(options) as service:
            service.send_many("orders", range(4))
            with pytest.raises(ConfigError, match="more than 3 messages"):
                self.found(options)
            assert len(self.found({**options, "limit": "4"})) == 4
            with pytest.raises(QueueNotFound):
                self.found({**options, "channel": "nobody"})
        redis = {"channel": "orders", "type": "redis", "mode": "pubsub", "url": "redis://x:1/0"}
        with pytest.raises(Unsupported, match="as a stream"):
            self.found(redis)
        with pytest.raises(ConfigError, match="name the directory"):
            BatchReader(plan_of({"channel": "orders"}))
