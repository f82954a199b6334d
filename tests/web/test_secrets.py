"""Secrets: none appears in a response, log, error or metric."""

from __future__ import annotations

import logging
import socket
import traceback
from typing import Any

import pytest

from qkit import QueueError, QueueService, Settings
from qkit.web import create_app
from tests.support.faulty import FaultyBackend
from tests.support.web import Orders, client_of

CANARY = "c4n4ry-0f-4-s3cret"
TOKEN = f"{CANARY}-token"
PAGES = sorted(
    route.path.replace("{name}", "orders")  # type: ignore[attr-defined]  # all are Routes
    for route in create_app(QueueService(Settings(type="native"))).routes
    if "GET" in (route.methods or ()) and route.path != "/api/events"  # type: ignore[attr-defined]
)


async def all_output(service: QueueService) -> str:
    """Return all text that the web app, the settings and the health check expose."""
    async with client_of(service, token=TOKEN) as client:
        answers = [await client.get(page) for page in PAGES]
        answers.append(await client.post("/api/queues/orders/pause"))
        answers.append(
            await client.post(
                "/api/queues/orders/pause", headers={"Authorization": f"Bearer {TOKEN}"}
            )
        )
    texts = [f"{answer.headers!r} {answer.text}" for answer in answers]
    return "\n".join([*texts, repr(service.settings), repr(service.health_check())])


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def test_an_unreachable_broker_leaks_no_password(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    url = f"redis://user:{CANARY}@127.0.0.1:{closed_port()}/0"
    service = QueueService(Settings(type="redis", mode="list", url=url, send_timeout=1))
    service.register(Orders())
    with pytest.raises(QueueError) as caught:
        await service.start()
    trace = "".join(traceback.format_exception(caught.value))
    assert CANARY not in await all_output(service) + trace + caplog.text


async def test_a_wrong_password_is_not_shown(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    scheme, _, rest = redis_url.partition("://")
    url = f"{scheme}://user:{CANARY}@{rest.rpartition('@')[2]}"
    service = QueueService(Settings(type="redis", mode="list", url=url, send_timeout=2))
    service.register(Orders())
    with pytest.raises(QueueError) as caught:
        await service.start()
    trace = "".join(traceback.format_exception(caught.value))
    assert CANARY not in await all_output(service) + trace + caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {"type": "rabbitmq", "url": f"amqp://user:{CANARY}@broker.example:5672/shop"},
        {"type": "redis", "mode": "list", "url": f"redis://:{CANARY}@broker.example:6379/0"},
        {
            "type": "kafka",
            "url": "broker.example:9092",
            "sasl_mechanism": "PLAIN",
            "sasl_username": "user",
            "sasl_password": CANARY,
        },
    ],
    ids=["rabbitmq", "redis", "kafka"],
)
async def test_a_running_service_leaks_no_secrets(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    service = QueueService(Settings(**settings), backend=FaultyBackend())
    service.register(Orders())
    async with service:
        await service.send("orders", 1)
        assert CANARY not in await all_output(service) + caplog.text
