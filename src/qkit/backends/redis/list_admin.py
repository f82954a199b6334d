"""Administration of Redis lists: list queues, read statistics, peek, purge, remove and delete."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from qkit.backend import QueueStats
from qkit.backends.redis import codec
from qkit.backends.redis.connection import ReconnectingConnection
from qkit.backends.redis.errors import queue_not_found, translate_errors
from qkit.backends.redis.keys import QUEUES, QueueKeys
from qkit.backends.redis.queue_scripts import QueueScripts, Run
from qkit.backends.redis.scripts import admin
from qkit.backends.redis.scripts.script import Script
from qkit.errors import ConfigError
from qkit.message import GROUP, Envelope

__all__ = ["ListAdmin"]

BATCH: Final = 500  # ids per script call
PEEK_BYTES: Final = 4 * 2**20  # limit of a reply to peek; one message is read in any case


class ListAdmin:
    """``Admin`` on Redis lists.

    Args:
        connection: Connection for commands.
        scripts: Runner of scripts on queues and topics.
    """

    def __init__(self, connection: ReconnectingConnection, scripts: QueueScripts) -> None:
        self._connection = connection
        self._scripts = scripts

    async def queues(self) -> list[str]:
        """Return the names of all queues and topics declared on this server, sorted."""
        with translate_errors("queues"):
            return sorted(
                name.decode() for name in await self._connection.command("SMEMBERS", QUEUES)
            )

    async def stats(self, queue: str) -> QueueStats:
        """Return the queue's statistics; for a topic, the sums over its groups."""
        ready, held, scheduled = await self._run(admin.STATS, queue, "stats")
        return QueueStats(
            queue=queue,
            depth=ready,
            in_flight=held,
            scheduled=scheduled,
            consumers=await self._consumers(queue),
        )

    async def _consumers(self, queue: str) -> int | None:
        """Count consumers by the client names of their connections; ``None`` if not permitted."""
        try:
            with translate_errors("stats", queue):
                clients: bytes = await self._connection.command("CLIENT", "LIST", "TYPE", "normal")
        except ConfigError:  # the user lacks the permission client|list
            return None
        name = re.escape(QueueKeys.of(queue).client)
        return len(re.findall(rf" name={name}[: ]".encode(), clients))

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        """Return up to ``limit`` messages in delivery order, scheduled messages last.

        Each call reads at most ``PEEK_BYTES`` and uses a connection of its own, so that large
        messages do not delay the replies on the shared connection.
        """
        self._connection.check_loop()
        connection = ReconnectingConnection(self._connection.parameters)
        connection.connect()
        envelopes: list[Envelope] = []
        skip = 0
        try:
            while skip >= 0 and len(envelopes) < limit:
                arguments = limit - len(envelopes), PEEK_BYTES, skip
                skip, found = await self._run(
                    admin.PEEK, queue, "peek", *arguments, run=connection.run
                )
                envelopes += _peeked(found)
        finally:
            await connection.aclose()
        return envelopes

    async def purge(self, queue: str) -> int:
        """Delete every message that is not in flight; return the number deleted."""
        return int(await self._run(admin.PURGE, queue, "purge"))

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Delete the messages with these ids that are not in flight; return the number deleted."""
        removed = 0
        for start in range(0, len(ids), BATCH):
            batch = [codec.wire_id(id) for id in ids[start : start + BATCH]]
            removed += int(await self._run(admin.REMOVE, queue, "remove", *batch))
        return removed

    async def delete(self, queue: str) -> None:
        """Delete the queue and all its messages."""
        await self._run(admin.DELETE, queue, "delete")
        with translate_errors("delete", queue):
            await self._connection.command("SREM", QUEUES, queue)

    async def _run(
        self, script: Script, queue: str, operation: str, *arguments: Any, run: Run | None = None
    ) -> Any:
        with translate_errors(operation, queue):
            reply = await self._scripts.run_whole(script, queue, *arguments, run=run)
        if reply is None:
            raise queue_not_found(queue, operation)
        return reply


def _peeked(found: list[bytes]) -> list[Envelope]:
    """Return the messages in a reply of PEEK; each frame follows the name of its group."""
    envelopes: list[Envelope] = []
    for group, frame in zip(found[::2], found[1::2], strict=True):
        envelope = codec.decode(frame)
        if group:
            envelope.headers[GROUP] = group.decode()
        envelopes.append(envelope)
    return envelopes
