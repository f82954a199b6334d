"""From settings to a backend: built in, or a third party's by the entry point ``qkit.backends``."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from qkit._internal.clock import Clock
from qkit.backend import Backend
from qkit.errors import ConfigError
from qkit.settings.model import Settings

__all__ = ["open_backend"]


def open_backend(settings: Settings, clock: Clock) -> Backend:
    """The backend that the settings choose, not yet started.

    A third party's entry point is called with the settings and returns a ``Backend``.
    """
    opener = _BUILT_IN.get(settings.type)
    if opener is not None:
        return opener(settings, clock)
    for entry in entry_points(group="qkit.backends", name=settings.type):
        make: Callable[[Settings], Backend] = entry.load()
        return make(settings)
    raise ConfigError(
        f"type {settings.type!r}: this version of qkit does not carry that backend yet; "
        f"it has {', '.join(_BUILT_IN)}"
    )


def _native(settings: Settings, clock: Clock) -> Backend:
    from qkit.backends.native.factory import from_settings

    return from_settings(settings, clock)


def _redis(settings: Settings, clock: Clock) -> Backend:
    try:
        from qkit.backends.redis.connection import Address
        from qkit.backends.redis.list_backend import RedisListBackend
        from qkit.backends.redis.pubsub_backend import RedisPubSubBackend
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("redis", "hiredis"):
            raise
        raise ConfigError(
            "type 'redis' needs the Redis client: install the extra 'redis', see docs/install.md",
            cause=error,
        ) from error

    assert settings.url is not None
    ca_file, cert_file, key_file = _tls_files(settings)
    address = Address(
        settings.url.get_secret_value(),
        timeout=settings.send_timeout,
        tls_ca_file=ca_file,
        tls_cert_file=cert_file,
        tls_key_file=key_file,
    )
    if settings.mode == "pubsub":
        return RedisPubSubBackend(address, clock=clock)
    return RedisListBackend(
        address,
        clock=clock,
        ack_deadline=settings.ack_deadline,
        replicas=settings.replicas,
        reliable=settings.reliable,
    )


def _rabbitmq(settings: Settings, clock: Clock) -> Backend:
    try:
        from qkit.backends.rabbitmq.backend import from_settings
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"aiormq", "pamqp", "yarl"}:
            raise
        raise ConfigError(
            "type 'rabbitmq' needs the RabbitMQ client: install the extra 'rabbitmq', "
            "see docs/install.md",
            cause=error,
        ) from error

    return from_settings(settings, clock)


def _kafka(settings: Settings, clock: Clock) -> Backend:
    try:
        from qkit.backends.kafka.backend import KafkaBackend
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "aiokafka":
            raise
        raise ConfigError(
            "type 'kafka' needs the Kafka client: install the extra 'kafka', see docs/install.md",
            cause=error,
        ) from error

    assert settings.url is not None
    password = settings.sasl_password
    ca_file, cert_file, key_file = _tls_files(settings)
    return KafkaBackend(
        settings.url.get_secret_value(),
        clock=clock,
        partitions=settings.partitions,
        replicas=settings.replicas,
        group_prefix=settings.group_prefix,
        batch_size=settings.batch_size,
        max_message_bytes=settings.max_message_bytes,
        timeout=settings.send_timeout,
        sasl_mechanism=settings.sasl_mechanism,
        sasl_username=settings.sasl_username,
        sasl_password=None if password is None else password.get_secret_value(),
        tls=settings.tls,
        tls_ca_file=ca_file,
        tls_cert_file=cert_file,
        tls_key_file=key_file,
    )


def _tls_files(settings: Settings) -> list[str | None]:
    files = (settings.tls_ca_file, settings.tls_cert_file, settings.tls_key_file)
    return [None if path is None else str(path) for path in files]


_BUILT_IN: dict[str, Callable[[Settings, Clock], Backend]] = {
    "native": _native,
    "kafka": _kafka,
    "rabbitmq": _rabbitmq,
    "redis": _redis,
}
