"""Lookup of tests by the node ids that a document cites."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

# Tests that are skipped, expected to fail, or deselected by the default `-m` prove nothing.
NO_PROOF = {"skip", "skipif", "xfail", "torture", "full"}


def find(test: str) -> list[Any]:
    """Return the module, class and function of a test.

    It imports the module, because collecting the test takes ten times as long.
    """
    path, *names = test.split("::")
    found: list[Any] = [importlib.import_module(path.removesuffix(".py").replace("/", "."))]
    for name in names:
        found.append(getattr(found[-1], name))
    return found


def marks(item: Any) -> set[str]:
    own = getattr(item, "pytestmark", [])
    return {mark.name for mark in (own if isinstance(own, list) else [own])}


def fault(test: str) -> str | None:
    """Return why a node id proves nothing, or ``None`` if it names a test that runs."""
    try:
        _, *classes, function = found = find(test)
    except (AttributeError, ImportError, FileNotFoundError) as error:
        return f"does not exist: {error}"
    names = [Path(test.partition("::")[0]).name, function.__name__]
    if not all(name.startswith("test_") for name in names) or not callable(function):
        return "is not a test"
    if not all(item.__name__.startswith("Test") for item in classes):
        return "is in a class that is not collected"
    if excluding := NO_PROOF & {mark for item in found for mark in marks(item)}:
        return f"is marked {', '.join(excluding)}"
    needs = getattr(function, "__qkit_requires__", ())
    if unsupported := [feature for feature in needs if not classes[-1].column.supports(feature)]:
        return f"is skipped: the backend lacks {', '.join(unsupported)}"
    return None
