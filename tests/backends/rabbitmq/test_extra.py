"""The extra ``rabbitmq`` names every library that the package imports, in tested versions."""

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
    """The libraries that the package imports, beside qkit's own modules and the standard ones."""
    found: set[str] = set()
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module).partition(".")[0])
    return found - {"qkit"} - sys.stdlib_module_names


def test_the_extra_names_what_the_package_imports() -> None:
    # aio-pika is the client that the documentation names; the package uses the layer below it.
    assert {item.name for item in EXTRA} == imported() | {"aio-pika"}


def test_each_library_is_bounded_and_the_installed_version_fits() -> None:
    for item in EXTRA:
        operators = {specifier.operator for specifier in item.specifier}
        assert operators == {">=", "<"}, item
        assert item.specifier.contains(version(item.name)), item


def test_the_pinned_requirements_name_the_same_versions() -> None:
    lines = (ROOT / "requirements" / "run.in").read_text().splitlines()
    assert {str(item) for item in EXTRA} <= {
        str(Requirement(line.partition("#")[0])) for line in lines if line[:1].isalpha()
    }
