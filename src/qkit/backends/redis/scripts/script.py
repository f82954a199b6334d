"""Lua scripts, loaded from the ``.lua`` files in this package.

The queue ``orders`` has these keys, all in one hash slot:

=========================  =========================================================
``orders``                 the ingress list: other programs push here, consumers block here
``{orders}:in``            arrivals: messages that ended a consumer's wait, until the next claim
``{orders}:p0`` … ``:p9``  ready messages by priority, oldest first (up to ``max_priority``)
``{orders}:due``           tokens of delayed messages, sorted by due time
``{orders}:lease``         tokens of claimed messages, sorted by the end of the lease
``{orders}:msg``           frames by token
``{orders}:keys``          message keys that ordered subscriptions hold
``{orders}:back``          messages of such keys that were set aside for the subscription
``{orders}:free``          keys that are not held and have messages in ``{orders}:back``
``{orders}:meta``          declaration; a queue without it does not exist
=========================  =========================================================

A group of a topic has the same keys under ``{prices}:g.<group>`` and shares the topic's ``:meta``.
The names of the groups are in ``{prices}:groups``.

Two invariants keep messages safe:

- Every message is in one of these keys at any time, because scripts move messages atomically.
- While any message is ready, the ingress list holds one (``wake`` in ``library.lua``). No consumer
  blocks on an empty list while messages are ready, so no wake-up is lost, and each claim wakes the
  next consumer. ``wake`` moves the last message of the lowest priority. When that message is
  enqueued again, it returns to its place, before all later messages.

Only queues that have or had an ordered subscription (field ``ordered`` of ``:meta``) use the keys
``:keys``, ``:back`` and ``:free``; ``order.lua`` describes them.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from importlib.resources import files

__all__ = ["Script"]

_LIBRARY = "library"
_ORDER = "order"


class Script:
    """Lua script and its SHA-1 digest, under which the server caches it.

    Any change to a script, even in a comment, changes its digest. Processes with different versions
    of a script can therefore share a server.

    Args:
        source: Lua code.
    """

    __slots__ = ("sha", "source")

    def __init__(self, source: str) -> None:
        self.source: str = source
        self.sha: str = sha1(source.encode(), usedforsecurity=False).hexdigest()

    @classmethod
    def load(cls, name: str, *, library: bool = True, order: bool = False) -> Script:
        """Load ``<name>.lua``.

        Args:
            name: File name without ``.lua``.
            library: Whether to prepend ``library.lua``. A script without it starts faster.
            order: Whether to prepend ``order.lua`` too.
        """
        names = [_LIBRARY] * library + [_ORDER] * order + [name]
        return cls("".join(map(_source, names)))


@cache
def _source(name: str) -> str:
    return files("qkit.backends.redis.scripts").joinpath(f"{name}.lua").read_text("utf-8")
