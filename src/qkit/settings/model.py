"""``Settings`` and its sections, validated before anything connects.

Values come from keyword arguments, ``QKIT_*`` environment variables (``QKIT_RETRY__MAX_ATTEMPTS``
for a nested field), a TOML file and defaults, in this order. Durations are in seconds. A single
``ConfigError`` lists all problems, one per line, and never contains a password.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypedDict, Unpack, cast

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
    # hide_input_in_errors keeps values out of pydantic's own errors, in case one is raised.
    model_config: ClassVar[ConfigDict] = ConfigDict(
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
        # Raised outside the except block; its context would be pydantic's error with all inputs.
        if problems:
            raise error_messages.SectionError(type(self).__name__, problems)

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool(cls, value: object, info: ValidationInfo) -> object:
        return _not_bool(value, cls.model_fields[cast("str", info.field_name)])


def _masked(url: SecretStr | None) -> str | None:
    return rules.mask_url(url.get_secret_value()) if url is not None else None


def _not_bool(value: object, info: FieldInfo) -> object:
    if isinstance(value, bool) and not error_messages.takes_bool(info):
        raise ValueError("expected a number, got bool")
    return value


class RetrySettings(_Section):
    """Retry policy for failed messages: exponential backoff, then the dead-letter queue.

    Attributes:
        enabled: Retry failed messages. If false, the first failure is final.
        max_attempts: Number of attempts, including the first.
        initial_delay: Seconds before the second attempt.
        multiplier: Factor by which the delay grows from one retry to the next.
        max_delay: Maximum delay in seconds, before jitter is added.
        jitter: Maximum random addition to the delay, as a fraction of it. A retry is never early.
        mode: ``release`` returns the message to the queue; ``inline`` waits in the consumer's slot
            and keeps the order.

    Raises:
        ConfigError: A value is invalid.

    Example:
        >>> RetrySettings(max_attempts=5).initial_delay
        1.0
    """

    enabled: bool = True
    max_attempts: int = Field(default=3, ge=1)
    initial_delay: float = Field(default=1.0, ge=0)
    multiplier: float = Field(default=2.0, ge=1)
    max_delay: float = Field(default=60.0, ge=0)
    jitter: float = Field(default=0.1, ge=0, le=0.1)
    mode: Literal["release", "inline"] = "release"


class DeadLetterSettings(_Section):
    """Settings of the dead-letter queues.

    Attributes:
        enabled: Store dead letters. If false, a final failure is logged and the message is acked.
        max_size: Maximum number of dead letters in a queue. When it is full, the oldest is dropped.
        suffix: Suffix that is added to a channel's name to form the name of its dead-letter queue.

    Raises:
        ConfigError: A value is invalid.

    Example:
        >>> DeadLetterSettings(max_size=500).enabled
        True
    """

    enabled: bool = True
    max_size: int = Field(default=10_000, ge=1)
    suffix: str | None = Field(default=None, pattern=_NAME_PART, min_length=1, max_length=16)


class ShutdownSettings(_Section):
    """Settings for shutting down a service.

    Attributes:
        timeout: Seconds that running handlers have to finish. After that, they are cancelled and
            their messages are released.

    Raises:
        ConfigError: A value is invalid.

    Example:
        >>> ShutdownSettings().timeout
        30.0
    """

    timeout: float = Field(default=30.0, ge=0)


class BreakerSettings(_Section):
    """Settings of the circuit breaker.

    Attributes:
        failure_threshold: Number of consecutive connection failures that open the breaker.
        recovery_timeout: Seconds that the breaker stays open before a trial call.

    Raises:
        ConfigError: A value is invalid.

    Example:
        >>> BreakerSettings(failure_threshold=3).recovery_timeout
        30.0
    """

    failure_threshold: int = Field(default=5, ge=1)
    recovery_timeout: float = Field(default=30.0, gt=0)


class SettingsValues(TypedDict, total=False):
    """Keyword arguments of ``Settings``, for type checkers."""

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
    management_url: str | SecretStr | None


class Settings(BaseSettings):
    """Settings of a service, immutable and validated.

    Keyword arguments override ``QKIT_*`` variables, which override the file that ``load`` or the
    variable ``QKIT_CONFIG`` names, which overrides the defaults. No other file is read. Sections
    are merged field by field: with ``retry=RetrySettings(max_attempts=5)`` or
    ``retry={"max_attempts": 5}``, ``QKIT_RETRY__JITTER`` still applies. An empty variable counts as
    unset.

    Attributes:
        type: Backend: ``native``, ``rabbitmq``, ``kafka``, ``redis`` or the name of an installed
            add-on.
        url: URL of the broker; for Kafka, a list of ``host:port``. Read it with
            ``get_secret_value()``.
        prefix: Prefix of every name on the broker.
        declare: ``create`` creates missing queues; ``passive`` only checks that they exist.
        prefetch: Maximum number of unsettled messages that a consumer may hold.
        batch_size: Number of settled messages after which offsets are committed. An incomplete
            batch is committed after one second.
        compression: Compression of sent bodies.
        max_message_bytes: Maximum size of a body in bytes, both compressed and decompressed.
        retry: Retry policy for failed messages.
        dead_letter: Settings of the dead-letter queues.
        shutdown: Settings for shutting down.
        breaker: Settings of the circuit breaker.
        send_timeout: Maximum duration of a send in seconds.
        ack_deadline: Length of a lease in seconds. The lease is extended while a handler runs.
        replicas: Number of copies of each message that the broker must store.
        path: Directory of the log. Without it, messages are kept in memory only.
        fsync: When the log is synced to disk: ``always`` before a send returns, ``interval`` every
            ``fsync_interval`` seconds, or ``never``.
        fsync_interval: Seconds between syncs, for ``fsync="interval"``.
        memory_limit: Maximum total size in bytes of the bodies that are kept in memory. Other
            bodies are read from disk.
        max_depth: Maximum number of messages in a queue.
        max_priority: Highest priority. Messages have priority 5 by default.
        mode: ``list`` delivers each message to one consumer; ``pubsub`` delivers it to all current
            subscribers, at most once.
        reliable: Use leases and redelivery. If false, messages are sent with ``RPUSH`` and
            received with ``BLPOP``, at most once.
        partitions: Number of partitions of a topic that qkit creates.
        group_prefix: Prefix of the name of every consumer group.
        sasl_mechanism: Mechanism of the SASL login.
        sasl_username: User name for the SASL login.
        sasl_password: Password for the SASL login.
        tls: Use TLS with the system's certificate authorities. Setting a TLS file also enables TLS.
        tls_ca_file: PEM file of the certificate authorities to trust.
        tls_cert_file: PEM file of the client's certificate.
        tls_key_file: PEM file of the client's key.
        management_url: URL of RabbitMQ's management plugin, which lists the queues. Without a user
            in it, the user of ``url`` logs in.

    Raises:
        ConfigError: Values are invalid; the message lists every problem.

    Example:
        >>> settings = Settings(type="rabbitmq", url="amqp://guest:secret@localhost:5672/")
        >>> settings
        Settings(type='rabbitmq', url='amqp://guest:***@localhost:5672/')
        >>> Settings(type="native", retry={"max_attempts": 5}).retry.max_attempts
        5
    """

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        hide_input_in_errors=True,
        defer_build=True,
        env_prefix=error_messages.PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
    )

    type: str = "native"
    url: SecretStr | None = None
    prefix: str = Field(default="", pattern=_NAME_PART, max_length=32)
    declare: Literal["create", "passive"] = "create"
    prefetch: int | None = Field(default=None, ge=1, le=1000)
    batch_size: int | None = Field(default=None, ge=1, le=10_000)
    compression: Literal["gzip"] | None = None
    max_message_bytes: int = Field(default=1 << 20, ge=1, le=1 << 30)
    retry: RetrySettings = Field(default_factory=RetrySettings)
    dead_letter: DeadLetterSettings = Field(default_factory=DeadLetterSettings)
    shutdown: ShutdownSettings = Field(default_factory=ShutdownSettings)
    breaker: BreakerSettings = Field(default_factory=BreakerSettings)
    send_timeout: float = Field(default=10.0, gt=0)
    ack_deadline: float = Field(default=30.0, ge=0.001, le=43_200)
    replicas: int = Field(default=1, ge=1, le=7)

    path: Path | None = None
    fsync: Literal["always", "interval", "never"] = "always"
    fsync_interval: float = Field(default=1.0, gt=0)
    memory_limit: int = Field(default=64 << 20, ge=0)
    max_depth: int = Field(default=100_000, ge=1)
    max_priority: int = Field(default=9, ge=0, le=255)

    mode: Literal["list", "pubsub"] | None = None
    reliable: bool = True

    partitions: int = Field(default=1, ge=1, le=10_000)
    group_prefix: str = Field(default="", pattern=_NAME_PART, max_length=32)
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None
    sasl_username: str | None = None
    sasl_password: SecretStr | None = None
    tls: bool = False
    tls_ca_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    management_url: SecretStr | None = None

    _implicit_mode: bool = PrivateAttr(default=False)  # type is redis and mode is not set

    def __init__(
        self, _file: sources.TomlFile | None = None, /, **values: Unpack[SettingsValues]
    ) -> None:
        cls = self.__class__
        layers: list[tuple[str, Mapping[str, object]]] = [
            ("", cls._given_fields(cast("Mapping[str, object]", values))),
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
        # Raised outside the except block; its context would be pydantic's error with all inputs.
        if problems:
            raise ConfigError(error_messages.config_error(problems, "the settings", origins))
        self._implicit_mode = implicit_mode
        if implicit_mode:
            _warn_default_mode(3 if _file is None else 4)

    @classmethod
    def _given_fields(cls, values: Mapping[str, object]) -> dict[str, object]:
        """Replace each section by a dict of the fields that were passed to it."""
        given = dict(values)
        for name, value in values.items():
            field = cls.model_fields.get(name)
            # A section of another class is left as it is, for validation to reject.
            if isinstance(value, _Section) and field and field.annotation is type(value):
                given[name] = value.model_dump(exclude_unset=True)
        return given

    @classmethod
    def load(cls, path: str | os.PathLike[str], /, **overrides: Unpack[SettingsValues]) -> Self:
        """Read settings from a TOML file.

        The fields are at the top level or in a ``[qkit]`` table. If the table exists, the rest of
        the file is ignored. ``QKIT_*`` variables override the file.

        Args:
            path: Path of the file.
            **overrides: Settings that override the file and the variables.

        Returns:
            The settings.

        Raises:
            ConfigError: The file is missing or not valid TOML, or its values are invalid.

        Example:
            >>> from tempfile import TemporaryDirectory
            >>> with TemporaryDirectory() as directory:
            ...     file = Path(directory, "qkit.toml")
            ...     _ = file.write_text('prefetch = 20\\n[retry]\\nmax_attempts = 5')
            ...     Settings.load(file, prefetch=30)
            Settings(prefetch=30, retry=RetrySettings(..., max_attempts=5, ...))
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
        """Use only the values that ``__init__`` merged, so that it can report every problem."""
        return (init_settings,)

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool(cls, value: object, info: ValidationInfo) -> object:
        return _not_bool(value, cls.model_fields[cast("str", info.field_name)])

    @field_validator("url")
    @classmethod
    def _normalize_brokers(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if value is None or info.data.get("type") != "kafka":
            return value
        return SecretStr(",".join(part.strip() for part in value.get_secret_value().split(",")))

    @field_serializer("url", "management_url", when_used="json")
    def _show_url(self, value: SecretStr | None) -> str | None:
        return _masked(value)

    def __repr_args__(self) -> Iterator[tuple[str, object]]:
        """Yield the values that differ from the defaults, with the password in the URL masked."""
        for name, info in self.__class__.model_fields.items():
            value = getattr(self, name)
            if value != info.get_default(call_default_factory=True):
                shown = _masked(value) if name in ("url", "management_url") else value
                yield name, shown

    @property
    def safe_url(self) -> str | None:
        """URL with the password replaced by ``***``, for logs.

        Example:
            >>> Settings(type="rabbitmq", url="amqp://guest:secret@localhost/").safe_url
            'amqp://guest:***@localhost/'
        """
        return _masked(self.url)

    @property
    def effective_prefetch(self) -> int:
        """``prefetch``, or the backend's default if it is not set.

        Example:
            >>> Settings(type="native").effective_prefetch
            10
        """
        return self.prefetch or _PREFETCH.get(self.type, _DEFAULT_PREFETCH)

    @property
    def default_priority(self) -> int:
        """Priority of a message that is sent without one: 5, limited by ``max_priority``.

        Example:
            >>> Settings(type="native", max_priority=3).default_priority
            3
        """
        return min(_DEFAULT_PRIORITY, self.max_priority)

    @property
    def uses_tls(self) -> bool:
        """Whether the connection is encrypted.

        Example:
            >>> Settings(type="rabbitmq", url="amqps://localhost/").uses_tls
            True
        """
        if self.type == "kafka":
            return self.tls or self.tls_ca_file is not None or self.tls_cert_file is not None
        return (self.safe_url or "").lower().startswith(("amqps://", "rediss://"))

    @property
    def backend_key(self) -> str:
        """Column of the capability matrix that the settings select.

        Example:
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
        """Check that Redis settings set a ``mode``.

        Commands and jobs that send messages call this method. With the default mode, a message
        would be published to the current subscribers, if any, instead of being stored in a list.

        Raises:
            ConfigError: ``type`` is ``redis`` and ``mode`` is not set.

        Example:
            >>> Settings(type="redis", url="redis://localhost/", mode="list").require_mode()
        """
        if self._implicit_mode:
            raise ConfigError(
                "type 'redis' needs an explicit mode here: mode='list' stores each message until "
                "one consumer has handled it, mode='pubsub' sends it to the current subscribers "
                "and stores nothing"
            )

    def broker_name(self, name: str) -> str:
        """Return the name of a channel or dead-letter queue on the broker.

        Args:
            name: Name of the channel or dead-letter queue.

        Returns:
            The name with the prefix.

        Example:
            >>> Settings(type="native", prefix="staging.").broker_name("orders")
            'staging.orders'
        """
        return self.prefix + name

    def dead_letter_name(self, channel: str) -> str:
        """Return the name of a channel's dead-letter queue, without the prefix.

        Args:
            channel: Name of the channel.

        Returns:
            The name of the dead-letter queue.

        Example:
            >>> Settings(type="native").dead_letter_name("orders")
            'orders_dlq'
        """
        default = "_dlq" if self.type == "native" else ".dlq"
        return channel + (self.dead_letter.suffix or default)


def _warn_default_mode(stacklevel: int) -> None:
    text = (
        "type='redis' without a mode currently means 'pubsub': messages are broadcast, and lost if "
        "no consumer is subscribed. Set mode='list' or mode='pubsub' explicitly"
    )
    logger.warning(text)
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)
