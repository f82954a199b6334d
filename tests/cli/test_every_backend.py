"""Commands on every broker, with settings from the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from qkit.cli.app import app

Qkit = Callable[..., Result]


def environment(kind: str, url: str) -> dict[str, str]:
    mode = {"QKIT_MODE": "list"} if kind == "redis" else {}
    return {"QKIT_TYPE": kind, "QKIT_URL": url, **mode}


@pytest.fixture(
    params=[pytest.param(kind, marks=pytest.mark.broker) for kind in ("redis", "rabbitmq", "kafka")]
)
def broker(request: pytest.FixtureRequest) -> dict[str, str]:
    return environment(request.param, request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def qkit(broker: dict[str, str]) -> Qkit:
    """Return a function that runs a command and asserts that it succeeds."""
    runner = CliRunner()

    def run(*words: str) -> Result:
        result = runner.invoke(app, list(words), env=broker)
        assert result.exit_code == 0, result.output
        return result

    return run


def test_send_stats_peek_consume_and_purge_work_on_every_broker(qkit: Qkit) -> None:
    name = f"orders-{uuid.uuid4().hex[:8]}"
    assert json.loads(qkit("health", "--json").stdout)["status"] == "healthy"
    qkit("send", name, '{"id": 1}')
    qkit("send", name, '{"id": 2}')  # to an existing queue
    (row,) = json.loads(qkit("stats", name, "--json").stdout)
    assert row["depth"] == 2
    messages = json.loads(qkit("peek", name, "--json").stdout)
    assert [json.loads(item["body"]["content"])["id"] for item in messages] == [1, 2]
    shown = qkit("consume", name, "--limit", "2", "--timeout", "20")
    assert '{"id":1}' in shown.stdout.replace(" ", "")
    assert "2 messages shown and released" in shown.stderr
    acked = qkit("consume", name, "--ack", "--limit", "1", "--timeout", "20")
    assert "1 message acked" in acked.stderr
    assert json.loads(qkit("purge", name, "--yes", "--json").stdout)["purged"] == 1
    assert json.loads(qkit("dlq", "list", name, "--json").stdout) == []


def test_consume_dead_letters_expired_messages(qkit: Qkit) -> None:
    name = f"orders-{uuid.uuid4().hex[:8]}"
    qkit("send", name, "1", "--ttl", "0.01")
    qkit("send", name, "2")
    shown = qkit("consume", name, "--ack", "--limit", "1", "--timeout", "20", "--json")
    assert json.loads(json.loads(shown.stdout)["body"]["content"]) == 2
    letters = json.loads(qkit("dlq", "list", name, "--json").stdout)
    assert [letter["reason"] for letter in letters] == ["TTLExpired"]


@pytest.mark.broker
def test_sending_to_redis_requires_a_mode_and_reports_unheard_messages(
    redis_url: str,
) -> None:
    runner = CliRunner()
    name = f"orders-{uuid.uuid4().hex[:8]}"
    redis = {"QKIT_TYPE": "redis", "QKIT_URL": redis_url}
    for command in (["send", name, "1"], ["dlq", "replay", name]):
        with pytest.warns(DeprecationWarning, match="without a mode"):
            result = runner.invoke(app, command, env=redis)
        assert result.exit_code == 2, result.output
        assert "mode='list'" in result.stderr
        assert "mode='pubsub'" in result.stderr
    redis["QKIT_MODE"] = "pubsub"
    result = runner.invoke(app, ["send", name, "1"], env=redis)
    assert result.exit_code == 1, result.output
    assert "1 of 1 message had no subscriber and is lost" in result.stderr
    result = runner.invoke(app, ["send", name, "--json"], input="1\n2\n", env=redis)
    assert result.exit_code == 1, result.output
    answer = json.loads(result.stdout)
    assert (answer["sent"], answer["unheard"]) == (2, 2)


@pytest.mark.parametrize(
    ("kind", "url"),
    [
        ("redis", "redis://127.0.0.1:1"),
        ("rabbitmq", "amqp://127.0.0.1:1"),
        ("kafka", "127.0.0.1:1"),
    ],
)
def test_an_unreachable_broker_prints_one_error_message(kind: str, url: str) -> None:
    """The command runs in a subprocess, to catch log lines that a driver writes to stderr."""
    result = subprocess.run(
        [sys.executable, "-m", "qkit.cli", "queues"],
        env=os.environ | environment(kind, url),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.count("error: ") == 1
    assert result.stderr.startswith("error: the connection to "), result.stderr
    assert len(result.stderr.splitlines()) <= 3
