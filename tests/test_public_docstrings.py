"""Every public name has a docstring with its parameters, its result and an example that runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import Protocol

import pytest

from tests.support.docstrings import PublicItem, doctest_names, problems, public_items

MODULES = (
    "qkit",
    "qkit.backend",
    "qkit.conformance",
    "qkit.native",
    "qkit.spark",
    "qkit.testing",
    "qkit.web",
)

ITEMS = {item.name: item for module in MODULES for item in public_items(import_module(module))}
every_item = pytest.mark.parametrize(
    "item",
    [pytest.param(ITEMS[name], id=name) for name in ITEMS],
)


def test_public_names_are_found() -> None:
    assert len(ITEMS) > 250
    assert {"qkit.errors.Retry", "qkit.backend.Backend.publish"} <= set(ITEMS)


@every_item
def test_a_public_name_is_documented(item: PublicItem) -> None:
    assert problems(item.value) == []


@every_item
def test_the_example_of_a_public_name_is_a_doctest_of_its_module(item: PublicItem) -> None:
    assert item.name in doctest_names(item.module)


def test_the_ordinary_suite_runs_the_doctests_of_all_modules(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getoption("doctestmodules")
    assert "src" in pytestconfig.getini("testpaths")


# -- the checker -----------------------------------------------------------------------------------


class Documented(Protocol):
    __doc__: str | None


def function(first: int, *rest: int, **options: str) -> Iterator[int]:
    """Add numbers.

    Args:
        first: The first number.
        *rest: More numbers.
        **options: How to add them,
            in detail.

    Returns:
        Their sum.

    Raises:
        QueueFull: The result is full.

    Example:
        >>> 1 + 1
        2
    """
    raise NotImplementedError


@dataclass
class Data:
    """Two numbers.

    Attributes:
        left: The first number.
        right: The second number.

    Example:
        >>> 1 + 1
        2
    """

    left: int
    right: int


class Plain:
    """A counter.

    Args:
        start: The first number.

    Attributes:
        step: The distance between two numbers.

    Example:
        >>> 1 + 1
        2
    """

    step: int = 1

    def __init__(self, start: int) -> None:
        self.start = start


class Choice(StrEnum):
    """A choice.

    Attributes:
        YES: It is true.

    Example:
        >>> 1 + 1
        2
    """

    YES = "yes"


@pytest.mark.parametrize("value", [function, Data, Plain, Choice])
def test_the_checker_accepts_a_complete_docstring(value: object) -> None:
    assert problems(value) == []


@pytest.mark.parametrize(
    ("value", "old", "new", "problem"),
    [
        (function, "Add numbers.", "Add numbers", "the summary does not end with a full stop"),
        (function, "Add numbers.", "Add.\n    More.", "the summary is longer than one line"),
        (function, "first: The first number.", "", "Args: first is missing"),
        (function, "first: The first number.", "first:", "Args: first is missing"),
        (function, "*rest: More numbers.", "", "Args: rest is missing"),
        (function, "**options: How to add", "**others: How to add", "Args: options is missing"),
        (
            function,
            "first: The",
            "other: Not there.\n        first: The",
            "Args: other is not in the code",
        ),
        (function, "Args:", "Parameters:", "unknown section Parameters"),
        (function, "Returns:\n        Their sum.", "", "Returns is missing"),
        (
            function,
            "QueueFull:",
            "QueueEmpty:",
            "Raises: no exception QueueEmpty in qkit or Python",
        ),
        (function, "Example:", "", "Example is missing"),
        (function, ">>> 1 + 1", "1 + 1", "Example: no line runs"),
        (function, ">>> 1 + 1", ">>> 1 + 1  # doctest: +SKIP", "Example: no line runs"),
        (Data, "left: The first number.", "", "Attributes: left is missing"),
        (Plain, "start: The first number.", "", "Args: start is missing"),
        (Plain, "step: The distance between two numbers.", "", "Attributes: step is missing"),
        (Choice, "YES: It is true.", "", "Attributes: YES is missing"),
    ],
)
def test_the_checker_finds_a_fault(
    value: Documented, old: str, new: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = value.__doc__ or ""
    assert old in text
    monkeypatch.setattr(value, "__doc__", text.replace(old, new))
    assert problem in problems(value)


def test_the_checker_finds_a_missing_docstring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function, "__doc__", None)
    assert problems(function) == ["no docstring"]
