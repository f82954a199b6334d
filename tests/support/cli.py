"""Runner for ``qkit`` commands in tests."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from qkit.cli.app import app
from qkit.cli.common import LOGGERS

__all__ = ["Shell", "restored_log_levels"]


@contextmanager
def restored_log_levels() -> Iterator[None]:
    """Restore, on exit, the log levels that commands change."""
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


class Shell:
    """Runner for ``qkit`` commands on the directory of a native engine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._runner = CliRunner()

    def run(self, *words: str, code: int = 0, stdin: str | None = None) -> Result:
        """Run a command, check its exit code, and return the result."""
        result = self._runner.invoke(
            app, list(words), input=stdin, env={"QKIT_PATH": str(self.path), "COLUMNS": "100"}
        )
        assert result.exit_code == code, f"{result.stdout}\n{result.stderr}\n{result.exception}"
        assert "Traceback" not in result.output
        return result

    def json(self, *words: str, code: int = 0, stdin: str | None = None) -> Any:
        """Run a command with ``--json`` and return the parsed output."""
        return json.loads(self.run(*words, "--json", code=code, stdin=stdin).stdout)
