"""docs/requirements.toml, the tests marked `proves` and docs/requirements.md are consistent."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = "scripts/requirements"


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_each_requirement_is_proven_and_the_page_is_up_to_date() -> None:
    done = run(ROOT, "--check")
    assert done.returncode == 0, done.stderr


FILES = {
    "docs/requirements.toml": """
[bench]
000-a-4 = "memory.rate"
[planned]
000-a-5 = "later"
[000."Section"]
000-a-1 = "On a test."
000-a-2 = "On a class."
000-a-3 = "On a module."
000-a-4 = "Measured."
000-a-5 = "Not yet."
000-a-6 = "By a scenario."
""",
    "tests/test_some.py": """
import pytest
pytestmark = [pytest.mark.slow, pytest.mark.proves("000-a-3")]
@pytest.mark.proves("000-a-2")
class TestSome:
    @pytest.mark.proves("000-a-1")
    async def test_a(self): ...
""",
    "tests/conformance/proofs.py": 'PROOFS = {"test_b": ("000-a-6",)}',
    "src/qkit/conformance/some.py": "async def test_b(self): ...",
    "benchmarks/some.py": 'Figure("memory.rate")',
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Minimal project whose requirements are all proven."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / SCRIPT).parent.mkdir()
    shutil.copy(ROOT / SCRIPT, tmp_path / SCRIPT)
    assert run(tmp_path).returncode == 0
    assert run(tmp_path, "--check").returncode == 0
    return tmp_path


@pytest.mark.parametrize(
    ("file", "old", "new", "fault"),
    [
        ("tests/test_some.py", "000-a-1", "000-a-9", "test_a proves 000-a-9, which"),
        ("tests/test_some.py", '"000-a-1"', "", "no test proves 000-a-1"),
        ("tests/test_some.py", '"000-a-2"', "", "no test proves 000-a-2"),
        ("tests/test_some.py", '"000-a-3"', "", "no test proves 000-a-3"),
        ("tests/test_some.py", "test_a", "helper", "test_some.py:6: `proves` marks no test"),
        ("tests/conformance/proofs.py", "test_b", "test_c", "no scenario is called test_c"),
        ("tests/conformance/proofs.py", "000-a-6", "000-b-6", "test_b proves 000-b-6, which"),
        ("docs/requirements.toml", "test.", "test!", "docs/requirements.md is out of date"),
        ("docs/requirements.toml", "memory.rate", "memory.size", "no benchmark is called"),
        ("docs/requirements.toml", '5 = "later"', '9 = "later"', "[planned] 000-a-9: unknown"),
        ("docs/requirements.toml", '"later"', '""', "[planned] 000-a-5: unknown id"),
        ("docs/requirements.toml", '000-a-5 = "N', '001-a-5 = "N', "001-a-5: duplicate id"),
    ],
)
def test_a_problem_is_reported(tree: Path, file: str, old: str, new: str, fault: str) -> None:
    assert old in FILES[file]
    (tree / file).write_text(FILES[file].replace(old, new))
    done = run(tree, "--check")
    assert done.returncode == 1
    assert fault in done.stderr


SUITE = """
import pytest

@pytest.mark.proves("one-of-two")
@pytest.mark.parametrize("case", [1, 2])
def test_some_cases(case):
    if case == 1:
        pytest.skip("one of two")

@pytest.mark.proves("all")
@pytest.mark.parametrize("case", [1, 2])
def test_no_case(case):
    pytest.skip("all of them")

@pytest.fixture
def broker():
    pytest.skip("no broker")

@pytest.mark.proves("in-a-fixture", "elsewhere")
def test_in_a_fixture(broker): ...

@pytest.mark.proves("elsewhere")
def test_elsewhere(): ...

@pytest.mark.proves("expected-to-fail")
@pytest.mark.xfail
def test_expected_to_fail():
    assert False

@pytest.mark.proves("deselected")
@pytest.mark.torture
def test_deselected(): ...
"""
INI = """
[pytest]
testpaths = .
addopts = -m "not torture"
markers =
    proves
    torture
"""
PLUGIN = """
import tests.support.requirements as module

module.need_tests = lambda: {
    *("one-of-two", "elsewhere"),
    *("all", "in-a-fixture", "expected-to-fail", "deselected", "without-test"),
}

def pytest_configure(config):
    config.pluginmanager.register(module.SkippedProofs())
"""
UNPROVEN = {"all", "in-a-fixture", "expected-to-fail", "deselected", "without-test"}


@pytest.mark.parametrize(
    ("variable", "arguments", "fails"),
    [
        ("CI=true", [], True),
        ("CI=true", ["-n", "2"], True),
        ("QKIT_REQUIRE_BROKERS=1", [], True),
        ("CI=", [], False),
        ("CI=true", ["test_suite.py"], False),
        ("CI=true", ["-k", "test"], False),
        ("CI=true", ["-m", "proves"], False),
        ("CI=true", ["--collect-only"], False),
    ],
    ids=["CI", "in parallel", "brokers required", "laptop", "path", "-k", "-m", "collected"],
)
def test_a_requirement_without_a_passing_test_fails_a_complete_run(
    tmp_path: Path, variable: str, arguments: list[str], fails: bool
) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "pytest.ini").write_text(INI)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in {"CI", "QKIT_REQUIRE_BROKERS"} and not name.startswith(("COV", "PYTEST"))
    }
    name, _, value = variable.partition("=")
    environment |= {name: value, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist.plugin"),
            *arguments,
        ],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == (1 if fails else 0), done.stdout + done.stderr
    reported = set(re.findall(r"^[a-z-]+$", done.stdout, re.MULTILINE))
    assert reported == (UNPROVEN if fails else set())
