"""Example ``durable_queue.py``: no job is lost when its processes are killed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "durable_queue.py"


@pytest.mark.proves(
    "002-overview-1", "002-delivery-4", "002-delivery-5", "002-place-5", "002-testing-9"
)
def test_no_job_is_lost_when_processes_are_killed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(tmp_path / "data")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"confirmed to the shop: 1\d\d, done: 1\d\d\n", done.stdout)
    assert "lost: 0, done twice: " in done.stdout
    assert done.stdout.count("ended by SIGKILL") == 2
    assert done.stdout.count("ended by SIGTERM") == 1
    assert "Traceback" not in done.stderr
