"""Scheduling of tests: which tests share a process, and which groups start first.

By default a module or class is one group, so that its fixtures (for example a server) start once.
Some groups that take minutes are split, and the longest groups start first, so that all processes
finish at about the same time.
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

__all__ = ["scope_of", "start_order"]

RELIABILITY: Final = "tests/reliability/"
SHARDS: Final = 4

# Modules of independent tests, which can be split because all processes use the same server.
SHARDED: Final = (
    "tests/conformance/test_kafka.py",
    "tests/conformance/test_rabbitmq.py",
    "tests/conformance/test_redis_list.py",
    "tests/conformance/test_redis_pubsub.py",
)

# One group, because its tests share a Spark session, which takes ten seconds and two CPUs to start.
SPARK: Final = "tests/spark/"

# Prefixes of the longest groups by measured time, longest first; other groups start after them.
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
    """Return the sort key of a group; groups with lower keys start earlier."""
    places = (place for place, prefix in enumerate(LONGEST) if scope.startswith(prefix))
    return next(places, len(LONGEST))
