"""Sources of settings: environment variables and a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource

from qkit.errors import ConfigError
from qkit.settings.error_messages import PREFIX


class TomlFile(NamedTuple):
    """Path of a TOML file and the settings in it."""

    path: Path
    values: dict[str, object]


class Environment(EnvSettingsSource):
    """Settings source that reads the ``QKIT_*`` environment variables."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> object:
        """Decode a section as JSON; return invalid JSON unchanged, for validation to reject."""
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError:
            return value


def merge(
    layers: list[tuple[str, Mapping[str, object]]],
) -> tuple[dict[str, object], dict[tuple[str, ...], str]]:
    """Merge sources; an earlier source overrides a later one.

    A dict is a section and is merged field by field.

    Returns:
        The merged values, and the origin of each value for error messages.
    """
    merged: dict[str, object] = {}
    sections: dict[str, dict[str, object]] = {}
    origins: dict[tuple[str, ...], str] = {}
    for source, values in layers:
        for name, value in values.items():
            leaves = _leaves(value)
            if name not in merged:
                merged[name] = value
                origins[name,] = _origin(source, name)
                if leaves is not None:
                    merged[name] = sections[name] = {}
            for leaf, item in (leaves or {}).items():
                if name in sections and leaf not in sections[name]:
                    sections[name][leaf] = item
                    origins[name, leaf] = _origin(source, name, leaf)
    return merged, origins


def _leaves(value: object) -> dict[str, object] | None:
    if not isinstance(value, Mapping):
        return None
    return {str(leaf): item for leaf, item in cast("Mapping[object, object]", value).items()}


def _origin(source: str, *names: str) -> str:
    return f" (from {source}{'__'.join(names).upper()})" if source == PREFIX else source


def file_from_environment(environ: Mapping[str, str]) -> TomlFile | None:
    """Read the file that ``QKIT_CONFIG`` names; return ``None`` if it is not set."""
    path = environ.get(f"{PREFIX}CONFIG")
    return read_toml(Path(path)) if path else None


def read_toml(path: Path) -> TomlFile:
    """Read the settings in a TOML file.

    Raises:
        ConfigError: The file is missing or invalid; the message contains its path and, if the
            contents are invalid, the line.
    """
    try:
        content = path.read_bytes()
    except OSError as exc:
        hint = "give the path of a TOML file"
        raise ConfigError(f"{path}: {exc.strerror or type(exc).__name__}; {hint}") from exc
    values: dict[str, object] = {}
    fault = ""
    try:
        text = content.decode()
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        fault = f": not valid TOML: {_with_line(exc, content)}"
    except UnicodeDecodeError as exc:
        line = content.count(b"\n", 0, exc.start) + 1
        fault = f", line {line}: not UTF-8; save the file as UTF-8"
    # Raised outside the except blocks, because the caught error may contain the whole file, with
    # its passwords.
    if fault:
        raise ConfigError(f"{path}{fault}")
    table = values.get("qkit")
    return TomlFile(path, cast("dict[str, object]", table) if isinstance(table, dict) else values)


def _with_line(exc: tomllib.TOMLDecodeError, content: bytes) -> str:
    end = content.count(b"\n") + 1
    return str(exc).replace("at end of document", f"at line {end}, the end")
