"""Backend factory for built-in backends and third-party backends from entry points."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from qkit._internal.clock import Clock
from qkit.backend import Backend
from qkit.errors import ConfigError
from qkit.settings.model import Settings

__all__ = ["open_backend"]


def open_backend(settings: Settings, clock: Clock) -> Backend:
    """Return the backend that ``settings.type`` selects, not yet started.

    A third-party backend is looked up in the entry-point group ``qkit.backends``. Its entry point
    is called with the settings and must return a ``Backend``.

    Args:
        settings: Settings of the service.
        clock: Clock of the service; not passed to third-party backends.

    Raises:
        ConfigError: The type is unknown, or its client library is not installed.
    """
    opener = _BUILT_IN.get(settings.type)
    if opener is not None:
        return opener(settings, clock)
    for entry in entry_points(group="qkit.backends", name=settings.type):
        make: Callable[[Settings], Backend] = entry.load()
        return make(settings)
    raise ConfigError(
        f"unknown backend type {settings.type!r}: use one of {', '.join(_BUILT_IN)}, or install "
        "a package that provides it"
    )


def _native(settings: Settings, clock: Clock) -> Backend:
    from qkit.backends.native.factory import from_settings

    return from_settings(settings, clock)


def _redis(settings: Settings, clock: Clock) -> Backend:
    try:
        from qkit.backends.redis import list_backend, pubsub_backend
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("redis", "hiredis"):
            raise
        raise ConfigError(
            "type 'redis' needs the Redis client: install the extra 'redis', see docs/install.md",
            cause=error,
        ) from error

    if settings.mode == "pubsub":
        return pubsub_backend.from_settings(settings, clock)
    return list_backend.from_settings(settings, clock)


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
        from qkit.backends.kafka.backend import from_settings
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "aiokafka":
            raise
        raise ConfigError(
            "type 'kafka' needs the Kafka client: install the extra 'kafka', see docs/install.md",
            cause=error,
        ) from error

    return from_settings(settings, clock)


_BUILT_IN: dict[str, Callable[[Settings, Clock], Backend]] = {
    "native": _native,
    "kafka": _kafka,
    "rabbitmq": _rabbitmq,
    "redis": _redis,
}
