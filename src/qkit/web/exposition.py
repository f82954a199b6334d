"""``/metrics``: the service's counters and the queues' figures in Prometheus' format.

The numbers are read when somebody scrapes; nothing is counted twice and nothing runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from qkit.observability.metrics import Metrics
from qkit.sending.circuit_breaker import BreakerState
from qkit.service import QueueService
from qkit.web.schemas import Overview, QueueView

__all__ = ["CONTENT_TYPE", "exposition"]

# The plain text format: every Prometheus reads it, whatever it asked for.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

COUNTERS = {
    "messages_sent": "Messages that the broker confirmed to this service.",
    "messages_received": "Deliveries to this service's handlers.",
    "messages_retried": "Failed attempts that will be tried again.",
    "messages_failed": "Final failures.",
    "messages_dead_lettered": "Messages that became dead letters.",
}
GAUGES = {
    "depth": "Messages that are ready for a consumer.",
    "in_flight": "Messages that consumers hold.",
    "scheduled": "Messages that wait for their time.",
    "consumers": "Consumers of the queue.",
    "oldest_seconds": "Age of the message that has waited longest.",
    "dead_letters": "Dead letters that are kept.",
}


class _Figures(Collector):
    def __init__(self, service: QueueService, overview: Overview) -> None:
        self._service = service
        self._overview = overview

    def collect(self) -> Iterable[Metric]:
        metrics = self._service.metrics()
        yield from _counters(metrics)
        for field, text in GAUGES.items():
            yield _gauge_by_queue(field, text, self._overview.queues)
        yield from self._state()

    def _state(self) -> Iterable[Metric]:
        health = self._overview.health
        yield _gauge("ready", "Whether the service does its work.", self._overview.ready)
        connected = health.connection_state == "connected"
        yield _gauge("connected", "Whether the broker answers.", connected)
        yield _gauge("durable", "Whether an accepted send survives a restart.", health.durable)
        breaker = GaugeMetricFamily(
            "qkit_breaker_state",
            "1 for the state that the circuit breaker is in.",
            labels=["state"],
        )
        for state in BreakerState:
            breaker.add_metric([str(state)], health.breaker == state)
        yield breaker
        polled = GaugeMetricFamily(
            "qkit_consumer_last_poll_timestamp_seconds",
            "When the consumer last asked for messages.",
            labels=["channel", "group"],
        )
        settled = GaugeMetricFamily(
            "qkit_consumer_last_settle_timestamp_seconds",
            "When the consumer last settled a message.",
            labels=["channel", "group"],
        )
        for consumer in health.consumers:
            labels = [consumer.channel, consumer.group]
            if consumer.last_poll_at is not None:
                polled.add_metric(labels, consumer.last_poll_at)
            if consumer.last_settle_at is not None:
                settled.add_metric(labels, consumer.last_settle_at)
        yield polled
        yield settled
        hidden = "Queues beyond those whose figures are given."
        yield _gauge("queues_hidden", hidden, self._overview.hidden)


def exposition(service: QueueService, overview: Overview) -> bytes:
    """Everything, as Prometheus scrapes it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(service, overview))
    return generate_latest(registry)


def _counters(metrics: Metrics) -> Iterable[Metric]:
    for field, text in COUNTERS.items():
        family = CounterMetricFamily(f"qkit_{field}", text, labels=["channel"])
        for channel, figures in metrics.channels.items():
            family.add_metric([channel], getattr(figures, field))
        yield family
    running = GaugeMetricFamily(
        "qkit_handlers_running", "Handler calls running now.", labels=["channel"]
    )
    for channel, figures in metrics.channels.items():
        running.add_metric([channel], figures.in_flight)
    yield running
    refused = "Sends to yet another channel when a service has used all it may."
    yield CounterMetricFamily("qkit_channels_refused", refused, value=metrics.channels_refused)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"qkit_{name}", text, value=float(value))


def _gauge_by_queue(field: str, text: str, queues: list[QueueView]) -> Metric:
    family = GaugeMetricFamily(f"qkit_queue_{field}", text, labels=["queue"])
    for view in queues:
        value: float | None = getattr(view, field)
        if value is not None:
            family.add_metric([view.name], value)
    return family
