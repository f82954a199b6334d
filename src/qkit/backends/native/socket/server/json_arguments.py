"""What a JSON command is given: each field taken by its name and type, the rest refused."""

from __future__ import annotations

import base64
import json
import math
from typing import Any, Final, TypeVar, cast, overload

from qkit.errors import QueueError

__all__ = ["Arguments", "BadRequest", "as_json", "as_value"]

T = TypeVar("T", bool, int, float, str)
D = TypeVar("D")

FARTHEST: Final = 1 << 53  # beyond it a number of seconds means nothing
WORDS: Final[dict[type, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
}


class BadRequest(QueueError, ValueError):
    """A command that cannot be understood; its text says what could be."""


class Arguments:
    """The payload of one command. Taken one by one; ``done`` refuses whatever is left over."""

    def __init__(self, command: str, payload: object) -> None:
        if not isinstance(payload, dict):
            raise BadRequest(f'{command}: payload is an object, such as {{"queue": "orders"}}')
        self._command = command
        self._left: dict[str, Any] = dict(cast("dict[str, Any]", payload))
        self._taken: list[str] = []

    def __contains__(self, name: str) -> bool:
        self._taken.append(name)
        return self._left.get(name) is not None

    def anything(self, name: str) -> object:
        """A field that must be there, whatever it is."""
        self._taken.append(name)
        if name not in self._left:
            raise BadRequest(f"{self._command}: {name} is missing")
        return self._left.pop(name)

    def nothing(self, name: str) -> bool:
        """Whether the field is there and ``null``."""
        return name in self._left and self._left.pop(name) is None

    def text(self, name: str) -> str:
        """A string that must be there."""
        return _typed(self._command, name, self.anything(name), str)

    @overload
    def of(self, name: str, kind: type[T]) -> T: ...
    @overload
    def of(self, name: str, kind: type[T], default: D) -> T | D: ...
    def of(self, name: str, kind: type[T], default: object = None) -> object:
        """A field of that type; the default if it is absent or ``null``."""
        self._taken.append(name)
        value = self._left.pop(name, None)
        return default if value is None else _typed(self._command, name, value, kind)

    def whole(self, name: str, default: int, *, at_least: int, at_most: int = 10_000) -> int:
        """A whole number within bounds."""
        number = self.of(name, int, default)
        if not at_least <= number <= at_most:
            raise BadRequest(f"{self._command}: {name} is {at_least} to {at_most}, not {number}")
        return number

    def seconds(self, name: str, default: float, *, above: bool = False) -> float:
        """A time that is not negative, or more than nothing if ``above``."""
        number = self.of(name, float, default)
        if not (number > 0 if above else number >= 0) or not math.isfinite(number):
            least = "more than 0" if above else "0 or more"
            raise BadRequest(f"{self._command}: {name} is {least} seconds, not {number}")
        return number

    def headers(self) -> dict[str, str]:
        """The field ``headers``; their contents are checked elsewhere."""
        self._taken.append("headers")
        value = self._left.pop("headers", None)
        if value is not None and not isinstance(value, dict):
            raise BadRequest(f"{self._command}: headers is an object of strings")
        return cast("dict[str, str]", value or {})

    def texts(self, name: str) -> list[str] | None:
        """A list of strings, or ``None`` if it is absent."""
        self._taken.append(name)
        value = self._left.pop(name, None)
        if value is None:
            return None
        if not isinstance(value, list):
            raise BadRequest(f"{self._command}: {name} is a list of strings")
        items = cast("list[object]", value)
        return [_typed(self._command, name, item, str) for item in items]

    def done(self) -> None:
        """Refuse fields that nothing took: a misspelt option must not be passed over."""
        if self._left:
            known = ", ".join(dict.fromkeys(self._taken)) or "nothing"
            raise BadRequest(
                f"{self._command}: {next(iter(self._left))!r} is unknown; it takes {known}"
            )


def _typed(command: str, name: str, value: object, kind: type[T]) -> T:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < FARTHEST else math.inf
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadRequest(f"{command}: {name} is {WORDS[kind]}, not {value!r:.80}")
    return value


def as_json(value: object) -> bytes:
    """A message's body: the value as JSON, which is what a body without a content type is."""
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half a character, which only an escape can carry
        return json.dumps(value, separators=(",", ":")).encode()


def as_value(body: bytes) -> object:
    """A body as people can read it: the JSON it is, else its bytes in ``{"base64": …}``.

    >>> as_value(b'{"a":1}'), as_value(b"\\xff")
    ({'a': 1}, {'base64': '/w=='})
    """
    try:
        return json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return {"base64": base64.b64encode(body).decode()}


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")
