"""``scripts/brokers``, tested with a separate Redis so that the suite's brokers are unaffected."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from local_brokers.processes import ProcessRecord, end
from tests.support.brokers import SCRIPT, brokers_required

pytestmark = pytest.mark.broker


class Script:
    """Runner of ``scripts/brokers`` with a separate data directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {**os.environ, "QKIT_BROKERS_DIR": str(directory)}
        for variable in ("CI", "QKIT_REQUIRE_BROKERS", "QKIT_TEST_REDIS_URL"):
            self.environment.pop(variable, None)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **environment)
        output, errors = process.communicate(timeout=60)
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)

    @property
    def state_file(self) -> Path:
        return self.directory / "state.json"

    def redis(self) -> tuple[int, int]:
        """Return the recorded pid and port of Redis."""
        entry = json.loads(self.state_file.read_text())["redis"]
        return entry["processes"][0]["pid"], entry["ports"]["redis"]

    def send(self, command: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.redis()[1]), timeout=30) as connection:
            connection.sendall(command + b"\r\n")
            return connection.recv(1024)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    if shutil.which("redis-server") is None and not (brokers_required() or os.geteuid() == 0):
        pytest.skip("redis-server is not installed")
    script = Script(tmp_path / "brokers")
    yield script
    script("down")


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """Unrelated process that the script must not signal."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_up_is_idempotent_and_down_removes_everything(script: Script) -> None:
    assert script("up", "redis").returncode == 0
    state = script.state_file.read_text()
    assert script("up", "redis").returncode == 0
    assert script.state_file.read_text() == state

    urls = script("urls", "redis")
    assert urls.returncode == 0
    assert re.fullmatch(r"QKIT_TEST_REDIS_URL=redis://127\.0\.0\.1:\d+/0\n", urls.stdout)
    status = script("status", "redis")
    assert status.returncode == 0
    assert "running" in status.stdout

    pid, port = script.redis()
    assert script("down").returncode == 0
    assert ProcessRecord.of(pid) is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=30).close()
    assert sorted(path.name for path in script.directory.iterdir()) == ["lock", "state.json"]


def test_two_concurrent_calls_start_one_server(script: Script) -> None:
    both = [script.start("up", "redis") for _ in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    log = (script.directory / "redis" / "server.log").read_text()
    assert log.count("Ready to accept connections") == 1


def test_status_and_urls_report_missing_servers(script: Script) -> None:
    status = script("status")
    assert status.returncode == 1
    assert [line.split()[:2] for line in status.stdout.splitlines()] == [
        ["redis", "down"],
        ["rabbitmq", "down"],
        ["kafka", "down"],
    ]
    urls = script("urls", "redis")
    assert (urls.returncode, urls.stdout) == (1, "")
    assert "scripts/brokers up redis" in urls.stderr


def test_a_killed_server_restarts_at_its_address_with_its_data(script: Script) -> None:
    script("up", "redis")
    pid, port = script.redis()
    script.send(b"SET survivor yes")
    os.kill(pid, signal.SIGKILL)
    assert script("status", "redis").returncode == 1
    assert script("up", "redis").returncode == 0
    assert script.redis()[0] != pid
    assert script.redis()[1] == port
    assert script.send(b"GET survivor") == b"$3\r\nyes\r\n"


@pytest.mark.parametrize("flags", [[], ["--kill"]], ids=["SIGTERM", "SIGKILL"])
def test_stop_keeps_the_data_for_the_next_up(script: Script, flags: list[str]) -> None:
    script("up", "redis")
    port = script.redis()[1]
    script.send(b"SET survivor yes")
    assert script("stop", *flags, "redis").returncode == 0
    assert script("status", "redis").returncode == 1
    assert script("up", "redis").returncode == 0
    assert script.redis()[1] == port
    assert script.send(b"GET survivor") == b"$3\r\nyes\r\n"


def test_down_never_kills_another_process_with_a_recorded_pid(
    script: Script, bystander: subprocess.Popen[bytes]
) -> None:
    script("up", "redis")
    state = json.loads(script.state_file.read_text())
    ours = ProcessRecord(**state["redis"]["processes"][0])
    state["redis"]["processes"][0]["pid"] = bystander.pid
    script.state_file.write_text(json.dumps(state))
    try:
        assert script("status", "redis").returncode == 1
        assert script("down").returncode == 0
        assert bystander.poll() is None
    finally:
        end([ours], grace=5)


def test_a_process_record_matches_only_its_own_process_and_boot(
    bystander: subprocess.Popen[bytes],
) -> None:
    record = ProcessRecord.of(bystander.pid)
    assert record is not None
    for stranger in (
        replace(record, start_ticks=record.start_ticks - 1),
        replace(record, boot_id="another boot"),
    ):
        end([stranger], grace=0)
        stranger.signal(signal.SIGKILL)
        assert bystander.poll() is None
    end([record], grace=5)
    assert bystander.wait(timeout=60) == -signal.SIGTERM
    assert not record.is_alive()


def test_run_sets_the_addresses_and_returns_the_exit_code(script: Script) -> None:
    program = "import os, sys; print(os.environ['QKIT_TEST_REDIS_URL']); sys.exit(7)"
    given = {"QKIT_TEST_RABBITMQ_URL": "amqp://given/", "QKIT_TEST_KAFKA_URL": "given:1"}
    result = script("run", sys.executable, "-c", program, **given)
    assert result.returncode == 7
    assert result.stdout.startswith("redis://127.0.0.1:")
    assert script("status", "redis").returncode == 1


def test_run_does_not_stop_servers_that_ran_before(script: Script) -> None:
    script("up", "redis")
    given = {"QKIT_TEST_RABBITMQ_URL": "amqp://given/", "QKIT_TEST_KAFKA_URL": "given:1"}
    assert script("run", sys.executable, "-c", "", **given).returncode == 0
    assert script("status", "redis").returncode == 0


def test_a_failed_start_shows_the_log(script: Script, tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "redis-server"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nsleep 0.2\necho out of memory\nexit 1\n")
    fake.chmod(0o755)
    result = script("up", "redis", PATH=f"{fake.parent}:{os.environ['PATH']}")
    assert result.returncode == 1
    assert "out of memory" in result.stderr
    assert script("status", "redis").returncode == 1


def test_the_error_for_a_missing_program_names_it(script: Script, tmp_path: Path) -> None:
    result = script("up", "redis", PATH=str(tmp_path))
    assert result.returncode == 1
    assert "redis-server" in result.stderr


def test_the_error_for_an_unknown_broker_lists_the_known_ones(script: Script) -> None:
    result = script("up", "rabbit")
    assert result.returncode == 2
    assert "redis, rabbitmq, kafka" in result.stderr
