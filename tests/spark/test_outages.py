"""Streams whose broker goes away."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from qkit._internal.ids import new_id
from qkit.errors import (
    BackendUnavailable,
)
from qkit.spark.options import plan_of
from qkit.spark.stream_reader import StreamReader
from tests.spark.channels import service_of, values
from tests.support.private_brokers import PrivateBroker
from tests.support.proxy import Proxy


class TestOutages:
    """Of Redis, which is staged, and of Kafka, which has a log."""

    @pytest.fixture
    def outage(
        self, request: pytest.FixtureRequest, tmp_path: Path
    ) -> Iterator[tuple[dict[str, str], Callable[[], AbstractContextManager[None]]]]:
        """Options of a channel, and what makes its broker go away for a while."""
        options = {"channel": f"spark-{new_id()}", "type": request.param, "send_timeout": "2"}
        if request.param == "kafka":
            kafka: PrivateBroker = request.getfixturevalue("private_kafka")
            yield {**options, "url": kafka.url}, kafka.frozen
            return
        port = urlsplit(request.getfixturevalue("redis_url")).port
        assert port is not None
        with Proxy(port) as proxy:

            @contextmanager
            def refused() -> Iterator[None]:
                proxy.refuse()
                yield
                proxy.heal()

            url = f"redis://127.0.0.1:{proxy.port}/0"
            yield {**options, "url": url, "mode": "list", "stage": str(tmp_path / "s")}, refused
            with service_of({**options, "url": url, "mode": "list"}) as service:
                service.delete(options["channel"])

    def send(self, options: dict[str, str], *bodies: int) -> None:
        chosen = {name: value for name, value in options.items() if name != "send_timeout"}
        with service_of(chosen) as service:
            service.send_many(options["channel"], bodies)

    @pytest.mark.parametrize("outage", ["redis", "kafka"], indirect=True)
    def test_a_stream_waits_for_its_broker(self, outage: Any) -> None:
        options, away = outage
        self.send(options, 1)
        reader = StreamReader(plan_of(options))
        start = reader.initialOffset()
        first = reader.latestOffset(start, ReadAllAvailable())
        assert self.read(reader, start, first) == [1]
        with away():
            assert reader.latestOffset(first, ReadAllAvailable()) == first
        self.send(options, 2)
        deadline = time.monotonic() + 60
        while (second := reader.latestOffset(first, ReadAllAvailable())) == first:
            assert time.monotonic() < deadline
        assert self.read(reader, first, second) == [2]
        reader.stop()

    def read(self, reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
        found = [
            row
            for piece in reader.partitions(start, end)
            for batch in reader.read(piece)
            for row in batch.to_pylist()
        ]
        return values(found)

    @pytest.mark.parametrize("outage", ["redis"], indirect=True)
    def test_an_outage_is_not_the_end_of_what_is_there_now(self, outage: Any) -> None:
        options, away = outage
        self.send(options, 1, 2)
        reader = StreamReader(plan_of(options))
        start = reader.initialOffset()
        reader.prepareForTriggerAvailableNow()
        first = reader.latestOffset(start, ReadMaxRows(1))
        with away(), pytest.raises(BackendUnavailable):
            reader.latestOffset(first, ReadMaxRows(1))
        reader.stop()
