"""Several worker processes: started, started again when they crash, and drained together.

Each worker holds the reading end of a pipe whose other end only the supervisor has. When the
supervisor is gone, even by kill -9, the pipe closes and the workers drain by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Generator, Mapping, Sequence

from qkit._internal.logging import logger
from qkit._internal.retry import Backoff
from qkit._internal.signals import handle_signals

__all__ = ["Supervisor"]

RESTART = Backoff(initial=1.0, multiplier=2.0, maximum=30.0, jitter=0.1)
STABLE_AFTER_SECONDS = 30.0  # after which a worker's crash begins a new count
CONFIG_ERROR_EXIT_CODE = 2  # of settings or a target that cannot work


class Supervisor:
    """Runs one process for each of ``commands`` until it is told to stop.

    ``drain_timeout`` is how many seconds workers may drain before they are killed.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environment: Mapping[str, str],
        *,
        drain_timeout: float,
        restart: Backoff = RESTART,
    ) -> None:
        self._commands = commands
        self._environment = dict(environment)
        self._drain_timeout = drain_timeout
        self._restart = restart
        self._stop = asyncio.Event()
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._code = 0

    async def run(self) -> int:
        """Supervise until SIGTERM or SIGINT; the exit code."""
        loop = asyncio.get_running_loop()
        with handle_signals(loop, self._first, self._second), _parent_pipe() as parent_pipe:
            async with asyncio.TaskGroup() as tasks:
                for number, command in enumerate(self._commands):
                    tasks.create_task(
                        self._keep(
                            number, [*command, "--parent-pipe", str(parent_pipe)], parent_pipe
                        ),
                        name=f"qkit worker {number}",
                    )
        return self._code

    def _first(self, name: str) -> None:
        logger.info("%s: draining %d workers, a second signal forces", name, len(self._processes))
        self._end()

    def _second(self, name: str) -> None:
        logger.warning("%s again: not waiting for handlers", name)
        self._signal(signal.SIGTERM)  # it is the workers' second too

    def _end(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    async def _keep(self, number: int, command: Sequence[str], parent_pipe: int) -> None:
        """One worker's life, and the next one's after it."""
        crashes, lives = 0, 0
        while not self._stop.is_set():
            began, lives = time.monotonic(), lives + 1
            process = await asyncio.create_subprocess_exec(
                *command,
                env=self._environment,
                pass_fds=[parent_pipe],
                # Ctrl-C in a terminal reaches everybody in the group; our word must be the first.
                start_new_session=True,
            )
            self._processes[number] = process
            logger.info("worker %d is process %d", number, process.pid)
            if self._stop.is_set():  # the signal came while it was being started
                process.send_signal(signal.SIGTERM)
            code = await self._wait(process)
            del self._processes[number]
            if self._stop.is_set():
                # By the signal itself: it came before the worker had anything to drain.
                if code not in (0, -signal.SIGTERM):
                    logger.error("worker %d did not drain well (%s)", number, _cause(code))
                    self._code = self._code or 1
                return
            if code == 0:
                logger.info("worker %d ended by itself", number)
                return
            stable = time.monotonic() - began >= STABLE_AFTER_SECONDS
            # One that worked before can work: its program ended itself like that, or was changed.
            if code == CONFIG_ERROR_EXIT_CODE and lives == 1 and not stable:
                logger.error("worker %d cannot work; ending the others", number)
                self._code = code
                self._end()
                return
            crashes = 1 if stable else crashes + 1
            pause = self._restart.after(crashes)
            logger.error(
                "worker %d crashed (%s), starting it again in %.1f s", number, _cause(code), pause
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stop.wait()

    async def _wait(self, process: asyncio.subprocess.Process) -> int:
        """Its exit code; one that does not drain in time is killed."""
        ended = asyncio.ensure_future(process.wait())
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({ended}, timeout=self._drain_timeout)
            if not ended.done():
                logger.error("process %d did not end in time and is killed", process.pid)
                process.kill()
            return await ended
        finally:
            stopped.cancel()


def _cause(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


@contextlib.contextmanager
def _parent_pipe() -> Generator[int, None, None]:
    """Yield the reading end of a pipe that closes with this process."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)
