"""State of the servers in .brokers/state.json, and the lock that protects changes to it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from local_brokers.processes import ProcessRecord

REPOSITORY = Path(__file__).resolve().parents[2]


def brokers_directory() -> Path:
    """Return the directory for data, logs and state: QKIT_BROKERS_DIR, or .brokers by default."""
    return Path(os.environ.get("QKIT_BROKERS_DIR") or REPOSITORY / ".brokers").absolute()


@dataclass
class ServerState:
    """Ports and processes of a server; a stopped server keeps its ports."""

    ports: dict[str, int]
    processes: list[ProcessRecord] = field(default_factory=list)


class StateFile:
    """File with the state of the servers; write it only inside `locked()`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._path = directory / "state.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the directory, so that other commands wait."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def load(self) -> dict[str, ServerState]:
        try:
            raw = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        return {
            name: ServerState(
                ports=entry["ports"],
                processes=[ProcessRecord(**record) for record in entry["processes"]],
            )
            for name, entry in raw.items()
        }

    def put(self, name: str, server: ServerState) -> None:
        self._write({**self.load(), name: server})

    def remove(self, name: str) -> None:
        self._write({key: value for key, value in self.load().items() if key != name})

    def _write(self, servers: dict[str, ServerState]) -> None:
        # Replace the file atomically, because `urls` and `status` read it without the lock.
        partial = self._path.with_suffix(".partial")
        partial.write_text(
            json.dumps({name: asdict(server) for name, server in servers.items()}, indent=2) + "\n"
        )
        partial.replace(self._path)
