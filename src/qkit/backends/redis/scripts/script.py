"""Lua scripts, read from the ``.lua`` files beside this module.

The keys of a queue ``orders``, all in one slot of a cluster:

=========================  =========================================================
``orders``                 the ingress list: other programs push here, consumers block here
``{orders}:in``            arrivals: messages that a blocked consumer moved, until a claim
``{orders}:p0`` … ``:p9``  ready messages by priority, oldest first (up to ``max_priority``)
``{orders}:due``           tokens of delayed messages, by the time when they are due
``{orders}:lease``         tokens of claimed messages, by the end of the lease
``{orders}:msg``           frames by token
``{orders}:meta``          the declaration; without it there is no queue
=========================  =========================================================

A group of a topic has the same keys under ``{prices}:g.<group>``, with the topic's ``:meta``; the
names of the groups are in ``{prices}:groups``.

Two rules make it safe. Every message is in one of these keys at any time, because each script
moves it in one step. And whenever a message is ready the ingress list holds one (``wake``), so no
consumer blocks on an empty list while there is work: no wake-up can be lost, and each claim wakes
the next consumer. The message in the ingress list is the last of the lowest priority, so it returns
to its place, before all that arrived later.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from importlib.resources import files

__all__ = ["Script"]

_LIBRARY = "library"


class Script:
    """A script, and the name under which the server keeps it.

    Args:
        source: Lua code.
    """

    __slots__ = ("sha", "source")

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = sha1(source.encode(), usedforsecurity=False).hexdigest()

    @classmethod
    def load(cls, name: str, *, library: bool = True) -> Script:
        """Read ``<name>.lua``.

        Args:
            name: File name without ``.lua``.
            library: Put ``library.lua`` before it; a script without it starts faster.
        """
        return cls((_source(_LIBRARY) if library else "") + _source(name))


@cache
def _source(name: str) -> str:
    return files("qkit.backends.redis.scripts").joinpath(f"{name}.lua").read_text("utf-8")
