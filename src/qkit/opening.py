"""From settings to a backend: built in, or a third party's by the entry point ``qkit.backends``."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from qkit.backend import Backend
from qkit.clock import Clock
from qkit.config import Settings
from qkit.errors import ConfigError

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
    from qkit.backends.native import NativeBackend

    if settings.path is not None:
        raise ConfigError(
            "path: this version of qkit keeps native queues in memory only; leave path out"
        )
    return NativeBackend(
        clock=clock,
        max_depth=settings.max_depth,
        max_priority=settings.max_priority,
        ack_deadline=settings.ack_deadline,
    )


_BUILT_IN: dict[str, Callable[[Settings, Clock], Backend]] = {"native": _native}
