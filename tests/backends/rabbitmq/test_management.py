"""Listing of queues: over the management API, or a clear error where it is not configured."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from typer.testing import CliRunner, Result

from qkit import QueueService, Settings
from qkit.backend import QueueSpec
from qkit.backends.rabbitmq.backend import RabbitMQBackend
from qkit.cli.app import app
from qkit.errors import BackendUnavailable, ConfigError
from qkit.message import Envelope
from qkit.web.sampler import Sampler
from tests.support.cli import restored_log_levels
from tests.support.private_brokers import private_broker
from tests.support.rabbitmq import bare_channel, declare, spec

pytestmark = pytest.mark.broker

VARIABLE = "QKIT_TEST_RABBITMQ_MANAGEMENT_URL"


@dataclass
class Broker:
    url: str
    management: str


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    """Yield the suite's broker if it has the management plugin, otherwise a private one."""
    url, management = os.environ.get("QKIT_TEST_RABBITMQ_URL"), os.environ.get(VARIABLE)
    if url and management:
        yield Broker(url, management)
        return
    with private_broker("rabbitmq") as private:
        yield Broker(private.url, private.further_urls[VARIABLE])


@pytest_asyncio.fixture
async def vhost(broker: Broker) -> AsyncIterator[str]:
    """Yield a prefix of names, and delete the queues with it."""
    prefix = f"m{uuid.uuid4().hex[:8]}."
    yield prefix
    backend = RabbitMQBackend(broker.url, management_url=broker.management)
    await backend.start()
    for name in await backend.queues():
        if name.startswith(prefix):
            await backend.delete(name)
    await backend.aclose()


async def test_the_management_api_lists_the_queues_and_topics_of_the_vhost(
    broker: Broker, vhost: str
) -> None:
    sender = RabbitMQBackend(broker.url)
    await sender.start()
    await declare(sender, f"{vhost}orders")
    await sender.declare(QueueSpec(name=f"{vhost}prices", broadcast=True))
    options = {"group": "mail", "broadcast": True, "ordered": True}
    lister = RabbitMQBackend(broker.url, management_url=broker.management)
    await lister.start()
    async with (
        bare_channel(broker.url) as raw,
        sender.subscribe(spec(f"{vhost}prices", **options)),
    ):
        await raw.queue_declare(f"{vhost}exclusive", exclusive=True)
        await raw.queue_declare(f"{vhost}with space", durable=True)
        found = [name for name in await lister.queues() if vhost in name]
        wanted = ("orders", "orders.dlq", "prices", "prices.dlq")
        assert found == [f"{vhost}{name}" for name in wanted]
        assert not [name for name in await lister.queues() if name.startswith("qkit.")]
        await raw.queue_delete(f"{vhost}with space")
        await sender.publish(f"{vhost}prices", [Envelope("a", b"x")])
    assert (await lister.stats(f"{vhost}prices")).depth == 1, "the groups of a topic are known"
    await lister.aclose()
    await sender.aclose()


async def test_faults_of_the_management_api_are_reported_without_the_password(
    broker: Broker,
) -> None:
    place = urlsplit(broker.management).netloc
    faults = {
        f"http://guest:hunter2@{place}": (ConfigError, "rejected the login"),
        f"http://{place}/nowhere": (ConfigError, "the status 4"),
        "http://guest:hunter2@127.0.0.1:1": (BackendUnavailable, "did not respond"),
        f"http://guest:hunter2@{urlsplit(broker.url).netloc.rpartition('@')[2]}": (
            BackendUnavailable,
            "did not respond",
        ),
    }
    for url, (kind, text) in faults.items():
        backend = RabbitMQBackend(broker.url, management_url=url, timeout=5)
        with pytest.raises(kind, match=text) as caught:
            await backend.queues()
        assert "hunter2" not in str(caught.value)


def qkit(environment: dict[str, str], *words: str) -> Result:
    with restored_log_levels():
        return CliRunner().invoke(app, list(words), env={**environment, "COLUMNS": "200"})


def test_the_command_line_lists_queues_and_dead_letters(broker: Broker, vhost: str) -> None:
    environment = {
        "QKIT_TYPE": "rabbitmq",
        "QKIT_URL": broker.url,
        "QKIT_PREFIX": vhost,
        "QKIT_MANAGEMENT_URL": broker.management,
    }
    qkit(environment, "send", "orders", "1")
    (row,) = json.loads(qkit(environment, "queues", "--json").stdout)
    assert (row["queue"], row["depth"], row["dead_letters"]) == ("orders", 1, 0)
    qkit(environment, "send", "orders.dlq", "1")
    assert json.loads(qkit(environment, "dlq", "list", "--json").stdout) == {"orders": 1}


def test_without_the_management_api_the_command_line_says_that_it_cannot_list(
    rabbitmq_url: str,
) -> None:
    environment = {"QKIT_TYPE": "rabbitmq", "QKIT_URL": rabbitmq_url}
    for command in (["queues"], ["stats"], ["dlq", "list"]):
        failed = qkit(environment, *command)
        text = " ".join(failed.stderr.split())
        assert failed.exit_code == 1
        for expected in ("cannot list the queues", "management_url", "qkit dlq list QUEUE"):
            assert expected in text


async def test_without_the_management_api_the_dashboard_says_that_it_cannot_list(
    rabbitmq_url: str, name: str
) -> None:
    settings = Settings(type="rabbitmq", url=rabbitmq_url, declare="passive")
    async with QueueService(settings) as service:
        overview = await Sampler(service, writable=False).sample()
        assert "cannot list the queues" in (overview.error or "")


def test_the_password_of_management_url_is_never_shown() -> None:
    settings = Settings(
        type="rabbitmq",
        url="amqp://localhost/",
        management_url="http://admin:hunter2@localhost:15672",
    )
    assert "management_url='http://admin:***@localhost:15672'" in repr(settings)
    assert "hunter2" not in settings.model_dump_json() + str(settings)
    with pytest.raises(ConfigError, match="must begin with http:// or https://") as caught:
        Settings(type="rabbitmq", url="amqp://localhost/", management_url="amqp://u:hunter2@h/")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match="belongs to rabbitmq"):
        Settings(type="native", management_url="http://localhost:15672")
