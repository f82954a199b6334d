"""Lookup of queues by a name that a user typed, with suggestions for misspelled names."""

from __future__ import annotations

import difflib
from contextlib import suppress

from qkit.errors import QueueNotFound, Unsupported
from qkit.service import QueueService

__all__ = ["require_queue", "suggest_name"]


async def require_queue(service: QueueService, name: str) -> None:
    """Raise ``QueueNotFound``, with a suggestion, if there is no such queue.

    The queue counts as existing if only its dead-letter queue exists, because that queue can
    outlive it. The check is skipped if the backend cannot look up queues.
    """
    if any(channel.name == name for channel in service.channels):
        return
    with suppress(Unsupported):
        for queue in (name, service.settings.dead_letter_name(name)):
            try:
                await service.stats(queue)
            except QueueNotFound:
                continue
            return
        near = await suggest_name(service, name)
        hint = f"; did you mean {near!r}?" if near else ""
        raise QueueNotFound(f"no queue {name!r}{hint}", operation="stats", queue=name)


async def suggest_name(service: QueueService, name: str) -> str | None:
    """Return the name of an existing queue that is similar to ``name``, or ``None``."""
    known = {channel.name for channel in service.channels}
    with suppress(Unsupported):
        known |= set(await service.queues())
    known -= {name} | {service.settings.dead_letter_name(other) for other in known}
    return next(iter(difflib.get_close_matches(name, sorted(known), 1)), None)
