"""Live figures: the history once, an overview every second, to a bounded number of pages."""

from __future__ import annotations

import json

import httpx
import pytest

from qkit import QueueService
from qkit.web import serve
from qkit.web.access_control import SECURITY_HEADERS
from tests.support.web import Orders


async def test_a_page_gets_the_history_and_then_what_happens(service: QueueService) -> None:
    async with serve(service, port=0) as address, httpx.AsyncClient(timeout=60) as client:
        await client.get(f"{address}metrics")  # whoever looks leaves a history
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
    sent = [event["queues"][0]["sent"] for _, event in events[1:]]  # type: ignore[index]  # JSON
    assert sent == sorted(sent)
    assert sent[-1] > sent[0]


async def test_only_so_many_pages_are_served(
    service: QueueService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkit.web.event_stream.MAX_STREAMS", 1)
    async with serve(service, port=0) as address, httpx.AsyncClient(timeout=60) as client:
        async with client.stream("GET", f"{address}api/events") as stream:
            await anext(stream.aiter_lines())
            answer = await client.get(f"{address}api/events")
            assert answer.status_code == 503
            assert answer.json()["error"]["type"] == "TooManyStreams"


async def test_a_page_that_leaves_makes_room(
    service: QueueService, monkeypatch: pytest.MonkeyPatch, orders: Orders
) -> None:
    monkeypatch.setattr("qkit.web.event_stream.MAX_STREAMS", 1)
    async with serve(service, port=0) as address:
        for _ in range(3):
            async with httpx.AsyncClient(timeout=60) as client:
                for _ in range(100):  # the server hears of the one before with its next event
                    async with client.stream("GET", f"{address}api/events") as stream:
                        if stream.status_code == 200:
                            await anext(stream.aiter_lines())
                            break
                        await stream.aread()
                else:
                    raise AssertionError("there was no room again")
