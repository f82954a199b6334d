"""The Typer application with all commands."""

from __future__ import annotations

from typing import Annotated

import typer

import qkit
from qkit.cli import dead_letters, info, messages, queues, worker
from qkit.cli.terminal import out

__all__ = ["app"]

app: typer.Typer = typer.Typer(
    help=(
        "Run workers, send messages, inspect queues and replay dead letters.\n\n"
        "Settings come from [bold]QKIT_*[/] variables and from the file that [bold]--config[/] or "
        "[bold]QKIT_CONFIG[/] names."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_MESSAGES, _QUEUES, _INFO = "Workers and messages", "Queues", "Information"
app.command(rich_help_panel=_MESSAGES)(worker.run)
app.command(rich_help_panel=_MESSAGES)(worker.web)
app.command(rich_help_panel=_MESSAGES)(messages.send)
app.command(rich_help_panel=_MESSAGES)(messages.consume)
app.command("queues", rich_help_panel=_QUEUES)(queues.list_queues)
app.command(rich_help_panel=_QUEUES)(queues.stats)
app.command(rich_help_panel=_QUEUES)(messages.peek)
app.command(rich_help_panel=_QUEUES)(queues.purge)
app.add_typer(dead_letters.app, name="dlq", rich_help_panel=_QUEUES)
app.command(rich_help_panel=_INFO)(info.health)
app.command(rich_help_panel=_INFO)(info.capabilities)
app.command(rich_help_panel=_INFO)(info.asyncapi)
app.add_typer(info.config_app, name="config", rich_help_panel=_INFO)


def _show_version(requested: bool) -> None:
    if requested:
        out.print(f"qkit {qkit.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Accept the options that precede a command."""
