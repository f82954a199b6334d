"""OpenTelemetry spans and metrics of sends and handler calls, and trace context in headers.

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

from qkit.message import Envelope

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.metrics import Meter
    from opentelemetry.trace import Span, Tracer
    from opentelemetry.util.types import AttributeValue

__all__ = ["Counts", "Telemetry"]

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
    return None if isinstance(provider, placeholders) else trace.get_tracer("qkit")


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
    return None if is_placeholder else metrics.get_meter("qkit")


class Telemetry:
    """Spans and metrics of sends and handler calls, by OpenTelemetry's messaging conventions."""

    def __init__(self, backend: str) -> None:
        self._system = _SYSTEMS.get(backend, backend)
        self._tracer: Tracer | None = None
        self._instruments: _Instruments | None = None
        self.enabled: bool = False  # whether a provider is set; check it first on a hot path

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
        self.enabled = self._tracer is not None or meter is not None

    def producer_span(
        self, channel: str, envelopes: Sequence[Envelope]
    ) -> AbstractContextManager[object]:
        """Return a producer span for a send; it writes its context to the envelopes' headers."""
        if self._tracer is None and self._instruments is None:
            return nullcontext()
        return self._send(channel, envelopes)

    @contextmanager
    def _send(
        self, channel: str, envelopes: Sequence[Envelope]
    ) -> Generator[Span | None, None, None]:
        common = self._common("send", channel)
        with self._measured("send", common, len(envelopes)):
            if self._tracer is None:
                yield None
                return
            from opentelemetry.trace import SpanKind

            with self._tracer.start_as_current_span(
                f"send {channel}",
                kind=SpanKind.PRODUCER,
                attributes=_described(common, envelopes),
            ) as span:
                for envelope in envelopes:
                    inject(envelope.headers)
                yield span

    def consumer_span(
        self, channel: str, group: str, envelopes: Sequence[Envelope]
    ) -> AbstractContextManager[object]:
        """Return a consumer span for a handler call, linked to the spans of the sends."""
        if self._tracer is None and self._instruments is None:
            return nullcontext()
        return self._handle(channel, group, envelopes)

    @contextmanager
    def _handle(
        self, channel: str, group: str, envelopes: Sequence[Envelope]
    ) -> Generator[Span | None, None, None]:
        common = self._common("process", channel)
        common["messaging.consumer.group.name"] = group
        with self._measured("process", common, len(envelopes)):
            if self._tracer is None:
                yield None
                return
            from opentelemetry.trace import Link, SpanKind, get_current_span

            contexts = [extract(envelope.headers) for envelope in envelopes]
            spans = [get_current_span(context).get_span_context() for context in contexts]
            with self._tracer.start_as_current_span(
                f"process {channel}",
                # One message continues the trace of its send; a batch only links to several traces.
                context=contexts[0] if len(contexts) == 1 else None,
                kind=SpanKind.CONSUMER,
                links=[Link(span) for span in spans if span.is_valid],
                attributes=_described(common, envelopes),
            ) as span:
                yield span

    @contextmanager
    def _measured(
        self, operation: str, attributes: Mapping[str, AttributeValue], messages: int
    ) -> Generator[None, None, None]:
        """Count and time the block, and record the type of its exception."""
        if self._instruments is None:
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
            self._instruments.record(operation, time.perf_counter() - started_at, messages, labels)

    def _common(self, operation: str, channel: str) -> dict[str, AttributeValue]:
        return {
            "messaging.system": self._system,
            "messaging.destination.name": channel,
            "messaging.operation.name": operation,
            "messaging.operation.type": operation,
        }


class _Instruments:
    """Metric instruments of OpenTelemetry's messaging conventions."""

    def __init__(self, meter: Meter) -> None:
        counter, histogram = meter.create_counter, meter.create_histogram
        self._counts = {
            "send": counter(
                "messaging.client.sent.messages", "{message}", "Messages that were sent."
            ),
            "process": counter(
                "messaging.client.consumed.messages", "{message}", "Messages that were handled."
            ),
        }
        self._durations = {
            "send": histogram("messaging.client.operation.duration", "s", "Duration of a send."),
            "process": histogram("messaging.process.duration", "s", "Duration of a handler call."),
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


def _described(
    common: Mapping[str, AttributeValue], envelopes: Sequence[Envelope]
) -> dict[str, AttributeValue]:
    """Return the attributes of a span: the common ones and those of the messages."""
    attributes = dict(common)
    if len(envelopes) == 1:
        attributes["messaging.message.id"] = envelopes[0].id
        attributes["messaging.message.body.size"] = len(envelopes[0].body)
    else:
        attributes["messaging.batch.message_count"] = len(envelopes)
    return attributes


def inject(headers: MutableMapping[str, str]) -> None:
    """Write the current trace context to ``headers``, unless they already have one."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if "traceparent" not in headers:
        TraceContextTextMapPropagator().inject(headers)


def extract(headers: Mapping[str, str]) -> Context:
    """Return the trace context in ``headers``."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(headers)
