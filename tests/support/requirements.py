"""Pytest plugin that fails a CI run if a requirement has no passed test."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.support.brokers import brokers_required

LIST = Path(__file__).resolve().parents[2] / "docs" / "requirements.toml"
# Options that select tests, besides paths and ``-m``.
SELECTIONS = ("keyword", "deselect", "ignore", "ignore_glob", "lf", "collectonly")


def need_tests() -> set[str]:
    """Return the ids of the requirements in the state `test`."""
    tables = tomllib.loads(LIST.read_text(encoding="utf-8"))
    noted = {key for state in ("bench", "deviation", "planned") for key in tables.pop(state, ())}
    return {
        key for document in tables.values() for lines in document.values() for key in lines
    } - noted


def is_complete(config: pytest.Config) -> bool:
    """Return whether the whole suite runs, without paths, ``-k`` or a custom ``-m``."""
    return (
        config.args_source is pytest.Config.ArgsSource.TESTPATHS
        and config.getoption("markexpr") in ("", *config.getini("addopts"))
        and not any(config.getoption(name, None) for name in SELECTIONS)
    )


class SkippedProofs:
    """Plugin that fails a complete run with brokers if a `test` requirement has no passed test.

    Test reports carry the requirement ids as user properties, so that it works with xdist too.
    """

    def __init__(self) -> None:
        self._proven: set[str] = set()
        self._unproven: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            marks = item.iter_markers("proves")
            item.user_properties += [("proves", key) for mark in marks for key in mark.args]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            marks = (key for name, key in report.user_properties if name == "proves")
            self._proven.update(map(str, marks))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        passed = session.exitstatus == pytest.ExitCode.OK
        if passed and brokers_required() and is_complete(session.config):
            self._unproven = sorted(need_tests() - self._proven)
        if self._unproven:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._unproven:
            terminalreporter.section("requirements without a passed test", red=True)
            for key in self._unproven:
                terminalreporter.line(key)
