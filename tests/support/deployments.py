"""Table of the deployments that the reliability tests run on.

A test names the properties it needs and runs with a ``Site`` for each deployment that has them::

    @on(redelivers, in_other_processes)
    async def test_…(site: Site) -> None: ...
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from local_brokers.probes import free_port
from qkit import QueueService, Settings
from qkit._internal.clock import SystemClock
from qkit.backend import Backend, Capabilities
from qkit.backends.capability_matrix import MATRIX
from qkit.backends.factory import open_backend
from tests.support.private_brokers import PrivateBroker, private_broker
from tests.support.proxy import Proxy
from tests.support.sessions import SESSION_SECONDS
from tests.support.workers import Worker, Workers

__all__ = [
    "DEPLOYMENTS",
    "Deployment",
    "Servers",
    "Site",
    "behind_a_network",
    "durable",
    "has_a_server_process",
    "in_other_processes",
    "keeps_dead_letters",
    "on",
    "redelivers",
]

Values = dict[str, Any]
LEASE_SECONDS: Final = 2.0  # short, so that a dead worker's messages are redelivered quickly

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Deployment:
    """Backend with its settings and its server.

    ``settings`` returns the settings for an address. ``consumers`` asks the server how many
    consumers a queue has. ``redelivered_within`` is the number of seconds until a dead worker's
    messages are redelivered: the lease or, on a broker without leases, the time until the broker
    detects that the worker is dead.
    """

    name: str
    capabilities: Capabilities
    settings: Callable[[str], Values]
    server: str | None = None
    shared: bool = True  # other processes can connect
    variant: bool = False  # variant of another entry, used only by tests that ask for variants
    owned: bool = False  # a separate owner process acts as the server (native engine)
    consumers: Callable[[Site, str], Awaitable[int]] | None = None
    redelivered_within: float = LEASE_SECONDS

    def __str__(self) -> str:
        return self.name


# -- consumers, as reported by the brokers -----------------------------------------------------


async def _parked_on_redis(site: Site, queue: str) -> int:
    """Return the number of clients blocked on a list; only the test's clients are connected."""
    from redis.asyncio import Redis

    async with Redis.from_url(site.url) as client:
        clients = await client.client_list()
    return sum(item["cmd"] in ("blmove", "blpop") for item in clients)


async def _subscribed_on_redis(site: Site, queue: str) -> int:
    from redis.asyncio import Redis

    async with Redis.from_url(site.url) as client:
        ((_, count),) = await client.pubsub_numsub(queue)
    return int(count)


async def _consuming_on_rabbitmq(site: Site, queue: str) -> int:
    import aio_pika

    async with await aio_pika.connect(site.url) as connection:
        channel = await connection.channel()
        declared = await channel.declare_queue(queue, passive=True)
    return declared.declaration_result.consumer_count or 0


async def _members_on_kafka(site: Site, queue: str) -> int:
    """Return the number of group members, or 0 until the assignment is stable."""
    from aiokafka.admin import AIOKafkaAdminClient

    admin = AIOKafkaAdminClient(bootstrap_servers=site.url)
    await admin.start()
    try:
        (answer,) = await admin.describe_consumer_groups([queue])
    finally:
        await admin.close()
    ((_, _, state, _, _, members, *_),) = answer.groups
    return len(members) if state == "Stable" else 0


async def _known_to_owner(site: Site, queue: str) -> int:
    service = site.service()
    async with service:
        return (await service.stats(queue)).consumers or 0


# -- table of deployments ----------------------------------------------------------------------

DEPLOYMENTS: Final = (
    Deployment(
        "native-memory",
        MATRIX["native-memory"],
        lambda address: {"type": "native"},
        shared=False,
    ),
    Deployment(
        "native-durable",
        MATRIX["native-durable"],
        lambda address: {"type": "native", "path": address},
    ),
    Deployment(
        "native-socket",
        MATRIX["native-durable"],
        lambda address: {"type": "native", "path": address},
        owned=True,
        consumers=_known_to_owner,
    ),
    Deployment(
        "redis-list",
        MATRIX["redis-list"],
        lambda address: {"type": "redis", "mode": "list", "url": address},
        server="redis",
        consumers=_parked_on_redis,
    ),
    Deployment(
        "redis-list-unreliable",
        MATRIX["redis-list-unreliable"],
        lambda address: {"type": "redis", "mode": "list", "url": address, "reliable": False},
        server="redis",
        consumers=_parked_on_redis,
        variant=True,
    ),
    Deployment(
        "redis-pubsub",
        MATRIX["redis-pubsub"],
        lambda address: {"type": "redis", "mode": "pubsub", "url": address},
        server="redis",
        consumers=_subscribed_on_redis,
    ),
    Deployment(
        "rabbitmq",
        MATRIX["rabbitmq-classic"],
        lambda address: {"type": "rabbitmq", "url": address},
        server="rabbitmq",
        consumers=_consuming_on_rabbitmq,
    ),
    Deployment(
        "kafka",
        MATRIX["kafka"],
        lambda address: {"type": "kafka", "url": address},
        server="kafka",
        consumers=_members_on_kafka,
        redelivered_within=SESSION_SECONDS,
    ),
)

Condition = Callable[[Deployment], object]


def redelivers(deployment: Deployment) -> bool:
    """Return whether unacknowledged messages are redelivered."""
    return bool(deployment.capabilities.redelivery)


def durable(deployment: Deployment) -> bool:
    """Return whether a confirmed send survives a restart."""
    return bool(deployment.capabilities.durable)


def keeps_dead_letters(deployment: Deployment) -> bool:
    """Return whether final failures become dead letters."""
    return bool(deployment.capabilities.dead_letters)


def in_other_processes(deployment: Deployment) -> bool:
    """Return whether a worker in another process can consume."""
    return deployment.shared


def has_a_server_process(deployment: Deployment) -> bool:
    """Return whether a separate process, which a test can freeze and kill, holds the messages."""
    return deployment.server is not None or deployment.owned


def behind_a_network(deployment: Deployment) -> bool:
    """Return whether clients connect over TCP, so that a proxy can be inserted."""
    return deployment.server is not None


def on(*conditions: Condition, variants: bool = False) -> pytest.MarkDecorator:
    """Parametrize a test with a ``site`` for each deployment that meets all conditions."""
    return pytest.mark.parametrize(
        "site",
        [
            pytest.param(
                deployment, id=deployment.name, marks=[pytest.mark.broker] * bool(deployment.server)
            )
            for deployment in DEPLOYMENTS
            if all(condition(deployment) for condition in conditions)
            and (variants or not deployment.variant)
        ],
        indirect=True,
    )


# -- servers and sites -------------------------------------------------------------------------


class Servers:
    """Private servers of a test run, each started when a test first needs it."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self._stack = ExitStack()
        self._started: dict[str, tuple[PrivateBroker, Proxy]] = {}

    def __getitem__(self, name: str) -> tuple[PrivateBroker, Proxy]:
        """Return a ready server and a proxy in front of it."""
        if name not in self._started:
            self._started[name] = self._start(name)
        return self._started[name]

    def _start(self, name: str) -> tuple[PrivateBroker, Proxy]:
        port = free_port()
        advertised = port if name == "kafka" else None
        broker = self._stack.enter_context(private_broker(name, advertised=advertised))
        return broker, self._stack.enter_context(Proxy(broker.proxied, port=port))

    def close(self) -> None:
        """Stop all servers."""
        self._stack.close()


@dataclass
class Site:
    """Deployment with a running server, for one test; ``queue`` is a unique queue name."""

    deployment: Deployment
    workers: Workers
    directory: Path
    broker: PrivateBroker | None = None
    proxy: Proxy | None = None
    owner: Worker | None = None
    queue: str = field(default_factory=lambda: f"t{next(_numbers)}-{uuid.uuid4().hex[:8]}")
    _started: list[Worker] = field(default_factory=list)

    @classmethod
    def open(cls, deployment: Deployment, servers: Servers, directory: Path) -> Iterator[Site]:
        """Yield a site with a running server, and restore the server after the test."""
        site = cls(deployment, servers.workers, directory)
        if deployment.server is not None:
            site.broker, site.proxy = servers[deployment.server]
        if deployment.owned:
            site.restart()
        yield site
        for worker in site._started:
            worker.kill()
        if site.broker is not None and site.proxy is not None:
            site.proxy.heal()
            site.broker.thaw()
            site.broker.restart()

    # -- settings, services and workers ------------------------------------------------------

    @property
    def url(self) -> str:
        """Direct address of the server, not of the proxy; for the native engine, its directory."""
        return str(self.directory) if self.broker is None else self.broker.url

    def values(self, *, proxied: bool = False, **more: object) -> Values:
        """Return the settings as plain values, for this process or another."""
        address = self.url
        if proxied:
            assert self.broker is not None
            assert self.proxy is not None
            address = address.replace(str(self.broker.port), str(self.proxy.port))
        leases = {"ack_deadline": LEASE_SECONDS} if self.deployment.capabilities.lease else {}
        return {**self.deployment.settings(address), **leases, **more}

    def settings(self, *, proxied: bool = False, **more: object) -> Settings:
        """Return the validated settings."""
        return Settings(**self.values(proxied=proxied, **more))

    def backend(self, *, proxied: bool = False, **more: object) -> Backend:
        """Return a new backend that is not started; two in-memory backends share no queues."""
        return open_backend(self.settings(proxied=proxied, **more), SystemClock())

    def service(
        self,
        *handlers: object,
        backend: Backend | None = None,
        proxied: bool = False,
        **more: object,
    ) -> QueueService:
        """Return a service that is not started."""
        service = QueueService(
            self.settings(proxied=proxied, **more),
            backend=backend or self.backend(proxied=proxied, **more),
        )
        for handler in handlers:
            service.register(handler)
        return service

    def worker(self, role: str, *, proxied: bool = False, **job: object) -> Worker:
        """Start a worker process with a role from ``tests.support.worker_roles``.

        ``settings`` extend and override the site's settings.
        """
        more = job.pop("settings", {})
        assert isinstance(more, Mapping)
        values = self.values(proxied=proxied, **more)
        worker = self.workers.start(role, settings=values, queue=self.queue, **job)
        self._started.append(worker)
        return worker

    async def consumers(self) -> int:
        """Return the number of consumers of the queue, as reported by the broker."""
        assert self.deployment.consumers is not None
        return await self.deployment.consumers(self, self.queue)

    # -- the server --------------------------------------------------------------------------

    def freeze(self) -> None:
        """Stop the server with SIGSTOP."""
        if self.broker is not None:
            self.broker.freeze()
        else:
            assert self.owner is not None
            self.owner.freeze()

    def thaw(self) -> None:
        """Resume the server with SIGCONT."""
        if self.broker is not None:
            self.broker.thaw()
        else:
            assert self.owner is not None
            self.owner.thaw()

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        if self.broker is not None:
            self.broker.kill()
        else:
            assert self.owner is not None
            self.owner.kill()

    def restart(self) -> None:
        """Start the server with its existing data, and wait until it is ready."""
        if self.broker is not None:
            self.broker.restart()
        else:
            self.owner = self.worker("own")
            self.owner.wait_for("ready")
