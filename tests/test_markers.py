"""Which tests are whose: what is chosen by marker must not start what it leaves out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.slow
def test_no_broker_is_asked_for_by_a_test_that_is_no_broker_test() -> None:
    """Those that name their fixture only when they run are seen by no hook: they must say it."""
    asking = sorted(
        str(path)
        for path in TESTS.rglob("test_*.py")
        if "getfixturevalue" in path.read_text() and path != Path(__file__)
    )
    found = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"),
            *("-m", "not broker and not spark and not torture and not full", *asking),
        ],
        cwd=TESTS.parent, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    chosen = [line for line in found.stdout.splitlines() if "::" in line]
    assert chosen, found.stdout + found.stderr
    named = ("[redis", "[rabbitmq", "[kafka")
    there = "is_not_there"  # a broker that nobody needs to have
    assert [line for line in chosen if any(n in line for n in named) and there not in line] == []
