"""Publisher for Redis lists, with or without confirmation by replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from qkit.backends.common.errors import queue_full
from qkit.backends.redis import codec
from qkit.backends.redis.connection import ReconnectingConnection
from qkit.backends.redis.errors import BACKEND, queue_not_found, translate_errors
from qkit.backends.redis.keys import QueueKeys
from qkit.backends.redis.queue_scripts import STALE_KEYS, QueueScripts
from qkit.backends.redis.scripts import lifecycle
from qkit.backends.redis.scripts.script import Script
from qkit.errors import PartialSend, QueueError, SendTimeout
from qkit.message import GROUP, Envelope, Sent

__all__ = ["ListPublisher"]

QUEUE_FULL: Final = -2  # result of SEND for a message that was not added
USE_GENERAL_SCRIPT: Final = -1  # reply of SEND_PLAIN: nothing was sent, use SEND


class ListPublisher:
    """Publisher that adds messages to queues and topics.

    Args:
        connection: Connection for scripts and commands.
        scripts: Runner of scripts on queues and topics.
        replicas: Number of servers, including the primary, that must store a message before
            ``publish`` returns.
        on_evicted: Called with the queue and frame of each message that was dropped because its
            queue was full.
    """

    def __init__(
        self,
        connection: ReconnectingConnection,
        scripts: QueueScripts,
        *,
        replicas: int,
        on_evicted: Callable[[str, bytes], None],
    ) -> None:
        self.replicas = replicas
        self._connection = connection
        self._scripts = scripts
        self._on_evicted = on_evicted

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Add messages in order.

        Raises:
            PartialSend: Some messages were not added; ``results`` has the outcome of each message.
        """
        results: list[Sent | QueueError] = []
        for batch in codec.batches(envelopes):
            try:
                results += await self._send(queue, batch)
            except QueueError as error:
                if not results:
                    raise
                results += [error] * (len(envelopes) - len(results))
                break
        sent = [item for item in results if isinstance(item, Sent)]
        if len(sent) < len(results):
            raise PartialSend.of(results, backend=BACKEND, queue=queue)
        return sent

    async def _send(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent | QueueError]:
        with translate_errors("publish", queue):
            first = USE_GENERAL_SCRIPT
            if all(map(_is_plain, envelopes)):
                frames = [codec.encode(item) for item in envelopes]
                keys = QueueKeys.of(queue).plain_keys
                first = await self._confirmed(lifecycle.SEND_PLAIN, keys, *frames)
                if first is None:
                    raise queue_not_found(queue, "publish")
            if first != USE_GENERAL_SCRIPT:
                return [Sent(item.id, first + at) for at, item in enumerate(envelopes)]
            return await self._send_general(queue, envelopes)

    async def _send_general(
        self, queue: str, envelopes: Sequence[Envelope]
    ) -> list[Sent | QueueError]:
        arguments: list[str | int | bytes] = []
        groups: set[str] = set()
        # Only a topic routes by GROUP; in a dead-letter queue it is an ordinary header.
        topic = any(GROUP in item.headers for item in envelopes) and await self._is_topic(queue)
        for item in envelopes:
            group = item.headers.get(GROUP, "") if topic else ""
            if group:
                groups.add(group)
                headers = {name: item.headers[name] for name in item.headers if name != GROUP}
                item = replace(item, headers=headers)
            priority = "" if item.priority is None else item.priority
            arguments += (group, priority, codec.milliseconds(item.not_before), codec.encode(item))
        reply = await self._scripts.run_whole(
            lifecycle.SEND, queue, *arguments, groups=sorted(groups), run=self._confirmed
        )
        if reply is None:
            raise queue_not_found(queue, "publish")
        positions, evicted = reply
        for content in evicted:
            self._on_evicted(queue, content)
        return [
            queue_full(BACKEND, queue, item.id)
            if position == QUEUE_FULL
            else Sent(item.id, position if position >= 0 else None)
            for item, position in zip(envelopes, positions, strict=True)
        ]

    async def _is_topic(self, queue: str) -> bool:
        kind: bytes | None = await self._connection.command(
            "HGET", QueueKeys.of(queue).meta, "kind"
        )
        return kind == b"topic"

    async def _confirmed(self, script: Script, keys: Sequence[str], *arguments: Any) -> Any:
        """Run a script and wait until the replicas confirm it; ``keys[1]`` is the queue's name."""
        if self.replicas == 1:
            return await self._connection.run(script, keys, *arguments)
        wait = self._connection.parameters.timeout / 2
        reply, copies = await self._connection.run_and_wait(
            script, keys, arguments, self.replicas - 1, wait
        )
        if reply not in (None, USE_GENERAL_SCRIPT, STALE_KEYS) and copies < self.replicas - 1:
            raise SendTimeout(
                f"the primary stored the messages, but only {copies} of {self.replicas - 1} "
                f"replicas confirmed them within {wait:g} s: they may be lost if the primary fails",
                backend=BACKEND,
                operation="publish",
                queue=keys[1],
            )
        return reply


def _is_plain(envelope: Envelope) -> bool:
    return (
        envelope.priority in (None, 5)
        and envelope.not_before is None
        and GROUP not in envelope.headers
    )
