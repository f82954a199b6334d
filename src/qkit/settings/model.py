"""``Settings``: every choice in one place, validated whole before any connection is tried.

Values come from keyword arguments, ``QKIT_*`` environment variables (``QKIT_RETRY__MAX_ATTEMPTS``
for what is nested) and, with ``Settings.load``, a TOML file. Durations are seconds. Whatever is
wrong is said in one ``ConfigError``, a line for each problem, and passwords are never shown.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, Unpack, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from qkit._internal.logging import logger
from qkit.errors import ConfigError
from qkit.settings import error_messages, rules, sources

__all__ = [
    "BreakerSettings",
    "DeadLetterSettings",
    "RetrySettings",
    "Settings",
    "SettingsValues",
    "ShutdownSettings",
]

_NAME_PART = r"^[A-Za-z0-9._-]*$"
_PREFETCH = {"rabbitmq": 1, "kafka": 500}
_DEFAULT_PREFETCH = 10
_DEFAULT_PRIORITY = 5


class _Section(BaseModel):
    # hide_input_in_errors: should pydantic's own error ever surface, it shows no value.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        hide_input_in_errors=True,
        defer_build=True,
    )

    def __init__(self, **values: Any) -> None:
        problems: list[error_messages.Problem] = []
        try:
            super().__init__(**values)
        except ValidationError as exc:
            problems = error_messages.from_validation(exc, type(self))
        # Raised out here: inside, pydantic's error with all its inputs would be the context.
        if problems:
            raise error_messages.SectionError(type(self).__name__, problems)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool(cls, value: object, info: ValidationInfo) -> object:
        return _not_bool(value, cls.model_fields[cast("str", info.field_name)])


def _not_bool(value: object, info: FieldInfo) -> object:
    if isinstance(value, bool) and not error_messages.takes_bool(info):
        raise ValueError("a bool is no number")
    return value


class RetrySettings(_Section):
    """How a failed handler is tried again: exponential backoff, then the dead letters.

    ``jitter`` is a fraction of the wait that is added at random, so it is never early.

    >>> RetrySettings(max_attempts=5).initial_delay
    1.0
    """

    enabled: bool = Field(default=True, description="off: the first failure is final")
    max_attempts: int = Field(default=3, ge=1, description="all deliveries, the first included")
    initial_delay: float = Field(default=1.0, ge=0, description="before the second attempt")
    multiplier: float = Field(
        default=2.0, ge=1, description="each wait is this many times the last"
    )
    max_delay: float = Field(default=60.0, ge=0, description="no wait is longer, jitter aside")
    jitter: float = Field(
        default=0.1, ge=0, le=0.1, description="fraction of the wait added at random"
    )
    mode: Literal["release", "inline"] = Field(
        default="release", description="`inline` waits in the consumer's slot and keeps the order"
    )


class DeadLetterSettings(_Section):
    """Where final failures go.

    >>> DeadLetterSettings(max_size=500).enabled
    True
    """

    enabled: bool = Field(
        default=True, description="off: a final failure is logged and acknowledged"
    )
    max_size: int = Field(default=10_000, ge=1, description="when full, the oldest goes")
    suffix: str | None = Field(
        default=None,
        pattern=_NAME_PART,
        min_length=1,
        max_length=16,
        description="added to the name",
    )


class ShutdownSettings(_Section):
    """How long a shutdown waits for running handlers.

    >>> ShutdownSettings().timeout
    30.0
    """

    timeout: float = Field(
        default=30.0, ge=0, description="then handlers are cancelled and given back"
    )


class BreakerSettings(_Section):
    """When to stop trying a broker that cannot be reached.

    >>> BreakerSettings(failure_threshold=3).recovery_timeout
    30.0
    """

    failure_threshold: int = Field(default=5, ge=1, description="connection failures in a row")
    recovery_timeout: float = Field(default=30.0, gt=0, description="rest before one probe")


class SettingsValues(TypedDict, total=False):
    """The keyword arguments of ``Settings``, as type checkers see them."""

    type: str
    url: str | SecretStr | None
    prefix: str
    declare: Literal["create", "passive"]
    prefetch: int | None
    batch_size: int | None
    compression: Literal["gzip"] | None
    max_message_bytes: int
    retry: RetrySettings | Mapping[str, object]
    dead_letter: DeadLetterSettings | Mapping[str, object]
    shutdown: ShutdownSettings | Mapping[str, object]
    breaker: BreakerSettings | Mapping[str, object]
    send_timeout: float
    ack_deadline: float
    replicas: int
    path: str | Path | None
    fsync: Literal["always", "interval", "never"]
    fsync_interval: float
    memory_limit: int
    max_depth: int
    max_priority: int
    mode: Literal["list", "pubsub"] | None
    reliable: bool
    partitions: int
    group_prefix: str
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None
    sasl_username: str | None
    sasl_password: str | SecretStr | None
    tls: bool
    tls_ca_file: str | Path | None
    tls_cert_file: str | Path | None
    tls_key_file: str | Path | None


class Settings(BaseSettings):
    """Every setting, validated whole. Keyword arguments win over ``QKIT_*`` variables.

    Sections are merged field by field: ``retry={"max_attempts": 5}`` leaves room for
    ``QKIT_RETRY__JITTER``; an instance, ``retry=RetrySettings(…)``, is taken as it is. An empty
    variable counts as unset. ``QKIT_CONFIG`` names a file as for ``load``, beneath both.

    >>> settings = Settings(type="rabbitmq", url="amqp://guest:secret@localhost:5672/")
    >>> settings
    Settings(type='rabbitmq', url='amqp://guest:***@localhost:5672/')
    >>> settings.effective_prefetch
    1
    >>> Settings(type="native", retry={"max_attempts": 5}).retry.max_attempts
    5

    Raises ``ConfigError`` that lists every problem.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        hide_input_in_errors=True,
        defer_build=True,
        env_prefix=error_messages.PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
    )

    type: str = Field(
        default="native", description="`native`, `rabbitmq`, `kafka`, `redis` or an add-on's"
    )
    url: SecretStr | None = Field(
        default=None, description="where the broker is; read it with `get_secret_value()`"
    )
    prefix: str = Field(
        default="", pattern=_NAME_PART, max_length=32, description="before every name on the broker"
    )
    declare: Literal["create", "passive"] = Field(
        default="create", description="`passive` creates nothing on the broker and checks instead"
    )
    prefetch: int | None = Field(
        default=None, ge=1, le=1000, description="unacknowledged messages a consumer may hold"
    )
    batch_size: int | None = Field(
        default=None, ge=1, le=10_000, description="commit after each completed batch"
    )
    compression: Literal["gzip"] | None = Field(
        default=None, description="of the bodies that are sent"
    )
    max_message_bytes: int = Field(
        default=1 << 20, ge=1, le=1 << 30, description="bound of a body, also after decompression"
    )
    retry: RetrySettings = Field(default_factory=RetrySettings, description="see below")
    dead_letter: DeadLetterSettings = Field(
        default_factory=DeadLetterSettings, description="see below"
    )
    shutdown: ShutdownSettings = Field(default_factory=ShutdownSettings, description="see below")
    breaker: BreakerSettings = Field(default_factory=BreakerSettings, description="see below")
    send_timeout: float = Field(default=10.0, gt=0, description="no send takes longer")
    ack_deadline: float = Field(
        default=30.0, ge=0.001, le=43_200, description="the lease; renewed while a handler runs"
    )
    replicas: int = Field(default=1, ge=1, le=7, description="copies the broker must keep")

    path: Path | None = Field(default=None, description="directory of the log; none: memory only")
    fsync: Literal["always", "interval", "never"] = Field(
        default="always", description="`always`: a send returns once it is on disk"
    )
    fsync_interval: float = Field(default=1.0, gt=0, description='with `fsync = "interval"`')
    memory_limit: int = Field(
        default=64 << 20, ge=0, description="bytes of bodies in memory; more stay on disk"
    )
    max_depth: int = Field(default=100_000, ge=1, description="messages a queue holds")
    max_priority: int = Field(default=9, ge=0, le=255, description="the default is 5")

    mode: Literal["list", "pubsub"] | None = Field(
        default=None,
        description="`list`: each message to one consumer; `pubsub`: to all, at most once",
    )
    reliable: bool = Field(default=True, description="off: plain `RPUSH`/`BLPOP`, at most once")

    partitions: int = Field(default=1, ge=1, le=10_000, description="of a topic that qkit creates")
    group_prefix: str = Field(
        default="",
        pattern=_NAME_PART,
        max_length=32,
        description="before every consumer group's name",
    )
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = Field(
        default=None, description="how to log in"
    )
    sasl_username: str | None = Field(default=None, description="goes with `sasl_mechanism`")
    sasl_password: SecretStr | None = Field(default=None, description="goes with `sasl_mechanism`")
    tls: bool = Field(
        default=False, description="TLS with the system's authorities; the files imply it"
    )
    tls_ca_file: Path | None = Field(default=None, description="authorities to trust, PEM")
    tls_cert_file: Path | None = Field(default=None, description="the client's certificate, PEM")
    tls_key_file: Path | None = Field(default=None, description="its key, PEM")

    _implicit_mode: bool = PrivateAttr(default=False)  # Redis, and the mode is not set

    def __init__(
        self, _file: sources.TomlFile | None = None, /, **values: Unpack[SettingsValues]
    ) -> None:
        cls = self.__class__
        layers: list[tuple[str, Mapping[str, object]]] = [
            ("", cast("Mapping[str, object]", values)),
            (error_messages.PREFIX, sources.Environment(cls)()),
        ]
        file = _file or sources.file_from_environment(os.environ)
        if file is not None:
            layers.append((f" (in {file.path})", file.values))
        merged, origins = sources.merge(layers)
        problems = error_messages.unknown_variables(os.environ, cls)
        problems += [
            ((name[:80],), error_messages.unknown_field(name, cls))
            for name in merged
            if name not in cls.model_fields
        ]
        implicit_mode = merged.get("type") == "redis" and merged.get("mode") is None
        if implicit_mode:
            merged["mode"] = "pubsub"
        problems += rules.check_combinations(merged)
        known: dict[str, Any] = {
            name: value for name, value in merged.items() if name in cls.model_fields
        }
        try:
            super().__init__(**known)
        except ValidationError as exc:
            seen = {where[:1] for where, _ in problems}
            found = error_messages.from_validation(exc, cls)
            problems += [problem for problem in found if problem[0] not in seen]
        # Raised out here: inside, pydantic's error with all its inputs would be the context.
        if problems:
            raise ConfigError(error_messages.config_error(problems, "the settings", origins))
        self._implicit_mode = implicit_mode
        if implicit_mode:
            _warn_default_mode(3 if _file is None else 4)

    @classmethod
    def load(cls, path: str | os.PathLike[str], /, **overrides: Unpack[SettingsValues]) -> Self:
        """Read a TOML file; ``QKIT_*`` variables win over it, and ``overrides`` over both.

        The fields stand at the top level, or in a ``[qkit]`` table; where there is such a table,
        nothing else in the file is looked at.

        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as directory:
        ...     file = Path(directory, "qkit.toml")
        ...     _ = file.write_text('prefetch = 20\\n[retry]\\nmax_attempts = 5')
        ...     Settings.load(file, prefetch=30).prefetch
        30

        Raises ``ConfigError`` for a file that is missing or not TOML, with the line, and for
        everything that ``Settings`` refuses.
        """
        return cls(sources.read_toml(Path(path)), **overrides)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: object,
        init_settings: Any,
        *others: object,
        **more: object,
    ) -> tuple[Any, ...]:
        """Only what ``__init__`` merged: it needs to see every source to name every problem."""
        return (init_settings,)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool(cls, value: object, info: ValidationInfo) -> object:
        return _not_bool(value, cls.model_fields[cast("str", info.field_name)])

    @field_validator("url")
    @classmethod
    def _normalize_brokers(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if value is None or info.data.get("type") != "kafka":
            return value
        return SecretStr(",".join(part.strip() for part in value.get_secret_value().split(",")))

    @field_serializer("url", when_used="json")
    def _show_url(self, value: SecretStr | None) -> str | None:
        return rules.mask_url(value.get_secret_value()) if value is not None else None

    def __repr_args__(self) -> Iterator[tuple[str, object]]:
        """Only what differs from the defaults, and the address without its password."""
        for name, info in self.__class__.model_fields.items():
            value = getattr(self, name)
            if value != info.get_default(call_default_factory=True):
                yield name, self.safe_url if name == "url" else value

    @property
    def safe_url(self) -> str | None:
        """The address as it may be shown: the password, if any, is ``***``."""
        return rules.mask_url(self.url.get_secret_value()) if self.url is not None else None

    @property
    def effective_prefetch(self) -> int:
        """``prefetch``, or the backend's default where it is not set."""
        return self.prefetch or _PREFETCH.get(self.type, _DEFAULT_PREFETCH)

    @property
    def default_priority(self) -> int:
        """The priority of a message that was sent without one: 5, or less if 5 is too high.

        >>> Settings(type="native", max_priority=3).default_priority
        3
        """
        return min(_DEFAULT_PRIORITY, self.max_priority)

    @property
    def uses_tls(self) -> bool:
        """Whether the connection is encrypted."""
        if self.type == "kafka":
            return self.tls or self.tls_ca_file is not None or self.tls_cert_file is not None
        return (self.safe_url or "").lower().startswith(("amqps://", "rediss://"))

    @property
    def backend_key(self) -> str:
        """Which column of the capability matrix applies, as far as the settings decide it.

        >>> Settings(type="native").backend_key
        'native-memory'
        """
        if self.type == "native":
            return "native-memory" if self.path is None else "native-durable"
        if self.type == "redis":
            if self.mode == "pubsub":
                return "redis-pubsub"
            return "redis-list" if self.reliable else "redis-list-unreliable"
        return self.type

    def require_mode(self) -> None:
        """Raise ``ConfigError`` for Redis settings without a ``mode``.

        For commands and jobs that write: their messages would be published to subscribers that
        may not exist, instead of a list that keeps them.
        """
        if self._implicit_mode:
            raise ConfigError(
                "type 'redis' needs an explicit mode here: mode='list' keeps each message until "
                "one consumer has handled it, mode='pubsub' sends it to the subscribers of this "
                "moment and keeps nothing"
            )

    def broker_name(self, name: str) -> str:
        """What the broker calls a channel or dead-letter queue: the name after the prefix.

        >>> Settings(type="native", prefix="staging.").broker_name("orders")
        'staging.orders'
        """
        return self.prefix + name

    def dead_letter_name(self, channel: str) -> str:
        """The channel's dead-letter queue, before any prefix.

        >>> Settings(type="native").dead_letter_name("orders")
        'orders_dlq'
        """
        usual = "_dlq" if self.type == "native" else ".dlq"
        return channel + (self.dead_letter.suffix or usual)


def _warn_default_mode(stacklevel: int) -> None:
    text = (
        "type='redis' without a mode means 'pubsub' for now: messages are broadcast and lost when "
        "nobody listens. Set mode='list' or mode='pubsub' explicitly"
    )
    logger.warning(text)
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)
