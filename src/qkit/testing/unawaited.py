"""Pytest hooks that fail a test in which a coroutine of qkit was never awaited.

A typical case is a send without ``await``. Python only issues a warning when the coroutine is
freed, and warnings may be filtered. This module replaces ``warnings._warn_unawaited_coroutine``,
which Python calls with the coroutine regardless of filters. It costs nothing if all coroutines are
awaited. On a Python version without that function, only the ordinary warning remains.

A coroutine is freed as soon as nothing refers to it, so the test that created it fails. The
exception is a coroutine that a failed test keeps alive in its traceback: it may be freed during a
later test.
"""

from __future__ import annotations

import linecache
import traceback
import warnings
from collections.abc import Callable, Generator
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final

import pytest

__all__ = [
    "pytest_configure",
    "pytest_runtest_call",
    "pytest_runtest_setup",
    "pytest_runtest_teardown",
    "pytest_unconfigure",
]

HOOK: Final = "_warn_unawaited_coroutine"

if TYPE_CHECKING:
    Hook = Callable[[CoroutineType[Any, Any, Any]], None]


class Watch:
    """Collector of the names of qkit's coroutines that were freed without being awaited."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._replaced: Hook | None = getattr(warnings, HOOK, None)
        self._own: Hook = self._record  # stored because each access creates a new bound method
        if self._replaced is not None:
            setattr(warnings, HOOK, self._own)

    def end(self) -> None:
        """Restore the previous hook."""
        if self._replaced is not None and getattr(warnings, HOOK) is self._own:
            setattr(warnings, HOOK, self._replaced)

    def take(self) -> list[str]:
        """Return the names collected since the last call."""
        names, self._names = self._names, []
        return names

    def _record(self, coroutine: CoroutineType[Any, Any, Any]) -> None:
        frame = coroutine.cr_frame
        if frame is not None and frame.f_globals.get("__name__", "").startswith("qkit."):
            self._names.append(coroutine.__qualname__)
        # Issue the same warning as Python. Python's own function would report this frame instead
        # of the line that freed the coroutine.
        warnings.warn(_text(coroutine), RuntimeWarning, stacklevel=2, source=coroutine)


def _text(coroutine: CoroutineType[Any, Any, Any]) -> str:
    text = f"coroutine '{coroutine.__qualname__}' was never awaited"
    origin = coroutine.cr_origin  # set in asyncio's debug mode
    if origin is None:
        return text
    frames = [
        (file, line, function, linecache.getline(file, line))
        for file, line, function in reversed(origin)
    ]
    created = "".join(traceback.format_list(frames)).rstrip("\n")
    return f"{text}\nCoroutine created at (most recent call last)\n{created}"


WATCH: Final = pytest.StashKey[Watch]()


def pytest_configure(config: pytest.Config) -> None:
    """Install the hook for the test run."""
    config.stash[WATCH] = Watch()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the hook."""
    if (watch := config.stash.get(WATCH, None)) is not None:
        watch.end()


@pytest.hookimpl(hookwrapper=True)  # wrapper=True is unknown to pytest before 7.4
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, None]:
    """Fail the setup of a test if it leaves a coroutine unawaited."""
    item.config.stash[WATCH].take()  # coroutines freed between tests belong to no test
    yield from _watched(item)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    """Fail a test if it leaves a coroutine unawaited."""
    yield from _watched(item)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, None]:
    """Fail the teardown of a test if it leaves a coroutine unawaited."""
    yield from _watched(item)


def _watched(item: pytest.Item) -> Generator[None, Any, None]:
    outcome = yield
    names = item.config.stash[WATCH].take()
    if names and outcome.excinfo is None:
        listed = ", ".join(sorted(set(names)))
        text = f"never awaited: {listed}. The call did nothing: write `await` before it"
        outcome.force_exception(pytest.fail.Exception(text, pytrace=False))
