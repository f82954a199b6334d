"""Supervisor that starts worker processes, restarts crashed ones and drains them at the end.

Each worker has the read end of a pipe, and only the supervisor has the write end. When the
supervisor ends, even by SIGKILL, the pipe closes and the workers drain.
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
STABLE_AFTER_SECONDS = 30.0  # a crash after this uptime resets the backoff
CONFIG_ERROR_EXIT_CODE = 2  # invalid settings or an invalid target


class Supervisor:
    """Supervisor of one process per command, until SIGTERM or SIGINT.

    Args:
        commands: Command line of each worker.
        environment: Environment of the workers.
        drain_timeout: Seconds that a worker may take to drain before it is killed.
        restart: Delays between a crash and the restart. Default: 1 s, doubled up to 30 s.
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
        """Supervise until SIGTERM or SIGINT; return the exit code."""
        loop = asyncio.get_running_loop()
        with (
            handle_signals(loop, self._on_first_signal, self._on_second_signal),
            _parent_pipe() as parent_pipe,
        ):
            async with asyncio.TaskGroup() as tasks:
                for number, command in enumerate(self._commands):
                    tasks.create_task(
                        self._supervise(
                            number, [*command, "--parent-pipe", str(parent_pipe)], parent_pipe
                        ),
                        name=f"qkit worker {number}",
                    )
        return self._code

    def _on_first_signal(self, name: str) -> None:
        logger.info(
            "%s: draining %d workers; a second signal cancels running handlers",
            name,
            len(self._processes),
        )
        self._stop_all()

    def _on_second_signal(self, name: str) -> None:
        logger.warning("second signal (%s): cancelling running handlers", name)
        self._signal(signal.SIGTERM)  # also the second signal for each worker

    def _stop_all(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    async def _supervise(self, number: int, command: Sequence[str], parent_pipe: int) -> None:
        """Start a worker and restart it after each crash, until the supervisor stops."""
        crashes, starts = 0, 0
        while not self._stop.is_set():
            started_at, starts = time.monotonic(), starts + 1
            process = await asyncio.create_subprocess_exec(
                *command,
                env=self._environment,
                pass_fds=[parent_pipe],
                # Ctrl-C signals the whole process group; workers must receive only our signal.
                start_new_session=True,
            )
            self._processes[number] = process
            logger.info("worker %d is process %d", number, process.pid)
            if self._stop.is_set():  # a signal arrived during the start
                process.send_signal(signal.SIGTERM)
            code = await self._wait(process)
            del self._processes[number]
            if self._stop.is_set():
                # SIGTERM kills a worker that has not installed its signal handlers yet.
                if code not in (0, -signal.SIGTERM):
                    logger.error("worker %d did not drain cleanly (%s)", number, _cause(code))
                    self._code = self._code or 1
                return
            if code == 0:
                logger.info("worker %d exited", number)
                return
            stable = time.monotonic() - started_at >= STABLE_AFTER_SECONDS
            # A worker that has run before has valid settings; its program chose this code.
            if code == CONFIG_ERROR_EXIT_CODE and starts == 1 and not stable:
                logger.error(
                    "worker %d cannot start: invalid settings or target; stopping the others",
                    number,
                )
                self._code = code
                self._stop_all()
                return
            crashes = 1 if stable else crashes + 1
            pause = self._restart.after(crashes)
            logger.error(
                "worker %d crashed (%s); restarting in %.1f s", number, _cause(code), pause
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stop.wait()

    async def _wait(self, process: asyncio.subprocess.Process) -> int:
        """Wait for a worker; kill it if it does not drain in time. Return its exit code."""
        ended = asyncio.ensure_future(process.wait())
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({ended}, timeout=self._drain_timeout)
            if not ended.done():
                logger.error("process %d did not drain in time; killing it", process.pid)
                process.kill()
            return await ended
        finally:
            stopped.cancel()


def _cause(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


@contextlib.contextmanager
def _parent_pipe() -> Generator[int, None, None]:
    """Yield the read end of a pipe that closes when this process ends."""
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(read_end)
        os.close(write_end)
