"""Spark's own Kafka connector, writing and reading messages in qkit's format."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pyspark.sql import SparkSession

import qkit.spark
from qkit import Header, Message, Settings, SyncQueueService, consume
from qkit._internal.ids import new_id
from qkit.errors import Unsupported
from qkit.spark.kafka_connector import connector_options, connector_supports, has_connector
from qkit.spark.publish import as_options
from tests.support.brokers import brokers_required

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def connected(spark: SparkSession) -> SparkSession:
    if not has_connector(spark):
        if brokers_required():
            pytest.fail("the connector's jars are missing; run scripts/spark-jars", pytrace=False)
        pytest.skip("the connector's jars are missing; run scripts/spark-jars")
    return spark


@pytest.fixture
def settings(kafka_url: str) -> Settings:
    return Settings(type="kafka", url=kafka_url, partitions=2)


@pytest.fixture
def channel(settings: Settings) -> Iterator[str]:
    name = f"spark-{new_id()}"
    yield name
    with SyncQueueService(settings) as service:
        service.delete(name)


def test_rows_written_by_the_connector_are_read_back_and_handled(
    connected: SparkSession, settings: Settings, channel: str
) -> None:
    frame = connected.range(0, 50, 1, 2).selectExpr(
        "named_struct('id', id, 'note', cast(null as string)) as value",
        "concat('k', id % 5) as key",
        "map('tenant', concat('t', id)) as headers",
        "if(id = 7, 60, null) as ttl",
    )
    written = qkit.spark.write(frame, channel, settings)
    assert written == qkit.spark.Written(None), "the connector does not count messages"
    read = (
        connected.read.format("kafka")
        .options(**connector_options(settings), subscribe=channel, includeHeaders="true")
        .load()
    )
    rows = {json.loads(row.value)["id"]: row for row in qkit.spark.from_kafka_frame(read).collect()}
    assert rows.keys() == set(range(50))
    assert json.loads(rows[7].value) == {"id": 7, "note": None}
    assert (rows[7].key, rows[7].headers, rows[7].attempt) == ("k2", {"tenant": "t7"}, 1)
    assert rows[7].expires_at is not None
    assert rows[8].expires_at is None
    assert {len(row.id) for row in rows.values()} == {32}
    assert len({row.id for row in rows.values()}) == 50

    received: dict[int, tuple[Message, str]] = {}
    done = threading.Event()

    @consume(channel)
    async def take(
        body: dict[str, Any], message: Message, tenant: Annotated[str, Header("tenant")]
    ) -> None:
        received[body["id"]] = message, tenant
        if len(received) == 50:
            done.set()

    service = SyncQueueService(settings)
    service.register(take)
    with service:
        assert done.wait(120)
    message, tenant = received[7]
    assert (message.id, message.key, tenant) == (rows[7].id, "k2", "t7")
    assert message.sent_at is not None
    assert rows[7].sent_at.timestamp() == pytest.approx(message.sent_at, abs=86_400)


def test_the_data_source_writes_and_streams_the_same_channel(
    spark: SparkSession, settings: Settings, channel: str, tmp_path: Any
) -> None:
    options = {**as_options(settings), "channel": channel}
    frame = spark.range(0, 100, 1, 2)
    frame.write.format("qkit").mode("append").options(**options).save()
    assert spark.read.format("qkit").options(**options).load().count() == 100
    query = (
        spark.readStream.format("qkit")
        .options(**options, max_rows="60")
        .load()
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "out"))
    )
    assert query.awaitTermination(600)
    found = spark.read.parquet(str(tmp_path / "out")).select("value").collect()
    assert sorted(json.loads(row.value)["id"] for row in found) == list(range(100))


def test_unsupported_columns_are_rejected_and_unsupported_options_use_the_data_source(
    spark: SparkSession, settings: Settings
) -> None:
    frame = spark.sql("select '{}' as value, 5 as priority")
    with pytest.raises(Unsupported, match="priority"):
        qkit.spark.kafka_frame(frame, "orders")
    assert connector_supports(settings, {"key": "id"}, ["id"])
    assert not connector_supports(settings, {"model": "a:B"}, ["id"])
    assert not connector_supports(settings, {}, ["value", "delay"])
    assert not connector_supports(settings.model_copy(update={"compression": "gzip"}), {}, ["id"])


def test_settings_become_connector_options(tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    authority.touch()
    settings = Settings(
        type="kafka",
        url="a:1,b:2",
        sasl_mechanism="PLAIN",
        sasl_username="anna",
        sasl_password='se"cret',
        tls_ca_file=authority,
    )
    options = connector_options(settings)
    assert options["kafka.bootstrap.servers"] == "a:1,b:2"
    assert options["kafka.security.protocol"] == "SASL_SSL"
    assert options["kafka.ssl.truststore.location"] == str(authority)
    assert 'password="se\\"cret";' in options["kafka.sasl.jaas.config"]
