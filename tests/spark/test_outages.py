"""Streams during a broker outage."""

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
from qkit.spark.options import parse_options
from qkit.spark.stream_reader import StreamReader
from tests.spark.channels import service_of, values
from tests.support.private_brokers import PrivateBroker
from tests.support.proxy import Proxy


class TestOutages:
    """Outages of Redis, read through staging files, and of Kafka, read by offsets."""

    @pytest.fixture
    def outage(
        self, request: pytest.FixtureRequest, tmp_path: Path
    ) -> Iterator[tuple[dict[str, str], Callable[[], AbstractContextManager[None]]]]:
        """Options of a channel, and a context manager that makes its broker unavailable."""
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
    def test_a_stream_continues_after_an_outage(self, outage: Any) -> None:
        options, outage_of_broker = outage
        self.send(options, 1)
        reader = StreamReader(parse_options(options))
        start = reader.initialOffset()
        first = reader.latestOffset(start, ReadAllAvailable())
        assert self.read(reader, start, first) == [1]
        with outage_of_broker():
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
            for partition in reader.partitions(start, end)
            for batch in reader.read(partition)
            for row in batch.to_pylist()
        ]
        return values(found)

    @pytest.mark.parametrize("outage", ["redis"], indirect=True)
    def test_a_stream_of_available_messages_fails_in_an_outage(self, outage: Any) -> None:
        options, outage_of_broker = outage
        self.send(options, 1, 2)
        reader = StreamReader(parse_options(options))
        start = reader.initialOffset()
        reader.prepareForTriggerAvailableNow()
        first = reader.latestOffset(start, ReadMaxRows(1))
        with outage_of_broker(), pytest.raises(BackendUnavailable):
            reader.latestOffset(first, ReadMaxRows(1))
        reader.stop()
