"""From the options of a Spark reader or writer to one checked plan that travels to the tasks."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, cast, get_args

from qkit._internal.names import check_name
from qkit.errors import ConfigError
from qkit.settings.model import Settings, SettingsValues

__all__ = ["METADATA", "OPTIONS", "Plan", "absolute", "plan_of"]

OnInvalid = Literal["fail", "dead_letter"]
OnUnheard = Literal["fail", "warn"]
Starting = Literal["earliest", "latest"]

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
_SPARK: Final = frozenset({"checkpointlocation"})  # Spark's own, handed to us with the rest
_SECTIONS: Final = frozenset({"retry", "dead_letter", "shutdown", "breaker"})
_FLAGS: Final = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_WEEK: Final = 7 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a read or write is to do, checked on the driver; tasks get it whole.

    ``columns`` says which column holds what of a message's metadata. Paths are absolute: a task
    has another working directory than the driver.
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
    starting: Starting = "earliest"
    consume: bool = False
    retention: float = _WEEK

    @property
    def name(self) -> str:
        """The channel, or its dead-letter queue where that is to be read."""
        return self.letters if self.dead_letters else self.channel

    @property
    def queue(self) -> str:
        """What the broker calls it."""
        return self.settings.broker_name(self.name)

    @property
    def letters(self) -> str:
        """The channel's dead-letter queue, before any prefix."""
        return self.settings.dead_letter_name(self.channel)


def plan_of(options: Mapping[str, str]) -> Plan:
    """Check every option; what is not one of Spark's or this format's is a setting of qkit's.

    >>> plan = plan_of({"channel": "orders", "type": "native", "path": "data",
    ...                 "retry.max_attempts": "5"})
    >>> plan.settings.retry.max_attempts, plan.queue
    (5, 'orders')

    Raises ``ConfigError`` that names the option.
    """
    given = {name.lower(): value for name, value in options.items()}
    own = {name: value for name, value in given.items() if name in OPTIONS}
    rest = {
        name: value for name, value in given.items() if name not in OPTIONS and name not in _SPARK
    }
    if "channel" not in own:
        near = difflib.get_close_matches("channel", rest, 1)
        hint = f" (there is {near[0]!r})" if near else ""
        raise ConfigError(f"option 'channel' is missing{hint}: name the queue or topic")
    return Plan(
        settings=_settings(own.get("config"), rest),
        channel=check_name(own["channel"]),
        broadcast=_flag(own, "broadcast"),
        group=check_name(own.get("group", "spark"), "group"),
        model=_model(own.get("model")),
        on_invalid=cast("OnInvalid", _one_of(own, "on_invalid", get_args(OnInvalid))),
        on_unheard=cast("OnUnheard", _one_of(own, "on_unheard", get_args(OnUnheard))),
        content_type=own.get("content_type"),
        columns={name: own[name] for name in METADATA if name in own},
        job_id=own.get("job_id"),
        report=_path(own.get("report")),
        dead_letters=_flag(own, "dead_letters"),
        limit=_count(own, "limit"),
        max_rows=_count(own, "max_rows"),
        stage=_path(own.get("stage")),
        starting=cast("Starting", _one_of(own, "starting", get_args(Starting))),
        consume=_flag(own, "consume"),
        retention=_seconds(own, "retention", _WEEK),
    )


def _settings(config: str | None, values: Mapping[str, str]) -> Settings:
    nested: dict[str, object] = {}
    for name, value in values.items():
        section, dot, name_in_it = name.partition(".")
        if dot and section in _SECTIONS:
            fields = cast("dict[str, object]", nested.setdefault(section, {}))
            fields[name_in_it] = value
        else:
            nested[name] = value
    if config is None:
        settings = Settings(**cast("SettingsValues", nested))
    else:
        settings = Settings.load(  # its own path is positional only, which pyright does not see
            config,
            **cast("SettingsValues", nested),  # pyright: ignore[reportArgumentType]
        )
    settings.require_mode()
    if settings.path is None:
        return settings
    return settings.model_copy(update={"path": settings.path.resolve()})


def absolute(options: Mapping[str, str], plan: Plan) -> dict[str, str]:
    """Return the options with the paths of their plan.

    Spark makes a plan of options again, in a process that may have another working directory than
    the one that chose them.
    """
    paths = {
        "path": None if plan.settings.path is None else str(plan.settings.path),
        "config": _path(options.get("config")),
        "stage": plan.stage,
        "report": plan.report,
    }
    return {**options, **{name: path for name, path in paths.items() if path is not None}}


def _path(path: str | None) -> str | None:
    return None if path is None else str(Path(path).resolve())


def _model(name: str | None) -> str | None:
    if name is not None and not all(name.partition(":")):
        raise ConfigError(f"option 'model' is {name!r}: write it as package.module:Class")
    return name


def _flag(own: Mapping[str, str], name: str) -> bool:
    value = own.get(name, "false").lower()
    if value not in _FLAGS:
        raise ConfigError(f"option {name!r} is {own[name]!r}: write true or false")
    return _FLAGS[value]


def _one_of(own: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    value = own.get(name, allowed[0])
    if value not in allowed:
        raise ConfigError(f"option {name!r} is {value!r}: write {' or '.join(allowed)}")
    return value


def _count(own: Mapping[str, str], name: str) -> int | None:
    value = own.get(name)
    if value is None:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"option {name!r} is {value!r}: write a whole number, 1 or more")
    return int(value)


def _seconds(own: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(own.get(name, default))
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"option {name!r} is {own[name]!r}: write a number of seconds")
    return value
