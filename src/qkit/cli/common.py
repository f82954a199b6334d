"""Options, settings, service and error handling that all commands share."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Literal, ParamSpec, TypeVar

import typer
from rich.text import Text

from qkit._internal.clock import SystemClock
from qkit._internal.logging import logger
from qkit.backend import Backend
from qkit.backends.factory import open_backend
from qkit.cli.terminal import err, print_json, print_note, safe, safe_line
from qkit.errors import ConfigError, QueueError
from qkit.native.bulk_import import wait_for_import
from qkit.service import QueueService
from qkit.settings.model import Settings

__all__ = [
    "AsJson",
    "Config",
    "Yes",
    "command",
    "confirm",
    "find_settings",
    "run",
    "service",
    "service_on",
    "use_config",
]

P = ParamSpec("P")
T = TypeVar("T")

ErrorFormat = Literal["text", "json", "log"]
"""How a command reports an error: as text, as JSON, or in the log."""

FAILED, USAGE_ERROR, INTERRUPTED = 1, 2, 130
LOGGERS = ("qkit", "aiormq", "aio_pika", "aiokafka", "redis")

Config = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", envvar="QKIT_CONFIG", metavar="FILE", rich_help_panel="Settings",
        help="Settings file (TOML). QKIT_* variables override it.",
    ),
]  # fmt: skip
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def command(function: Callable[P, None]) -> Callable[P, None]:
    """Decorate a command so that errors become a message and an exit code, not a traceback."""

    @functools.wraps(function)
    def handle_errors(*arguments: P.args, **options: P.kwargs) -> None:
        error_format: ErrorFormat = "text"
        if options.get("as_json"):
            error_format = "json"
        elif options.get("log_json"):
            error_format = "log"
        try:
            function(*arguments, **options)
        except ConfigError as error:
            raise _fail(error, USAGE_ERROR, error_format) from None
        except (QueueError, ValueError, OSError) as error:
            raise _fail(error, FAILED, error_format) from None
        except (KeyboardInterrupt, asyncio.CancelledError):
            raise typer.Exit(INTERRUPTED) from None

    return handle_errors


def _fail(error: Exception, code: int, error_format: ErrorFormat) -> typer.Exit:
    if isinstance(error, BrokenPipeError):  # `qkit peek … | head` closed the pipe
        sys.stderr.close()
        return typer.Exit(0)
    if error_format == "log":
        logger.error("%s", str(error) or type(error).__name__)
    elif error_format == "json":
        print_json({"error": {"type": type(error).__name__, "message": str(error)}})
    else:
        # A configuration error lists one problem per line; others may quote ids and names.
        escape = safe if isinstance(error, ConfigError) else safe_line
        text = escape(str(error) or type(error).__name__)
        err.print(Text("error: ", style="bold red").append(text, style="default not bold"))
    return typer.Exit(code)


def find_settings(config: Path | None) -> Settings:
    """Return the settings of a command: ``--config`` or ``QKIT_CONFIG``, and the environment."""
    return Settings() if config is None else Settings.load(config)


def use_config(config: Path | None) -> None:
    """Make this process and its worker processes read their settings from this file.

    Raises:
        ConfigError: The file does not exist.
    """
    if config is not None:
        if not config.is_file():
            raise ConfigError(f"--config {config}: no such file")
        os.environ["QKIT_CONFIG"] = str(config.resolve())


def _passive_settings(config: Path | None) -> Settings:
    """Return the settings of a command that declares no queues."""
    if config is None:
        return Settings(declare="passive", dead_letter={"enabled": False})
    return Settings.load(config, declare="passive", dead_letter={"enabled": False})


def run(main: Coroutine[object, object, T]) -> T:
    """Run a coroutine to completion, on uvloop if it is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


@asynccontextmanager
async def service(
    config: Path | None, *, declares: bool = False
) -> AsyncGenerator[QueueService, None]:
    """Open a service without handlers, connected while the context is open.

    Args:
        config: TOML file with the settings.
        declares: Whether to declare queues. By default, queues are used as their consumers declared
            them, so that a command does not impose options such as retries or limits.
    """
    async with service_on(config, declares=declares) as (running, _):
        yield running


@asynccontextmanager
async def service_on(
    config: Path | None, *, declares: bool = False
) -> AsyncGenerator[tuple[QueueService, Backend], None]:
    """Open a service and its backend; see ``service``."""
    settings = find_settings(config) if declares else _passive_settings(config)
    if settings.type == "native" and settings.path is None:
        unread = _unread_file_hint(config)
        raise ConfigError(
            "these settings keep queues in the memory of one process, which a command cannot "
            "reach: set a directory (QKIT_PATH=data), a broker (QKIT_TYPE and QKIT_URL), or a "
            f"settings file (--config or QKIT_CONFIG){unread}"
        )
    # The command reports errors itself; log lines would clutter its output.
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    backend = open_backend(settings, SystemClock())
    async with QueueService(settings, backend=backend) as running:
        if settings.type == "native" and settings.path is not None:
            for error in await wait_for_import(settings.path):
                print_note(
                    f"warning: a bulk file in {settings.path / 'inbox'} is ignored: {error}",
                    "yellow",
                )
        yield running, backend


def _unread_file_hint(config: Path | None) -> str:
    """Return a hint if ``./qkit.toml`` exists, because it is only read if it is named."""
    if config is None and Path("qkit.toml").is_file():
        return ". ./qkit.toml was not read: pass --config qkit.toml"
    return ""


def confirm(question: str, yes: bool) -> bool:
    """Ask for confirmation before a deletion; return whether it was given.

    Raises:
        ConfigError: Standard input is not a terminal, and ``yes`` is false.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} Cannot ask without a terminal: confirm with --yes")
    return typer.confirm(safe_line(question), err=True)
