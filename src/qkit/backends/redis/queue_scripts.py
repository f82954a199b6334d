"""Script calls on queues and topics, with all keys that a script uses passed in KEYS."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from qkit.backends.redis.connection import ReconnectingConnection
from qkit.backends.redis.driver import CommandArgument, Reply
from qkit.backends.redis.keys import MIN_LEVELS, QueueKeys
from qkit.backends.redis.scripts.script import Script

__all__ = ["DISTRIBUTE_FIRST", "ORDERED", "STALE_KEYS", "QueueScripts", "Run"]

STALE_KEYS: Final = b"keys"  # reply: KEYS lacks a priority or a group; nothing was changed
DISTRIBUTE_FIRST: Final = b"distribute"  # reply of CLAIM: run DISTRIBUTE; nothing was changed
ORDERED: Final = b"ordered"  # reply of CLAIM: use CLAIM_ORDERED; nothing was changed
MAX_LAYOUTS: Final = 1_000  # maximum number of cached layouts

Run = Callable[..., Awaitable[Reply]]


class _Layout(NamedTuple):
    """Number of priority levels and names of groups, which determine the keys of a queue."""

    levels: int = MIN_LEVELS
    groups: tuple[str, ...] = ()


class QueueScripts:
    """Runner of scripts on queues and topics.

    The number of keys of a queue depends on its ``max_priority`` and, for a topic, on its groups. A
    call uses the last known layout. A script that needs more keys changes nothing and returns
    ``STALE_KEYS``; the layout is then read and the call is repeated. Layouts change rarely, so
    nearly every call takes one round trip.

    Args:
        connection: Connection for scripts and commands.
    """

    def __init__(self, connection: ReconnectingConnection) -> None:
        self._connection = connection
        self._layouts: dict[str, _Layout] = {}

    async def run_whole(
        self,
        script: Script,
        queue: str,
        *arguments: CommandArgument,
        groups: Sequence[str] = (),
        run: Run | None = None,
    ) -> Reply:
        """Run a script on a whole queue or topic.

        Args:
            script: A script that calls ``open_whole``.
            queue: Name of the queue or topic.
            arguments: The script's own arguments.
            groups: Groups that the arguments name; they need not exist yet.
            run: Function to call instead of the connection's ``run``, with the same arguments.
        """
        run = run or self._connection.run
        keys = QueueKeys.of(queue)
        while True:
            levels, known = self._layouts.get(queue, _DEFAULT)
            names = tuple({*known, *groups}) if groups else known
            script_keys = keys.whole_keys(levels, names)
            reply = await run(script, script_keys, levels, len(names), *names, *arguments)
            if reply != STALE_KEYS:
                return reply
            await self._read_layout(queue)

    async def run_part(self, script: Script, keys: QueueKeys, *arguments: CommandArgument) -> Reply:
        """Run a script on one queue or one group of a topic.

        Args:
            script: Script that calls ``open``.
            keys: Keys of the queue or group.
            arguments: Script's own arguments.
        """
        while True:
            script_keys, levels = self.part_call(keys)
            reply = await self._connection.run(script, script_keys, levels, *arguments)
            if reply != STALE_KEYS:
                return reply
            await self._read_layout(keys.queue)

    def part_call(self, keys: QueueKeys) -> tuple[tuple[str, ...], int]:
        """Return the KEYS of a script on one part, and the number of levels, its first argument."""
        levels = self._layouts.get(keys.queue, _DEFAULT).levels
        return keys.part_keys(levels), levels

    async def _read_layout(self, queue: str) -> None:
        keys = QueueKeys.of(queue)
        (top, used), names = await self._connection.commands(
            [("HMGET", keys.meta, "max_priority", "levels"), ("SMEMBERS", keys.group_names)]
        )
        levels = [int(level) for level in (used or b"").split(b",") if level]
        count = max(MIN_LEVELS, int(top or 0) + 1, *(level + 1 for level in levels))
        if len(self._layouts) >= MAX_LAYOUTS:
            self._layouts.clear()
        self._layouts[queue] = _Layout(count, tuple(sorted(name.decode() for name in names)))


_DEFAULT: Final = _Layout()
