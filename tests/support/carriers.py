"""The backends that the tests of reliability run on: one entry in a table for each.

A test says which carriers it fits and gets a ``Site`` for each of them::

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
from tests.support.sessions import SESSION
from tests.support.workers import Worker, Workers

__all__ = [
    "CARRIERS",
    "Carrier",
    "Servers",
    "Site",
    "behind_a_network",
    "durable",
    "in_other_processes",
    "keeps_dead_letters",
    "on",
    "outlives_its_server",
    "redelivers",
]

Values = dict[str, Any]
LEASE: Final = 2.0  # seconds; short, so that a dead worker's messages are back soon

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Carrier:
    """How one backend is reached, and how the broker itself is asked.

    ``settings`` turns an address into settings. ``consumers`` asks the server, past qkit, how many
    consumers a queue has. ``back_within`` is how long what a dead worker held may stay away: the
    lease, or where there is none what the broker takes to notice.
    """

    name: str
    capabilities: Capabilities
    settings: Callable[[str], Values]
    server: str | None = None
    shared: bool = True  # another process can reach it
    variant: bool = False  # a way to use another carrier, which stands for it in most tests
    owned: bool = False  # a process of its own holds it: native's way to be a server
    consumers: Callable[[Site, str], Awaitable[int]] | None = None
    back_within: float = LEASE

    def __str__(self) -> str:
        return self.name


# -- how the brokers themselves are asked ------------------------------------------------------


async def _parked_on_redis(site: Site, queue: str) -> int:
    """Consumers of lists that wait at the server; the only ones there while a test asks."""
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
    """Members of the group that owns the queue, once they agree on who has what."""
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


# -- the table ---------------------------------------------------------------------------------

CARRIERS: Final = (
    Carrier(
        "native-memory",
        MATRIX["native-memory"],
        lambda address: {"type": "native"},
        shared=False,
    ),
    Carrier(
        "native-durable",
        MATRIX["native-durable"],
        lambda address: {"type": "native", "path": address},
    ),
    Carrier(
        "native-socket",
        MATRIX["native-durable"],
        lambda address: {"type": "native", "path": address},
        owned=True,
        consumers=_known_to_owner,
    ),
    Carrier(
        "redis-list",
        MATRIX["redis-list"],
        lambda address: {"type": "redis", "mode": "list", "url": address},
        server="redis",
        consumers=_parked_on_redis,
    ),
    Carrier(
        "redis-list-unreliable",
        MATRIX["redis-list-unreliable"],
        lambda address: {"type": "redis", "mode": "list", "url": address, "reliable": False},
        server="redis",
        consumers=_parked_on_redis,
        variant=True,
    ),
    Carrier(
        "redis-pubsub",
        MATRIX["redis-pubsub"],
        lambda address: {"type": "redis", "mode": "pubsub", "url": address},
        server="redis",
        consumers=_subscribed_on_redis,
    ),
    Carrier(
        "rabbitmq",
        MATRIX["rabbitmq-classic"],
        lambda address: {"type": "rabbitmq", "url": address},
        server="rabbitmq",
        consumers=_consuming_on_rabbitmq,
    ),
    Carrier(
        "kafka",
        MATRIX["kafka"],
        lambda address: {"type": "kafka", "url": address},
        server="kafka",
        consumers=_members_on_kafka,
        back_within=SESSION,
    ),
)

Fits = Callable[[Carrier], object]


def redelivers(carrier: Carrier) -> bool:
    """What a consumer did not acknowledge is delivered again."""
    return bool(carrier.capabilities.redelivery)


def durable(carrier: Carrier) -> bool:
    """An accepted send survives a restart."""
    return bool(carrier.capabilities.durable)


def keeps_dead_letters(carrier: Carrier) -> bool:
    """A final failure is kept."""
    return bool(carrier.capabilities.dead_letters)


def in_other_processes(carrier: Carrier) -> bool:
    """A worker in a process of its own can consume from it."""
    return carrier.shared


def outlives_its_server(carrier: Carrier) -> bool:
    """Its messages lie with a process that can be stopped and killed: a broker, or an owner."""
    return carrier.server is not None or carrier.owned


def behind_a_network(carrier: Carrier) -> bool:
    """It is reached over TCP, so a proxy can stand in between."""
    return carrier.server is not None


def on(*fits: Fits, variants: bool = False) -> pytest.MarkDecorator:
    """Run a test on each carrier that it fits, with a ``site`` there."""
    return pytest.mark.parametrize(
        "site",
        [
            pytest.param(
                carrier, id=carrier.name, marks=[pytest.mark.broker] * bool(carrier.server)
            )
            for carrier in CARRIERS
            if all(fit(carrier) for fit in fits) and (variants or not carrier.variant)
        ],
        indirect=True,
    )


# -- where a test takes place ------------------------------------------------------------------


class Servers:
    """The private servers of a test run; each starts when the first test asks for it."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self._stack = ExitStack()
        self._started: dict[str, tuple[PrivateBroker, Proxy]] = {}

    def __getitem__(self, name: str) -> tuple[PrivateBroker, Proxy]:
        """A server that is ready, and a proxy in front of it."""
        if name not in self._started:
            self._started[name] = self._start(name)
        return self._started[name]

    def _start(self, name: str) -> tuple[PrivateBroker, Proxy]:
        port = free_port()
        advertised = port if name == "kafka" else None
        broker = self._stack.enter_context(private_broker(name, advertised=advertised))
        return broker, self._stack.enter_context(Proxy(broker.proxied, port=port))

    def close(self) -> None:
        """End them all."""
        self._stack.close()


@dataclass
class Site:
    """A carrier with a running server, for one test; ``queue`` is a name nobody else uses."""

    carrier: Carrier
    workers: Workers
    directory: Path
    broker: PrivateBroker | None = None
    proxy: Proxy | None = None
    owner: Worker | None = None
    queue: str = field(default_factory=lambda: f"t{next(_numbers)}-{uuid.uuid4().hex[:8]}")
    _started: list[Worker] = field(default_factory=list)

    @classmethod
    def open(cls, carrier: Carrier, servers: Servers, directory: Path) -> Iterator[Site]:
        """For a fixture: what it takes is there while the test runs, and whole again after it."""
        site = cls(carrier, servers.workers, directory)
        if carrier.server is not None:
            site.broker, site.proxy = servers[carrier.server]
        if carrier.owned:
            site.restart()
        yield site
        for worker in site._started:
            worker.kill()
        if site.broker is not None and site.proxy is not None:
            site.proxy.heal()
            site.broker.thaw()
            site.broker.restart()

    # -- reaching it -------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The address of the server itself, or the directory."""
        return str(self.directory) if self.broker is None else self.broker.url

    def values(self, *, proxied: bool = False, **more: object) -> Values:
        """Settings as plain values, for this process or another."""
        address = self.url
        if proxied:
            assert self.broker is not None
            assert self.proxy is not None
            address = address.replace(str(self.broker.port), str(self.proxy.port))
        leases = {"ack_deadline": LEASE} if self.carrier.capabilities.lease else {}
        return {**self.carrier.settings(address), **leases, **more}

    def settings(self, *, proxied: bool = False, **more: object) -> Settings:
        """The same, validated."""
        return Settings(**self.values(proxied=proxied, **more))

    def backend(self, *, proxied: bool = False, **more: object) -> Backend:
        """A backend that is not started; in memory each is a world of its own."""
        return open_backend(self.settings(proxied=proxied, **more), SystemClock())

    def service(
        self,
        *handlers: object,
        backend: Backend | None = None,
        proxied: bool = False,
        **more: object,
    ) -> QueueService:
        """A service that is not started."""
        service = QueueService(
            self.settings(proxied=proxied, **more),
            backend=backend or self.backend(proxied=proxied, **more),
        )
        for handler in handlers:
            service.register(handler)
        return service

    def worker(self, role: str, *, proxied: bool = False, **job: object) -> Worker:
        """A process with a role of ``tests.support.working``; ``settings`` add to the site's."""
        more = job.pop("settings", {})
        assert isinstance(more, Mapping)
        values = self.values(proxied=proxied, **more)
        worker = self.workers.start(role, settings=values, queue=self.queue, **job)
        self._started.append(worker)
        return worker

    async def consumers(self) -> int:
        """How many consumers the queue has, as its broker says."""
        assert self.carrier.consumers is not None
        return await self.carrier.consumers(self, self.queue)

    # -- its server --------------------------------------------------------------------------

    def freeze(self) -> None:
        """Stop the server as SIGSTOP does."""
        if self.broker is not None:
            self.broker.freeze()
        else:
            assert self.owner is not None
            self.owner.freeze()

    def thaw(self) -> None:
        """Let it go on."""
        if self.broker is not None:
            self.broker.thaw()
        else:
            assert self.owner is not None
            self.owner.thaw()

    def kill(self) -> None:
        """kill -9 the server."""
        if self.broker is not None:
            self.broker.kill()
        else:
            assert self.owner is not None
            self.owner.kill()

    def restart(self) -> None:
        """Start it again with what it had; returns when it is ready."""
        if self.broker is not None:
            self.broker.restart()
        else:
            self.owner = self.worker("own")
            self.owner.wait_for("ready")
