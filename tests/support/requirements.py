"""Which tests docs/requirements.toml maps, and that none of them goes unrun in CI."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.brokers import brokers_required

ROOT = Path(__file__).resolve().parents[2]


@cache
def requirements() -> tuple[dict[str, Any], ...]:
    with (ROOT / "docs" / "requirements.toml").open("rb") as file:
        return tuple(tomllib.load(file)["requirement"])


@cache
def mapped_tests() -> frozenset[str]:
    return frozenset(test for entry in requirements() for test in entry.get("tests", ()))


class SkippedProofs:
    """A pytest plugin: where brokers are due, a mapped test that only skipped fails the run.

    The cases of a parametrised test count together: it is skipped when every case of it was.
    """

    def __init__(self) -> None:
        self._skipped: set[str] = set()
        self._ran: set[str] = set()

    def unproven(self) -> list[str]:
        return sorted((self._skipped - self._ran) & mapped_tests())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid.partition("[")[0]
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skipped.add(test)
        elif report.when == "call":
            self._ran.add(test)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unproven() and brokers_required() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.unproven() and brokers_required():
            terminalreporter.section("requirements whose test was skipped", red=True)
            for test in self.unproven():
                terminalreporter.line(test)
