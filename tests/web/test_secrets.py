"""Secrets: none appears in a response, log, error or metric."""

from __future__ import annotations

import json
import logging
import socket
import traceback
from typing import Any

import pytest
from typer.testing import CliRunner

from qkit import ConfigError, QueueError, QueueService, Settings
from qkit.asyncapi import document
from qkit.cli.app import app
from qkit.settings.rules import mask_url
from qkit.spark.options import parse_options
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


def url_forms(port: int) -> dict[str, str]:
    """Return URLs with a secret in every place where one may be."""
    host = f"127.0.0.1:{port}"
    return {
        "user only": f"redis://{CANARY}@{host}/0",
        "password only": f"redis://:{CANARY}@{host}/0",
        "user and password": f"redis://user:{CANARY}@{host}/0",
        "encoded": f"redis://user:%40{CANARY}@{host}/0",
        "query": f"redis://{host}/0?password={CANARY}",
        "two parameters": f"redis://{host}/0?username=user&password={CANARY}",
        "fragment": f"redis://{host}/0#{CANARY}",
    }


MORE_FORMS = [
    f"amqp://{CANARY}@host-1:5672/shop",
    f"amqp://user:{CANARY}@host-1:5672/shop?heartbeat={CANARY}",
    f"amqp://user:{CANARY}@host-1:5672,user:{CANARY}@host-2:5672/shop",
    f"amqp://user:{CANARY}@host-1:5672,host-2:5672/shop",
    f"user:{CANARY}@host-1:9092,host-2:9092",
    f"redis://user:a?{CANARY}@host-1/0",
    f"redis://user:a#{CANARY}@host-1/0",
    f"redis://user:a/{CANARY}@host-1/0",
    f"redis://{CANARY}@{CANARY}:b@host-1/0",
    f"redis://host-1/0?{CANARY}",
    f"redis://host-1/0?a=1;password={CANARY}",
    f"redis://host-1/0?password=a@{CANARY}",
]


@pytest.mark.parametrize("url", [*url_forms(6379).values(), *MORE_FORMS])
def test_every_form_of_a_url_is_masked(url: str) -> None:
    assert CANARY not in mask_url(url)


@pytest.mark.parametrize("form", url_forms(0))
async def test_no_form_of_a_url_leaks_its_secret(
    form: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    url = url_forms(closed_port())[form]
    settings = Settings(type="redis", mode="list", url=url, send_timeout=1)
    service = QueueService(settings)
    service.register(Orders())
    with pytest.raises(QueueError) as caught:
        await service.start()
    trace = "".join(traceback.format_exception(caught.value))
    texts = [await all_output(service), trace, caplog.text, settings.model_dump_json()]
    texts += [str(settings), repr(settings.model_dump()), json.dumps(document(service))]
    options = {"channel": "orders", "type": "redis", "mode": "list", "url": url}
    texts.append(repr(parse_options(options)))
    with pytest.raises(ConfigError) as rejected:
        parse_options({**options, "limit": "0"})
    texts += traceback.format_exception(rejected.value)
    assert CANARY not in "\n".join(texts)

    for name, value in (("TYPE", "redis"), ("MODE", "list"), ("URL", url)):
        monkeypatch.setenv(f"QKIT_{name}", value)
    for words in (["config", "show"], ["config", "show", "--all", "--json"], ["config", "check"]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0
        assert CANARY not in result.output


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
