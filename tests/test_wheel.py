"""The wheel works in an empty environment with the core dependencies only."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import qkit

REPOSITORY = Path(__file__).resolve().parents[1]

PROGRAM = """
import asyncio
import importlib.resources
import importlib.util
import sys

EXTRAS = ("aio_pika", "aiokafka", "redis", "pyspark", "starlette", "typer")
for name in EXTRAS:
    assert importlib.util.find_spec(name) is None, f"{name} is installed"

import qkit
from qkit import QueueService, Settings, consume

assert "site-packages" in qkit.__file__, qkit.__file__
assert (importlib.resources.files("qkit") / "py.typed").is_file()
scripts = importlib.resources.files("qkit") / "backends" / "redis" / "scripts"
assert (scripts / "claim.lua").is_file()


async def main() -> None:
    handled = asyncio.Event()
    received = []

    @consume("audit")
    async def audit(entry: dict) -> None:
        received.append(entry)
        handled.set()

    service = QueueService(Settings(type="native"))
    service.register(audit)
    async with service:
        sent = await service.send("audit", {"action": "login"})
        assert sent.message_id
        await asyncio.wait_for(handled.wait(), 60)
    assert received == [{"action": "login"}]


asyncio.run(main())
assert not set(EXTRAS) & set(sys.modules)
print("handled")
"""

WITH_REDIS = """
from qkit import QueueService, Settings

QueueService(Settings(type="redis", mode="list", url="redis://localhost/"))
"""


def run(*arguments: str | Path, directory: Path) -> str:
    """Run a program in a clean environment and return its output; fail if it exits with an error.

    Args:
        *arguments: The command line.
        directory: The working directory.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" and not name.startswith(("COV", "QKIT_"))
    }
    result = subprocess.run(
        [str(argument) for argument in arguments],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.mark.proves("002-place-1", "003-docs-7", "003-compat-1")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_alone_sends_and_consumes(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    run(*build, "--outdir", tmp_path, REPOSITORY, directory=tmp_path)
    (wheel,) = tmp_path.glob("qkit_messaging-*.whl")
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel, directory=tmp_path)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert "handled" in run(python, program, directory=tmp_path)
    assert "Name: qkit-messaging" in run(
        python, "-m", "pip", "show", "qkit-messaging", directory=tmp_path
    )

    # Install with extras as docs/install.md describes: the path of the wheel, then the extras.
    run(python, "-m", "pip", "install", "--quiet", f"./{wheel.name}[cli,redis]", directory=tmp_path)
    shown = run(python.with_name("qkit"), "--version", directory=tmp_path)
    assert shown.strip() == f"qkit {qkit.__version__}"
    run(python, "-c", WITH_REDIS, directory=tmp_path)
