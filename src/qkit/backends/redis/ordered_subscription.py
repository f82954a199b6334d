"""Subscription to a Redis list with a lock for each message key."""

from __future__ import annotations

import secrets
from typing import Any, Final

from qkit._internal.logging import logger
from qkit.backends.redis.errors import translate_errors
from qkit.backends.redis.list_subscription import ListSubscription
from qkit.backends.redis.scripts import lifecycle
from qkit.errors import QueueError

__all__ = ["ORDERED_SUFFIX", "OrderedSubscription"]

ORDERED_SUFFIX: Final = ":ordered"  # of the client name of an ordered subscription's connection
MAX_RESTORES: Final = 100  # calls that return messages to the ready lists, each up to 1,000


class OrderedSubscription(ListSubscription):
    """Subscription that receives the messages of a key in order.

    While it holds messages of a key, no other ordered subscription receives that key. A message
    that is released without a delay returns to its old place at once. If a lease expires, all
    messages of its key that this subscription holds return to their places.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ordered_id = secrets.token_hex(8)
        self._claim_script = lifecycle.CLAIM_ORDERED
        self._release_script = lifecycle.RELEASE_ORDERED

    @property
    def _client_name(self) -> str:
        return self._keys.client + ORDERED_SUFFIX

    async def _ack_all(self, tokens: list[str]) -> list[int]:
        with translate_errors("ack", self._keys.queue):
            done: int | list[int] = await self._scripts.run_part(
                lifecycle.ACK_ORDERED, self._keys, *tokens
            )
        return [1] * done if isinstance(done, int) else done

    async def _release_held(self) -> None:
        """Release all held deliveries, then return the messages set aside to the ready lists.

        Another ordered subscription would find them where they are. Consumers of earlier versions
        and other programs would not.
        """
        await super()._release_held()
        try:
            with translate_errors("release", self._keys.queue):
                for _ in range(MAX_RESTORES):
                    if await self._scripts.run_part(lifecycle.RESTORE, self._keys) != 1:
                        break
        except QueueError as error:  # consumers of this version find the messages
            logger.debug("%s: could not restore messages: %s", self._keys.queue, error)
