"""``DeadLetters``: list, replay and purge the dead letters of a channel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace

from qkit._internal.channel_errors import ChannelErrors
from qkit.backend import Admin
from qkit.errors import PartialSend, QueueNotFound
from qkit.message import DeadLetter, Envelope, Sent

__all__ = ["DeadLetters"]

REPLAY_BATCH_SIZE = 100  # messages
MAX_LISTED = 1_000_000  # maximum number of dead letters that a filter searches


class DeadLetters:
    """Access to the dead letters of one channel.

    ``service.dead_letters(name)`` returns it.

    Args:
        admin: The administration of the backend.
        channel: The name of the channel.
        queue: The name of the dead-letter queue on the broker.
        send: Sends envelopes to the channel.
        check: Takes the name of an operation; raises ``LifecycleError`` unless the service is
            running in this event loop.

    Example:
        >>> import asyncio
        >>> from qkit import QueueService, Reject, Settings, consume
        >>> from qkit.testing import TestService
        >>> @consume("orders")
        ... async def place(order: int) -> None:
        ...     raise Reject("out of stock")
        >>> service = QueueService(Settings(type="native"))
        >>> service.register(place)
        >>> async def main() -> None:
        ...     async with TestService(service) as t:
        ...         await t.send("orders", 7)
        ...         await t.drain()
        ...         for letter in await service.dead_letters("orders").list():
        ...             print(letter.reason, letter.error)
        >>> asyncio.run(main())
        ExplicitNack out of stock
    """

    def __init__(
        self,
        admin: Admin,
        *,
        channel: str,
        queue: str,
        send: Callable[[Sequence[Envelope]], Awaitable[list[Sent]]],
        check: Callable[[str], None],
    ) -> None:
        self._admin = admin
        self._channel = channel
        self._queue = queue
        self._send = send
        self._check = check

    async def list(
        self,
        limit: int = 100,
        *,
        reason: str | None = None,
        error: str | None = None,
        ids: Collection[str] | str | None = None,
    ) -> list[DeadLetter]:
        """Return dead letters without removing them, oldest first.

        Args:
            limit: The maximum number of dead letters. Default: 100.
            reason: Only dead letters with this reason; see ``Reason``.
            error: Only dead letters whose error has this type, or this text in its message.
            ids: Only dead letters of these message ids.

        Returns:
            The dead letters. The list is empty if the channel has none.

        Raises:
            ValueError: ``limit`` is less than 1.
            LifecycleError: The service is not running, or runs in another event loop.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> async def main() -> None:
            ...     async with QueueService(Settings(type="native")) as service:
            ...         print(await service.dead_letters("orders").list(error="TimeoutError"))
            >>> asyncio.run(main())
            []
        """
        self._check("dead_letters().list")
        if limit < 1:
            raise ValueError(f"limit={limit!r}: must be at least 1")
        wanted_ids = {ids} if isinstance(ids, str) else None if ids is None else set(ids)
        filtered = reason is not None or error is not None or wanted_ids is not None
        try:
            with ChannelErrors(self._channel):
                envelopes = await self._admin.peek(self._queue, MAX_LISTED if filtered else limit)
        except QueueNotFound:
            return []  # the first dead letter or the first consumer declares the queue
        letters = (
            replace(DeadLetter.from_envelope(item), channel=self._channel) for item in envelopes
        )
        return [letter for letter in letters if _matches(letter, reason, error, wanted_ids)][:limit]

    async def replay(
        self,
        ids: Collection[str] | str | None = None,
        *,
        reason: str | None = None,
        error: str | None = None,
        limit: int | None = None,
    ) -> int:
        """Send dead letters back to their channel, oldest first.

        A message keeps its id and starts at attempt 1. It is sent before its dead letter is
        removed, so a crash in between duplicates it. If a message of a topic failed in several
        groups, all its dead letters are replayed together, each to its own group.

        Args:
            ids: Only dead letters of these message ids. Default: all.
            reason: Only dead letters with this reason; see ``Reason``.
            error: Only dead letters whose error has this type, or this text in its message.
            limit: The maximum number of dead letters. Default: no limit.

        Returns:
            The number of dead letters that were replayed.

        Raises:
            PartialSend: Some messages were not confirmed. Their dead letters are kept.
            ValueError: ``limit`` is less than 1.
            LifecycleError: The service is not running, or runs in another event loop.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> async def main() -> None:
            ...     async with QueueService(Settings(type="native")) as service:
            ...         print(await service.dead_letters("orders").replay(error="TimeoutError"))
            >>> asyncio.run(main())
            0
        """
        self._check("dead_letters().replay")
        letters = await self.list(
            MAX_LISTED if limit is None else limit, reason=reason, error=error, ids=ids
        )
        if any(letter.group is not None for letter in letters):
            # ``remove`` selects by message id, which the letters of all groups share. Without this,
            # the letter of another group could be removed without being sent.
            letters = await self.list(MAX_LISTED, ids={letter.message_id for letter in letters})
        by_id: dict[str, list[DeadLetter]] = {}
        for letter in letters:
            by_id.setdefault(letter.message_id, []).append(letter)
        groups = list(by_id.values())
        for start in range(0, len(groups), REPLAY_BATCH_SIZE):
            batch = groups[start : start + REPLAY_BATCH_SIZE]
            await self._replay([letter for group in batch for letter in group])
        return len(letters)

    async def _replay(self, letters: Sequence[DeadLetter]) -> None:
        # ``remove`` deletes the oldest message with an id, once for each time the id is listed. If
        # a message fails again before its letter is removed, the new letter is kept.
        try:
            await self._send([letter.to_replay() for letter in letters])
        except PartialSend as partial:
            # Remove the letters whose messages were confirmed; otherwise a second replay would
            # send them twice. Keep them if another letter with the same id was rejected, because
            # ``remove`` might delete that one.
            results = list(zip(letters, partial.results, strict=True))
            kept = {letter.message_id for letter, item in results if not isinstance(item, Sent)}
            sent = [letter.message_id for letter in letters if letter.message_id not in kept]
            await self._remove(sent)
            raise
        await self._remove([letter.message_id for letter in letters])

    async def _remove(self, ids: Sequence[str]) -> int:
        with ChannelErrors(self._channel):
            return await self._admin.remove(self._queue, ids)

    async def purge(
        self,
        ids: Collection[str] | str | None = None,
        *,
        reason: str | None = None,
        error: str | None = None,
    ) -> int:
        """Delete dead letters.

        If a message of a topic failed in several groups and the filters match only some of its dead
        letters, all of them are kept, because they share the message id.

        Args:
            ids: Only dead letters of these message ids. Default: all.
            reason: Only dead letters with this reason; see ``Reason``.
            error: Only dead letters whose error has this type, or this text in its message.

        Returns:
            The number of dead letters that were deleted.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> async def main() -> None:
            ...     async with QueueService(Settings(type="native")) as service:
            ...         print(await service.dead_letters("orders").purge())
            >>> asyncio.run(main())
            0
        """
        self._check("dead_letters().purge")
        try:
            if ids is None and reason is None and error is None:
                with ChannelErrors(self._channel):
                    return await self._admin.purge(self._queue)
            matching = await self._count(reason=reason, error=error, ids=ids)
            existing = await self._count(ids=set(matching))
            purged = [id for id in matching.elements() if matching[id] == existing[id]]
            return await self._remove(purged)
        except QueueNotFound:
            return 0

    async def _count(
        self,
        *,
        ids: Collection[str] | str | None,
        reason: str | None = None,
        error: str | None = None,
    ) -> Counter[str]:
        letters = await self.list(MAX_LISTED, reason=reason, error=error, ids=ids)
        return Counter(letter.message_id for letter in letters)


def _matches(
    letter: DeadLetter, reason: str | None, error: str | None, ids: set[str] | None
) -> bool:
    return (
        (reason is None or letter.reason == reason)
        and (error is None or error == letter.error_type or error in (letter.error or ""))
        and (ids is None or letter.message_id in ids)
    )
