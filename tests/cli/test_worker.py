"""``qkit run`` with one and several workers, and ``qkit web``."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from qkit import ConfigError
from qkit.cli.target import load
from qkit.cli.worker import WebOptions, set_up_logs
from tests.support.cli import Shell

WORKER = """
import asyncio, os
from qkit import QueueService, Settings, consume

def report(*arguments):
    os.write(1, (" ".join(map(str, arguments)) + "\\n").encode())

@consume("orders", concurrency=4)
async def place(number: int) -> None:
    if number < 0:
        report("dying", os.getpid())
        os._exit(3)
    report("begin", number)
    await asyncio.sleep(number)
    report("end", number)

service = QueueService(Settings(type="native", retry={"max_attempts": 2}))
service.register(place)
report("loaded", os.getpid())
"""

SYNC_WORKER = """
import os, time
from qkit import Settings, SyncQueueService, consume

def report(*arguments):
    os.write(1, (" ".join(map(str, arguments)) + "\\n").encode())

@consume("orders", concurrency=4)
def place(number: int) -> None:
    if number < 0:
        report("dying", os.getpid())
        os._exit(3)
    report("begin", number)
    time.sleep(number)
    service.send("invoices", number)
    report("sent", number)
    if number == 0:
        service.stop()

@consume("invoices")
async def bill(number: int) -> None:
    report("billed", number)

service = SyncQueueService(Settings(type="native", retry={"max_attempts": 2}))
service.register(place)
service.register(bill)
report("loaded", os.getpid())
"""


class Running:
    """Running ``qkit`` process and its output."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log

    def lines(self) -> list[str]:
        return self._log.read_text().splitlines()

    def until(self, condition: Callable[[str], object], seconds: float = 40) -> str:
        """Wait for the first line that satisfies the condition, and return it."""
        deadline = time.monotonic() + seconds
        while True:
            for line in self.lines():
                if condition(line):
                    return line
            over = time.monotonic() > deadline or self.process.poll() is not None
            assert not over, self._log.read_text()
            time.sleep(0.05)

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@contextmanager
def qkit(directory: Path, *arguments: str, **environment: str) -> Iterator[Running]:
    log = directory / f"{'-'.join(arguments[:1])}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "qkit.cli", *arguments],
            cwd=directory,
            env=os.environ | {"QKIT_PATH": str(directory / "data")} | environment,
            stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
    try:
        yield Running(process, log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def place(tmp_path: Path, shell: Shell) -> Path:
    (tmp_path / "shop.py").write_text(WORKER)
    return tmp_path


def test_a_worker_handles_messages_serves_the_web_app_and_drains(place: Path, shell: Shell) -> None:
    arguments = ("run", "shop:service", "--log-json", "--port", "0")
    with qkit(place, *arguments, QKIT_TOKEN="a-long-token") as running:
        served = json.loads(running.until(lambda line: "serving on http" in line))
        address = served["message"].removeprefix("serving on ")
        running.until(lambda line: '"connecting -> connected"' in line or "-> connected" in line)
        assert httpx.get(f"{address}readyz").status_code == 200
        shell.run("send", "orders", "1")
        running.until(lambda line: line == "begin 1")
        assert running.end() == 0
        assert "end 1" in running.lines()
        printed = ("loaded", "begin", "end")  # the program's own output; other lines are JSON
        logged = [json.loads(line) for line in running.lines() if not line.startswith(printed)]
        assert any(record["message"].startswith("shut down") for record in logged)
        assert {"timestamp", "level", "message"} <= set(logged[0])


@pytest.mark.slow
def test_a_crashed_worker_is_restarted_and_all_workers_drain(place: Path, shell: Shell) -> None:
    with qkit(place, "run", "shop:service", "--workers", "2") as running:
        running.until(lambda line: "worker 1 is process" in line)
        running.until(lambda line: "this process now owns" in line)
        shell.run("send", "orders", "--", "-1")
        running.until(lambda line: "crashed (exit code 3); restarting in" in line)
        # Crashed attempts are counted, so the message becomes a dead letter.
        deadline = time.monotonic() + 60
        while not has_dead_letters(shell):
            assert time.monotonic() < deadline, running.lines()
            time.sleep(0.2)
        for _ in range(6):
            shell.run("send", "orders", "2")
        running.until(lambda line: line == "begin 2")
        assert running.end() == 0
        begun = sum(line == "begin 2" for line in running.lines())
        assert sum(line == "end 2" for line in running.lines()) == begun
    (row,) = shell.json("queues")
    # Nothing is lost. If the owner of the directory ended first, messages in flight in the other
    # worker are delivered again.
    assert row["depth"] + row["in_flight"] >= 6 - begun


def has_dead_letters(shell: Shell) -> bool:
    """Return whether there are dead letters; false while the directory has no owner."""
    try:
        return bool(shell.json("dlq", "list"))
    except AssertionError:
        return False


@pytest.mark.slow
def test_workers_drain_if_the_supervisor_is_killed(place: Path) -> None:
    with qkit(place, "run", "shop:service", "--workers", "2") as running:
        running.until(lambda line: "worker 1 is process" in line)
        running.until(lambda line: line.startswith("loaded") and running.lines().count(line))
        pids = [
            int(found[1])
            for line in running.lines()
            if (found := re.search(r"worker \d is process (\d+)", line))
        ]
        running.until(lambda line: "this process now owns" in line)
        running.process.kill()
        running.process.wait()
        deadline = time.monotonic() + 40
        while any(alive(pid) for pid in pids):
            assert time.monotonic() < deadline, running.lines()
            time.sleep(0.05)
        assert any("shut down" in line for line in running.lines())


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_reads_the_settings_file(place: Path, workers: int) -> None:
    (place / "plain.py").write_text(
        "from qkit import QueueService\n"
        "service = QueueService()\n"
        "print('prefetch', service.settings.prefetch, flush=True)\n"
    )
    (place / "qkit.toml").write_text("prefetch = 21\n")
    (place / "other.toml").write_text("prefetch = 22\n")
    for file, expected in (("qkit.toml", 21), ("other.toml", 22)):
        command = ("run", "plain:service", "--workers", str(workers), "--config", file)
        with qkit(place, *command) as running:
            running.until(lambda line: "-> connected" in line)  # logged by a worker
            assert set(running.lines()) & {"prefetch 21", "prefetch 22"} == {f"prefetch {expected}"}
            assert running.lines().count(f"prefetch {expected}") >= min(workers, 2)
            assert running.end() == 0


def test_an_error_is_logged_as_json(place: Path) -> None:
    with qkit(place, "run", "shop:servise", "--log-json") as running:
        assert running.process.wait(60) == 2
        (line,) = [line for line in running.lines() if not line.startswith("loaded")]
        assert "did you mean shop:service?" in json.loads(line)["message"]


def test_control_characters_in_errors_are_escaped(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        set_up_logs(False, "info")
        text = "\x1b[2J\x1b]0;owned\x07"
        try:
            raise ValueError(text)
        except ValueError:
            logging.getLogger("shop").exception("failed: %s", text)
        written = capsys.readouterr().err
    finally:
        for handler in root.handlers[:]:
            root.removeHandler(handler)
        for handler in before[0]:
            root.addHandler(handler)
        root.setLevel(before[1])
    assert "\x1b" not in written
    assert written.count("\\x1b[2J") == 2  # in the log line and in the traceback below it


def test_each_worker_gets_its_own_port_and_all_host_names() -> None:
    options = WebOptions(port=8710, host="0.0.0.0", token="t", hosts=["a.example", "b.example"])
    named = ["--allow-host", "a.example", "--allow-host", "b.example"]
    assert options.of_worker(2) == ["--host", "0.0.0.0", "--port", "8712", *named]
    assert WebOptions(port=0, host="::1", token=None, hosts=[]).of_worker(2)[-1] == "0"
    assert WebOptions(port=None, host="::1", token=None, hosts=["a.example"]).of_worker(2) == []


def test_a_worker_with_invalid_options_is_not_restarted(place: Path) -> None:
    with qkit(place, "run", "shop:servise", "--workers", "2") as running:
        assert running.process.wait(60) == 2
        assert any("did you mean shop:service?" in line for line in running.lines())
    with qkit(place, "run", "shop:service", "--workers", "2", "--port", "65535") as running:
        assert running.process.wait(60) == 2
        assert any("--port 65535 is too high" in line for line in running.lines())
        assert not any("is process" in line for line in running.lines())
    with qkit(place, "run", "shop:service", "--log-level", "loud") as running:
        assert running.process.wait(60) == 2


def test_qkit_web_shows_queues_of_other_processes(place: Path, shell: Shell) -> None:
    shell.run("send", "orders", "1")
    with qkit(place, "web", "--port", "0", "--json", "--allow-host", "shop.example") as running:
        address = json.loads(f"{{{running.until(lambda line: 'address' in line)}}}")["address"]
        rows = httpx.get(f"{address}api/queues").json()
        assert [(row["name"], row["depth"], row["state"]) for row in rows] == [
            ("orders", 1, "none")
        ]
        for host, status in (("shop.example:80", 200), ("evil.example", 421)):
            answer = httpx.get(f"{address}metrics", headers={"Host": host})
            assert answer.status_code == status
        assert running.end() == 0


# -- SyncQueueService ------------------------------------------------------------------------


@pytest.fixture
def sync_place(tmp_path: Path, shell: Shell) -> Path:
    (tmp_path / "shop.py").write_text(SYNC_WORKER)
    return tmp_path


def test_a_synchronous_service_handles_messages_serves_the_web_app_and_drains(
    sync_place: Path, shell: Shell
) -> None:
    arguments = ("run", "shop:service", "--log-json", "--port", "0")
    with qkit(sync_place, *arguments) as running:
        served = json.loads(running.until(lambda line: "serving on http" in line))
        address = served["message"].removeprefix("serving on ")
        running.until(lambda line: "-> connected" in line)
        assert httpx.get(f"{address}readyz").status_code == 200
        shell.run("send", "orders", "1")
        running.until(lambda line: line == "begin 1")
        assert running.end() == 0  # the handler sends a message during the drain
        assert "sent 1" in running.lines()
    with qkit(sync_place, "run", "shop:service") as running:
        # The message that was sent during the drain is still in the queue.
        running.until(lambda line: line == "billed 1")
        shell.run("send", "orders", "0")  # for 0, the handler calls service.stop()
        running.until(lambda line: line == "sent 0")
        assert running.process.wait(60) == 0


def test_a_second_signal_forces_the_shutdown_of_a_synchronous_service(
    sync_place: Path, shell: Shell
) -> None:
    with qkit(sync_place, "run", "shop:service") as running:
        running.until(lambda line: "-> connected" in line or "this process now owns" in line)
        shell.run("send", "orders", "60")
        running.until(lambda line: line == "begin 60")
        running.process.send_signal(signal.SIGTERM)
        running.until(lambda line: "a second signal" in line)
        began = time.monotonic()
        assert running.end() == 0
        assert time.monotonic() - began < 50  # the handler takes 60 s
        assert any("still running" in line for line in running.lines())


@pytest.mark.slow
def test_workers_of_a_synchronous_service_are_restarted_and_drain(
    sync_place: Path, shell: Shell
) -> None:
    with qkit(sync_place, "run", "shop:service", "--workers", "2") as running:
        running.until(lambda line: "worker 1 is process" in line)
        running.until(lambda line: "this process now owns" in line)
        shell.run("send", "orders", "--", "-1")
        running.until(lambda line: "crashed (exit code 3); restarting in" in line)
        shell.run("send", "orders", "1")
        running.until(lambda line: line == "billed 1")
        assert running.end() == 0


@pytest.mark.parametrize("command", [("run", "shop:service"), ("web",)], ids=["run", "web"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "queues.example"])
def test_another_address_without_a_token_is_rejected_at_start(
    place: Path, shell: Shell, command: tuple[str, ...], host: str
) -> None:
    result = shell.run(*command, "--host", host, "--port", "0", code=2)
    text = " ".join(result.stderr.split())
    assert "QKIT_TOKEN" in text
    assert "QKIT_READ_TOKEN" in text


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_a_loopback_address_needs_no_token(host: str) -> None:
    WebOptions(port=0, host=host, token=None, read_token=None, hosts=[])
    WebOptions(port=None, host="0.0.0.0", token=None, read_token=None, hosts=[])
    other = WebOptions(port=0, host="0.0.0.0", token=None, read_token="r", hosts=[])
    assert other.environment() == {"QKIT_READ_TOKEN": "r"}


APPLICATION = """
from fastapi import FastAPI
from qkit import QueueService, Settings

service = QueueService(Settings(type="native"))
app = FastAPI()

def create(name: str) -> QueueService:
    return service
"""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("app", "is an ASGI application (FastAPI)"),
        ("create", "missing a required argument"),
    ],
)
def test_a_target_that_is_not_a_service_is_named_with_what_to_pass(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"web_shop_{name}"
    Path(tmp_path, f"{module}.py").write_text(APPLICATION)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load(f"{module}:{name}")
    assert reason in str(caught.value)
    assert f"pass {module}:service" in str(caught.value)
