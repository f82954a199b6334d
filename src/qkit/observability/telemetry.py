"""OpenTelemetry spans and metrics of sending and handling, and the trace context in the headers.

Only the API is used, and only when the program has set a provider: without one nothing is
imported, no span is made and no header is written. A provider set after ``start`` is not seen.
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

_SYSTEMS = {"native": "qkit"}  # the broker's name in the semantic conventions, where it differs
_FAILURES = {
    "messages_retried": "Failed attempts that will be tried again.",
    "messages_failed": "Final failures.",
    "messages_dead_lettered": "Messages that became dead letters.",
}


class Counts(Protocol):
    """What ``start`` is told of a channel."""

    @property
    def messages_retried(self) -> int: ...
    @property
    def messages_failed(self) -> int: ...
    @property
    def messages_dead_lettered(self) -> int: ...


def _tracer() -> Tracer | None:
    """A tracer, if anybody set a provider; importing OpenTelemetry to find out costs too much."""
    if "opentelemetry.trace" not in sys.modules and "OTEL_PYTHON_TRACER_PROVIDER" not in os.environ:
        return None
    from opentelemetry import trace

    silent = (trace.ProxyTracerProvider, trace.NoOpTracerProvider)
    return None if isinstance(trace.get_tracer_provider(), silent) else trace.get_tracer("qkit")


def _meter() -> Meter | None:
    """A meter, if anybody set a provider."""
    if "opentelemetry.metrics" not in sys.modules and (
        "OTEL_PYTHON_METER_PROVIDER" not in os.environ
    ):
        return None
    from opentelemetry import metrics

    # The API has no public name for what stands in until a provider is set.
    provider = metrics.get_meter_provider()
    silent = isinstance(provider, metrics.NoOpMeterProvider) or (
        type(provider).__name__ == "_ProxyMeterProvider"
    )
    return None if silent else metrics.get_meter("qkit")


class Telemetry:
    """Spans and metrics by the messaging conventions: of each send, and of each handler call."""

    def __init__(self, backend: str) -> None:
        self._system = _SYSTEMS.get(backend, backend)
        self._tracer: Tracer | None = None
        self._instruments: _Instruments | None = None
        self.enabled = False  # whether anybody listens; look here first on a hot path

    def start(self, counts: Callable[[], Mapping[str, Counts]] | None = None) -> None:
        """Take the providers that the program has set, if any.

        ``counts`` tells the failures of each channel so far, whenever metrics are collected.
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
        """A producer span around a send; writes its context into the envelopes' headers."""
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
        """A consumer span around a handler call, linked to the spans that sent the messages."""
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
                # One message continues its sender's trace; a batch has many and only links.
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
        """Count and time what happens inside, with the type of what it raises."""
        if self._instruments is None:
            yield
            return
        began = time.perf_counter()
        labels = dict(attributes)
        try:
            yield
        except BaseException as error:
            labels["error.type"] = type(error).__qualname__
            raise
        finally:
            self._instruments.record(operation, time.perf_counter() - began, messages, labels)

    def _common(self, operation: str, channel: str) -> dict[str, AttributeValue]:
        return {
            "messaging.system": self._system,
            "messaging.destination.name": channel,
            "messaging.operation.name": operation,
            "messaging.operation.type": operation,
        }


class _Instruments:
    """The instruments of the messaging conventions."""

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
            "send": histogram("messaging.client.operation.duration", "s", "How long a send took."),
            "process": histogram("messaging.process.duration", "s", "How long a handler took."),
        }

    def record(
        self, operation: str, seconds: float, messages: int, labels: Mapping[str, AttributeValue]
    ) -> None:
        """One send or handler call, of one message or several."""
        self._counts[operation].add(messages, labels)
        self._durations[operation].record(seconds, labels)


def _observe(meter: Meter, system: str, counts: Callable[[], Mapping[str, Counts]]) -> None:
    """Failures, which no convention names: read from the service's counters when asked."""
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
    """A span's attributes: what a metric's are, and which message it was."""
    attributes = dict(common)
    if len(envelopes) == 1:
        attributes["messaging.message.id"] = envelopes[0].id
        attributes["messaging.message.body.size"] = len(envelopes[0].body)
    else:
        attributes["messaging.batch.message_count"] = len(envelopes)
    return attributes


def inject(headers: MutableMapping[str, str]) -> None:
    """Write the current trace context into ``headers``, unless they carry one already."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if "traceparent" not in headers:
        TraceContextTextMapPropagator().inject(headers)


def extract(headers: Mapping[str, str]) -> Context:
    """The trace context inside ``headers``."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(headers)
