"""The command's parts, put together."""

from __future__ import annotations

from typing import Annotated

import typer

import qkit
from qkit.cli import dead_letters, info, messages, queues, worker
from qkit.cli.terminal import out

__all__ = ["app"]

app = typer.Typer(
    help=(
        "One way to work with queues on every broker: run workers, send, look, replay.\n\n"
        "Settings come from [bold]QKIT_*[/] variables, [bold]./qkit.toml[/] or [bold]--config[/]."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_WORK, _LOOK, _TELL = "Work", "Look and tidy", "Tell"
app.command(rich_help_panel=_WORK)(worker.run)
app.command(rich_help_panel=_WORK)(worker.web)
app.command(rich_help_panel=_WORK)(messages.send)
app.command(rich_help_panel=_WORK)(messages.consume)
app.command("queues", rich_help_panel=_LOOK)(queues.list_queues)
app.command(rich_help_panel=_LOOK)(queues.stats)
app.command(rich_help_panel=_LOOK)(messages.peek)
app.command(rich_help_panel=_LOOK)(queues.purge)
app.add_typer(dead_letters.app, name="dlq", rich_help_panel=_LOOK)
app.command(rich_help_panel=_TELL)(info.health)
app.command(rich_help_panel=_TELL)(info.capabilities)
app.command(rich_help_panel=_TELL)(info.asyncapi)
app.add_typer(info.config_app, name="config", rich_help_panel=_TELL)


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"qkit {qkit.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which it is.")
    ] = False,
) -> None:
    """What stands before a command."""
