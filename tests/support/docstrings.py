"""Checker for Google-style docstrings: sections, parameters, fields and runnable examples."""

from __future__ import annotations

import builtins
import doctest
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, cached_property
from types import ModuleType
from typing import Any, NamedTuple, get_type_hints, is_typeddict

from pydantic import BaseModel

from qkit import errors

__all__ = ["PublicItem", "attributes", "doctest_names", "problems", "public_items"]

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example")
# Section headings of other styles. The checks below would ignore the text under such a heading.
OTHER_SECTIONS = (
    *("Arguments", "Parameters", "Params", "Keyword Args", "Fields", "Members"),
    *("Return", "Yield", "Raise", "Exceptions", "Examples", "Usage"),
)
HEADING = re.compile(rf"^({'|'.join((*SECTIONS, *OTHER_SECTIONS))})::?\s*$")
ENTRY = re.compile(r"^    \*{0,2}([A-Za-z_][\w.]*)(?: \([^)]*\))?:(.*)$")

Sections = dict[str, list[str]]


class PublicItem(NamedTuple):
    """A class, function, method or property, with the module and the class that define it."""

    module: str
    qualname: str
    value: object

    @property
    def name(self) -> str:
        return f"{self.module}.{self.qualname}"


def public_items(module: ModuleType) -> Iterator[PublicItem]:
    """Yield the classes and functions in a module's ``__all__``, and the members of its classes."""
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, type):
            yield PublicItem(value.__module__, value.__qualname__, value)
            yield from _members(value)
        elif inspect.isfunction(value):
            yield PublicItem(value.__module__, value.__qualname__, value)


def _members(cls: type) -> Iterator[PublicItem]:
    """Yield the methods and properties of a class, except overrides of non-qkit base classes."""
    own = [base for base in cls.__mro__ if base.__module__.split(".")[0] == "qkit"]
    inherited = {name for base in cls.__mro__ if base not in own for name in vars(base)}
    for base in own:
        for name, member in vars(base).items():
            # The names of conformance scenarios describe them, and pytest documents its hooks.
            # Fixtures, which an example cannot call, are not functions and are excluded below.
            if name.startswith(("_", "test_", "pytest_")) or name in inherited:
                continue
            if _is_property(member) or inspect.isfunction(getattr(member, "__func__", member)):
                inherited.add(name)
                yield PublicItem(base.__module__, f"{base.__qualname__}.{name}", member)


def _is_property(member: object) -> bool:
    return isinstance(member, (property, cached_property))


def problems(value: Any) -> list[str]:
    """Return what is missing or wrong in the docstring of a class, function or property."""
    # Ignore a docstring that a class inherits.
    own = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
    text = inspect.cleandoc(own or "")
    if not text:
        return ["no docstring"]
    sections = _sections(text)
    found = [f"unknown section {name}" for name in OTHER_SECTIONS if name in sections]
    found += [*_summary_problems(text), *_raises_problems(sections)]
    found += _example_problems(sections, getattr(value, "__module__", ""))
    if isinstance(value, type):
        found += _class_problems(value, sections)
    elif not _is_property(value):
        found += _function_problems(inspect.unwrap(value), text, sections)
    return found


def _sections(text: str) -> Sections:
    """Return the indented lines of each section."""
    sections: Sections = {}
    lines: list[str] = []
    for line in text.splitlines():
        heading = HEADING.match(line)
        if heading:
            lines = sections.setdefault(heading[1], [])
        elif line and not line.startswith(" "):
            lines = []
        else:
            lines.append(line)
    return sections


def _entries(lines: list[str]) -> dict[str, str]:
    """Return the names that a section describes, with their descriptions."""
    entries: dict[str, str] = {}
    name = ""
    for line in lines:
        entry = ENTRY.match(line)
        if entry:
            name = entry[1]
            entries[name] = entry[2].strip()
        elif name:
            entries[name] = f"{entries[name]} {line.strip()}".strip()
    return entries


def attributes(cls: type) -> dict[str, str]:
    """Return the descriptions in the ``Attributes`` section of a class, by name."""
    return _entries(_sections(inspect.cleandoc(cls.__doc__ or ""))["Attributes"])


def _summary_problems(text: str) -> Iterator[str]:
    summary, *more = text.splitlines()
    if not summary.endswith("."):
        yield "the summary does not end with a full stop"
    if more and more[0]:
        yield "the summary is longer than one line"


def _raises_problems(sections: Sections) -> Iterator[str]:
    for name in _entries(sections.get("Raises", [])):
        if "." in name:  # an exception of another package
            pkgutil.resolve_name(name)
        elif not hasattr(errors, name) and not hasattr(builtins, name):
            yield f"Raises: no exception {name} in qkit or Python"


def _example_problems(sections: Sections, module: str) -> Iterator[str]:
    examples = doctest.DocTestParser().get_examples("\n".join(sections.get("Example", [])))
    if "Example" not in sections:
        yield "Example is missing"
    elif module.startswith("qkit.spark"):
        return  # tests/spark/test_docs.py runs the lines that need a Spark session
    elif all(example.options.get(doctest.SKIP) for example in examples):
        yield "Example: no line runs"


def _class_problems(cls: type, sections: Sections) -> Iterator[str]:
    described = _fields(cls)
    if described is None:  # not a data class: annotated attributes and its own constructor
        annotated = vars(cls).get("__annotations__", {})
        yield from _entry_problems("Attributes", sections, _public(annotated), exact=False)
        constructor = vars(cls).get("__init__")
        if constructor is not None and constructor.__module__ == cls.__module__:
            names = list(inspect.signature(constructor).parameters)[1:]
            yield from _entry_problems("Args", sections, _public(names))
    else:
        yield from _entry_problems("Attributes", sections, _public(described))


def _fields(cls: type) -> list[str] | None:
    """Return the fields of a data class, model, typed dictionary or enumeration."""
    if issubclass(cls, Enum):
        return list(cls.__members__)
    if is_dataclass(cls):
        return [field.name for field in fields(cls)]
    if issubclass(cls, BaseModel):
        return list(cls.model_fields)
    if is_typeddict(cls):
        return list(get_type_hints(cls))
    named_tuple_fields: tuple[str, ...] | None = getattr(cls, "_fields", None)
    return None if named_tuple_fields is None else list(named_tuple_fields)


def _public(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith("_")]


def _function_problems(
    function: Callable[..., object], text: str, sections: Sections
) -> Iterator[str]:
    signature = inspect.signature(getattr(function, "__func__", function))
    parameters = [name for name in signature.parameters if name not in {"self", "cls"}]
    yield from _entry_problems("Args", sections, _public(parameters))
    is_accessor = not parameters and text.startswith("Return ")
    returns_none = signature.return_annotation in (None, "None")
    if not returns_none and not is_accessor and not {"Returns", "Yields"} & set(sections):
        yield "Returns is missing"


def _entry_problems(
    section: str, sections: Sections, expected: list[str], *, exact: bool = True
) -> Iterator[str]:
    entries = _entries(sections.get(section, []))
    for name in expected:
        if not entries.get(name):
            yield f"{section}: {name} is missing"
    for name in entries:
        if exact and name not in expected:
            yield f"{section}: {name} is not in the code"


@cache
def doctest_names(module: str) -> frozenset[str]:
    """Return the names whose docstrings run as doctests when pytest collects a module."""
    tests = doctest.DocTestFinder().find(sys.modules[module])
    return frozenset(test.name for test in tests if test.examples)
