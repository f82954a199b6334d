"""OpenTelemetry spans and metrics of sends and handler calls, and their context in headers.

Only the OpenTelemetry API is used, and only if the program has set a provider. Without a provider,
it is not imported, and no span or header is written. A provider that is set after ``start`` has no
effect.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from qkit.backend import Delivery, DeliveryDetails
from qkit.message import Envelope
from qkit.observability.durations import BOUNDS_SECONDS, Durations, Operation

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.metrics import Histogram, Meter
    from opentelemetry.trace import Span, Tracer
    from opentelemetry.util.types import AttributeValue

__all__ = ["Counts", "Telemetry", "server_of"]

SCOPE = "qkit"
#: Version of the semantic conventions that the names of spans, metrics and attributes follow.
SCHEMA_URL = "https://opentelemetry.io/schemas/1.30.0"
_DEFAULT_PORTS = {"amqp": 5672, "amqps": 5671, "redis": 6379, "rediss": 6379, "kafka": 9092}

_SYSTEMS = {"native": "qkit"}  # backend names that differ in the semantic conventions
_FAILURES = {
    "messages_retried": "Failed attempts that will be retried.",
    "messages_failed": "Final failures.",
    "messages_dead_lettered": "Messages that became dead letters.",
}


class Counts(Protocol):
    """Failure counters of a channel."""

    @property
    def messages_retried(self) -> int:
        """Failed attempts that will be retried."""
        ...

    @property
    def messages_failed(self) -> int:
        """Final failures."""
        ...

    @property
    def messages_dead_lettered(self) -> int:
        """Messages that became dead letters."""
        ...


def _tracer() -> Tracer | None:
    """Return a tracer, or ``None`` if the program has not set a provider."""
    # Importing OpenTelemetry only to look for a provider would take too long.
    if "opentelemetry.trace" not in sys.modules and "OTEL_PYTHON_TRACER_PROVIDER" not in os.environ:
        return None
    from opentelemetry import trace

    placeholders = (trace.ProxyTracerProvider, trace.NoOpTracerProvider)
    provider = trace.get_tracer_provider()
    if isinstance(provider, placeholders):
        return None
    return trace.get_tracer(SCOPE, _version(), schema_url=SCHEMA_URL)


def _meter() -> Meter | None:
    """Return a meter, or ``None`` if the program has not set a provider."""
    if "opentelemetry.metrics" not in sys.modules and (
        "OTEL_PYTHON_METER_PROVIDER" not in os.environ
    ):
        return None
    from opentelemetry import metrics

    # The API's placeholder for a provider that is not yet set has no public name.
    provider = metrics.get_meter_provider()
    is_placeholder = isinstance(provider, metrics.NoOpMeterProvider) or (
        type(provider).__name__ == "_ProxyMeterProvider"
    )
    return None if is_placeholder else metrics.get_meter(SCOPE, _version(), schema_url=SCHEMA_URL)


def _version() -> str:
    """Return the version of qkit; it is part of the instrumentation scope."""
    return str(getattr(sys.modules["qkit"], "__version__", ""))


def server_of(url: str | None) -> Mapping[str, AttributeValue]:
    """Return the attributes of the server in a URL; none if there are several servers, or none.

    >>> server_of("amqp://guest:secret@broker/"), server_of("one:9092,two:9092")
    ({'server.address': 'broker', 'server.port': 5672}, {})
    """
    if not url or "," in url:
        return {}
    try:
        parts = urlsplit(url if "://" in url else f"kafka://{url}")
        host, port = parts.hostname, parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        return {}
    if host is None:
        return {}
    return {"server.address": host} | ({} if port is None else {"server.port": port})


class Telemetry:
    """Spans and metrics of sends and handler calls, by OpenTelemetry's messaging conventions.

    Args:
        backend: The name of the backend.
        server: Attributes of the server; see ``server_of``. Default: none.
        details: Returns details of a delivery, for consumer spans. Default: none.

    Attributes:
        durations: Histograms for ``/metrics``; ``None`` unless ``keep_durations`` was called.
        enabled: Whether anything is recorded; check it first on a hot path.
    """

    def __init__(
        self,
        backend: str,
        server: Mapping[str, AttributeValue] | None = None,
        details: DeliveryDetails | None = None,
    ) -> None:
        self._system = _SYSTEMS.get(backend, backend)
        self._server = dict(server or {})
        self._details = details
        self.durations: Durations | None = None
        self._tracer: Tracer | None = None
        self._instruments: _Instruments | None = None
        self.enabled: bool = False

    def keep_durations(self) -> None:
        """Keep histograms for ``/metrics``. Has no effect after ``start``."""
        if self.durations is None:
            self.durations = Durations()

    def start(self, counts: Callable[[], Mapping[str, Counts]] | None = None) -> None:
        """Use the providers that the program has set, if any.

        Args:
            counts: Returns the failure counters of each channel. It is called whenever metrics are
                collected. Default: none.
        """
        self._tracer = _tracer()
        meter = _meter()
        if meter is not None:
            self._instruments = _Instruments(meter)
            if counts is not None:
                _observe(meter, self._system, counts)
        self.enabled = not (self._tracer is None and meter is None and self.durations is None)

    def producer_span(
        self, channel: str, envelopes: Sequence[Envelope]
    ) -> AbstractContextManager[object]:
        """Return a producer span for a send; it writes its context to the envelopes' headers."""
        return self._send(channel, envelopes) if self.enabled else nullcontext()

    @contextmanager
    def _send(
        self, channel: str, envelopes: Sequence[Envelope]
    ) -> Generator[Span | None, None, None]:
        common = self._common("send", channel)
        with self._measured("send", channel, common, len(envelopes)):
            if self._tracer is None:
                yield None
                return
            from opentelemetry.trace import SpanKind

            with self._tracer.start_as_current_span(
                f"send {channel}",
                kind=SpanKind.PRODUCER,
                attributes=self._described(common, envelopes),
            ) as span:
                for envelope in envelopes:
                    inject(envelope.headers)
                with _error_type(span):
                    yield span

    def consumer_span(
        self, channel: str, group: str | None, deliveries: Sequence[Delivery]
    ) -> AbstractContextManager[object]:
        """Return a consumer span for a handler call, linked to the spans of the sends.

        Args:
            channel: The name of the channel.
            group: The group of a topic; ``None`` for a queue.
            deliveries: The deliveries that the handler is called with.
        """
        return self._handle(channel, group, deliveries) if self.enabled else nullcontext()

    @contextmanager
    def _handle(
        self, channel: str, group: str | None, deliveries: Sequence[Delivery]
    ) -> Generator[Span | None, None, None]:
        envelopes = [delivery.envelope for delivery in deliveries]
        common = self._common("process", channel)
        if self._details is not None and deliveries:
            group = self._details.consumer_group(deliveries[0].queue, group)
        if group is not None:
            common["messaging.consumer.group.name"] = group
        with self._measured("process", channel, common, len(envelopes)):
            if self._tracer is None:
                yield None
                return
            from opentelemetry.context import attach, detach
            from opentelemetry.trace import Link, SpanKind, get_current_span

            contexts = [extract(envelope.headers) for envelope in envelopes]
            spans = [get_current_span(context).get_span_context() for context in contexts]
            attributes = self._described(common, envelopes)
            if self._details is not None and len(deliveries) == 1:
                attributes |= self._details.delivery_attributes(deliveries[0])
            # One message continues the trace of its send, with its baggage. A batch only links to
            # several traces.
            token = attach(contexts[0]) if len(contexts) == 1 else None
            try:
                with (
                    self._tracer.start_as_current_span(
                        f"process {channel}",
                        kind=SpanKind.CONSUMER,
                        links=[Link(span) for span in spans if span.is_valid],
                        attributes=attributes,
                    ) as span,
                    _error_type(span),
                ):
                    yield span
            finally:
                if token is not None:
                    detach(token)

    @contextmanager
    def _measured(
        self,
        operation: Operation,
        channel: str,
        attributes: Mapping[str, AttributeValue],
        messages: int,
    ) -> Generator[None, None, None]:
        """Count and time the block, and record the type of its exception."""
        if self._instruments is None and self.durations is None:
            yield
            return
        started_at = time.perf_counter()
        labels = dict(attributes)
        try:
            yield
        except BaseException as error:
            labels["error.type"] = type(error).__qualname__
            raise
        finally:
            seconds = time.perf_counter() - started_at
            if self.durations is not None:
                self.durations.record(operation, channel, seconds)
            if self._instruments is not None:
                self._instruments.record(operation, seconds, messages, labels)

    def _common(self, operation: str, channel: str) -> dict[str, AttributeValue]:
        return {
            "messaging.system": self._system,
            "messaging.destination.name": channel,
            "messaging.operation.name": operation,
            "messaging.operation.type": operation,
            **self._server,
        }

    def _described(
        self, common: Mapping[str, AttributeValue], envelopes: Sequence[Envelope]
    ) -> dict[str, AttributeValue]:
        """Return the attributes of a span: the common ones and those of the messages."""
        attributes = dict(common)
        if len(envelopes) == 1:
            (envelope,) = envelopes
            attributes["messaging.message.id"] = envelope.id
            attributes["messaging.message.body.size"] = len(envelope.body)
            if envelope.key is not None:
                kafka = self._system == "kafka"  # the conventions name a key only for Kafka
                name = "messaging.kafka.message.key" if kafka else "qkit.message.key"
                attributes[name] = envelope.key
        else:
            attributes["messaging.batch.message_count"] = len(envelopes)
        return attributes


@contextmanager
def _error_type(span: Span) -> Generator[None, None, None]:
    """Record the type of an exception as an attribute of the span."""
    try:
        yield
    except BaseException as error:
        span.set_attribute("error.type", type(error).__qualname__)
        raise


class _Instruments:
    """Metric instruments of OpenTelemetry's messaging conventions."""

    def __init__(self, meter: Meter) -> None:
        counter = meter.create_counter

        def histogram(name: str, description: str) -> Histogram:
            # The default bounds of the SDK are meant for milliseconds.
            return meter.create_histogram(
                name, "s", description, explicit_bucket_boundaries_advisory=BOUNDS_SECONDS
            )

        self._counts = {
            "send": counter(
                "messaging.client.sent.messages", "{message}", "Messages that were sent."
            ),
            "process": counter(
                "messaging.client.consumed.messages", "{message}", "Messages that were handled."
            ),
        }
        self._durations = {
            "send": histogram("messaging.client.operation.duration", "Duration of a send."),
            "process": histogram("messaging.process.duration", "Duration of a handler call."),
        }

    def record(
        self, operation: str, seconds: float, messages: int, labels: Mapping[str, AttributeValue]
    ) -> None:
        """Record a send or handler call of one or more messages."""
        self._counts[operation].add(messages, labels)
        self._durations[operation].record(seconds, labels)


def _observe(meter: Meter, system: str, counts: Callable[[], Mapping[str, Counts]]) -> None:
    """Register failure counters, which the conventions lack; they are read when collected."""
    from opentelemetry.metrics import CallbackOptions, Observation

    def callback(field: str) -> Callable[[CallbackOptions], list[Observation]]:
        def observe(options: CallbackOptions) -> list[Observation]:
            return [
                Observation(
                    getattr(figures, field),
                    {"messaging.system": system, "messaging.destination.name": channel},
                )
                for channel, figures in counts().items()
            ]

        return observe

    for field, description in _FAILURES.items():
        meter.create_observable_counter(
            f"qkit.{field.replace('_', '.', 1)}", [callback(field)], "{message}", description
        )


def inject(headers: MutableMapping[str, str]) -> None:
    """Write the current context to ``headers``, unless they already have one.

    The propagator is the global one of OpenTelemetry: W3C trace context and baggage, or what
    ``OTEL_PROPAGATORS`` names. A replayed message keeps the context of its send.
    """
    from opentelemetry import propagate

    fields = propagate.get_global_textmap().fields - {"baggage", "tracestate"}
    if not fields.intersection(headers):
        propagate.inject(headers)


def extract(headers: Mapping[str, str]) -> Context:
    """Return the context in ``headers``, read by the global propagator."""
    from opentelemetry import propagate
    from opentelemetry.context import Context

    # With OTEL_PROPAGATORS=none, the composite propagator returns None instead of a context.
    return propagate.extract(headers) or Context()
