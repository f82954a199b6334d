"""OpenTelemetry spans for sending and handling, and the trace context in the headers.

Only the API is used, and only when the program has set a tracer provider: without one nothing is
imported, no span is made and no header is written. A provider set after ``start`` is not seen.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from qkit.message import Envelope

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer
    from opentelemetry.util.types import AttributeValue

__all__ = ["Telemetry"]

_SYSTEMS = {"native": "qkit"}  # the broker's name in the semantic conventions, where it differs


def _provider_is_set() -> bool:
    """Whether anybody set a tracer provider; importing OpenTelemetry to find out costs too much."""
    if "opentelemetry.trace" not in sys.modules and "OTEL_PYTHON_TRACER_PROVIDER" not in os.environ:
        return False
    from opentelemetry import trace

    silent = (trace.ProxyTracerProvider, trace.NoOpTracerProvider)
    return not isinstance(trace.get_tracer_provider(), silent)


class Telemetry:
    """Spans by the messaging conventions: a producer span per send, a consumer span per call."""

    def __init__(self, backend: str) -> None:
        self._system = _SYSTEMS.get(backend, backend)
        self._tracer: Tracer | None = None
        self.enabled = False  # whether spans are made; look here first on a hot path

    def start(self) -> None:
        """Take the tracer provider that the program has set, if any."""
        if _provider_is_set():
            from opentelemetry import trace

            self._tracer = trace.get_tracer("qkit")
            self.enabled = True

    def sending(
        self, channel: str, envelopes: Sequence[Envelope]
    ) -> AbstractContextManager[object]:
        """A producer span around a send; writes its context into the envelopes' headers."""
        if self._tracer is None:
            return nullcontext()
        return self._producer(self._tracer, channel, envelopes)

    @contextmanager
    def _producer(
        self, tracer: Tracer, channel: str, envelopes: Sequence[Envelope]
    ) -> Generator[Span, None, None]:
        from opentelemetry.trace import SpanKind

        attributes = self._attributes("send", channel, envelopes)
        with tracer.start_as_current_span(
            f"send {channel}", kind=SpanKind.PRODUCER, attributes=attributes
        ) as span:
            for envelope in envelopes:
                inject(envelope.headers)
            yield span

    def handling(
        self, channel: str, group: str, envelopes: Sequence[Envelope]
    ) -> AbstractContextManager[object]:
        """A consumer span around a handler call, linked to the spans that sent the messages."""
        if self._tracer is None:
            return nullcontext()
        return self._consumer(self._tracer, channel, group, envelopes)

    @contextmanager
    def _consumer(
        self, tracer: Tracer, channel: str, group: str, envelopes: Sequence[Envelope]
    ) -> Generator[Span, None, None]:
        from opentelemetry.trace import Link, SpanKind, get_current_span

        contexts = [extract(envelope.headers) for envelope in envelopes]
        spans = [get_current_span(context).get_span_context() for context in contexts]
        attributes = self._attributes("process", channel, envelopes)
        attributes["messaging.consumer.group.name"] = group
        with tracer.start_as_current_span(
            f"process {channel}",
            # One message continues its sender's trace; a batch has many senders and only links.
            context=contexts[0] if len(contexts) == 1 else None,
            kind=SpanKind.CONSUMER,
            links=[Link(span) for span in spans if span.is_valid],
            attributes=attributes,
        ) as span:
            yield span

    def _attributes(
        self, operation: str, channel: str, envelopes: Sequence[Envelope]
    ) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {
            "messaging.system": self._system,
            "messaging.destination.name": channel,
            "messaging.operation.name": operation,
            "messaging.operation.type": operation,
        }
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
