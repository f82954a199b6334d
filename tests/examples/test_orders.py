"""The demo does what the README says it does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "orders.py"


def test_the_demo_checks_itself_and_exits_0() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✗" not in done.stdout
    for words in ("retry", "dead letter", "replay", "300/300", "reminder waited"):
        assert words in done.stdout
