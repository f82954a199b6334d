"""Metrics in the Prometheus text format."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from qkit import QueueService, Reject, Settings, consume
from qkit.observability.durations import BOUNDS_SECONDS
from tests.support.web import client_of, wait_for_dead_letters


def samples(text: str) -> dict[tuple[str, str], float]:
    """Return the sample values, by metric name and value of the first label."""
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_counters_queue_figures_and_states_are_exposed(
    client: httpx.AsyncClient, service: QueueService
) -> None:
    await service.send("orders", -1)
    await wait_for_dead_letters(service, "orders", 1)
    await service.send("audit", 1)
    answer = await client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = samples(answer.text)
    assert found["qkit_messages_sent_total", "orders"] == 1
    assert found["qkit_messages_dead_lettered_total", "orders"] == 1
    assert found["qkit_queue_dead_letters", "orders"] == 1
    assert found["qkit_queue_depth", "audit"] == 1
    assert found["qkit_queue_oldest_message_age_seconds", "audit"] >= 0
    assert found["qkit_messages_in_flight", "orders"] == 0
    assert found["qkit_ready", ""] == 1
    assert found["qkit_connected", ""] == 1
    assert found["qkit_breaker_state", "closed"] == 1
    assert found["qkit_breaker_state", "open"] == 0
    assert found["qkit_consumer_last_poll_timestamp_seconds", "orders"] > 1e9
    assert found["qkit_consumer_last_settle_timestamp_seconds", "orders"] > 1e9


async def test_durations_of_sends_and_handler_calls_are_histograms() -> None:
    @consume("orders")
    async def reject(number: int) -> None:
        raise Reject("negative total")

    service = QueueService(Settings(type="native"))
    service.register(reject)
    async with client_of(service) as client, service:  # the app is created before the start
        await service.send("orders", -1)
        await wait_for_dead_letters(service, "orders", 1)
        text = (await client.get("/metrics")).text
    for name in ("qkit_send_duration_seconds", "qkit_process_duration_seconds"):
        (family,) = [item for item in text_string_to_metric_families(text) if item.name == name]
        assert family.type == "histogram"
        orders = [item for item in family.samples if item.labels["channel"] == "orders"]
        buckets = {item.labels["le"]: item.value for item in orders if "le" in item.labels}
        assert list(map(float, buckets)) == [*BOUNDS_SECONDS, float("inf")]
        assert list(buckets.values()) == sorted(buckets.values())
        figures = {item.name.removeprefix(name): item.value for item in orders}
        assert figures["_count"] == buckets["+Inf"] >= 1
        assert figures["_sum"] > 0


async def test_a_stopped_service_still_exposes_metrics(
    client: httpx.AsyncClient, service: QueueService
) -> None:
    await service.shutdown()
    found = samples((await client.get("/metrics")).text)
    assert found["qkit_ready", ""] == 0
    assert found["qkit_connected", ""] == 0


@pytest.mark.parametrize("count", [1_100])
async def test_the_number_of_label_values_is_limited(
    client: httpx.AsyncClient, service: QueueService, count: int
) -> None:
    for number in range(count):
        await service.send(f"channel-{number}", 1)
    found = samples((await client.get("/metrics")).text)
    assert found["qkit_messages_sent_total", "(other)"] > 50
    assert sum(name == "qkit_messages_sent_total" for name, _ in found) <= 1_001
    assert sum(name == "qkit_queue_depth" for name, _ in found) <= 200
    assert found["qkit_queues_omitted", ""] > 800
