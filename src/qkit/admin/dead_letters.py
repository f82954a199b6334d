"""A channel's dead letters: look at them, send them again, throw them away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace

from qkit.backend import Admin
from qkit.errors import PartialSend, QueueNotFound
from qkit.message import DeadLetter, Envelope, Sent

__all__ = ["DeadLetters"]

REPLAY_BATCH_SIZE = 100
MAX_LISTED = 1_000_000


class DeadLetters:
    """The dead letters of one channel, as ``service.dead_letters(name)`` gives them.

    >>> async def give_them_another_chance(service):
    ...     letters = service.dead_letters("orders")
    ...     for letter in await letters.list(error="ConnectionError"):
    ...         print(letter.message_id, letter.error, letter.attempts)
    ...     return await letters.replay(error="ConnectionError")
    """

    def __init__(
        self,
        admin: Admin,
        *,
        channel: str,
        queue: str,
        send: Callable[[Sequence[Envelope]], Awaitable[list[Sent]]],
    ) -> None:
        self._admin = admin
        self._channel = channel
        self._queue = queue
        self._send = send

    async def list(
        self,
        limit: int = 100,
        *,
        reason: str | None = None,
        error: str | None = None,
        ids: Collection[str] | str | None = None,
    ) -> list[DeadLetter]:
        """The oldest dead letters, up to ``limit``, without consuming them.

        ``reason`` is one of ``Reason``; ``error`` matches the error's type, or a part of its text.
        """
        if limit < 1:
            raise ValueError(f"limit={limit!r}: ask for one or more")
        chosen = {ids} if isinstance(ids, str) else None if ids is None else set(ids)
        filtered = reason is not None or error is not None or chosen is not None
        try:
            envelopes = await self._admin.peek(self._queue, MAX_LISTED if filtered else limit)
        except QueueNotFound:
            return []  # it is made with the first dead letter, or by the first consumer
        letters = (
            replace(DeadLetter.from_envelope(item), channel=self._channel) for item in envelopes
        )
        return [letter for letter in letters if _matches(letter, reason, error, chosen)][:limit]

    async def replay(
        self,
        ids: Collection[str] | str | None = None,
        *,
        reason: str | None = None,
        error: str | None = None,
        limit: int | None = None,
    ) -> int:
        """Send dead letters to their channel again, oldest first; return how many.

        All of them, unless ``ids`` or a filter says which. A message keeps its id and starts over
        at attempt 1. It is sent before it is removed here, so a crash in between duplicates it.

        A topic's message may have failed in several groups: then all its letters go together,
        each to its own group.
        """
        letters = await self.list(
            MAX_LISTED if limit is None else limit, reason=reason, error=error, ids=ids
        )
        if any(letter.group is not None for letter in letters):
            # They share the message's id, which is all that ``remove`` goes by: a letter of
            # another group left out here would be removed unsent.
            letters = await self.list(MAX_LISTED, ids={letter.message_id for letter in letters})
        by_id: dict[str, list[DeadLetter]] = {}
        for letter in letters:
            by_id.setdefault(letter.message_id, []).append(letter)
        groups = list(by_id.values())
        for start in range(0, len(groups), REPLAY_BATCH_SIZE):
            together = groups[start : start + REPLAY_BATCH_SIZE]
            await self._replay([letter for group in together for letter in group])
        return len(letters)

    async def _replay(self, letters: Sequence[DeadLetter]) -> None:
        # One removal for each letter: if a message fails again before that, the new letter has the
        # same id and stays, because the oldest goes.
        try:
            await self._send([letter.to_replay() for letter in letters])
        except PartialSend as partial:
            # What was accepted goes, or a second try would send it twice; unless another letter
            # of its id was refused, for the oldest to go may be that one.
            results = list(zip(letters, partial.results, strict=True))
            kept = {letter.message_id for letter, item in results if not isinstance(item, Sent)}
            gone = [letter.message_id for letter in letters if letter.message_id not in kept]
            await self._admin.remove(self._queue, gone)
            raise
        await self._admin.remove(self._queue, [letter.message_id for letter in letters])

    async def purge(
        self,
        ids: Collection[str] | str | None = None,
        *,
        reason: str | None = None,
        error: str | None = None,
    ) -> int:
        """Delete them, all unless ``ids`` or a filter says which; return how many went.

        Where a topic's message failed in several groups and a filter means some of its letters
        only, they all stay: ``remove`` goes by the id, which they share.
        """
        try:
            if ids is None and reason is None and error is None:
                return await self._admin.purge(self._queue)
            meant = await self._count(reason=reason, error=error, ids=ids)
            found = await self._count(ids=set(meant))
            gone = [id for id in meant.elements() if meant[id] == found[id]]
            return await self._admin.remove(self._queue, gone)
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
