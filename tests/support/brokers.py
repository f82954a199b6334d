"""Addresses of brokers for tests: from the environment, in Docker, or on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "brokers"
VARIABLES = {
    "redis": "QKIT_TEST_REDIS_URL",
    "rabbitmq": "QKIT_TEST_RABBITMQ_URL",
    "kafka": "QKIT_TEST_KAFKA_URL",
}


class BrokerMissing(Exception):
    """Error raised when a broker is not available; its text is the reason."""


@contextmanager
def broker_url(name: str) -> Iterator[str]:
    """Yield the address of a running broker; if it is missing, skip the test, or fail in CI."""
    try:
        with _find(name) as url:
            yield url
    except BrokerMissing as missing:
        reason = f"no {name}: {missing}"
        if brokers_required():
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


def brokers_required() -> bool:
    """Return whether a missing broker fails a test instead of skipping it, as in CI."""
    return os.environ.get("CI", "").lower() in {"1", "true", "yes"} or (
        os.environ.get("QKIT_REQUIRE_BROKERS") == "1"
    )


@contextmanager
def _find(name: str) -> Iterator[str]:
    if url := os.environ.get(VARIABLES[name]):
        yield url
    elif _docker_answers():
        with _container(name) as url:
            yield url
    else:
        # Local servers keep running for the next test run; `make brokers-down` stops them.
        yield _local(name)


def _docker_answers() -> bool:
    """Ping the Docker engine over its socket; Docker's SDK leaks a socket if the ping fails."""
    address = urlsplit(os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock")
    try:
        with socket.socket(
            socket.AF_UNIX if address.scheme == "unix" else socket.AF_INET
        ) as engine:
            engine.settimeout(2)
            engine.connect(
                address.path
                if address.scheme == "unix"
                else (address.hostname or "localhost", address.port or 2375)
            )
            engine.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return b" 200 " in engine.recv(64)
    except OSError:
        return False


@contextmanager
def _container(name: str) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hide the warnings of testcontainers
        try:
            container, address = _start_container(name)
        except Exception as error:  # a failed pull raises various errors
            raise BrokerMissing(f"the container did not start: {error}") from error
    try:
        yield address
    finally:
        container.stop()


def _start_container(name: str) -> tuple[Any, str]:
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.waiting_utils import wait_for_logs
    from testcontainers.kafka import KafkaContainer

    if name == "kafka":
        kafka = KafkaContainer("confluentinc/cp-kafka:7.9.0").with_kraft().start()
        return kafka, kafka.get_bootstrap_server()
    if name == "redis":
        # Append-only file, as on the local server, because a test may restart Redis.
        container = DockerContainer("redis:7").with_command("redis-server --appendonly yes")
        port, ready, url = 6379, "Ready to accept connections", "redis://{}:{}/0"
    else:
        container = DockerContainer("rabbitmq:3.13")
        port, ready, url = 5672, "Server startup complete", "amqp://guest:guest@{}:{}/"
    container.with_exposed_ports(port).start()
    wait_for_logs(container, ready, timeout=60)
    return container, url.format(
        container.get_container_host_ip(), container.get_exposed_port(port)
    )


def _local(name: str) -> str:
    up = _script("up", name)
    if up.returncode:
        raise BrokerMissing(up.stderr.strip().removeprefix(f"{name}: "))
    lines = dict(line.split("=", 1) for line in _script("urls", name).stdout.splitlines())
    return lines[VARIABLES[name]]


def _script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )
