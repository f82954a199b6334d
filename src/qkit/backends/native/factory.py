"""Factory for the native backend, in memory or on a directory shared by several processes."""

from __future__ import annotations

from pathlib import Path

from qkit._internal.clock import Clock
from qkit.backend import Backend
from qkit.backends.capability_matrix import MATRIX
from qkit.backends.native.backend import NativeBackend
from qkit.errors import LogLocked
from qkit.native.config import QueueConfig
from qkit.native.engine import Engine
from qkit.settings.model import Settings

__all__ = ["from_settings", "queue_defaults"]


def from_settings(settings: Settings, clock: Clock) -> Backend:
    """Create the backend that the settings describe; the caller starts it.

    Args:
        settings: Settings with ``type="native"``. If ``path`` is set, the queues are durable.
        clock: Clock of the engine.
    """
    if settings.path is not None:
        return _on_directory(settings, clock, settings.path)
    return NativeBackend(
        clock=clock,
        max_depth=settings.max_depth,
        max_priority=settings.max_priority,
        ack_deadline=settings.ack_deadline,
    )


def queue_defaults(settings: Settings) -> QueueConfig:
    """Return the defaults for fields that a queue's declaration does not set."""
    return QueueConfig(
        max_depth=settings.max_depth,
        max_priority=settings.max_priority,
        max_deliveries=None,
        ack_deadline=settings.ack_deadline,
    )


def _on_directory(settings: Settings, clock: Clock, path: Path) -> Backend:
    # Imported here because an in-memory backend needs no socket.
    from qkit.backends.native.shared_directory import SharedDirectoryBackend
    from qkit.backends.native.socket import protocol

    async def own() -> tuple[NativeBackend, Engine]:
        engine = await Engine.open(
            path,
            fsync=settings.fsync,
            fsync_interval=settings.fsync_interval,
            memory_limit=settings.memory_limit,
            clock=clock,
            defaults=queue_defaults(settings),
        )
        return NativeBackend(engine=engine), engine

    return SharedDirectoryBackend(
        path,
        own,
        locked=LogLocked,
        clock=clock,
        capabilities=MATRIX["native-durable"],
        max_frame=max(protocol.MAX_FRAME, 2 * settings.max_message_bytes),
    )
