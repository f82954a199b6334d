"""How problems with settings are told, so that the reader knows what to do. Private.

Nothing here ever repeats a value that could be a secret: numbers and short words of a closed
list are shown, anything else is only named by its type.
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
# Where None stands for something better than "none".
DEFAULTS = {
    "prefetch": "1 on rabbitmq, 10 on native and redis, 500 on kafka",
    "mode": "'pubsub', with a deprecation warning",
    "suffix": "'.dlq', on native '_dlq'",
}

# Variables that are no settings: the file's name, the web application's token, the tests', and
# those that Kubernetes or Docker links set for a service that happens to be called "qkit".
_NOT_SETTINGS = re.compile(
    r"QKIT_(TEST_.*|CONFIG|TOKEN|SERVICE_(HOST|PORT)(_.*)?|PORT(_\d+_(TCP|UDP)(_.*)?)?)"
)


def config_error(
    problems: Sequence[Problem], what: str, origins: Mapping[tuple[str, ...], str]
) -> str:
    """Every problem on a line of its own, under a heading."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"{count} in {what}:"]
    for where, text in problems:
        origin = origins.get(where) or origins.get(where[:1], "")
        lines.append(f"  - {'.'.join(where)}{origin}: {text}" if where else f"  - {text}")
    return "\n".join(lines)


def from_validation(exc: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Pydantic's findings in our words: the field, what it takes, its default."""
    problems: list[Problem] = []
    for item in exc.errors(include_url=False):
        where = tuple(str(part) for part in item["loc"][:1])
        nested = item.get("ctx", {}).get("error")
        if isinstance(nested, SectionError):
            problems += [((*where, *inner), text) for inner, text in nested.problems]
        elif item["type"] == "extra_forbidden":
            problems.append((where, unknown_field(where[0], model)))
        else:
            problems.append((where, _wrong(model.model_fields[where[0]], where[0], item["input"])))
    return problems


class SectionError(ConfigError):
    """A section (``RetrySettings(…)``) that cannot be; ``problems`` lets settings place them."""

    def __init__(self, section: str, problems: list[Problem]) -> None:
        super().__init__(config_error(problems, section, {}))
        self.problems = problems


def unknown_field(name: str, model: type[BaseModel]) -> str:
    """What to say about a name that is no field of ``model``."""
    names = list(model.model_fields)
    for section, info in model.model_fields.items():
        if is_section(info.annotation):
            names += [f"{section}.{leaf}" for leaf in info.annotation.model_fields]
    found = _nearest(name, names)
    return "there is no such setting" + (f"; did you mean {found!r}?" if found else "")


def unknown_variables(environ: Iterable[str], model: type[BaseModel]) -> list[Problem]:
    """``QKIT_*`` variables that set nothing: most likely mistyped, so not ignored."""
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
        # What follows a section's name is checked with the section.
        if not upper.startswith(PREFIX) or upper in known or upper.startswith(tuple(sections)):
            continue
        if not _NOT_SETTINGS.fullmatch(upper):
            found = _nearest(upper, known + leaves, ignoring=PREFIX)
            text = "this environment variable sets nothing"
            hint = f"; did you mean {found}?" if found else "; remove it"
            problems.append(((variable[:80],), text + hint))
    return problems


def _nearest(name: str, names: Iterable[str], ignoring: str = "") -> str | None:
    """The name most like ``name``, blind to case and underscores, and to a section left out."""
    import difflib  # only a mistake needs it; importing qkit stays quick

    plain: dict[str, str] = {}
    for candidate in names:
        plain[_plain(candidate.removeprefix(ignoring))] = candidate
        plain.setdefault(_plain(candidate.rpartition(".")[2]), candidate)
    found = difflib.get_close_matches(_plain(name.removeprefix(ignoring)), plain, 1, cutoff=0.7)
    return plain[found[0]] if found else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")[:80]


def _wrong(info: FieldInfo, name: str, value: object) -> str:
    return f"expected {expected(info)}, got {_shown(info, value)} (default: {default(name, info)})"


def expected(info: FieldInfo) -> str:
    """What a field takes: ``an int from 1 to 1000 or none``."""
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
    """A field's default for a person."""
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


def _shown(info: FieldInfo, value: object) -> str:
    """The value if it cannot be a secret, else the name of its type."""
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
    """Whether true and false are values of the field; pydantic would read them as 1 and 0."""
    return bool in _members(info.annotation)


def is_section(annotation: object) -> TypeGuard[type[BaseModel]]:
    """Whether a field holds a section of its own (``retry``), set with ``__`` in variables."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
