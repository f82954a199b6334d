"""Which tests stay together in one process, and which of these groups start first.

By default a module or class is one group: its fixtures, a server among them, start once. Groups
that take minutes are split, and the longest start first, so that no process runs alone at the end.
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

__all__ = ["scope_of", "start_order"]

RELIABILITY: Final = "tests/reliability/"
SHARDS: Final = 4

# Their scenarios are independent and use a server that runs already.
SHARDED: Final = (
    "tests/conformance/test_kafka.py",
    "tests/conformance/test_rabbitmq.py",
    "tests/conformance/test_redis_list.py",
    "tests/conformance/test_redis_pubsub.py",
)

# They share a session, which takes ten seconds and both cores to start.
SPARK: Final = "tests/spark/"

# Longest first, as measured; all other groups follow by number of tests.
LONGEST: Final = (
    "tests/spark/",
    "tests/reliability/#kafka",
    "tests/reliability/#rabbitmq",
    "tests/web/test_dashboard.py",
    "tests/reliability/",
    "tests/conformance/test_kafka.py",
    "tests/conformance/test_rabbitmq.py",
    "tests/upgrade/",
    "tests/backends/",
    "tests/cli/",
    "tests/brokers/",
    "tests/conformance/",
    "tests/native/",
)


def scope_of(nodeid: str, scope: str) -> str:
    """Return the group of a test; ``scope`` is its module or class.

    >>> scope_of("tests/reliability/test_killed_worker.py::test_it[redis-list-before]", "…")
    'tests/reliability/#redis'
    >>> scope_of("tests/codec/test_codec.py::test_it", "tests/codec/test_codec.py")
    'tests/codec/test_codec.py'
    """
    if nodeid.startswith(RELIABILITY):
        server = nodeid.partition("[")[2].rstrip("]").partition("-")[0]
        return f"{RELIABILITY}#{server}"
    if nodeid.startswith(SPARK):
        return SPARK
    if nodeid.startswith(SHARDED):
        return f"{scope}#{crc32(nodeid.encode()) % SHARDS}"
    return scope


def start_order(scope: str) -> int:
    """Return the place of a group among those that start first; a lower one starts earlier."""
    places = (place for place, prefix in enumerate(LONGEST) if scope.startswith(prefix))
    return next(places, len(LONGEST))
