"""Short Kafka sessions, so that tests need not wait the default 45 s for one to expire."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["SESSION_SECONDS", "short_sessions"]

SESSION_SECONDS: Final = 6.0


@contextmanager
def short_sessions() -> Iterator[None]:
    """Change the default session timeout of ``KafkaBackend`` to ``SESSION_SECONDS``."""
    from qkit.backends.kafka.backend import KafkaBackend

    defaults = KafkaBackend.__init__.__kwdefaults__
    assert defaults is not None
    usual, defaults["session"] = defaults["session"], SESSION_SECONDS
    try:
        yield
    finally:
        defaults["session"] = usual
