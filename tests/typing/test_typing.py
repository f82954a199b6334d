"""mypy and pyright accept ``proofs.py`` and report each expected error in it."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import qkit

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MARK = re.compile(r"  # type: ignore\[.*$", re.MULTILINE)


def mypy(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", str(path)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def pyright(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pyright", "-p", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def lines_with_errors(output: str) -> set[int]:
    return {int(line) for line in re.findall(r"proofs\.py:(\d+)(?::\d+)?(?: -|:) error", output)}


@pytest.fixture
def unmarked(tmp_path: Path) -> Path:
    """Directory with a copy of the proofs without ignore comments, and the configuration."""
    (tmp_path / "proofs.py").write_text(MARK.sub("", (HERE / "proofs.py").read_text()))
    config = (HERE / "pyrightconfig.json").read_text().replace('"../.."', f'"{ROOT}"')
    (tmp_path / "pyrightconfig.json").write_text(config)
    return tmp_path


EXPECTED = {
    number
    for number, line in enumerate((HERE / "proofs.py").read_text().splitlines(), 1)
    if MARK.search(line)
}


def test_the_proofs_contain_at_least_25_expected_errors() -> None:
    assert len(EXPECTED) >= 25


@pytest.mark.proves(
    "002-place-7",
    "003-types-1",
    "003-types-3",
    "003-types-6",
    "003-types-7",
    "003-docs-4",
    "003-docs-7",
    "003-docs-8",
    "003-compat-9",
)
@pytest.mark.slow
def test_mypy_finds_exactly_the_expected_errors(unmarked: Path) -> None:
    clean = mypy(HERE / "proofs.py")
    assert clean.returncode == 0, clean.stdout
    assert lines_with_errors(mypy(unmarked / "proofs.py").stdout) == EXPECTED


@pytest.mark.proves(
    "002-place-7", "003-types-1", "003-types-3", "003-types-6", "003-types-7", "003-docs-8"
)
@pytest.mark.slow
def test_pyright_finds_exactly_the_expected_errors(unmarked: Path) -> None:
    clean = pyright(HERE)
    assert clean.returncode == 0, clean.stdout
    assert lines_with_errors(pyright(unmarked).stdout) == EXPECTED


@pytest.mark.proves("003-types-3", "003-docs-7")
def test_the_package_has_a_py_typed_marker() -> None:
    assert files("qkit").joinpath("py.typed").is_file()


@pytest.mark.proves("003-docs-1", "003-docs-2", "003-docs-6")
@pytest.mark.parametrize("name", qkit.__all__)
def test_every_export_can_be_imported_and_is_documented(name: str) -> None:
    item = getattr(qkit, name)
    documentation = getattr(item, "__doc__", None)
    if name in {"CallNext", "Middleware"}:  # type aliases have no docstring
        assert name in (ROOT / "docs" / "api.md").read_text()
        return
    assert documentation, f"qkit.{name} has no docstring"


@pytest.mark.proves("003-docs-1", "003-docs-5")
def test_every_export_has_an_example_in_the_reference() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    missing = [name for name in qkit.__all__ if not re.search(rf"\b{name}\b", code)]
    assert not missing, f"docs/api.md has no example of {missing}"
