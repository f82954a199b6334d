"""Where settings come from: variables of the environment and a TOML file, as one. Private."""

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
    path: Path
    values: dict[str, object]


class Environment(EnvSettingsSource):
    """``QKIT_*`` variables; a section that is not JSON is left to validation to refuse."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> object:
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError:
            return value


def merge(
    layers: list[tuple[str, Mapping[str, object]]],
) -> tuple[dict[str, object], dict[tuple[str, ...], str]]:
    """All sources as one, the first one winning, and where each value came from.

    A dict is a section and merged leaf by leaf; a section that is an instance is whole.
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
    """The file that ``QKIT_CONFIG`` names, if it names one."""
    path = environ.get(f"{PREFIX}CONFIG")
    return read_toml(Path(path)) if path else None


def read_toml(path: Path) -> TomlFile:
    """The settings in a TOML file; ``ConfigError`` with path and line if there are none."""
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
        fault = f": not valid TOML: {_placed(exc, content)}"
    except UnicodeDecodeError as exc:
        line = content.count(b"\n", 0, exc.start) + 1
        fault = f", line {line}: not UTF-8; save the file as UTF-8"
    # Raised out here: those errors may keep the whole file, passwords and all.
    if fault:
        raise ConfigError(f"{path}{fault}")
    table = values.get("qkit")
    return TomlFile(path, cast("dict[str, object]", table) if isinstance(table, dict) else values)


def _placed(exc: tomllib.TOMLDecodeError, content: bytes) -> str:
    end = content.count(b"\n") + 1
    return str(exc).replace("at end of document", f"at line {end}, the end")
