"""Texts of settings errors.

The texts never contain a value that could be a secret. They show numbers, and short strings for
fields with a fixed set of values; for any other value they show only its type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from qkit.errors import ConfigError

Problem = tuple[tuple[str, ...], str]

PREFIX = "QKIT_"
# Descriptions of defaults, for fields whose default of None stands for another value.
DEFAULTS = {
    "prefetch": "1 on rabbitmq, 10 on native and redis, 500 on kafka",
    "mode": "'pubsub', with a deprecation warning",
    "suffix": "'.dlq', on native '_dlq'",
}

# QKIT_* variables that are not settings: QKIT_CONFIG, the tokens, variables of the tests, and those
# that Kubernetes or Docker links set for a service named "qkit".
_NOT_SETTINGS = re.compile(
    r"QKIT_(TEST_.*|CONFIG|(READ_)?TOKEN|SERVICE_(HOST|PORT)(_.*)?|PORT(_\d+_(TCP|UDP)(_.*)?)?)"
)


def config_error(
    problems: Sequence[Problem], what: str, origins: Mapping[tuple[str, ...], str]
) -> str:
    """Return the text of an error: a heading, then one line per problem."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"{count} in {what}:"]
    for where, text in problems:
        origin = origins.get(where) or origins.get(where[:1], "")
        lines.append(f"  - {'.'.join(where)}{origin}: {text}" if where else f"  - {text}")
    return "\n".join(lines)


def from_validation(exc: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Convert pydantic's errors to problems with the expected value and the default."""
    problems: list[Problem] = []
    for item in exc.errors(include_url=False):
        where = tuple(str(part) for part in item["loc"][:1])
        nested = item.get("ctx", {}).get("error")
        if isinstance(nested, SectionError):
            problems += [((*where, *inner), text) for inner, text in nested.problems]
        elif item["type"] == "extra_forbidden":
            problems.append((where, unknown_field(where[0], model)))
        else:
            problems.append(
                (where, _invalid_value(model.model_fields[where[0]], where[0], item["input"]))
            )
    return problems


class SectionError(ConfigError):
    """Error for an invalid section such as ``RetrySettings``; ``Settings`` reports ``problems``."""

    def __init__(self, section: str, problems: list[Problem]) -> None:
        super().__init__(config_error(problems, section, {}))
        self.problems = problems


def unknown_field(name: str, model: type[BaseModel]) -> str:
    """Return the text for an unknown field of ``model``, with the most similar name if any."""
    names = list(model.model_fields)
    for section, info in model.model_fields.items():
        if is_section(info.annotation):
            names += [f"{section}.{leaf}" for leaf in info.annotation.model_fields]
    found = _nearest(name, names)
    return "unknown setting" + (f"; did you mean {found!r}?" if found else "")


def unknown_variables(environ: Iterable[str], model: type[BaseModel]) -> list[Problem]:
    """Return a problem for each unknown ``QKIT_*`` variable, which is probably mistyped."""
    known = [PREFIX + name.upper() for name in model.model_fields]
    sections = [
        f"{PREFIX}{name.upper()}__"
        for name, info in model.model_fields.items()
        if is_section(info.annotation)
    ]
    leaves = [
        f"{PREFIX}{name.upper()}__{leaf.upper()}"
        for name, info in model.model_fields.items()
        if is_section(info.annotation)
        for leaf in info.annotation.model_fields
    ]
    problems: list[Problem] = []
    for variable in environ:
        upper = variable.upper()
        # Variables of a section are checked when the section is validated.
        if not upper.startswith(PREFIX) or upper in known or upper.startswith(tuple(sections)):
            continue
        if not _NOT_SETTINGS.fullmatch(upper):
            found = _nearest(upper, known + leaves, ignoring=PREFIX)
            text = "unknown environment variable"
            hint = f"; did you mean {found}?" if found else "; remove it"
            problems.append(((variable[:80],), text + hint))
    return problems


def _nearest(name: str, names: Iterable[str], ignoring: str = "") -> str | None:
    """Return the most similar name, ignoring case, underscores and a missing section."""
    import difflib  # imported only on errors, so that importing qkit stays fast

    plain: dict[str, str] = {}
    for candidate in names:
        plain[_plain(candidate.removeprefix(ignoring))] = candidate
        plain.setdefault(_plain(candidate.rpartition(".")[2]), candidate)
    found = difflib.get_close_matches(_plain(name.removeprefix(ignoring)), plain, 1, cutoff=0.7)
    return plain[found[0]] if found else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")[:80]


def _invalid_value(info: FieldInfo, name: str, value: object) -> str:
    got = _describe_value(info, value)
    return f"expected {expected(info)}, got {got} (default: {default(name, info)})"


def expected(info: FieldInfo) -> str:
    """Describe the values that a field accepts, such as ``an int from 1 to 1000 or none``."""
    members = _members(info.annotation)
    optional = NoneType in members
    (kind,) = (member for member in members if member is not NoneType)
    if get_origin(kind) is Literal:
        choices = [repr(choice) for choice in get_args(kind)]
        text = f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    elif is_section(kind):
        text = f"a {kind.__name__} or a dict of {', '.join(kind.model_fields)}"
    else:
        words = {int: "an int", float: "a float", bool: "a bool", Path: "a path"}
        text = words.get(kind, "a str") + _bounds(info)
    return f"{text} or none" if optional else text


def default(name: str, info: FieldInfo) -> str:
    """Return the default of a field as text."""
    if info.default is None and name in DEFAULTS:
        return DEFAULTS[name]
    if is_section(info.annotation):
        return f"{info.annotation.__name__}()"
    return "none" if info.default is None else repr(info.default)


def _bounds(info: FieldInfo) -> str:
    facts: dict[str, object] = {}
    for item in info.metadata:
        for word in ("ge", "gt", "le", "max_length", "pattern"):
            value = getattr(item, word, None)
            if value is not None:
                facts[word] = value
    if "pattern" in facts:
        return f" of at most {facts['max_length']} letters, digits and . _ -"
    if "gt" in facts:
        return f" above {facts['gt']}"
    if "le" in facts:
        return f" from {facts['ge']} to {facts['le']}"
    return f" of at least {facts['ge']}" if "ge" in facts else ""


def _describe_value(info: FieldInfo, value: object) -> str:
    """Return the value if it cannot be a secret, otherwise the name of its type."""
    kinds = {get_origin(member) or member for member in _members(info.annotation)}
    if value is None or (isinstance(value, (bool, int, float)) and kinds & {int, float, Literal}):
        return repr(value)
    if isinstance(value, str) and Literal in kinds and re.fullmatch(r"[\w-]{1,16}", value):
        return repr(value)
    return "an empty str" if value == "" else f"a value of type {type(value).__name__}"


def _members(annotation: object) -> list[type]:
    union = get_origin(annotation) in (Union, UnionType)
    return list(get_args(annotation)) if union else [annotation]  # type: ignore[list-item]  # fields are annotated with types


def takes_bool(info: FieldInfo) -> bool:
    """Return whether a field accepts a bool; in a number field, pydantic would convert it."""
    return bool in _members(info.annotation)


def is_section(annotation: object) -> TypeGuard[type[BaseModel]]:
    """Return whether a field's annotation is the model of a section, such as ``RetrySettings``."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
