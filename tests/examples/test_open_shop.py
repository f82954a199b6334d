"""Example ``open_shop.py``: its dashboard, and a replay by another process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_dead_letters_are_listed_and_replayed_as_in_the_readme(tmp_path: Path) -> None:
    copy_shop(tmp_path, port=0)  # any free port, because the demo itself may be running
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "examples.open_shop"],
        cwd=tmp_path, env=os.environ | {"COLUMNS": "200"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while "Ctrl-C" not in (lines[-1] if lines else ""):
            line = process.stdout.readline()
            assert line, "the example exited before it was ready"
            lines.append(line)
        output = "".join(lines)
        address = next(word for word in output.split() if word.startswith("http://"))
        token = {"Authorization": "Bearer demo"}
        rows = {row["name"]: row for row in httpx.get(f"{address}api/queues", headers=token).json()}
        assert rows["orders"]["dead_letters"] == 3
        assert rows["payments"]["dead_letters"] == 2
        assert "QKIT_PATH=.demo .venv/bin/qkit dlq replay orders" in output
        answer = qkit(tmp_path, "dlq", "replay", "orders")
        assert answer["replayed"] == 3
        wait_until(lambda: qkit(tmp_path, "dlq", "list") == {"payments": 2})
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_second_demo_fails_and_keeps_the_data_of_the_first(tmp_path: Path) -> None:
    (tmp_path / ".demo").mkdir()
    (tmp_path / ".demo" / "orders").write_text("first")
    with socket.create_server(("127.0.0.1", 0)) as first:
        copy_shop(tmp_path, port=first.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "examples.open_shop"],
            cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert "cannot listen" in done.stderr
    assert "already running" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / ".demo" / "orders").read_text() == "first"


def copy_shop(directory: Path, *, port: int) -> None:
    (directory / "examples").mkdir()
    for name in ("orders.py", "open_shop.py"):
        text = (EXAMPLES / name).read_text().replace("PORT = 8710", f"PORT = {port}")
        (directory / "examples" / name).write_text(text)


def qkit(directory: Path, *words: str) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-m", "qkit.cli", *words, "--json"],
        cwd=directory, env=os.environ | {"QKIT_PATH": ".demo"}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    answer: dict[str, int] = json.loads(done.stdout)
    return answer


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
