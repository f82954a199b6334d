"""Traces and metrics on every backend."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import baggage, context, metrics, propagate, trace
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import qkit
from qkit import Message, QueueFull, QueueService, Reject, RetrySettings, Settings, consume
from qkit.observability.durations import BOUNDS_SECONDS
from qkit.observability.telemetry import SCHEMA_URL, extract
from tests.support.everywhere import BACKENDS, NAMES
from tests.support.web import eventually, wait_for_dead_letters


@pytest.fixture(params=NAMES)
def opened(request: pytest.FixtureRequest) -> tuple[str, Settings]:
    system, settings = BACKENDS[request.param]
    return system, settings(request.getfixturevalue)


@pytest.fixture
def channel() -> str:
    return f"orders-{uuid.uuid4().hex[:8]}"  # brokers are shared between tests


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Exporter of a tracer provider that is set for this test only.

    It is set through a private name, because OpenTelemetry accepts only one provider per process.
    """
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    monkeypatch.setattr(metrics._internal, "_METER_PROVIDER", provider)
    yield reader
    provider.shutdown()


def single_span(exporter: InMemorySpanExporter, name: str) -> ReadableSpan:
    (found,) = [span for span in exporter.get_finished_spans() if span.name == name]
    return found


async def test_a_consumer_span_continues_the_trace_and_links_to_the_producer_span(
    opened: tuple[str, Settings], channel: str, spans: InMemorySpanExporter
) -> None:
    system, settings = opened
    done = asyncio.Event()
    seen: list[Message] = []

    @consume(channel)
    async def handle(body: int, message: Message) -> None:
        seen.append(message)
        done.set()

    service = QueueService(settings)
    service.register(handle)
    async with service:
        with trace.get_tracer("app").start_as_current_span("request") as request:
            sent = await service.send(channel, 1)
        async with asyncio.timeout(60):
            await done.wait()
    producer, consumer = (
        single_span(spans, f"send {channel}"),
        single_span(spans, f"process {channel}"),
    )
    assert (producer.kind, consumer.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert producer.context is not None
    assert consumer.context is not None
    assert consumer.parent is not None
    # The request, the send and the handler call are one trace; the send is the handler's parent.
    trace_id_of_request = request.get_span_context().trace_id
    assert {producer.context.trace_id, consumer.context.trace_id} == {trace_id_of_request}
    assert consumer.parent.span_id == producer.context.span_id
    assert [link.context.span_id for link in consumer.links] == [producer.context.span_id]
    assert seen[0].trace_id == f"{trace_id_of_request:032x}"
    for span in (producer, consumer):
        attributes = dict(span.attributes or {})
        assert attributes["messaging.system"] == system
        assert attributes["messaging.destination.name"] == channel
        assert attributes["messaging.message.id"] == sent.message_id


async def test_a_dead_letter_keeps_its_trace_and_its_replay_continues_it(
    opened: tuple[str, Settings], channel: str, spans: InMemorySpanExporter
) -> None:
    _, settings = opened
    fixed = False
    done = asyncio.Event()

    @consume(channel)
    async def handle(body: int) -> None:
        if not fixed:
            raise Reject("negative total")
        done.set()

    service = QueueService(settings)
    service.register(handle)
    async with service:
        await service.send(channel, 1)
        await wait_for_dead_letters(service, channel, 1)
        (letter,) = await service.dead_letters(channel).list()
        fixed = True
        await service.dead_letters(channel).replay()
        async with asyncio.timeout(60):
            await done.wait()
    handled = [span for span in spans.get_finished_spans() if span.name == f"process {channel}"]
    assert len(handled) == 2
    traces = {span.context.trace_id for span in handled if span.context is not None}
    assert {f"{number:032x}" for number in traces} == {letter.trace_id}


def points(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


async def test_sends_and_handler_calls_are_counted_and_timed(
    opened: tuple[str, Settings], channel: str, reader: InMemoryMetricReader
) -> None:
    system, settings = opened
    handled: list[int] = []

    @consume(channel)
    async def handle(number: int) -> None:
        if number < 0:
            raise Reject("negative total")
        handled.append(number)

    service = QueueService(settings)
    service.register(handle)
    async with service:
        await service.send_many(channel, [1, 2])
        await service.send(channel, -1)
        await wait_for_dead_letters(service, channel, 1)

        async def all_handled() -> bool:
            return len(handled) == 2

        await eventually(all_handled)
        found = points(reader)
    (sent,) = found["messaging.client.sent.messages"]
    assert sent.value == 3
    assert sent.attributes["messaging.system"] == system
    assert sent.attributes["messaging.destination.name"] == channel
    consumed = {
        point.attributes.get("error.type"): point.value
        for point in found["messaging.client.consumed.messages"]
    }
    assert consumed == {None: 2, "Reject": 1}
    (duration,) = found["messaging.client.operation.duration"]
    assert duration.count == 2  # one per send call, not per message
    assert duration.sum > 0
    assert sum(point.count for point in found["messaging.process.duration"]) == 3
    assert "messaging.message.id" not in duration.attributes  # would create a series per message
    (failed,) = found["qkit.messages.failed"]
    assert failed.value == 1
    assert [point.value for point in found["qkit.messages.dead_lettered"]] == [1]
    assert [point.value for point in found["qkit.messages.retried"]] == [0]


async def test_a_failed_send_is_recorded_with_its_error(
    tmp_path: Path, reader: InMemoryMetricReader
) -> None:
    service = QueueService(Settings(type="native", max_depth=1))
    async with service:
        await service.send("orders", 1)
        with pytest.raises(QueueFull):
            await service.send("orders", 2)
        found = points(reader)
    errors = [
        point.attributes.get("error.type") for point in found["messaging.client.sent.messages"]
    ]
    assert sorted(map(str, errors)) == ["None", "QueueFull"]


async def test_spans_have_server_group_key_and_position(
    opened: tuple[str, Settings], channel: str, spans: InMemorySpanExporter
) -> None:
    system, settings = opened
    done = asyncio.Event()

    @consume(channel)
    async def handle(body: int) -> None:
        done.set()

    if settings.type == "kafka":
        settings = settings.model_copy(update={"group_prefix": "staging."})
    service = QueueService(settings)
    service.register(handle)
    async with service:
        await service.send(channel, 1, key="customer-7")
        async with asyncio.timeout(60):
            await done.wait()
    for name in (f"send {channel}", f"process {channel}"):
        span = single_span(spans, name)
        attributes = dict(span.attributes or {})
        assert (attributes.get("server.port") is not None) is (system != "qkit")
        assert ("server.address" in attributes) is (system != "qkit")
        key = "messaging.kafka.message.key" if system == "kafka" else "qkit.message.key"
        assert attributes.get(key) == "customer-7"
        assert span.instrumentation_scope is not None
        assert span.instrumentation_scope.version == qkit.__version__
        assert span.instrumentation_scope.schema_url == SCHEMA_URL
    group = attributes.get("messaging.consumer.group.name")
    if system == "kafka":
        assert group == f"staging.{channel}"  # as on the broker
        assert attributes["messaging.destination.partition.id"] == "0"
        assert attributes["messaging.kafka.offset"] == 0
    else:
        assert group is None  # a queue has no consumer groups there


async def test_a_failed_span_has_the_type_of_its_error(
    channel: str, spans: InMemorySpanExporter
) -> None:
    @consume(channel, retry=RetrySettings(enabled=False))
    async def handle(body: int) -> None:
        raise KeyError("no such customer")

    service = QueueService(Settings(type="native", max_depth=1))
    service.register(handle)
    async with service:
        await service.send(channel, 1)
        await wait_for_dead_letters(service, channel, 1)
        await service.send("full", 1)
        with pytest.raises(QueueFull):
            await service.send("full", 2)
    sends = [span for span in spans.get_finished_spans() if span.name == "send full"]
    failed = single_span(spans, f"process {channel}"), sends[-1]
    assert [dict(span.attributes or {}).get("error.type") for span in failed] == [
        "KeyError",
        "QueueFull",
    ]
    assert "error.type" not in dict(single_span(spans, f"send {channel}").attributes or {})


async def test_baggage_travels_with_the_message(channel: str, spans: InMemorySpanExporter) -> None:
    seen: list[object] = []

    @consume(channel)
    async def handle(body: int) -> None:
        seen.append(baggage.get_baggage("tenant"))

    @consume(f"{channel}-sync")
    def handle_in_a_thread(body: int) -> None:
        seen.append(baggage.get_baggage("tenant"))

    service = QueueService(Settings(type="native"))
    service.register(handle)
    service.register(handle_in_a_thread)
    async with service:
        token = context.attach(baggage.set_baggage("tenant", "acme"))
        try:
            await service.send(channel, 1)
            await service.send(f"{channel}-sync", 1)
        finally:
            context.detach(token)

        async def both() -> bool:
            return len(seen) == 2

        await eventually(both)
    assert seen == ["acme", "acme"]


async def test_the_global_propagator_is_used(
    channel: str, spans: InMemorySpanExporter, request: pytest.FixtureRequest
) -> None:
    class Custom(TraceContextTextMapPropagator):
        """Propagator that writes its own header, as OTEL_PROPAGATORS may select."""

        def inject(self, carrier: Any, *args: Any, **kwargs: Any) -> None:
            carrier["x-trace"] = "1"

        def extract(self, carrier: Any, *args: Any, **kwargs: Any) -> Any:
            return context.set_value("found", carrier["x-trace"])

        @property
        def fields(self) -> set[str]:
            return {"x-trace"}

    previous = propagate.get_global_textmap()
    propagate.set_global_textmap(Custom())
    request.addfinalizer(lambda: propagate.set_global_textmap(previous))
    seen: list[object] = []

    @consume(channel)
    async def handle(body: int, message: Message) -> None:
        seen.append((context.get_value("found"), "traceparent" in message.headers))

    service = QueueService(Settings(type="native"))
    service.register(handle)
    async with service:
        await service.send(channel, 1)

        async def handled() -> bool:
            return bool(seen)

        await eventually(handled)
    assert seen == [("1", False)]


async def test_durations_are_in_buckets_of_seconds(
    channel: str, reader: InMemoryMetricReader
) -> None:
    service = QueueService(Settings(type="native"))
    async with service:
        await service.send(channel, 1)
        (duration,) = points(reader)["messaging.client.operation.duration"]
    assert tuple(duration.explicit_bounds) == BOUNDS_SECONDS


def test_without_a_propagator_a_message_has_an_empty_context(
    request: pytest.FixtureRequest,
) -> None:
    """``OTEL_PROPAGATORS=none`` selects a composite propagator without members."""
    previous = propagate.get_global_textmap()
    propagate.set_global_textmap(CompositePropagator([]))
    request.addfinalizer(lambda: propagate.set_global_textmap(previous))
    assert extract({"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}) == {}
