"""The ``qkit`` command: run workers, send messages, inspect queues, replay dead letters.

Requires the extra ``cli``; see docs/install.md. ``qkit --help`` lists the commands.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; entry point of ``qkit``."""
    try:
        from qkit.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"rich", "typer"}:
            raise
        sys.exit(
            f"qkit: the command line needs {error.name}: install the extra 'cli', "
            "see docs/install.md"
        )
    app(prog_name="qkit")
