"""Capability matrix: how each backend supports each feature.

A backend takes its ``Capabilities`` from its column. For each column, the conformance suite tests
the supported features and checks that a service that needs an unsupported one does not start.
"""

from __future__ import annotations

from types import MappingProxyType

from qkit.backend import Capabilities, Support

__all__ = ["COLUMNS", "MATRIX"]

N, E, X = Support.NATIVE, Support.EMULATED, Support.UNSUPPORTED

COLUMNS = (
    "native-memory",
    "native-durable",
    "rabbitmq-classic",
    "rabbitmq-quorum",
    "kafka",
    "redis-list",
    "redis-list-unreliable",
    "redis-pubsub",
)

# A feature that the broker provides only in part counts as emulated.
_ROWS: dict[str, tuple[Support, ...]] = {
    "queues": (N, N, N, N, N, N, N, X),
    "durable": (X, N, N, N, N, N, N, X),
    "redelivery": (N, N, N, N, N, E, X, X),
    "counts_crashes": (N, N, X, N, X, E, X, X),
    "lease": (N, N, X, X, X, E, X, X),
    "priority": (N, N, N, X, X, E, E, X),
    "delay": (N, N, E, E, E, E, X, X),
    "ttl": (N, N, E, E, E, E, E, E),
    "topics": (N, N, N, N, N, E, X, N),
    "key_order": (E, E, E, E, N, E, X, X),
    "key_lock": (N, N, E, E, N, E, X, X),
    "dead_letters": (N, N, E, E, E, E, E, E),
    "prefetch": (N, N, N, N, E, E, X, X),
    "depth": (N, N, N, N, E, N, N, X),
    "peek": (N, N, E, E, E, N, N, X),
    "purge": (N, N, N, N, E, N, N, X),
    "delete": (N, N, N, N, N, N, N, X),
    "position": (N, N, X, X, X, N, N, X),
    "replicas": (X, X, X, N, N, N, N, X),
    "batch": (E, E, E, E, N, E, E, X),
}

MATRIX: MappingProxyType[str, Capabilities] = MappingProxyType(
    {
        column: Capabilities(**{feature: cells[index] for feature, cells in _ROWS.items()})
        for index, column in enumerate(COLUMNS)
    }
)
"""Capabilities of each column, for example ``MATRIX["redis-list"].lease``."""
