"""Documentation checks: code blocks run unchanged, and cited commands, links and tests exist."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from qkit.testing import TestService, VirtualClock
from tests.support.node_ids import fault, find

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[str]:
    found = BLOCK.findall((ROOT / page).read_text())
    assert found, f"{page} has no Python block"
    return found


@pytest.mark.proves("002-usage-1", "003-docs-5", "003-compat-10")
@pytest.mark.parametrize("page", ["docs/guide.md", "docs/api.md", "docs/testing.md"])
async def test_the_blocks_of_a_page_run_as_one_program(page: str) -> None:
    with VirtualClock() as clock:
        await run(page, {"clock": clock})


@pytest.mark.proves("002-log-4", "002-log-7", "002-log-9")
async def test_the_native_page_runs_in_real_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    await run("docs/native.md", {})


async def test_the_web_page_runs_in_real_time() -> None:
    await run("docs/web.md", {})


def test_the_observability_page_runs_as_one_program(tmp_path: Path) -> None:
    # In a separate process, because OpenTelemetry's providers can be set only once.
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks("docs/observability.md")))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_command_on_the_pages_exists_with_its_options() -> None:
    from typer.main import get_command

    from qkit.cli.app import app

    pages = [(ROOT / name).read_text() for name in ("docs/cli.md", "README.md")]
    lines = [
        line.removeprefix("$ ").split(" qkit ")[-1].removeprefix("qkit ").split(" < ")[0]
        for page in pages
        for line in re.findall(r"^\$ .*qkit .+$", page.replace(".venv/bin/qkit", "qkit"), re.M)
    ]
    assert len(lines) > 20
    for line in lines:
        command: Any = get_command(app)
        words = shlex.split(line)
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        with command.make_context(command.name, words):
            pass  # all options are known and no argument is missing


async def run(page: str, names: dict[str, object]) -> None:
    namespace: dict[str, object] = {"__name__": page, **names}
    for number, block in enumerate(blocks(page)):
        code = compile(
            block, f"{page} block {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )
        result = eval(code, namespace)
        if inspect.isawaitable(result):
            await result


async def test_the_pytest_example_of_the_testing_page_passes(
    qkit_service: Callable[..., Awaitable[TestService]],
) -> None:
    namespace: dict[str, Any] = {}
    for block in blocks("docs/testing.md"):
        if "await t.drain()                  " not in block:  # blocks that await are run above
            exec(block, namespace)
    await namespace["test_a_negative_total_is_rejected"](qkit_service)


@pytest.mark.proves("003-compat-1", "003-compat-10")
def test_the_readme_example_handles_its_order_and_ends_on_sigterm(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text(blocks("README.md")[0])
    process = subprocess.Popen(
        [sys.executable, "-u", str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"order 1, attempt 1\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, errors.decode()


PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_link_targets_inside_the_project_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"broken link to {target}"


def test_the_architecture_page_has_at_most_100_lines() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 100


HAZARDS = ROOT / "docs" / "native-hazards.md"
TEST = re.compile(r"tests/[\w/]+\.py(?:::\w+)+")


def test_every_test_that_the_hazards_page_names_exists() -> None:
    for name in TEST.findall(HAZARDS.read_text()):
        *_, function = find(name)
        assert function.__name__.startswith("test_"), name


def test_every_hazard_has_a_test_that_runs() -> None:
    rows = [line for line in HAZARDS.read_text().splitlines() if line.startswith("| ")]
    hazards = [row for row in rows if not row.startswith("| hazard |")]
    assert len(hazards) > 50
    for row in hazards:
        cells = row.strip("| ").split(" | ")
        assert len(cells) == 3, row
        assert any(fault(name) is None for name in TEST.findall(cells[2])), row


def test_a_wrong_node_id_is_detected() -> None:
    conformance = "tests/conformance/test_native_memory.py::TestNativeInMemory::"
    unsupported = "tests/conformance/test_unsupported.py::"
    assert "does not exist" in (fault("tests/test_nowhere.py::test_a") or "")
    assert "does not exist" in (fault("tests/test_docs.py::test_a") or "")
    assert "does not exist" in (fault(f"{conformance}test_a") or "")
    assert "not a test" in (fault("tests/test_docs.py::blocks") or "")
    assert "not collected" in (
        fault(f"{unsupported}UnsupportedFeatures::test_an_unsupported_feature_raises_unsupported")
        or ""
    )
    assert "torture" in (
        fault(
            "tests/native/queue/test_state_model.py::test_a_queue_behaves_like_its_model_in_2000_histories"
        )
        or ""
    )
    assert fault(f"{conformance}test_start_is_idempotent") is None
