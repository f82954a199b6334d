"""``health``, ``capabilities``, ``config`` and ``asyncapi``: read-only information."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.text import Text

from qkit._internal.clock import SystemClock
from qkit.asyncapi import document
from qkit.backends.capability_matrix import COLUMNS, MATRIX
from qkit.backends.factory import open_backend
from qkit.cli.common import AsJson, Config, command, find_settings, run, service, use_config
from qkit.cli.target import load
from qkit.cli.terminal import count, out, print_json, print_note, safe_line, table
from qkit.errors import ConfigError
from qkit.observability.health import Health
from qkit.settings.model import Settings

__all__ = ["asyncapi", "capabilities", "config_app", "health"]

config_app: typer.Typer = typer.Typer(help="Check and show the settings.", no_args_is_help=True)

MARKS = {"native": ("●", "green"), "emulated": ("◐", "yellow"), "unsupported": ("–", "dim")}


@command
def health(
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="URL of a running worker to check instead of the broker."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait for the worker's response.")
    ] = 5.0,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Check the broker or a worker; exit with code 0 if it is ready, otherwise 1.

    [dim]qkit health · qkit health --url http://127.0.0.1:8710[/]
    """
    if url is not None:
        ready, facts = _check_worker(url, timeout)
    else:

        async def main() -> Health:
            async with service(config) as running:
                return running.health_check()

        state = run(main())
        ready, facts = state.status == "healthy", asdict(state)
    if as_json:
        print_json(facts)
    else:
        mark, style = ("ready", "green") if ready else ("not ready", "red")
        out.print(Text(mark, style=f"bold {style}"))
        for name in ("connection_state", "breaker", "durable", "reason", "last_error"):
            if facts.get(name) is not None:
                shown = name.replace("_", " ")
                out.print(Text(f"{shown:>17}  ", style="dim").append(safe_line(facts[name])))
    if not ready:
        raise typer.Exit(1)


def _check_worker(url: str, timeout: float) -> tuple[bool, dict[str, Any]]:
    """Return the readiness of a worker and the response of its ``/readyz``."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url: expected an http:// or https:// URL, got {url!r}")
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/readyz", timeout=timeout) as response:
            return True, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            try:
                return False, json.load(error)
            except ValueError:
                return False, {"reason": f"the worker responded with status {error.code}"}
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return False, {"reason": f"no response from {url}: {reason}"}


@command
def capabilities(
    all_backends: Annotated[bool, typer.Option("--all", help="Show all backends.")] = False,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Show the capabilities of the backend.

    A service that needs an unsupported feature fails to start or to send.
    """
    if all_backends:
        columns = {name: MATRIX[name].as_dict() for name in COLUMNS}
    else:
        settings = find_settings(config)
        columns = {
            settings.backend_key: open_backend(settings, SystemClock()).capabilities.as_dict()
        }
    if as_json:
        print_json(columns if all_backends else next(iter(columns.values())))
        return
    features = next(iter(columns.values()))
    rows = [
        [Text(feature.replace("_", " "), style="bold")]
        + [_support(column[feature], named=len(columns) == 1) for column in columns.values()]
        for feature in features
    ]
    names = [name.replace("-", "\n") if all_backends else name for name in columns]
    out.print(table(("", *names), rows, gap=1 if all_backends else None))
    if len(columns) > 1:
        print_note("● native to the backend  ◐ emulated by qkit  – unsupported", "dim")


def _support(support: str, *, named: bool) -> Text:
    mark, style = MARKS[support]
    return Text(f"{mark} {support}" if named else mark, style=style)


@config_app.command("check")
@command
def check(config: Config = None, as_json: AsJson = False) -> None:
    """Check the settings without connecting; exit with code 0 if they are valid, otherwise 2."""
    settings = find_settings(config)
    if as_json:
        print_json({"valid": True, "backend": settings.backend_key})
    else:
        print_note(f"The settings are valid: {settings.backend_key}.", "green")


@config_app.command("show")
@command
def show(
    include_defaults: Annotated[bool, typer.Option("--all", help="Include defaults.")] = False,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Show the merged settings; secrets are hidden."""
    settings = find_settings(config)
    values = visible(settings, include_defaults)
    if as_json:
        print_json(values)
        return
    rows = [(Text(name, style="bold"), _shown(value)) for name, value in _flatten(values)]
    out.print(table(("setting", "value"), rows))


def visible(settings: Settings, include_defaults: bool) -> dict[str, Any]:
    """Return the settings that differ from the defaults, or all of them, with secrets hidden."""
    values: dict[str, Any] = json.loads(settings.model_dump_json())
    if include_defaults:
        return values
    changed = {"type"} | {name for name, _ in settings.__repr_args__()}
    return {name: value for name, value in values.items() if name in changed}


def _flatten(values: dict[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _flatten(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def _shown(value: object) -> str | Text:
    return Text("none", style="dim") if value is None else json.dumps(value, ensure_ascii=False)


@command
def asyncapi(
    target: Annotated[
        str,
        typer.Argument(metavar="MODULE:SERVICE", help="Service, or a function that returns one."),
    ],
    title: Annotated[str, typer.Option(help="Title of the document.")] = "qkit service",
    version: Annotated[str, typer.Option(help="Version of your service.")] = "0.1.0",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the document to this file.")
    ] = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Print the AsyncAPI 3 document of a service."""
    use_config(config)
    asyncapi_document = document(load(target), title=title, version=version)
    if output is None:
        print_json(asyncapi_document)
    else:
        output.write_text(f"{json.dumps(asyncapi_document, indent=2)}\n")
        print_note(f"{output}: {count(len(asyncapi_document['channels']), 'channel')}.", "green")
