"""Look up the tests that a page names by their node ids."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

# Expected to fail, or left out by the default `-m`: as little proof as a skip.
NO_PROOF = {"skip", "skipif", "xfail", "torture", "full"}


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
