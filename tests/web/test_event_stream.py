"""Event streams: a history event, an overview every second, and the limit on streams."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack

import httpx
import pytest

from qkit import QueueService
from qkit.web import serve
from qkit.web.access_control import SECURITY_HEADERS
from qkit.web.event_stream import MAX_STREAMS
from tests.support.web import Orders


async def test_a_stream_starts_with_the_history_and_continues_with_overviews(
    service: QueueService,
) -> None:
    async with serve(service, port=0) as address, httpx.AsyncClient(timeout=60) as client:
        await client.get(f"{address}metrics")  # this request adds a sample to the history
        async with client.stream("GET", f"{address}api/events") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            for name, value in SECURITY_HEADERS.items():
                assert stream.headers[name] == value
            events: list[tuple[str, dict[str, object]]] = []
            name = ""
            async for line in stream.aiter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    events.append((name, json.loads(line.removeprefix("data: "))))
                    await service.send("orders", 1)
                if len(events) == 4:
                    break
    assert [name for name, _ in events] == ["history", "overview", "overview", "overview"]
    assert len(events[0][1]["orders"]) >= 1  # type: ignore[arg-type]  # a list of points
    published = [
        event["queues"][0]["published_total"]  # type: ignore[index]  # JSON
        for _, event in events[1:]
    ]
    assert published == sorted(published)
    assert published[-1] > published[0]


async def test_the_number_of_streams_is_limited(
    service: QueueService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkit.web.event_stream.MAX_STREAMS", 1)
    async with serve(service, port=0) as address, httpx.AsyncClient(timeout=60) as client:
        async with client.stream("GET", f"{address}api/events") as stream:
            await anext(stream.aiter_lines())
            answer = await client.get(f"{address}api/events")
            assert answer.status_code == 503
            assert answer.json()["error"]["type"] == "TooManyStreams"


async def test_a_closed_stream_no_longer_counts_towards_the_limit(
    service: QueueService, monkeypatch: pytest.MonkeyPatch, orders: Orders
) -> None:
    monkeypatch.setattr("qkit.web.event_stream.MAX_STREAMS", 1)
    async with serve(service, port=0) as address:
        for _ in range(3):
            async with httpx.AsyncClient(timeout=60) as client:
                for _ in range(100):  # the server detects a closed stream at its next event
                    async with client.stream("GET", f"{address}api/events") as stream:
                        if stream.status_code == 200:
                            await anext(stream.aiter_lines())
                            break
                        await stream.aread()
                else:
                    raise AssertionError("the closed stream still counts towards the limit")


async def test_the_limit_holds_for_streams_that_are_opened_at_the_same_time(
    service: QueueService,
) -> None:
    limits = httpx.Limits(max_connections=None)
    async with (
        serve(service, port=0) as address,
        httpx.AsyncClient(timeout=60, limits=limits) as client,
        AsyncExitStack() as stack,
    ):
        streams = await asyncio.gather(
            *(
                stack.enter_async_context(client.stream("GET", f"{address}api/events"))
                for _ in range(MAX_STREAMS + 8)
            )
        )
        assert Counter(stream.status_code for stream in streams) == {200: MAX_STREAMS, 503: 8}
