"""``QueueAdmin``: list, inspect, purge and delete the queues of a service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from qkit._internal.channel_errors import ChannelErrors
from qkit._internal.names import check_name
from qkit.admin.dead_letters import DeadLetters
from qkit.backend import Admin, PeekReporting, QueueStats, UnheardReporting
from qkit.errors import PartialSend, QueueError, SendTimeout, Unsupported
from qkit.message import GROUP, Envelope, Message, Sent
from qkit.sending.producer import Producer
from qkit.wiring import Wiring

__all__ = ["QueueAdmin"]


class QueueAdmin:
    """Administration of queues by channel name.

    Every method raises ``Unsupported`` if the backend lacks the feature.

    Args:
        wiring: The objects that the parts of the service share.
        producer: Sends replayed dead letters.
        check: Takes the name of an operation on dead letters; raises ``LifecycleError`` unless the
            service is running in this event loop.
    """

    def __init__(self, wiring: Wiring, producer: Producer, check: Callable[[str], None]) -> None:
        self._backend = wiring.backend
        self._settings = wiring.settings
        self._routes = wiring.routes
        self._producer = producer
        self._check = check

    async def queues(self) -> list[str]:
        """Return the names of all queues, sorted and without the prefix."""
        prefix = self._settings.prefix
        names = await self._admin("queues").queues()
        return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    async def stats(self, name: str) -> QueueStats:
        """Return the statistics of a queue."""
        with ChannelErrors(name):
            stats = await self._admin("stats", name, "depth").stats(self._queue(name))
        return replace(stats, queue=name)

    async def peek(self, name: str, limit: int) -> list[Message]:
        """Return the next messages without consuming them."""
        if limit < 1:
            raise ValueError(f"limit={limit!r}: must be at least 1")
        with ChannelErrors(name):
            found = await self._admin("peek", name, "peek").peek(self._queue(name), limit)
        return [
            Message(
                id=item.id,
                channel=name,
                body=item.body,
                headers=item.headers,
                key=item.key,
                priority=item.priority,
                attempt=max(1, item.attempt),  # 0 before the first delivery
                expires_at=item.expires_at,
            )
            for item in found
        ]

    @property
    def peek_affects_queue(self) -> bool:
        """Whether ``peek`` affects the queue that it reads; see ``PeekReporting``."""
        return isinstance(self._backend, PeekReporting) and self._backend.peek_affects_queue

    async def purge(self, name: str) -> int:
        """Delete the messages that are not in flight; return the number deleted."""
        with ChannelErrors(name):
            return await self._admin("purge", name, "purge").purge(self._queue(name))

    async def delete(self, name: str) -> None:
        """Delete the queue and all its messages; the next send declares it again."""
        with ChannelErrors(name):
            await self._admin("delete", name, "delete").delete(self._queue(name))
        route = self._routes.get(name)
        if route is not None:
            route.declared = False

    def dead_letters(self, name: str) -> DeadLetters:
        """Return access to the dead letters of a channel."""
        admin = self._admin("dead_letters", name, "dead_letters")

        async def replay(envelopes: Sequence[Envelope]) -> list[Sent]:
            topic = any(GROUP in envelope.headers for envelope in envelopes)
            if isinstance(self._backend, UnheardReporting):
                return await self._replay_heard(self._backend, name, envelopes, topic=topic)
            return await self._producer.replay(name, envelopes, topic=topic)

        queue = self._settings.broker_name(self._settings.dead_letter_name(check_name(name)))

        async def keep(envelopes: Sequence[Envelope]) -> None:
            try:
                async with asyncio.timeout(self._settings.send_timeout):
                    await self._backend.publish(queue, envelopes)
            except TimeoutError as error:
                raise SendTimeout(
                    "the broker did not confirm copies of dead letters in time; none was removed",
                    backend=self._backend.name,
                    operation="dead_letters",
                    queue=name,
                    cause=error,
                ) from error

        return DeadLetters(
            admin, channel=name, queue=queue, send=replay, check=self._check, keep=keep
        )

    async def _replay_heard(
        self, backend: UnheardReporting, name: str, envelopes: Sequence[Envelope], *, topic: bool
    ) -> list[Sent]:
        """Replay one message at a time on a backend that discards messages without a subscriber.

        A discarded message counts as not sent, so that its dead letter is kept. If another message
        is discarded at the same time, a delivered message may also count as not sent, but a
        discarded message never counts as sent.
        """
        results: list[Sent | QueueError] = []
        for envelope in envelopes:
            before = backend.unheard
            sent = await self._producer.replay(name, [envelope], topic=topic)
            if backend.unheard == before:
                results += sent
                continue
            results.append(
                QueueError(
                    "no subscriber received the message, so its dead letter is kept: start a "
                    "consumer of the channel first",
                    backend=self._backend.name,
                    operation="replay",
                    queue=name,
                    message_id=envelope.id,
                )
            )
        if any(isinstance(item, QueueError) for item in results):
            raise PartialSend.of(results, backend=self._backend.name, queue=name)
        return [item for item in results if isinstance(item, Sent)]

    def _queue(self, name: str) -> str:
        return self._settings.broker_name(check_name(name))

    def _admin(self, operation: str, name: str | None = None, feature: str | None = None) -> Admin:
        able = feature is None or self._backend.capabilities.supports(feature)
        if not able or not isinstance(self._backend, Admin):
            raise Unsupported(
                f"{self._backend.name} does not support {operation}()",
                backend=self._backend.name,
                operation=operation,
                queue=name,
            )
        return self._backend
