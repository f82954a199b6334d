"""``run`` and ``web``: run one or more workers, or only the dashboard."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.logging import RichHandler

from qkit._internal.logging import JsonFormatter, escape_record
from qkit.cli import common
from qkit.cli.common import AsJson, Config, command
from qkit.cli.supervisor import Supervisor
from qkit.cli.target import AnyService, load
from qkit.cli.terminal import err, print_json, print_note, safe
from qkit.errors import ConfigError
from qkit.service import QueueService
from qkit.sync import SyncQueueService

__all__ = ["run", "web"]

LAST_PORT = 65_535

Port = Annotated[
    int | None,
    typer.Option(
        min=0, max=LAST_PORT, help="Serve probes, metrics and the dashboard on this port."
    ),
]
Host = Annotated[str, typer.Option(help="Address to bind.")]
Token = Annotated[
    str | None,
    typer.Option(
        envvar="QKIT_TOKEN",
        help="Token that permits reading and changes; if omitted, changes are rejected.",
    ),
]
ReadToken = Annotated[
    str | None,
    typer.Option(envvar="QKIT_READ_TOKEN", help="Token that permits reading only."),
]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host",
        metavar="NAME",
        help="Accept requests for this host name in addition to loopback; * accepts any. "
        "May be repeated.",
    ),
]
ParentPipe = Annotated[
    int | None,
    # A supervisor that was started before an upgrade still passes --lifeline.
    typer.Option("--parent-pipe", "--lifeline", hidden=True),
]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log in JSON, one object per line.")]
LogLevel = Annotated[str, typer.Option(help="Log level: debug, info, warning or error.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class WebOptions:
    """Address, tokens and host names of the web app, which is served only if a port is given.

    Raises:
        ConfigError: Other machines can reach the address, and there is no token.
    """

    port: int | None
    host: str
    token: str | None
    read_token: str | None = None
    hosts: list[str]

    def __post_init__(self) -> None:
        if self.port is None or self.token or self.read_token or _is_loopback(self.host):
            return
        raise ConfigError(
            f"other machines can reach --host {self.host}, so the dashboard needs a token: set "
            "QKIT_TOKEN (permits everything) or QKIT_READ_TOKEN (permits reading only), or "
            "use --host 127.0.0.1"
        )

    def environment(self) -> dict[str, str]:
        """Return the variables that pass the tokens to a worker.

        Tokens are not passed as options, because every local user can read a command line.
        """
        tokens = {"QKIT_TOKEN": self.token, "QKIT_READ_TOKEN": self.read_token}
        return {name: token for name, token in tokens.items() if token}

    def of_worker(self, number: int) -> list[str]:
        """Return the command-line options of worker ``number``, without the tokens."""
        if self.port is None:
            return []
        port = self.port + number if self.port else 0
        named = [word for name in self.hosts for word in ("--allow-host", name)]
        return ["--host", self.host, "--port", str(port), *named]


@command
def run(
    target: Annotated[
        str,
        typer.Argument(metavar="MODULE:SERVICE", help="Service, or a function that returns one."),
    ],
    workers: Annotated[
        int, typer.Option("--workers", "-w", min=1, max=256, help="Number of worker processes.")
    ] = 1,
    port: Port = None,
    host: Host = "127.0.0.1",
    allow_host: Hosts = None,
    token: Token = None,
    read_token: ReadToken = None,
    log_json: LogJson = False,
    log_level: LogLevel = "info",
    config: Config = None,
    as_json: AsJson = False,
    parent_pipe: ParentPipe = None,
) -> None:
    """Run workers until SIGTERM or Ctrl-C, then drain.

    A second signal cancels running handlers.

    With several workers, each is a separate process, and a crashed worker is restarted.
    Worker [bold]n[/], counted from 0, serves on [bold]--port[/] + [bold]n[/].

    [dim]qkit run shop.worker:service --workers 4 --port 8710 --log-json[/]
    """
    log_json = log_json or as_json
    set_up_logs(log_json, log_level)
    common.use_config(config)
    web_options = WebOptions(
        port=port, host=host, token=token, read_token=read_token, hosts=allow_host or []
    )
    if workers > 1:
        sys.exit(_supervise(target, workers, web_options, log_json, log_level))
    common.run(_work(load(target), web_options, parent_pipe, log_json=log_json, as_json=as_json))


def _supervise(
    target: str, workers: int, web_options: WebOptions, log_json: bool, log_level: str
) -> int:
    if web_options.port is not None and web_options.port + workers - 1 > LAST_PORT:
        raise ConfigError(
            f"--port {web_options.port} is too high for {workers} workers: each needs its own "
            f"port, and the highest port is {LAST_PORT}"
        )
    timeout = load(target).settings.shutdown.timeout  # raises ``ConfigError`` for an invalid target
    commands: list[list[str]] = []
    for number in range(workers):
        words = [sys.executable, "-m", "qkit.cli", "run", target, "--log-level", log_level]
        words += ["--log-json"] if log_json else []
        commands.append([*words, *web_options.of_worker(number)])
    environment = os.environ | web_options.environment()
    return asyncio.run(Supervisor(commands, environment, drain_timeout=timeout + 10).run())


async def _work(
    target: AnyService,
    web_options: WebOptions,
    parent_pipe: int | None,
    *,
    log_json: bool,
    as_json: bool,
) -> None:
    with _in_this_loop(target) as service:
        async with _served(service, web_options, log_json=log_json, as_json=as_json):
            if parent_pipe is not None:
                _stop_with_parent(parent_pipe, service)
            await service.run()


@contextmanager
def _in_this_loop(target: AnyService) -> Generator[QueueService, None, None]:
    """Yield the service to run; a ``SyncQueueService`` uses this loop instead of its own thread."""
    if isinstance(target, SyncQueueService):
        with target.hosted() as service:
            yield service
    else:
        yield target


@asynccontextmanager
async def _served(
    service: QueueService, web_options: WebOptions, *, as_json: bool, log_json: bool = False
) -> AsyncGenerator[None, None]:
    if web_options.port is None:
        yield
        return
    from qkit.web import serve

    async with serve(
        service,
        host=web_options.host,
        port=web_options.port,
        token=web_options.token,
        read_token=web_options.read_token,
        hosts=web_options.hosts,
    ) as address:
        if as_json:
            print_json({"address": address})
        elif not log_json:  # the log has the address, and all output must be JSON
            print_note(f"Serving on {address}")
        yield


def _is_loopback(host: str) -> bool:
    from qkit.web.access_control import is_loopback  # needs the extra ``web``

    return is_loopback(host)


def _stop_with_parent(parent_pipe: int, service: QueueService) -> None:
    """Stop the service when the supervisor ends, which closes the pipe."""
    loop = asyncio.get_running_loop()

    def on_closed() -> None:
        loop.remove_reader(parent_pipe)
        os.close(parent_pipe)
        service.stop()

    loop.add_reader(parent_pipe, on_closed)


@command
def web(
    port: Annotated[
        int, typer.Option(min=0, max=LAST_PORT, help="Port to bind; 0 selects a free one.")
    ] = 8710,
    host: Host = "127.0.0.1",
    allow_host: Hosts = None,
    token: Token = None,
    read_token: ReadToken = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Serve the dashboard without consuming messages."""
    web_options = WebOptions(
        port=port, host=host, token=token, read_token=read_token, hosts=allow_host or []
    )

    async def main() -> None:
        async with common.service(config) as service:
            async with _served(service, web_options, as_json=as_json):
                await service.run()

    common.run(main())


class SafeFormatter(logging.Formatter):
    """Text formatter that escapes control characters, which errors may quote from messages."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record and escape its control characters; indent its traceback."""
        escape_record(record)
        return safe(super().format(record))


def set_up_logs(log_json: bool, level: str) -> None:
    """Log to stderr, as text or JSON.

    Raises:
        ConfigError: The level is unknown.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigError(f"--log-level: expected debug, info, warning or error, got {level!r}")
    if log_json:
        handler: logging.Handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
    elif err.is_terminal:
        handler = RichHandler(console=err, show_path=False, rich_tracebacks=False, markup=False)
        handler.setFormatter(SafeFormatter("%(message)s", datefmt="[%X]"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=number, handlers=[handler], force=True)
    logging.captureWarnings(log_json)
