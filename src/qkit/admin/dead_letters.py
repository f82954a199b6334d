"""``DeadLetters``: list, replay and purge the dead letters of a channel."""

from __future__ import annotations

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
        keep: Writes envelopes to the dead-letter queue and waits for the confirmation.

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
        keep: Callable[[Sequence[Envelope]], Awaitable[object]],
    ) -> None:
        self._admin = admin
        self._channel = channel
        self._queue = queue
        self._send = send
        self._check = check
        self._keep = keep

    async def list(
        self,
        limit: int = 100,
        *,
        reason: str | None = None,
        error: str | None = None,
        ids: Collection[str] | str | None = None,
        group: str | None = None,
    ) -> list[DeadLetter]:
        """Return dead letters without removing them, oldest first.

        Args:
            limit: The maximum number of dead letters. Default: 100.
            reason: Only dead letters with this reason; see ``Reason``.
            error: Only dead letters whose error has this type, or this text in its message.
            ids: Only dead letters of these message ids.
            group: Only dead letters of this group of a topic.

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
        filtered = any(item is not None for item in (reason, error, wanted_ids, group))
        try:
            with ChannelErrors(self._channel):
                envelopes = await self._admin.peek(self._queue, MAX_LISTED if filtered else limit)
        except QueueNotFound:
            return []  # the first dead letter or the first consumer declares the queue
        letters = (
            replace(DeadLetter.from_envelope(item), channel=self._channel) for item in envelopes
        )
        found = (
            letter
            for letter in letters
            if (group is None or letter.group == group)
            and _matches(letter, reason, error, wanted_ids)
        )
        return [letter for letter, _ in zip(found, range(limit), strict=False)]

    async def replay(
        self,
        ids: Collection[str] | str | None = None,
        *,
        reason: str | None = None,
        error: str | None = None,
        group: str | None = None,
        limit: int | None = None,
    ) -> int:
        """Send dead letters back to their channel, oldest first; those of a group to that group.

        A message keeps its id and starts at attempt 1. It is sent before its dead letter is
        removed, so a crash in between duplicates it. If a message of a topic failed in several
        groups, each has a dead letter with the same message id, and only those that match are
        replayed. An older one that does not match is moved to the end of the dead-letter queue.

        Args:
            ids: Only dead letters of these message ids. Default: all.
            reason: Only dead letters with this reason; see ``Reason``.
            error: Only dead letters whose error has this type, or this text in its message.
            group: Only dead letters of this group of a topic.
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
            MAX_LISTED if limit is None else limit,
            reason=reason,
            error=error,
            ids=ids,
            group=group,
        )
        complete = reason is None and error is None and group is None
        if not complete or any(letter.group is not None for letter in letters):
            # A message may have several dead letters: one for each group of a topic, or two if a
            # process was killed between the dead letter and the ack.
            same_ids = {letter.message_id for letter in letters}
            existing = _by_id(await self.list(MAX_LISTED, ids=same_ids))
        else:
            existing = _by_id(letters)
        # Letters that were removed meanwhile are not sent.
        groups = [item for item in _by_id(letters).items() if item[0] in existing]
        for start in range(0, len(groups), REPLAY_BATCH_SIZE):
            batch = groups[start : start + REPLAY_BATCH_SIZE]
            await self._replay(
                [letter for _, items in batch for letter in items],
                [letter for id, _ in batch for letter in existing[id]],
            )
        return sum(len(items) for _, items in groups)

    async def _replay(self, letters: Sequence[DeadLetter], existing: Sequence[DeadLetter]) -> None:
        try:
            await self._send([letter.to_replay() for letter in letters])
        except PartialSend as partial:
            # Remove the letters whose messages were confirmed; otherwise a second replay would
            # send them twice.
            results = zip(letters, partial.results, strict=True)
            sent = [letter for letter, result in results if isinstance(result, Sent)]
            await self._remove(sent, existing)
            raise
        await self._remove(letters, existing)

    async def _remove(self, letters: Sequence[DeadLetter], existing: Sequence[DeadLetter]) -> int:
        """Remove exactly these dead letters; return how many.

        The backend removes the oldest message with an id, once for each time the id is listed. An
        older letter that must be kept is therefore written again first. A letter that was written
        after ``existing`` was listed is younger, and is kept.

        Args:
            letters: The dead letters to remove.
            existing: All dead letters with their ids, oldest first.
        """
        remaining = _by_id(letters)
        ids: list[str] = []
        kept: list[DeadLetter] = []
        for letter in existing:
            wanted = remaining.get(letter.message_id)
            if not wanted:
                continue
            ids.append(letter.message_id)
            if letter in wanted:
                wanted.remove(letter)
            else:
                kept.append(letter)
        if kept:
            await self._keep([letter.to_envelope() for letter in kept])
        with ChannelErrors(self._channel):
            return await self._admin.remove(self._queue, ids) - len(kept)

    async def purge(
        self,
        ids: Collection[str] | str | None = None,
        *,
        reason: str | None = None,
        error: str | None = None,
        group: str | None = None,
    ) -> int:
        """Delete dead letters.

        If a message of a topic failed in several groups, only its dead letters that match are
        deleted. An older one that does not match is moved to the end of the dead-letter queue.

        Args:
            ids: Only dead letters of these message ids. Default: all.
            reason: Only dead letters with this reason; see ``Reason``.
            error: Only dead letters whose error has this type, or this text in its message.
            group: Only dead letters of this group of a topic.

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
            if ids is None and reason is None and error is None and group is None:
                with ChannelErrors(self._channel):
                    return await self._admin.purge(self._queue)
            letters = await self.list(MAX_LISTED, reason=reason, error=error, ids=ids, group=group)
            existing = await self.list(MAX_LISTED, ids={letter.message_id for letter in letters})
            return await self._remove(letters, existing)
        except QueueNotFound:
            return 0


def _by_id(letters: Sequence[DeadLetter]) -> dict[str, list[DeadLetter]]:
    found: dict[str, list[DeadLetter]] = {}
    for letter in letters:
        found.setdefault(letter.message_id, []).append(letter)
    return found


def _matches(
    letter: DeadLetter, reason: str | None, error: str | None, ids: set[str] | None
) -> bool:
    return (
        (reason is None or letter.reason == reason)
        and (error is None or error == letter.error_type or error in (letter.error or ""))
        and (ids is None or letter.message_id in ids)
    )
