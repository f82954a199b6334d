"""Durable engines for tests, and a view of their contents."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from qkit._internal.clock import Clock
from qkit.message import GROUP
from qkit.native import Engine
from qkit.native.log.disk import Disk
from qkit.native.storage.storage import Storage
from tests.support.disk import SimulatedDisk

__all__ = ["Seen", "held_bytes", "open_engine", "view"]


async def open_engine(
    where: SimulatedDisk | Path, clock: Clock | None = None, **options: Any
) -> Engine:
    """Open an engine on a simulated disk or in a directory; ``options`` are those of ``Storage``.

    With any clock but the system clock, the engine writes in the event loop, so that the order of
    the disk calls is deterministic.
    """
    engine = Engine(clock=clock)
    disk = Disk(where) if isinstance(where, Path) else where
    await engine.attach(Storage(disk, clock=engine.clock, **options))
    return engine


class Seen(NamedTuple):
    """Message in a queue, in a group of a topic, or in a dead-letter queue."""

    queue: str
    group: str | None
    id: str
    body: bytes
    attempt: int
    dead: bool = False
    reason: str = ""
    due: float | None = None


async def view(engine: Engine) -> list[Seen]:
    """Return all messages of an engine; fail if a message is in flight."""
    found: list[Seen] = []
    names = await engine.list()
    for name in names:
        if name.endswith("_dlq"):
            continue
        assert (await engine.stats(name)).in_flight == 0
        for item in await engine.peek(name, 1_000_000):
            group = item.headers.get(GROUP)
            found.append(Seen(name, group, item.id, item.body, item.attempt, due=item.not_before))
        for letter in await engine.dead_letters(name, 1_000_000):
            found.append(
                Seen(
                    name,
                    letter.group,
                    letter.message_id,
                    letter.body,
                    letter.attempts,
                    dead=True,
                    reason=str(letter.reason),
                )
            )
    return found


def held_bytes(engine: Engine) -> int:
    """Return the total size, in bytes, of the message bodies that the engine keeps in memory."""
    return engine.storage.journal.held
