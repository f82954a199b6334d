"""Private brokers, for tests that kill, freeze and restart them.

    with private_broker("redis") as redis:
        with redis.killed():  # kill -9; afterwards it runs again, same address, same data
            ...
        with redis.frozen():  # SIGSTOP; afterwards it goes on
            ...

Each has a directory and ports of its own. A guard in another process ends it and removes its data
when the test is over, also when the tests themselves were killed.
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
    # What it confirmed is on the disk: nothing may be missing after a kill.
    "redis": ["appendfsync always"],
    "rabbitmq": [],
    "kafka": [],
}


class PrivateBroker:
    """One server that a test may do anything to.

    ``url`` is its address. A Kafka client follows the address that the server gives it, so a Kafka
    that is to be reached through a proxy is made with the proxy's port as ``advertised``; it
    listens for the proxy at ``proxied``. The others are reached at their own port by a proxy too.
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
                raise ValueError("only Kafka tells its clients where it is")
            proxied = free_port()
            lines += _listeners(proxied, advertised)
        self._brokers = Brokers(directory, [name], {name: lines})
        if name == "kafka":
            _borrow_libraries(directory)
        self.restart()
        (status,) = self._brokers.status()
        self.url = status.url
        self.host, self.port = _address(status.url)
        self.proxied = self.port if proxied is None else proxied

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes now."""
        (status,) = self._brokers.status()
        return status.pids

    def restart(self) -> None:
        """Start it unless it runs, at the same address with the same data; wait for it."""
        failures = self._brokers.up()
        if failures:
            raise RuntimeError(f"{self.name} did not start: {failures[self.name]}")

    def kill(self) -> None:
        """kill -9: no chance to save anything."""
        self._brokers.stop(grace=0)

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, nobody answers."""
        self._brokers.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._brokers.signal(signal.SIGCONT)

    @contextmanager
    def killed(self) -> Iterator[None]:
        """Dead inside, back after it."""
        self.kill()
        try:
            yield
        finally:
            self.restart()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Frozen inside, going on after it."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()


@contextmanager
def private_broker(
    name: str, *, settings: Sequence[str] = (), advertised: int | None = None
) -> Iterator[PrivateBroker]:
    """A broker for one test or module; without its program the test skips, or fails in CI."""
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
    """A second way into Kafka: through a proxy, which its clients are then told to use."""
    return [
        "listeners=PLAINTEXT://127.0.0.1:{kafka},CONTROLLER://127.0.0.1:{controller},"
        f"PROXIED://127.0.0.1:{proxied}",
        f"advertised.listeners=PLAINTEXT://127.0.0.1:{{kafka}},PROXIED://127.0.0.1:{advertised}",
        "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,PROXIED:PLAINTEXT",
        "inter.broker.listener.name=PLAINTEXT",
    ]


def _borrow_libraries(directory: Path) -> None:
    """Kafka's jars do not change: use those that `scripts/brokers` has fetched, if it has."""
    fetched = Kafka(brokers_directory()).home / "libs"
    if fetched.exists():
        home = Kafka(directory).home
        home.mkdir(parents=True)
        (home / "libs").symlink_to(fetched.resolve())
