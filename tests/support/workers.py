"""Worker processes for the tests of reliability: started quickly, heard over a pipe, killed.

One interpreter imports everything once; each worker is a fork of it. What a worker says is kept
here, with the time at which it was heard, whatever becomes of the worker.
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
PATIENCE = 60.0  # seconds that only bound a test that fails


@dataclass(frozen=True)
class Line:
    """One thing a worker said: a word, what belongs to it, and when it was heard."""

    word: str
    rest: tuple[str, ...]
    at: float

    @property
    def number(self) -> int:
        """Which message it speaks of."""
        return int(self.rest[0])


class Worker:
    """A process with a role, and everything it has said so far."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.lines: list[Line] = []
        self.pid = 0
        self.exit_code: int | None = None

    def of(self, word: str) -> list[Line]:
        """The lines that begin with this word."""
        return [line for line in list(self.lines) if line.word == word]

    def numbers(self, word: str) -> list[int]:
        """The messages of which it said this word, in order."""
        return [line.number for line in self.of(word)]

    def wait(self, condition: Callable[[], object], within: float = PATIENCE) -> None:
        """Block until what it said makes the condition true."""
        self._workers.wait(condition, within)

    def wait_for(self, word: str, count: int = 1, within: float = PATIENCE) -> Line:
        """Block until it has said a word so many times; the line that did it."""
        self.wait(lambda: self.exit_code is not None or len(self.of(word)) >= count, within)
        found = self.of(word)
        if len(found) < count:
            pytest.fail(f"it ended without saying {word!r}: {self._workers.errors()}")
        return found[count - 1]

    def wait_for_exit(self, within: float = PATIENCE) -> int:
        """Block until it has ended; its exit code, or minus the signal that ended it."""
        self.wait(lambda: self.exit_code is not None, within)
        assert self.exit_code is not None
        return self.exit_code

    async def said(self, word: str, count: int = 1, within: float = PATIENCE) -> None:
        """As ``wait_for``, in a test that goes on meanwhile."""
        await eventually(lambda: self.exit_code is not None or len(self.of(word)) >= count, within)
        self.wait_for(word, count)

    async def ended(self, within: float = PATIENCE) -> int:
        """As ``wait_for_exit``, in a test that goes on meanwhile."""
        await eventually(lambda: self.exit_code is not None, within)
        return self.wait_for_exit()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        if self.exit_code is None:
            os.kill(self.pid, number)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, and wait for the end."""
        self.signal(signal.SIGKILL)
        self.wait_for_exit()

    def memory(self) -> int:
        """Bytes of memory that it holds now."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def __repr__(self) -> str:
        return f"<Worker {self.pid}, exit code {self.exit_code}, {len(self.lines)} lines>"


class Workers:
    """Starts workers and hears them; closing it ends all."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in close()
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", "tests.support.working"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
            start_new_session=True,  # it ends its whole group when it ends
        )
        self._workers: dict[str, Worker] = {}
        self._numbers = itertools.count(1)
        self._heard = threading.Condition()
        self._hearing = threading.Thread(target=self._hear, name="workers", daemon=True)
        self._hearing.start()

    def start(self, role: str, **job: object) -> Worker:
        """Fork a worker; see ``tests.support.working`` for the roles."""
        number = str(next(self._numbers))
        worker = self._workers[number] = Worker(self)
        assert self._nursery.stdin is not None
        self._nursery.stdin.write(json.dumps({"number": number, "role": role, **job}) + "\n")
        self.wait(lambda: worker.pid)
        return worker

    def wait(self, condition: Callable[[], object], within: float = PATIENCE) -> None:
        """Block until the condition holds; it is looked at whenever a worker says something."""
        with self._heard:
            if not self._heard.wait_for(condition, within):
                pytest.fail(f"it never happened, within {within:g} s; {self.errors()}")

    def errors(self) -> str:
        """The end of what the workers wrote to their standard error."""
        self._errors.flush()
        text = Path(f"/proc/self/fd/{self._errors.fileno()}").read_text(errors="replace")
        return f"their last words were: {text[-3000:]}"

    def _hear(self) -> None:
        assert self._nursery.stdout is not None
        for text in self._nursery.stdout:
            number, word, *rest = text.split()
            worker = self._workers[number]
            with self._heard:
                worker.lines.append(Line(word, tuple(rest), time.monotonic()))
                if word == "pid":
                    worker.pid = int(rest[0])
                elif word == "exit":
                    worker.exit_code = int(rest[0])
                self._heard.notify_all()

    def close(self) -> None:
        """End every worker."""
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        self._nursery.stdin.close()
        self._nursery.wait()
        self._hearing.join()
        self._nursery.stdout.close()
        self._errors.close()
