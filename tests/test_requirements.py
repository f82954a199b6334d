"""docs/requirements.toml: every requirement is proven by tests that exist and run, or planned."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.requirements import ROOT, mapped_tests, requirements

FIELDS = {"id", "seed", "section", "text", "tests", "planned"}
LATER = {"native engine, complete", "brokers", "Spark", "command line and web"}
# Expected to fail, or left out by the default `-m`: as little proof as a skip.
NO_PROOF = {"skip", "skipif", "xfail", "torture", "full"}


def test_every_entry_is_whole() -> None:
    for entry in requirements():
        assert set(entry) <= FIELDS, entry
        assert all(entry[name].strip() for name in ("id", "seed", "section", "text")), entry
        assert re.fullmatch(rf"{entry['seed']}-[a-z]+-[1-9]\d*", entry["id"]), entry
        assert entry.get("tests") or entry.get("planned"), f"{entry['id']}: tests or planned"
        assert entry.get("planned", "brokers") in LATER, entry
        tests = entry.get("tests", [])
        assert len(tests) == len(set(tests)), f"{entry['id']} names a test twice"


def test_ids_are_unique_and_sections_stand_together() -> None:
    counts = Counter(entry["id"] for entry in requirements())
    assert [name for name, count in counts.items() if count > 1] == []
    runs: list[tuple[str, str]] = []
    for entry in requirements():
        section = (entry["seed"], entry["section"])
        if runs[-1:] != [section]:
            runs.append(section)
    assert len(runs) == len(set(runs))


def test_every_seed_is_there() -> None:
    assert {entry["seed"] for entry in requirements()} == {"000", "001", "002", "003", "004"}


def test_the_page_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "requirements"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def find(test: str) -> list[Any]:
    """The module, class and function of a test; importing is a tenth of the cost of collecting."""
    path, *names = test.split("::")
    found: list[Any] = [importlib.import_module(path.removesuffix(".py").replace("/", "."))]
    for name in names:
        found.append(getattr(found[-1], name))
    return found


def marks(item: Any) -> set[str]:
    own = getattr(item, "pytestmark", [])
    return {mark.name for mark in (own if isinstance(own, list) else [own])}


def fault(test: str) -> str | None:
    try:
        _, *classes, function = found = find(test)
    except (AttributeError, ImportError, FileNotFoundError) as error:
        return f"does not exist: {error}"
    names = [Path(test.partition("::")[0]).name, function.__name__]
    if not all(name.startswith("test_") for name in names) or not callable(function):
        return "is no test"
    if not all(item.__name__.startswith("Test") for item in classes):
        return "is in a class that is not collected"
    if hollow := NO_PROOF & {mark for item in found for mark in marks(item)}:
        return f"is marked {', '.join(hollow)}"
    needs = getattr(function, "__qkit_requires__", ())
    if lacks := [feature for feature in needs if not classes[-1].column.supports(feature)]:
        return f"is skipped: the backend lacks {', '.join(lacks)}"
    return None


def test_every_mapped_test_exists_and_is_not_skipped() -> None:
    faults = {test: fault(test) for test in sorted(mapped_tests())}
    assert {test: why for test, why in faults.items() if why} == {}


def test_a_wrong_mapping_is_noticed() -> None:
    conformance = "tests/conformance/test_native_memory.py::TestNativeInMemory::"
    refusing = "tests/conformance/test_refusals.py::"
    assert "does not exist" in (fault("tests/test_nowhere.py::test_a") or "")
    assert "does not exist" in (fault("tests/test_requirements.py::test_a") or "")
    assert "does not exist" in (fault(f"{conformance}test_a") or "")
    assert "no test" in (fault("tests/test_requirements.py::fault") or "")
    assert "not collected" in (
        fault(f"{refusing}Refusals::test_what_is_unsupported_is_refused") or ""
    )
    assert "torture" in (
        fault("tests/native/test_model.py::test_a_queue_does_what_its_model_does_at_length") or ""
    )
    assert fault(f"{conformance}test_start_is_idempotent") is None


SUITE = """
import pytest

@pytest.mark.parametrize("case", [1, 2])
def test_some_cases(case):
    if case == 1:
        pytest.skip("one of two")

@pytest.mark.parametrize("case", [1, 2])
def test_no_case(case):
    pytest.skip("all of them")

@pytest.fixture
def broker():
    pytest.skip("no broker")

def test_in_a_fixture(broker): ...

def test_not_mapped():
    pytest.skip("nobody minds")
"""
PLUGIN = """
import tests.support.requirements as module

names = ["test_some_cases", "test_no_case", "test_in_a_fixture"]
module.mapped_tests = lambda: {f"test_suite.py::{name}" for name in names}

def pytest_configure(config):
    config.pluginmanager.register(module.SkippedProofs())
"""


@pytest.mark.parametrize(
    ("variables", "fails"),
    [({"CI": "true"}, True), ({"QKIT_REQUIRE_BROKERS": "1"}, True), ({}, False)],
    ids=["CI", "brokers required", "laptop"],
)
def test_a_mapped_test_that_only_skipped_fails_the_run(
    tmp_path: Path, variables: dict[str, str], fails: bool
) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text(PLUGIN)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in {"CI", "QKIT_REQUIRE_BROKERS"} and not name.startswith("COV")
    }
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "."],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == (1 if fails else 0), done.stdout + done.stderr
    told = set(re.findall(r"^test_suite\.py::(\w+)$", done.stdout, re.MULTILINE))
    assert told == ({"test_no_case", "test_in_a_fixture"} if fails else set())
