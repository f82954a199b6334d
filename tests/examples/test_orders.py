"""The demo does what the README says it does, on every backend."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def demo(**environment: str) -> str:
    """Run it as ``make demo`` does; what it showed."""
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
def test_the_demo_checks_itself_and_exits_0() -> None:
    shown = demo()
    assert "on native" in shown
    assert "express orders overtook" in shown
    assert "reminder waited" in shown


# How each is named in the environment, and what it cannot do.
ELSEWHERE = [
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
@pytest.mark.parametrize(("environment", "cannot"), ELSEWHERE)
def test_the_same_code_runs_elsewhere(
    request: pytest.FixtureRequest, environment: dict[str, str], cannot: set[str]
) -> None:
    kind = environment["QKIT_TYPE"]
    url = request.getfixturevalue(f"{kind}_url")
    shown = demo(**environment, QKIT_URL=url, QKIT_PREFIX=f"demo-{uuid.uuid4().hex[:8]}.")
    assert f"on {kind}" in shown
    for feature in ("delays", "priorities"):
        assert (f"no {feature} here" in shown) is (feature in cannot)


@pytest.mark.broker
def test_without_an_address_a_broker_is_started_for_it(tmp_path: Path) -> None:
    shown = demo(QKIT_TYPE="redis", QKIT_MODE="list", QKIT_BROKERS_DIR=str(tmp_path))
    assert "on redis" in shown
    assert not (tmp_path / "redis").exists(), "and ended after it"


def test_a_wrong_type_is_told_by_the_settings() -> None:
    with pytest.raises(AssertionError, match="rabbitmq"):
        demo(QKIT_TYPE="rabbit")
