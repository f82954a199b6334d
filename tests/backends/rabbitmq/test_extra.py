"""Check that the extra ``rabbitmq`` lists all imported libraries, with tested versions."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

import qkit.backends.rabbitmq

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = Path(qkit.backends.rabbitmq.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRA = [Requirement(text) for text in PROJECT["optional-dependencies"]["rabbitmq"]]


def imported() -> set[str]:
    """Return the third-party libraries that the package imports."""
    found: set[str] = set()
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module).partition(".")[0])
    return found - {"qkit"} - sys.stdlib_module_names


def test_the_extra_lists_the_libraries_that_the_package_imports() -> None:
    # The documentation names aio-pika as the client; the package uses aiormq, on which it is built.
    assert {item.name for item in EXTRA} == imported() | {"aio-pika"}


def test_each_library_has_version_bounds_that_include_the_installed_version() -> None:
    for item in EXTRA:
        operators = {specifier.operator for specifier in item.specifier}
        assert operators == {">=", "<"}, item
        assert item.specifier.contains(version(item.name)), item


def test_the_requirements_file_has_the_same_version_bounds() -> None:
    lines = (ROOT / "requirements" / "run.in").read_text().splitlines()
    assert {str(item) for item in EXTRA} <= {
        str(Requirement(line.partition("#")[0])) for line in lines if line[:1].isalpha()
    }
