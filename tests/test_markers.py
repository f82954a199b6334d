"""The broker marker: tests without it use no broker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.slow
def test_only_tests_with_the_broker_marker_use_a_broker() -> None:
    """Tests that call getfixturevalue need an explicit marker: no hook sees their fixtures."""
    files = sorted(
        str(path)
        for path in TESTS.rglob("test_*.py")
        if "getfixturevalue" in path.read_text() and path != Path(__file__)
    )
    found = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"),
            *("-m", "not broker and not spark and not torture and not full", *files),
        ],
        cwd=TESTS.parent, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    chosen = [line for line in found.stdout.splitlines() if "::" in line]
    assert chosen, found.stdout + found.stderr
    named = ("[redis", "[rabbitmq", "[kafka")
    unneeded = "unreachable_broker"  # these tests use an address without a broker
    assert [line for line in chosen if any(n in line for n in named) and unneeded not in line] == []
