"""Options of a Spark reader or writer, parsed into a ``Plan`` that tasks receive."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, cast, get_args

from qkit._internal.names import check_name
from qkit.errors import ConfigError
from qkit.settings.model import Settings, SettingsValues

__all__ = ["METADATA", "OPTIONS", "Plan", "parse_options", "with_absolute_paths"]

OnInvalid = Literal["fail", "dead_letter"]
OnUnheard = Literal["fail", "warn"]
StartingOffset = Literal["earliest", "latest"]

METADATA: Final = ("key", "priority", "delay", "ttl", "headers")
OPTIONS: Final = frozenset(
    {
        "channel",
        "config",
        "broadcast",
        "group",
        "model",
        "on_invalid",
        "on_unheard",
        "content_type",
        "job_id",
        "report",
        "dead_letters",
        "limit",
        "max_rows",
        "stage",
        "starting",
        "consume",
        "retention",
        *METADATA,
    }
)
_SPARK_OPTIONS: Final = frozenset({"checkpointlocation"})  # Spark passes them to the source
_NESTED_SECTIONS: Final = frozenset({"retry", "dead_letter", "shutdown", "breaker"})
_BOOLEANS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
DEFAULT_RETENTION_SECONDS: Final = 7 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Validated options of one read or write.

    The driver creates the plan, and every task receives a copy. ``columns`` maps a metadata field
    of a message (``key``, ``ttl``, …) to the column that holds it. Paths are absolute, because
    tasks and the driver have different working directories.
    """

    settings: Settings
    channel: str
    broadcast: bool = False
    group: str = "spark"
    model: str | None = None
    on_invalid: OnInvalid = "fail"
    on_unheard: OnUnheard = "fail"
    content_type: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    job_id: str | None = None
    report: str | None = None
    dead_letters: bool = False
    limit: int | None = None
    max_rows: int | None = None
    stage: str | None = None
    starting: StartingOffset = "earliest"
    consume: bool = False
    retention: float = DEFAULT_RETENTION_SECONDS

    @property
    def name(self) -> str:
        """Name of the channel to read, or of its dead-letter queue, without a prefix."""
        return self.dead_letter_name if self.dead_letters else self.channel

    @property
    def queue(self) -> str:
        """Name of the channel to read, or of its dead-letter queue, on the broker."""
        return self.settings.broker_name(self.name)

    @property
    def dead_letter_name(self) -> str:
        """Name of the channel's dead-letter queue, without a prefix."""
        return self.settings.dead_letter_name(self.channel)


def parse_options(options: Mapping[str, str]) -> Plan:
    """Parse and validate the options of a read or write.

    Options that belong neither to Spark nor to this format are treated as qkit settings.

    >>> plan = parse_options({"channel": "orders", "type": "native", "path": "data",
    ...                       "retry.max_attempts": "5"})
    >>> plan.settings.retry.max_attempts, plan.queue
    (5, 'orders')

    Raises:
        ConfigError: An option is missing or invalid; the message names it.
    """
    given = {name.lower(): value for name, value in options.items()}
    own = {name: value for name, value in given.items() if name in OPTIONS}
    settings = {
        name: value
        for name, value in given.items()
        if name not in OPTIONS and name not in _SPARK_OPTIONS
    }
    if "channel" not in own:
        near = difflib.get_close_matches("channel", settings, 1)
        hint = f" (found {near[0]!r})" if near else ""
        raise ConfigError(
            f"option 'channel' is missing{hint}: set it to the name of a queue or topic"
        )
    return Plan(
        settings=_settings(own.get("config"), settings),
        channel=check_name(own["channel"]),
        broadcast=_boolean(own, "broadcast"),
        group=check_name(own.get("group", "spark"), "group"),
        model=_model(own.get("model")),
        on_invalid=cast("OnInvalid", _one_of(own, "on_invalid", get_args(OnInvalid))),
        on_unheard=cast("OnUnheard", _one_of(own, "on_unheard", get_args(OnUnheard))),
        content_type=own.get("content_type"),
        columns={name: own[name] for name in METADATA if name in own},
        job_id=own.get("job_id"),
        report=_absolute_path(own.get("report")),
        dead_letters=_boolean(own, "dead_letters"),
        limit=_count(own, "limit"),
        max_rows=_count(own, "max_rows"),
        stage=_absolute_path(own.get("stage")),
        starting=cast("StartingOffset", _one_of(own, "starting", get_args(StartingOffset))),
        consume=_boolean(own, "consume"),
        retention=_seconds(own, "retention", DEFAULT_RETENTION_SECONDS),
    )


def _settings(config: str | None, values: Mapping[str, str]) -> Settings:
    nested: dict[str, object] = {}
    for name, value in values.items():
        section, dot, field_name = name.partition(".")
        if dot and section in _NESTED_SECTIONS:
            fields = cast("dict[str, object]", nested.setdefault(section, {}))
            fields[field_name] = value
        else:
            nested[name] = value
    if config is None:
        settings = Settings(**cast("SettingsValues", nested))
    else:
        settings = Settings.load(  # pyright overlooks that the file is positional-only
            config,
            **cast("SettingsValues", nested),  # pyright: ignore[reportArgumentType]
        )
    settings.require_mode()
    if settings.path is None:
        return settings
    return settings.model_copy(update={"path": settings.path.resolve()})


def with_absolute_paths(options: Mapping[str, str], plan: Plan) -> dict[str, str]:
    """Return the options with the absolute paths of their plan.

    Spark parses the options a second time, in a process whose working directory may differ.
    """
    paths = {
        "path": None if plan.settings.path is None else str(plan.settings.path),
        "config": _absolute_path(options.get("config")),
        "stage": plan.stage,
        "report": plan.report,
    }
    return {**options, **{name: path for name, path in paths.items() if path is not None}}


def _absolute_path(path: str | None) -> str | None:
    return None if path is None else str(Path(path).resolve())


def _model(name: str | None) -> str | None:
    if name is not None and not all(name.partition(":")):
        raise ConfigError(f"option 'model' is {name!r}: expected package.module:Class")
    return name


def _boolean(own: Mapping[str, str], name: str) -> bool:
    value = own.get(name, "false").lower()
    if value not in _BOOLEANS:
        raise ConfigError(f"option {name!r} is {own[name]!r}: expected true or false")
    return _BOOLEANS[value]


def _one_of(own: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    value = own.get(name, allowed[0])
    if value not in allowed:
        raise ConfigError(f"option {name!r} is {value!r}: expected {' or '.join(allowed)}")
    return value


def _count(own: Mapping[str, str], name: str) -> int | None:
    value = own.get(name)
    if value is None:
        return None
    if not re.fullmatch("[0-9]{1,18}", value) or int(value) < 1:
        raise ConfigError(f"option {name!r} is {value[:40]!r}: expected an integer of at least 1")
    return int(value)


def _seconds(own: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(own.get(name, default))
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(
            f"option {name!r} is {own[name]!r}: expected a number of seconds greater than 0"
        )
    return value
