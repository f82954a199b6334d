"""Start, stop and status of the servers; every change is made under the lock."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from local_brokers import packages, probes, processes
from local_brokers.servers import SERVERS, CannotPrepare, Server
from local_brokers.state import ServerState, StateFile

GRACE_SECONDS = 5.0
LOG_TAIL_LINES = 40


class StartFailed(Exception):
    """A server did not become ready; the message contains the end of its log."""


@dataclass(frozen=True)
class Status:
    """Status of one server, for `status` and `urls`."""

    name: str
    variable: str
    running: bool
    url: str
    pids: tuple[int, ...]
    further_urls: Mapping[str, str]

    @property
    def urls(self) -> dict[str, str]:
        """All URLs of the server, by variable."""
        return {self.variable: self.url, **self.further_urls}


class Brokers:
    """Servers in one directory: all, or those in `names`.

    `settings` contains additional configuration lines for each server, by its name.
    """

    def __init__(
        self,
        directory: Path,
        names: Sequence[str] = (),
        settings: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._state = StateFile(directory)
        self._servers: list[Server] = [
            server(directory, (settings or {}).get(server.name, ()))
            for server in SERVERS
            if not names or server.name in names
        ]

    def up(self) -> dict[str, str]:
        """Start the stopped servers and wait for them; return the reasons of failures by name."""
        with self._state.locked():
            stopped = [server for server in self._servers if not self._is_running(server)]
            failures = _install_programs(stopped)
            started: list[Server] = []
            for server in stopped:
                if server.name in failures:
                    continue
                try:
                    self._start(server)
                    started.append(server)
                except (CannotPrepare, RuntimeError, OSError) as error:
                    failures[server.name] = str(error)
            # Wait only now, so that the servers start concurrently.
            for server in started:
                try:
                    self._wait_until_ready(server)
                except StartFailed as error:
                    failures[server.name] = str(error)
        return failures

    def stop(self, *, grace: float = GRACE_SECONDS) -> None:
        """Stop the servers but keep their data and ports for the next `up`."""
        with self._state.locked():
            self._stop(self._servers, grace)

    def down(self) -> None:
        """Stop the servers and remove their data."""
        with self._state.locked():
            self._stop(self._servers, GRACE_SECONDS)
            for server in self._servers:
                self._state.remove(server.name)
                _remove_all_but(server.home, server.keep)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the recorded processes: SIGSTOP freezes a server, SIGCONT thaws it."""
        recorded = self._state.load()
        for server in self._servers:
            for record in recorded[server.name].processes if server.name in recorded else ():
                record.signal(number)

    def status(self) -> list[Status]:
        """Return the status of the servers; a server is running only if its probe succeeds."""
        recorded = self._state.load()
        statuses = []
        for server in self._servers:
            state = recorded.get(server.name)
            running = state is not None and self._is_running(server)
            statuses.append(
                Status(
                    name=server.name,
                    variable=server.variable,
                    running=running,
                    url=server.url(state.ports) if state else "",
                    pids=tuple(record.pid for record in state.processes) if state else (),
                    further_urls=server.further_urls(state.ports) if running and state else {},
                )
            )
        return statuses

    def _is_running(self, server: Server) -> bool:
        state = self._state.load().get(server.name)
        if state is None or not state.processes:
            return False
        if not all(record.is_alive() for record in state.processes):
            return False
        return _ready(server, state)

    def _start(self, server: Server) -> None:
        former = self._state.load().get(server.name)
        if former:
            # After a crash, one of the server's processes may still be running.
            processes.end(former.processes, grace=GRACE_SECONDS)
        known = former is not None and set(former.ports) == set(server.port_names)
        if former and known and _are_freed(former.ports.values()):
            state = ServerState(ports=former.ports)
        else:
            state = ServerState(ports=_pick_ports(server.port_names))
        server.prepare(state.ports)
        for command in server.commands(state.ports):
            record = processes.spawn(
                command.argv,
                environment={**os.environ, **command.environment},
                directory=server.home,
                log=server.log,
            )
            state.processes.append(record)
            # Record it immediately, so that `down` also stops the processes of an interrupted `up`.
            self._state.put(server.name, state)

    def _wait_until_ready(self, server: Server) -> None:
        state = self._state.load()[server.name]
        deadline = time.monotonic() + server.ready_within
        while not _ready(server, state):
            died = not all(record.is_alive() for record in state.processes)
            if died or time.monotonic() > deadline:
                what = "exited" if died else f"was not ready within {server.ready_within:.0f} s"
                self._stop([server], GRACE_SECONDS)
                raise StartFailed(
                    f"{server.name} {what}; the end of {server.log}:\n{_tail(server)}"
                )
            time.sleep(0.1)

    def _stop(self, servers: Iterable[Server], grace: float) -> None:
        recorded = self._state.load()
        present = [server for server in servers if server.name in recorded]
        processes.end(
            [record for server in present for record in recorded[server.name].processes],
            grace=grace,
        )
        for server in present:
            self._state.put(server.name, ServerState(ports=recorded[server.name].ports))


def _are_freed(ports: Iterable[int]) -> bool:
    """Wait up to `GRACE_SECONDS` for an earlier server's ports; return whether they are free.

    The kernel may still be closing its connections.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    while not all(probes.is_free(port) for port in ports):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _install_programs(servers: Sequence[Server]) -> dict[str, str]:
    """Install all missing packages in one call; return the failures by server name."""
    missing = {server.name: server.missing_packages() for server in servers}
    try:
        packages.ensure([package for names in missing.values() for package in names])
    except packages.Missing as error:
        return {name: str(error) for name, names in missing.items() if names}
    return {}


def _ready(server: Server, state: ServerState) -> bool:
    try:
        server.probe(state.ports)
    except (OSError, probes.NotReady):
        return False
    return True


def _pick_ports(names: Sequence[str]) -> dict[str, int]:
    ports: dict[str, int] = {}
    for name in names:
        port = probes.free_port()
        while port in ports.values():
            port = probes.free_port()
        ports[name] = port
    return ports


def _tail(server: Server) -> str:
    if not server.log.exists():
        return "(no log)"
    lines = server.log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])


def _remove_all_but(home: Path, keep: str | None) -> None:
    if not home.exists():
        return
    for entry in home.iterdir():
        if entry.name == keep:
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    if not any(home.iterdir()):
        home.rmdir()


def report(failures: dict[str, str]) -> None:
    for name, reason in failures.items():
        print(f"{name}: {reason}", file=sys.stderr)
