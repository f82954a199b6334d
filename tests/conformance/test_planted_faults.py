"""Each planted fault must make its registered scenarios fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.planted import FAULTS

PLANTED = Path(__file__).with_name("planted.py")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Outcome of each registered scenario, with its fault and without."""
    wanted = [
        f"{PLANTED}::Test_{suite}::{scenario}"
        for fault, (_, scenarios) in FAULTS.items()
        for scenario in scenarios
        for suite in (fault, "nothing")
    ]
    options = ["-q", "-rA", "--tb=line", "-p", "no:cacheprovider", "--timeout=120", "-W", "default"]
    environment = {name: value for name, value in os.environ.items() if "COV" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *dict.fromkeys(wanted)],
        capture_output=True,
        text=True,
        cwd=PLANTED.parents[2],
        env=environment,
        check=False,
    )
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        outcome, _, rest = line.partition(" ")
        if outcome in {"PASSED", "FAILED", "ERROR"} and "::" in rest:
            node = rest.split(" - ")[0].split("[")[0]
            name = "::".join(node.split("::")[1:])
            found[name] = "FAILED" if "FAILED" in (outcome, found.get(name)) else outcome
    assert found, done.stdout + done.stderr
    return found


def test_at_least_twenty_faults_are_planted() -> None:
    assert len(FAULTS) >= 20


CASES = [(fault, scenario) for fault, (_, scenarios) in FAULTS.items() for scenario in scenarios]


@pytest.mark.parametrize(("fault", "scenario"), CASES)
def test_a_planted_fault_makes_its_scenarios_fail(
    fault: str, scenario: str, outcomes: dict[str, str]
) -> None:
    assert outcomes.get(f"Test_nothing::{scenario}") == "PASSED"
    assert outcomes.get(f"Test_{fault}::{scenario}") == "FAILED"
