"""Scripts for administration: statistics, peek, purge, remove and delete."""

from __future__ import annotations

from typing import Final

from qkit.backends.redis.scripts.script import Script

__all__ = ["DELETE", "PEEK", "PURGE", "REMOVE", "STATS"]

STATS: Final = Script.load("stats")
PEEK: Final = Script.load("peek")
PURGE: Final = Script.load("purge")
REMOVE: Final = Script.load("remove", order=True)
DELETE: Final = Script.load("delete")
