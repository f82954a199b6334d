"""Demo ``orders.py``: its own checks pass on every backend."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def demo(**environment: str) -> str:
    """Run the demo as ``make demo`` does, and return its output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("QKIT_")}
    done = subprocess.run(
        [str(ROOT / "scripts" / "demo")],
        env={**clean, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✗" not in done.stdout
    for words in ("retry", "dead letter", "replay", "300/300", "✓ every order booked once"):
        assert words in done.stdout
    return done.stdout


@pytest.mark.proves("001-overview-1", "002-place-1", "002-usage-2")
def test_the_demo_passes_its_own_checks_and_exits_0() -> None:
    output = demo()
    assert "on native" in output
    assert "express orders overtook" in output
    assert "reminder waited" in output


# Environment variables that select each broker, and the features that it does not support.
BROKERS = [
    pytest.param({"QKIT_TYPE": "redis", "QKIT_MODE": "list"}, set(), id="redis-list"),
    pytest.param(
        {"QKIT_TYPE": "redis", "QKIT_MODE": "list", "QKIT_RELIABLE": "false"},
        {"delays"},
        id="redis-list-unreliable",
    ),
    pytest.param(
        {"QKIT_TYPE": "redis", "QKIT_MODE": "pubsub"}, {"delays", "priorities"}, id="redis-pubsub"
    ),
    pytest.param({"QKIT_TYPE": "rabbitmq"}, set(), id="rabbitmq"),
    pytest.param({"QKIT_TYPE": "kafka"}, {"priorities"}, id="kafka"),
]


@pytest.mark.proves("003-compat-1", "003-compat-4")
@pytest.mark.broker
@pytest.mark.parametrize(("environment", "unsupported"), BROKERS)
def test_the_same_code_runs_on_every_broker(
    request: pytest.FixtureRequest, environment: dict[str, str], unsupported: set[str]
) -> None:
    kind = environment["QKIT_TYPE"]
    url = request.getfixturevalue(f"{kind}_url")
    output = demo(**environment, QKIT_URL=url, QKIT_PREFIX=f"demo-{uuid.uuid4().hex[:8]}.")
    assert f"on {kind}" in output
    for feature in ("delays", "priorities"):
        assert (f"no {feature} on this backend" in output) is (feature in unsupported)


@pytest.mark.broker
def test_the_demo_starts_a_broker_if_no_url_is_set(tmp_path: Path) -> None:
    output = demo(QKIT_TYPE="redis", QKIT_MODE="list", QKIT_BROKERS_DIR=str(tmp_path))
    assert "on redis" in output
    assert not (tmp_path / "redis").exists(), "the broker was not stopped and removed"


def test_the_error_for_an_unknown_type_lists_the_known_ones() -> None:
    with pytest.raises(AssertionError, match="rabbitmq"):
        demo(QKIT_TYPE="rabbit")
