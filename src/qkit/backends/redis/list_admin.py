"""Administration of Redis lists: list queues, show statistics, read, empty and delete."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from qkit.backend import QueueStats
from qkit.backends.redis import codec
from qkit.backends.redis.connection import ReconnectingConnection
from qkit.backends.redis.errors import queue_not_found, translate_errors
from qkit.backends.redis.keys import QUEUES, QueueKeys
from qkit.backends.redis.queue_scripts import QueueScripts
from qkit.backends.redis.scripts import admin
from qkit.backends.redis.scripts.script import Script
from qkit.errors import ConfigError
from qkit.message import GROUP, Envelope

__all__ = ["ListAdmin"]

BATCH: Final = 500  # ids in one call of a script


class ListAdmin:
    """``Admin`` on Redis lists.

    Args:
        connection: Connection for commands.
        scripts: Runs scripts on whole queues.
    """

    def __init__(self, connection: ReconnectingConnection, scripts: QueueScripts) -> None:
        self._connection = connection
        self._scripts = scripts

    async def queues(self) -> list[str]:
        """The names of all queues and topics that were declared on this server."""
        with translate_errors("queues"):
            return sorted(
                name.decode() for name in await self._connection.command("SMEMBERS", QUEUES)
            )

    async def stats(self, queue: str) -> QueueStats:
        """The queue's figures now; a topic's are the sums of its groups'."""
        ready, held, scheduled = await self._ask(admin.STATS, queue, "stats")
        return QueueStats(
            queue=queue,
            depth=ready,
            in_flight=held,
            scheduled=scheduled,
            consumers=await self._consumers(queue),
        )

    async def _consumers(self, queue: str) -> int | None:
        """How many subscriptions the server has a connection of, by the names they gave it."""
        try:
            with translate_errors("stats", queue):
                clients: bytes = await self._connection.command("CLIENT", "LIST", "TYPE", "normal")
        except ConfigError:  # this user may not ask
            return None
        name = re.escape(QueueKeys.of(queue).client)
        return len(re.findall(rf" name={name}[: ]".encode(), clients))

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        """The next messages in order of delivery, delayed ones last."""
        found = await self._ask(admin.PEEK, queue, "peek", limit)
        envelopes: list[Envelope] = []
        for at in range(0, len(found), 2):
            envelope = codec.decode(found[at + 1])
            if found[at]:
                envelope.headers[GROUP] = found[at].decode()
            envelopes.append(envelope)
        return envelopes

    async def purge(self, queue: str) -> int:
        """Delete every message that no consumer holds; return how many."""
        return int(await self._ask(admin.PURGE, queue, "purge"))

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Delete these messages unless a consumer holds them; return how many were there."""
        gone = 0
        for at in range(0, len(ids), BATCH):
            some = [codec.wire_id(id) for id in ids[at : at + BATCH]]
            gone += int(await self._ask(admin.REMOVE, queue, "remove", *some))
        return gone

    async def delete(self, queue: str) -> None:
        """Delete the queue with all that is in it."""
        await self._ask(admin.DELETE, queue, "delete")
        with translate_errors("delete", queue):
            await self._connection.command("SREM", QUEUES, queue)

    async def _ask(self, script: Script, queue: str, operation: str, *arguments: Any) -> Any:
        with translate_errors(operation, queue):
            answer = await self._scripts.run_whole(script, queue, *arguments)
        if answer is None:
            raise queue_not_found(queue, operation)
        return answer
