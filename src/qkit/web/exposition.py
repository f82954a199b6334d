"""``/metrics``: counters of the service and statistics of its queues, for Prometheus.

Values are read during a scrape; nothing runs between scrapes. Durations are measured if
the app was created before the service was started.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from qkit.observability.durations import BOUNDS_SECONDS, DurationHistogram
from qkit.observability.metrics import Metrics
from qkit.sending.circuit_breaker import BreakerState
from qkit.service import QueueService
from qkit.web.schemas import Overview, QueueView

__all__ = ["CONTENT_TYPE", "exposition"]

# The plain text format, which every Prometheus version accepts.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

COUNTERS = {
    "messages_sent": "Confirmed sends of this service.",
    "messages_received": "Deliveries to this service.",
    "messages_retried": "Failed attempts that will be retried.",
    "messages_failed": "Final failures.",
    "messages_dead_lettered": "Messages that became dead letters.",
}
# Field of QueueView: name after ``qkit_queue_``, in the base units of Prometheus, and help text.
GAUGES = {
    "depth": ("depth", "Messages that are ready for a consumer."),
    "in_flight": ("in_flight", "Messages that were delivered and are not yet settled."),
    "scheduled": ("scheduled", "Messages whose delay has not passed."),
    "consumers": ("consumers", "Consumers that are subscribed."),
    "oldest_message_age_secs": ("oldest_message_age_seconds", "Age of the oldest ready message."),
    "dead_letters": ("dead_letters", "Dead letters of the queue."),
}


class _Figures(Collector):
    """Collector of the metrics for one scrape."""

    def __init__(self, service: QueueService, overview: Overview) -> None:
        self._service = service
        self._overview = overview

    def collect(self) -> Iterable[Metric]:
        metrics = self._service.metrics()
        yield from _counters(metrics)
        yield from _histograms(self._service.duration_histograms())
        for field, (name, text) in GAUGES.items():
            yield _gauge_by_queue(field, name, text, self._overview.queues)
        yield from self._state()

    def _state(self) -> Iterable[Metric]:
        health = self._overview.health
        yield _gauge("ready", "1 if the service is ready.", self._overview.ready)
        connected = health.connection_state == "connected"
        yield _gauge("connected", "1 if the service is connected to the broker.", connected)
        if health.durable is not None:
            yield _gauge("durable", "1 if confirmed messages survive a restart.", health.durable)
        breaker = GaugeMetricFamily(
            "qkit_breaker_state",
            "1 for the current state of the circuit breaker.",
            labels=["state"],
        )
        for state in BreakerState:
            breaker.add_metric([str(state)], health.breaker == state)
        yield breaker
        polled = GaugeMetricFamily(
            "qkit_consumer_last_poll_timestamp_seconds",
            "Time at which the consumer last polled.",
            labels=["channel", "group"],
        )
        settled = GaugeMetricFamily(
            "qkit_consumer_last_settle_timestamp_seconds",
            "Time at which the consumer last settled a message.",
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
        omitted = "Queues whose statistics are omitted because there are too many."
        yield _gauge("queues_omitted", omitted, self._overview.queues_omitted)


def exposition(service: QueueService, overview: Overview) -> bytes:
    """Return all metrics in the Prometheus text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(service, overview))
    return generate_latest(registry)


def _counters(metrics: Metrics) -> Iterable[Metric]:
    for field, text in COUNTERS.items():
        family = CounterMetricFamily(f"qkit_{field}", text, labels=["channel"])
        for channel, figures in metrics.channels.items():
            family.add_metric([channel], getattr(figures, field))
        yield family
    in_flight = GaugeMetricFamily(
        "qkit_messages_in_flight",
        "Messages that handlers of this service are processing.",
        labels=["channel"],
    )
    for channel, figures in metrics.channels.items():
        in_flight.add_metric([channel], figures.in_flight)
    yield in_flight
    refused = "Sends that were rejected because the service uses too many channels."
    yield CounterMetricFamily("qkit_channels_refused", refused, value=metrics.channels_refused)


def _histograms(found: Sequence[DurationHistogram]) -> Iterable[Metric]:
    """Return the histograms of sends and handler calls, with cumulative buckets."""
    families = {
        "send": HistogramMetricFamily(
            "qkit_send_duration_seconds", "Duration of a send.", labels=["channel"]
        ),
        "process": HistogramMetricFamily(
            "qkit_process_duration_seconds", "Duration of a handler call.", labels=["channel"]
        ),
    }
    bounds = [*map(str, BOUNDS_SECONDS), "+Inf"]
    for item in found:
        buckets = list(zip(bounds, map(float, accumulate(item.counts)), strict=True))
        families[item.operation].add_metric([item.channel], buckets, item.total)
    return families.values()


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"qkit_{name}", text, value=float(value))


def _gauge_by_queue(field: str, name: str, text: str, queues: list[QueueView]) -> Metric:
    family = GaugeMetricFamily(f"qkit_queue_{name}", text, labels=["queue"])
    for view in queues:
        value: float | None = getattr(view, field)
        if value is not None:
            family.add_metric([view.name], value)
    return family
