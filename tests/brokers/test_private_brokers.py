"""Private brokers: kill, freeze, restart, and cleanup after the tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from local_brokers.processes import ProcessRecord
from tests.support.private_brokers import PrivateBroker

ROOT = Path(__file__).parents[2]


def send(broker: PrivateBroker, command: bytes, timeout: float = 5.0) -> bytes:
    with socket.create_connection((broker.host, broker.port), timeout) as connection:
        connection.sendall(command + b"\r\n")
        return connection.recv(100)


def test_a_killed_broker_restarts_at_its_address(private_redis: PrivateBroker) -> None:
    before = [ProcessRecord.of(pid) for pid in private_redis.pids]
    assert all(before)
    with private_redis.killed():
        assert not any(record.is_alive() for record in before if record)
        with pytest.raises(ConnectionError):  # refused or reset
            send(private_redis, b"PING")
    assert send(private_redis, b"PING") == b"+PONG\r\n"


def test_a_frozen_broker_accepts_connections_and_does_not_reply(
    private_redis: PrivateBroker,
) -> None:
    with private_redis.frozen():
        with pytest.raises(TimeoutError):
            send(private_redis, b"PING", 0.3)
    assert send(private_redis, b"PING") == b"+PONG\r\n"


def test_a_killed_broker_keeps_its_confirmed_data(private_redis: PrivateBroker) -> None:
    for number in range(3):
        assert send(private_redis, b"SET survivor %d" % number) == b"+OK\r\n"
        with private_redis.killed():
            pass
        assert send(private_redis, b"GET survivor") == b"$1\r\n%d\r\n" % number


@pytest.mark.broker
def test_a_broker_is_stopped_if_the_test_process_is_killed(tmp_path: Path) -> None:
    program = """
import sys, time
from tests.support.private_brokers import private_broker
with private_broker("redis") as broker:
    print(broker.pids[0], flush=True)
    time.sleep(600)
"""
    path = os.pathsep.join([str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
        cwd=ROOT,
    )
    with child:
        assert child.stdout is not None
        server = ProcessRecord.of(int(child.stdout.readline()))
        assert server is not None
        child.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while server.is_alive() or any(tmp_path.iterdir()):
        assert time.monotonic() < deadline, "the broker is still running or left files behind"
        time.sleep(0.05)
