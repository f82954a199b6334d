"""Kafka notices a dead consumer when its session ends, after 45 s: tests do not wait so long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["SESSION", "short_sessions"]

SESSION: Final = 6.0


@contextmanager
def short_sessions() -> Iterator[None]:
    """Inside it a ``KafkaBackend`` that the settings open has sessions of six seconds."""
    from qkit.backends.kafka.backend import KafkaBackend

    defaults = KafkaBackend.__init__.__kwdefaults__
    assert defaults is not None
    usual, defaults["session"] = defaults["session"], SESSION
    try:
        yield
    finally:
        defaults["session"] = usual
