"""``run`` and ``web``: a worker, several of them under a supervisor, or only the pages."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated

import typer
from rich.logging import RichHandler

from qkit.cli import frame
from qkit.cli.frame import AsJson, Config, command
from qkit.cli.supervisor import Supervisor
from qkit.cli.target import load
from qkit.cli.terminal import err, print_json, tell
from qkit.errors import ConfigError
from qkit.logs import JsonFormatter
from qkit.service import QueueService

__all__ = ["run", "web"]

Port = Annotated[
    int | None, typer.Option(min=0, max=65_535, help="Serve probes, metrics and dashboard here.")
]
Host = Annotated[str, typer.Option(help="The address to bind; loopback unless you say so.")]
Token = Annotated[
    str | None,
    typer.Option(envvar="QKIT_TOKEN", help="What a change on the pages needs; none: no changes."),
]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log lines of JSON.")]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]


@command
def run(
    target: Annotated[str, typer.Argument(metavar="MODULE:SERVICE")],
    workers: Annotated[int, typer.Option("--workers", "-w", min=1, max=256)] = 1,
    port: Port = None,
    host: Host = "127.0.0.1",
    token: Token = None,
    log_json: LogJson = False,
    log_level: LogLevel = "info",
    config: Config = None,
    as_json: AsJson = False,
    lifeline: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Consume until SIGTERM or Ctrl-C, then drain; a second signal forces.

    With several workers each is a process; one that crashes is started again, with growing pauses.
    Worker number [bold]n[/] serves its pages on [bold]--port[/] + [bold]n[/], from 0.

    [dim]qkit run shop.worker:service --workers 4 --port 8710 --log-json[/]
    """
    log_json = log_json or as_json
    frame.adopt(config)
    if workers > 1:
        sys.exit(_supervise(target, workers, port, host, token, log_json, log_level))
    set_up_logs(log_json, log_level)
    service = load(target)
    frame.run(_work(service, port, host, token, lifeline, as_json))


def _supervise(
    target: str, workers: int, port: int | None, host: str, token: str | None, log_json: bool,
    log_level: str,
) -> int:  # fmt: skip
    set_up_logs(log_json, log_level)
    timeout = load(target).settings.shutdown.timeout  # and find out here whether it can work
    commands: list[list[str]] = []
    for number in range(workers):
        words = [sys.executable, "-m", "qkit.cli", "run", target, "--log-level", log_level]
        words += ["--log-json"] if log_json else []
        if port is not None:
            words += ["--host", host, "--port", str(port + number if port else 0)]
        commands.append(words)
    # By the environment: a command line is for everybody on the machine to read.
    environment = os.environ | ({"QKIT_TOKEN": token} if token else {})
    return asyncio.run(Supervisor(commands, environment, patience=timeout + 10).run())


async def _work(
    service: QueueService,
    port: int | None,
    host: str,
    token: str | None,
    lifeline: int | None,
    as_json: bool,
) -> None:
    async with _pages(service, port, host, token, as_json):
        if lifeline is not None:
            _hold(lifeline, service)
        await service.run()


@asynccontextmanager
async def _pages(
    service: QueueService, port: int | None, host: str, token: str | None, as_json: bool
) -> AsyncGenerator[None, None]:
    if port is None:
        yield
        return
    from qkit.web import serve

    async with serve(service, host=host, port=port, token=token) as address:
        if as_json:
            print_json({"address": address})
        else:
            tell(f"Pages: {address}")
        yield


def _hold(lifeline: int, service: QueueService) -> None:
    """Drain when the supervisor is gone: its end of the pipe is closed by whatever ended it."""
    loop = asyncio.get_running_loop()

    def cut() -> None:
        loop.remove_reader(lifeline)
        os.close(lifeline)
        service.stop()

    loop.add_reader(lifeline, cut)


@command
def web(
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes any that is free.")] = 8710,
    host: Host = "127.0.0.1",
    token: Token = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Serve the dashboard by itself, beside whatever works on the queues."""

    async def main() -> None:
        async with frame.service(config) as service:
            async with _pages(service, port, host, token, as_json):
                await service.run()

    frame.run(main())


def set_up_logs(log_json: bool, level: str) -> None:
    """Logs to stderr: lines for people, or JSON for programs."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigError(f"--log-level {level!r}: choose debug, info, warning or error")
    if log_json:
        handler: logging.Handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
    elif err.is_terminal:
        handler = RichHandler(console=err, show_path=False, rich_tracebacks=False, markup=False)
        handler.setFormatter(logging.Formatter("%(message)s", datefmt="[%X]"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=number, handlers=[handler], force=True)
