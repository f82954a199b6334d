"""Private brokers, for tests that kill, freeze and restart them.

    with private_broker("redis") as redis:
        with redis.killed():  # SIGKILL; restarted afterwards with the same address and data
            ...
        with redis.frozen():  # SIGSTOP; resumed afterwards
            ...

Each broker has its own directory and ports. A guard process stops it and removes its data after the
test, even if the test process was killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest

from local_brokers.lifecycle import Brokers
from local_brokers.probes import free_port
from local_brokers.servers import Kafka
from local_brokers.state import brokers_directory
from tests.support.brokers import SCRIPT, brokers_required

__all__ = ["PrivateBroker", "private_broker"]

SETTINGS: Final[Mapping[str, Sequence[str]]] = {
    # Sync every write, so that a killed server loses nothing that it has confirmed.
    "redis": ["appendfsync always"],
    "rabbitmq": [],
    "kafka": [],
}


class PrivateBroker:
    """Broker that a test may kill, freeze and restart.

    ``url`` is its address, and ``proxied`` is the port that a proxy connects to. Kafka clients
    connect to the address that the broker advertises, so a Kafka broker behind a proxy needs the
    proxy's port as ``advertised`` and has a separate listener on ``proxied``. For other brokers
    ``proxied`` is the normal port.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        *,
        settings: Sequence[str] = (),
        advertised: int | None = None,
    ) -> None:
        self.name = name
        lines = [*SETTINGS[name], *settings]
        proxied = None
        if advertised is not None:
            if name != "kafka":
                raise ValueError(f"advertised is only valid for kafka, not for {name}")
            proxied = free_port()
            lines += _listeners(proxied, advertised)
        self._brokers = Brokers(directory, [name], {name: lines})
        if name == "kafka":
            _borrow_libraries(directory)
        self.restart()
        (status,) = self._brokers.status()
        self.url = status.url
        self.further_urls = status.further_urls
        self.host, self.port = _address(status.url)
        self.proxied = self.port if proxied is None else proxied

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the running server."""
        (status,) = self._brokers.status()
        return status.pids

    def restart(self) -> None:
        """Start the server if it is not running, with the same address and data."""
        failures = self._brokers.up()
        if failures:
            raise RuntimeError(f"{self.name} did not start: {failures[self.name]}")

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        self._brokers.stop(grace=0)

    def freeze(self) -> None:
        """Stop the server with SIGSTOP: connections stay open but get no replies."""
        self._brokers.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume the server with SIGCONT."""
        self._brokers.signal(signal.SIGCONT)

    @contextmanager
    def killed(self) -> Iterator[None]:
        """Kill the server; restart it when the block ends."""
        self.kill()
        try:
            yield
        finally:
            self.restart()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze the server; resume it when the block ends."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()


@contextmanager
def private_broker(
    name: str, *, settings: Sequence[str] = (), advertised: int | None = None
) -> Iterator[PrivateBroker]:
    """Start a broker and stop it on exit; if it cannot start, skip the test, or fail in CI."""
    directory = Path(tempfile.mkdtemp(prefix=f"qkit-{name}-"))
    guard = subprocess.Popen(
        [sys.executable, str(SCRIPT), "guard"],
        env={**os.environ, "QKIT_BROKERS_DIR": str(directory)},
        stdin=subprocess.PIPE,
    )
    try:
        try:
            broker = PrivateBroker(name, directory, settings=settings, advertised=advertised)
        except RuntimeError as error:
            if brokers_required():
                pytest.fail(str(error), pytrace=False)
            pytest.skip(str(error))
        try:
            yield broker
        finally:
            broker.thaw()
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()


def _address(url: str) -> tuple[str, int]:
    address = urlsplit(url if "//" in url else f"//{url}")
    assert address.hostname is not None
    assert address.port is not None
    return address.hostname, address.port


def _listeners(proxied: int, advertised: int) -> list[str]:
    """Return settings for an additional Kafka listener that advertises the proxy's port."""
    return [
        "listeners=PLAINTEXT://127.0.0.1:{kafka},CONTROLLER://127.0.0.1:{controller},"
        f"PROXIED://127.0.0.1:{proxied}",
        f"advertised.listeners=PLAINTEXT://127.0.0.1:{{kafka}},PROXIED://127.0.0.1:{advertised}",
        "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,PROXIED:PLAINTEXT",
        "inter.broker.listener.name=PLAINTEXT",
    ]


def _borrow_libraries(directory: Path) -> None:
    """Link to the Kafka jars that `scripts/brokers` has already downloaded, if any."""
    fetched = Kafka(brokers_directory()).home / "libs"
    if fetched.exists():
        home = Kafka(directory).home
        home.mkdir(parents=True)
        (home / "libs").symlink_to(fetched.resolve())
