"""Redis, RabbitMQ and Kafka: their packages, configuration, commands and readiness."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from local_brokers import probes
from local_brokers.state import REPOSITORY

Ports = Mapping[str, int]


class CannotPrepare(Exception):
    """A server's files could not be created; the message contains the output of the tool."""


@dataclass(frozen=True)
class Command:
    """Command and environment of one process of a server."""

    argv: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class Server(ABC):
    """Broker in the directory `home`; `down` removes everything in it except `keep`.

    `settings` are lines that are appended to the configuration and override earlier lines. Port
    names in them, such as `{redis}`, are replaced by port numbers.
    """

    name: ClassVar[str]
    variable: ClassVar[str]
    port_names: ClassVar[tuple[str, ...]]
    ready_within: ClassVar[float]
    keep: ClassVar[str | None] = None

    def __init__(self, directory: Path, settings: Sequence[str] = ()) -> None:
        self.home = directory / self.name
        self.log = self.home / "server.log"
        self._settings = settings

    @abstractmethod
    def missing_packages(self) -> list[str]:
        """Return the Debian packages whose programs are not installed."""

    @abstractmethod
    def prepare(self, ports: Ports) -> None:
        """Create the files that the server needs, but keep the data of an earlier start."""

    @abstractmethod
    def commands(self, ports: Ports) -> list[Command]:
        """Return the commands that start the server's processes, in order."""

    @abstractmethod
    def probe(self, ports: Ports) -> None:
        """Return if the server is ready; raise otherwise."""

    @abstractmethod
    def url(self, ports: Ports) -> str:
        """Return the URL for clients."""

    def further_urls(self, ports: Ports) -> dict[str, str]:
        """Return other URLs of the server, by the variable that contains them; none by default."""
        return {}

    def _further_settings(self, ports: Ports) -> list[str]:
        return [line.format_map(ports) for line in self._settings]


class Redis(Server):
    name = "redis"
    variable = "QKIT_TEST_REDIS_URL"
    port_names = ("redis",)
    ready_within = 30.0

    def missing_packages(self) -> list[str]:
        return [] if shutil.which("redis-server") else ["redis-server"]

    def prepare(self, ports: Ports) -> None:
        data = self.home / "data"
        data.mkdir(parents=True, exist_ok=True)
        # `appendonly`, so that the data survives a test that kills and restarts the server.
        _write(
            self.home / "redis.conf",
            "bind 127.0.0.1",
            f"port {ports['redis']}",
            f'dir "{data}"',
            "daemonize no",
            "appendonly yes",
            'save ""',
            *self._further_settings(ports),
        )

    def commands(self, ports: Ports) -> list[Command]:
        return [Command(["redis-server", str(self.home / "redis.conf")])]

    def probe(self, ports: Ports) -> None:
        probes.redis(ports["redis"])

    def url(self, ports: Ports) -> str:
        return f"redis://127.0.0.1:{ports['redis']}/0"


class RabbitMQ(Server):
    name = "rabbitmq"
    variable = "QKIT_TEST_RABBITMQ_URL"
    port_names = ("amqp", "distribution", "epmd", "management")
    ready_within = 120.0

    # Not the wrapper in /usr/sbin, which must be run as root or `rabbitmq` and switches to the user
    # `rabbitmq`; that user cannot read a checkout in a home directory.
    _program = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")

    def missing_packages(self) -> list[str]:
        return [] if self._program.exists() else ["rabbitmq-server"]

    def prepare(self, ports: Ports) -> None:
        for name in ("data", "logs"):
            (self.home / name).mkdir(parents=True, exist_ok=True)
        _write(self.home / "enabled_plugins", "[rabbitmq_management].")
        _write(
            self.home / "rabbitmq.conf",
            f"listeners.tcp.1 = 127.0.0.1:{ports['amqp']}",
            # With the default limit, a nearly full disk would block the tests' publishers.
            "disk_free_limit.absolute = 50MB",
            "management.tcp.ip = 127.0.0.1",
            f"management.tcp.port = {ports['management']}",
            *self._further_settings(ports),
        )

    def commands(self, ports: Ports) -> list[Command]:
        erlang = {
            # The Erlang cookie is created in HOME, so that no other node on the machine shares it.
            "HOME": str(self.home),
            "ERL_EPMD_PORT": str(ports["epmd"]),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }
        node = {
            "RABBITMQ_NODENAME": f"qkit-{ports['amqp']}@localhost",
            "RABBITMQ_NODE_PORT": str(ports["amqp"]),
            "RABBITMQ_DIST_PORT": str(ports["distribution"]),
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_MNESIA_BASE": str(self.home / "data"),
            "RABBITMQ_LOG_BASE": str(self.home / "logs"),
            "RABBITMQ_CONFIG_FILE": str(self.home / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.home / "enabled_plugins"),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",  # ignore the system's settings
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "detached": "1",  # the start script execs the Erlang VM instead of supervising it
        }
        return [
            # If the node started epmd itself, nothing would stop it.
            Command(["epmd"], erlang),
            Command([str(self._program)], {**erlang, **node}),
        ]

    def probe(self, ports: Ports) -> None:
        probes.amqp(ports["amqp"])

    def url(self, ports: Ports) -> str:
        return f"amqp://guest:guest@127.0.0.1:{ports['amqp']}/"

    def further_urls(self, ports: Ports) -> dict[str, str]:
        return {"QKIT_TEST_RABBITMQ_MANAGEMENT_URL": f"http://127.0.0.1:{ports['management']}"}


class Kafka(Server):
    name = "kafka"
    variable = "QKIT_TEST_KAFKA_URL"
    port_names = ("kafka", "controller")
    ready_within = 120.0
    keep = "libs"  # jars, which the next `up` would otherwise download again

    _pom = REPOSITORY / "scripts" / "kafka" / "pom.xml"
    _oldest_java = 17

    def missing_packages(self) -> list[str]:
        missing = []
        if _java_version() < self._oldest_java:
            missing.append("openjdk-17-jre-headless")
        if not self._has_libraries() and shutil.which("mvn") is None:
            missing.append("maven")
        return missing

    def prepare(self, ports: Ports) -> None:
        data = self.home / "data"
        self.home.mkdir(parents=True, exist_ok=True)
        self._fetch_libraries()
        properties = self.home / "server.properties"
        _write(
            properties,
            "process.roles=broker,controller",
            "node.id=1",
            f"controller.quorum.voters=1@127.0.0.1:{ports['controller']}",
            "controller.listener.names=CONTROLLER",
            f"listeners=PLAINTEXT://127.0.0.1:{ports['kafka']},"
            f"CONTROLLER://127.0.0.1:{ports['controller']}",
            f"advertised.listeners=PLAINTEXT://127.0.0.1:{ports['kafka']}",
            f"log.dirs={data}",
            # With one node, internal topics cannot have the default of three replicas.
            "offsets.topic.replication.factor=1",
            "offsets.topic.num.partitions=4",
            "transaction.state.log.replication.factor=1",
            "transaction.state.log.min.isr=1",
            "transaction.state.log.num.partitions=4",
            "share.coordinator.state.topic.replication.factor=1",
            "share.coordinator.state.topic.min.isr=1",
            # Do not wait three seconds for more consumers, because tests often start new groups.
            "group.initial.rebalance.delay.ms=0",
            "group.min.session.timeout.ms=500",
            # The default buffer of 128 MiB would take a quarter of the heap.
            "log.cleaner.dedupe.buffer.size=4194304",
            *self._further_settings(ports),
        )
        if not (data / "meta.properties").exists():
            storage_tool = self._java("kafka.tools.StorageTool")
            cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
            _run(
                [*storage_tool, "format", f"--cluster-id={cluster}", f"--config={properties}"],
                "Kafka could not format its data directory",
            )

    def commands(self, ports: Ports) -> list[Command]:
        return [Command(self._java("kafka.Kafka", str(self.home / "server.properties")))]

    def probe(self, ports: Ports) -> None:
        probes.kafka(ports["kafka"])

    def url(self, ports: Ports) -> str:
        return f"127.0.0.1:{ports['kafka']}"

    def _java(self, *arguments: str) -> list[str]:
        return [
            "java",
            "-Xms128m",
            "-Xmx512m",
            "-XX:+UseSerialGC",
            "-Djava.awt.headless=true",
            "-Djava.net.preferIPv4Stack=true",
            f"-Dlog4j2.configurationFile={self._pom.with_name('log4j2.properties')}",
            "-cp",
            f"{self.home / 'libs'}/*",
            *arguments,
        ]

    def _fetch_libraries(self) -> None:
        if self._has_libraries():
            return
        print("downloading Kafka with Maven", file=sys.stderr, flush=True)
        partial = self.home / "libs.partial"
        for leftover in (partial, self.home / "libs"):
            shutil.rmtree(leftover, ignore_errors=True)
        maven = ["mvn", "--batch-mode", "--quiet", f"--file={self._pom}"]
        _run(
            [*maven, "dependency:copy-dependencies", f"-DoutputDirectory={partial}"],
            "Maven could not download Kafka",
        )
        _write(partial / "pom.sha256", self._pom_digest())
        partial.rename(self.home / "libs")

    def _has_libraries(self) -> bool:
        stamp = self.home / "libs" / "pom.sha256"
        return stamp.exists() and stamp.read_text().strip() == self._pom_digest()

    def _pom_digest(self) -> str:
        return hashlib.sha256(self._pom.read_bytes()).hexdigest()


SERVERS: tuple[type[Server], ...] = (Redis, RabbitMQ, Kafka)


def _write(path: Path, *lines: str) -> None:
    path.write_text("\n".join(lines) + "\n")


def _run(argv: list[str], failure: str) -> None:
    result = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ,
        check=False,
    )
    if result.returncode:
        raise CannotPrepare(f"{failure}:\n{result.stdout[-4000:]}")


def _java_version() -> int:
    if shutil.which("java") is None:
        return 0
    result = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False)
    found = re.search(r'version "(\d+)', result.stderr)
    return int(found.group(1)) if found else 0
