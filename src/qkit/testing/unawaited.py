"""Fail a test in which a coroutine of qkit was never awaited, such as a send without ``await``.

Python only warns about such a coroutine, when it is freed, and users filter warnings. Python calls
``warnings._warn_unawaited_coroutine`` with the coroutine itself, whatever the filters say, and that
is where this module listens. It costs nothing where every coroutine is awaited. Should a version of
Python drop that function, the ordinary warning is all that remains.

A coroutine is freed as soon as nothing refers to it, so the test that fails is the one that forgot
it. Only what a failed test kept alive in its traceback may be freed during a later test.
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
    """Collects the names of qkit's coroutines that were freed without being awaited."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._replaced: Hook | None = getattr(warnings, HOOK, None)
        self._own: Hook = self._hear  # one object: bound methods are made anew at each access
        if self._replaced is not None:
            setattr(warnings, HOOK, self._own)

    def end(self) -> None:
        """Give the hook back."""
        if self._replaced is not None and getattr(warnings, HOOK) is self._own:
            setattr(warnings, HOOK, self._replaced)

    def take(self) -> list[str]:
        """Return the names collected since the last call."""
        names, self._names = self._names, []
        return names

    def _hear(self, coroutine: CoroutineType[Any, Any, Any]) -> None:
        frame = coroutine.cr_frame
        if frame is not None and frame.f_globals.get("__name__", "").startswith("qkit."):
            self._names.append(coroutine.__qualname__)
        # The same warning as Python's own, issued here: through its function, this frame would
        # stand where the warning has to name the line that freed the coroutine.
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
    """Listen for the length of the run."""
    config.stash[WATCH] = Watch()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop listening."""
    if (watch := config.stash.get(WATCH, None)) is not None:
        watch.end()


@pytest.hookimpl(hookwrapper=True)  # wrapper=True is unknown to pytest before 7.4
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, None]:
    """Fail the set-up of a test, such as a fixture's."""
    item.config.stash[WATCH].take()  # what was freed between tests is no fault of this one
    yield from _watched(item)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    """Fail a test."""
    yield from _watched(item)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, None]:
    """Fail the tear-down of a test, such as a fixture's."""
    yield from _watched(item)


def _watched(item: pytest.Item) -> Generator[None, Any, None]:
    outcome = yield
    names = item.config.stash[WATCH].take()
    if names and outcome.excinfo is None:
        counted = ", ".join(sorted(set(names)))
        text = f"never awaited: {counted}. Nothing was done: write `await` before the call"
        outcome.force_exception(pytest.fail.Exception(text, pytrace=False))
