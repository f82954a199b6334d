"""The command line inside a test: its answer, and what it said beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from qkit.cli.app import app

__all__ = ["Shell"]


class Shell:
    """Runs ``qkit`` on a native directory of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._runner = CliRunner()

    def run(self, *words: str, code: int = 0, stdin: str | None = None) -> Result:
        """The result of a command, which must have ended with ``code``."""
        result = self._runner.invoke(
            app, list(words), input=stdin, env={"QKIT_PATH": str(self.path), "COLUMNS": "100"}
        )
        assert result.exit_code == code, f"{result.stdout}\n{result.stderr}\n{result.exception}"
        assert "Traceback" not in result.output
        return result

    def json(self, *words: str, code: int = 0, stdin: str | None = None) -> Any:
        """What a command says to programs."""
        return json.loads(self.run(*words, "--json", code=code, stdin=stdin).stdout)
