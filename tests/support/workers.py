"""Worker processes for the reliability tests.

A fork server imports everything once and forks each worker, so that workers start quickly. Workers
report over a pipe. Reports are stored with their arrival times and outlive a killed worker.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.waiting import eventually

__all__ = ["Line", "Worker", "Workers"]

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 60.0  # reached only if a test fails


@dataclass(frozen=True)
class Line:
    """Report from a worker: its first word, its other words, and the time of arrival."""

    word: str
    rest: tuple[str, ...]
    at: float

    @property
    def number(self) -> int:
        """Message number in the report."""
        return int(self.rest[0])


class Worker:
    """Worker process and the reports received from it."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.lines: list[Line] = []
        self.pid = 0
        self.exit_code: int | None = None

    def of(self, word: str) -> list[Line]:
        """Return the reports that start with this word."""
        return [line for line in list(self.lines) if line.word == word]

    def numbers(self, word: str) -> list[int]:
        """Return the message numbers of the reports that start with this word, in order."""
        return [line.number for line in self.of(word)]

    def wait(self, condition: Callable[[], object], within: float = TIMEOUT_SECONDS) -> None:
        """Block until the condition is true; see ``Workers.wait``."""
        self._workers.wait(condition, within)

    def wait_for(self, word: str, count: int = 1, within: float = TIMEOUT_SECONDS) -> Line:
        """Block until ``count`` reports start with this word, and return the last of these."""
        self.wait(lambda: self.exit_code is not None or len(self.of(word)) >= count, within)
        found = self.of(word)
        if len(found) < count:
            pytest.fail(f"the worker exited before reporting {word!r}; {self._workers.errors()}")
        return found[count - 1]

    def wait_for_exit(self, within: float = TIMEOUT_SECONDS) -> int:
        """Block until the worker exits; return its exit code, or the negated signal number."""
        self.wait(lambda: self.exit_code is not None, within)
        assert self.exit_code is not None
        return self.exit_code

    async def reported(self, word: str, count: int = 1, within: float = TIMEOUT_SECONDS) -> None:
        """Wait for reports like ``wait_for``, without blocking the event loop."""
        await eventually(lambda: self.exit_code is not None or len(self.of(word)) >= count, within)
        self.wait_for(word, count)

    async def exited(self, within: float = TIMEOUT_SECONDS) -> int:
        """Wait for the exit like ``wait_for_exit``, without blocking the event loop."""
        await eventually(lambda: self.exit_code is not None, within)
        return self.wait_for_exit()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker."""
        if self.exit_code is None:
            os.kill(self.pid, number)

    def freeze(self) -> None:
        """Stop the worker with SIGSTOP."""
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume the worker with SIGCONT."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the worker with SIGKILL and wait until it exits."""
        self.signal(signal.SIGKILL)
        self.wait_for_exit()

    def memory(self) -> int:
        """Return the resident memory of the worker in bytes."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def __repr__(self) -> str:
        return f"<Worker {self.pid}, exit code {self.exit_code}, {len(self.lines)} lines>"


class Workers:
    """Fork server that starts workers and collects their reports; ``close`` kills all workers."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in close()
        self._fork_server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.worker_roles"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
            start_new_session=True,  # the fork server kills its process group when it exits
        )
        self._workers: dict[str, Worker] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, name="workers", daemon=True)
        self._reader.start()

    def start(self, role: str, **job: object) -> Worker:
        """Fork a worker; see ``tests.support.worker_roles`` for the roles."""
        number = str(next(self._numbers))
        worker = self._workers[number] = Worker(self)
        assert self._fork_server.stdin is not None
        self._fork_server.stdin.write(json.dumps({"number": number, "role": role, **job}) + "\n")
        self.wait(lambda: worker.pid)
        return worker

    def wait(self, condition: Callable[[], object], within: float = TIMEOUT_SECONDS) -> None:
        """Block until the condition is true; it is checked after each report."""
        with self._changed:
            if not self._changed.wait_for(condition, within):
                pytest.fail(f"condition not true within {within:g} s; {self.errors()}")

    def errors(self) -> str:
        """Return the last 3,000 characters that the workers wrote to stderr."""
        self._errors.flush()
        text = Path(f"/proc/self/fd/{self._errors.fileno()}").read_text(errors="replace")
        return f"end of stderr: {text[-3000:]}"

    def _read(self) -> None:
        assert self._fork_server.stdout is not None
        for text in self._fork_server.stdout:
            number, word, *rest = text.split()
            worker = self._workers[number]
            with self._changed:
                worker.lines.append(Line(word, tuple(rest), time.monotonic()))
                if word == "pid":
                    worker.pid = int(rest[0])
                elif word == "exit":
                    worker.exit_code = int(rest[0])
                self._changed.notify_all()

    def close(self) -> None:
        """Kill every worker."""
        assert self._fork_server.stdin is not None
        assert self._fork_server.stdout is not None
        self._fork_server.stdin.close()
        self._fork_server.wait()
        self._reader.join()
        self._fork_server.stdout.close()
        self._errors.close()
