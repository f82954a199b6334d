"""Spans and trace context, with and without a tracer provider."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from qkit import Message, QueueService, Settings, consume
from qkit.observability.telemetry import Telemetry
from qkit.testing.clock import VirtualClock
from tests.support.faulty import FaultyBackend
from tests.support.waiting import eventually

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Exporter of a tracer provider that is set for this test only.

    It is set through a private name, because OpenTelemetry accepts only one provider per process.
    """
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


def make_service(*handlers: object, clock: VirtualClock) -> QueueService:
    service = QueueService(
        Settings(type="native", retry={"jitter": 0}),
        backend=FaultyBackend(clock, name="native"),
        clock=clock,
    )
    for handler in handlers:
        service.register(handler)
    return service


def spans_named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def ids(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


async def test_a_send_and_its_handler_call_are_one_trace(
    virtual_clock: VirtualClock, exporter: InMemorySpanExporter
) -> None:
    seen: list[Message] = []

    @consume("orders")
    async def handle(body: int, message: Message) -> None:
        seen.append(message)

    async with make_service(handle, clock=virtual_clock) as running:
        sent = await running.send("orders", 1)
        await virtual_clock.advance(1)
    (producer,) = spans_named(exporter, "send orders")
    (consumer,) = spans_named(exporter, "process orders")
    assert producer.kind is SpanKind.PRODUCER
    assert consumer.kind is SpanKind.CONSUMER
    assert consumer.parent is not None
    assert (consumer.parent.trace_id, consumer.parent.span_id) == ids(producer)
    assert [link.context.span_id for link in consumer.links] == [ids(producer)[1]]
    assert seen[0].trace_id == f"{ids(producer)[0]:032x}"
    assert dict(producer.attributes or {}) == {
        "messaging.system": "qkit",
        "messaging.destination.name": "orders",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.message.id": sent.message_id,
        "messaging.message.body.size": 1,
    }
    attributes = dict(consumer.attributes or {})
    assert attributes["messaging.operation.type"] == "process"
    assert "messaging.consumer.group.name" not in attributes  # a queue has no groups


async def test_each_attempt_has_a_span_that_records_its_error(
    virtual_clock: VirtualClock, exporter: InMemorySpanExporter
) -> None:
    @consume("orders")
    async def fail(body: int) -> None:
        raise ValueError("negative total")

    async with make_service(fail, clock=virtual_clock) as running:
        await running.send("orders", 1)
        await virtual_clock.advance(60)
        (letter,) = await running.dead_letters("orders").list()
    spans = spans_named(exporter, "process orders")
    assert [span.status.status_code for span in spans] == [StatusCode.ERROR] * 3
    assert all(span.events[0].name == "exception" for span in spans)
    assert len({ids(span)[0] for span in spans}) == 1
    assert letter.trace_id == f"{ids(spans[0])[0]:032x}"


async def test_a_batch_links_to_each_of_its_sends(
    virtual_clock: VirtualClock, exporter: InMemorySpanExporter
) -> None:
    @consume("orders", batch_size=3, batch_wait=5)
    async def handle(bodies: list[int]) -> None: ...

    async with make_service(handle, clock=virtual_clock) as running:
        for number in range(3):
            await running.send("orders", number)
        await virtual_clock.advance(10)
    (consumer,) = spans_named(exporter, "process orders")
    producers = spans_named(exporter, "send orders")
    assert consumer.parent is None
    assert {link.context.span_id for link in consumer.links} == {ids(span)[1] for span in producers}
    assert dict(consumer.attributes or {})["messaging.batch.message_count"] == 3


async def test_messages_sent_together_share_a_span(
    virtual_clock: VirtualClock, exporter: InMemorySpanExporter
) -> None:
    async with make_service(clock=virtual_clock) as running:
        await running.send_many("orders", range(3))
        messages = await running.peek("orders")
    (producer,) = spans_named(exporter, "send orders")
    assert {message.trace_id for message in messages} == {f"{ids(producer)[0]:032x}"}
    assert dict(producer.attributes or {})["messaging.batch.message_count"] == 3


async def test_a_traceparent_header_of_the_caller_is_kept(
    virtual_clock: VirtualClock, exporter: InMemorySpanExporter
) -> None:
    async with make_service(clock=virtual_clock) as running:
        await running.send("orders", 1, headers={"traceparent": TRACEPARENT})
        (message,) = await running.peek("orders")
    assert message.headers["traceparent"] == TRACEPARENT


async def test_a_send_is_a_child_of_the_current_span(
    virtual_clock: VirtualClock, exporter: InMemorySpanExporter
) -> None:
    async with make_service(clock=virtual_clock) as running:
        with trace.get_tracer("app").start_as_current_span("request") as request:
            await running.send("orders", 1)
    (producer,) = spans_named(exporter, "send orders")
    assert producer.parent is not None
    assert producer.parent.span_id == request.get_span_context().span_id


async def test_a_message_without_a_trace_starts_a_new_trace(
    virtual_clock: VirtualClock, exporter: InMemorySpanExporter
) -> None:
    done = asyncio.Event()

    @consume("orders")
    async def handle(body: int) -> None:
        done.set()

    running = make_service(handle, clock=virtual_clock)
    async with running:
        telemetry = running._runtime.wiring.telemetry
        telemetry._tracer, tracer = None, telemetry._tracer
        await running.send("orders", 1)
        telemetry._tracer = tracer
        await done.wait()
        await virtual_clock.advance(0)
    (consumer,) = spans_named(exporter, "process orders")
    assert consumer.parent is None
    assert consumer.links == ()


async def test_without_a_provider_no_header_is_written(virtual_clock: VirtualClock) -> None:
    async with make_service(clock=virtual_clock) as running:
        await running.send("orders", 1)
        (message,) = await running.peek("orders")
    assert message.headers == {}


def test_without_a_provider_there_are_no_spans() -> None:
    telemetry = Telemetry("native")
    telemetry.start()
    assert not telemetry.enabled
    with telemetry.producer_span("orders", []) as span:
        assert span is None
    with telemetry.consumer_span("orders", "g", []) as span:
        assert span is None


PROGRAM = """
import asyncio, json, sys
from qkit import QueueService, Settings, consume

@consume("orders")
async def handle(body: int) -> None:
    service.stop()

service = QueueService(Settings(type="native"))
service.register(handle)

async def main():
    await service.start()
    await service.send("orders", 1)
    await service.run()

asyncio.run(main())
print(json.dumps(sorted(name for name in sys.modules if name.startswith("opentelemetry"))))
"""


def test_a_program_without_a_provider_does_not_import_opentelemetry() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(ran.stdout) == []


async def test_a_send_in_a_synchronous_handler_continues_its_trace(
    virtual_clock: VirtualClock, exporter: InMemorySpanExporter
) -> None:
    headers: list[str] = []

    @consume("orders")
    def place(number: int) -> None:
        with trace.get_tracer("test").start_as_current_span("in the handler"):
            service.sync.send("invoices", number)

    @consume("invoices")
    async def bill(number: int, message: Message) -> None:
        headers.append(message.headers["traceparent"])

    service = make_service(place, bill, clock=virtual_clock)
    async with service:
        await service.send("orders", 1)
        await eventually(lambda: headers)
    (handling,) = spans_named(exporter, "process orders")
    (inner,) = spans_named(exporter, "in the handler")
    (sending,) = spans_named(exporter, "send invoices")
    assert inner.parent is not None
    assert sending.parent is not None
    assert (inner.parent.trace_id, inner.parent.span_id) == ids(handling)
    assert (sending.parent.trace_id, sending.parent.span_id) == ids(inner)
    assert f"{ids(sending)[1]:016x}" in headers[0]
