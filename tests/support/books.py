"""The books of a crash test: what was told before and after each act, and what follows from it.

``tell`` takes one line for each: ``("publish", queue, id, …)`` before the call, ``("published",
id)`` once it returned, and so on. Whatever happens to the engine in between, ``check`` says whether
what is found afterwards can be: nothing confirmed is lost, nothing settled is back, nothing is
there that was never sent, and nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from tests.support.engines import Seen

__all__ = ["LIMIT", "Books", "body_of"]

LIMIT = 4  # deliveries, as ``Engine.create`` has it by default

Key = tuple[str, str | None, str]


def body_of(id: str) -> bytes:
    """The body of a message follows from its id, so that a wrong one shows."""
    length = crc32(id.encode()) % 300
    return (f"{id} " * (length // len(id) + 1)).encode()[:length]


@dataclass
class Copy:
    """A message in one queue, or in one group's share of a topic."""

    mortal: bool  # it may expire
    published: bool = False
    claimed: int = 0  # the last delivery that was told of
    settling: set[str] = field(default_factory=set)  # begun: "ack", "dead", "purge"
    settled: str = ""  # the one that was confirmed
    replayed: bool = False  # at least begun: it may be there twice then


class Books:
    """See the module."""

    def __init__(self) -> None:
        self.copies: dict[Key, Copy] = {}
        self._keys: dict[str, list[Key]] = {}
        self._purging: dict[str, list[Key]] = {}  # what was there for certain when it began
        self.confirmed = 0

    def tell(self, line: Sequence[str | int | bool | None]) -> None:
        """Take one line down."""
        match list(line):
            case ["publish", str(queue), str(id), bool(mortal), *groups]:
                keys: list[Key] = [(queue, str(group), id) for group in groups]
                keys = keys or [(queue, None, id)]
                self._keys[id] = keys
                for key in keys:
                    copy = self.copies[key] = Copy(mortal)
                    if queue in self._purging:
                        copy.settling.add("purge")
            case ["published", str(id)]:
                self.confirmed += 1
                for key in self._keys[id]:
                    self.copies[key].published = True
            case ["claimed", str(queue), str() | None as group, str(id), int(attempt)]:
                self.copies[queue, group, id].claimed = attempt
            case ["settle", str(how), str(queue), str() | None as group, str(id)]:
                self.copies[queue, group, id].settling.add(how)
            case ["settled", str(how), str(queue), str() | None as group, str(id)]:
                self.confirmed += 1
                self.copies[queue, group, id].settled = how
            case ["purge", str(queue)]:
                mine = [key for key in self.copies if key[0] == queue]
                self._purging[queue] = [key for key in mine if self.copies[key].published]
                for key in mine:
                    self.copies[key].settling.add("purge")
            case ["purged", str(queue)]:
                self.confirmed += 1
                for key in self._purging.pop(queue):
                    self.copies[key].settled = "purge"
            case ["replay", str(queue), str(id)]:
                self.copies[queue, None, id].replayed = True
            case _:
                raise AssertionError(f"no such line: {line!r}")

    def restart(self, found: Iterable[Seen] = ()) -> None:
        """The process that told is gone: what it had begun and not ended stays in doubt.

        ``found`` is what was there after it: a delivery that it did not live to tell of counts.
        """
        self._purging.clear()
        for item in found:
            copy = self.copies[item.queue, item.group, item.id]
            copy.claimed = max(copy.claimed, item.attempt)

    def check(self, found: Iterable[Seen], *, power_lost: bool = False) -> None:
        """Fail unless an engine that stopped at this line may come back with this.

        After a power loss a confirmed settlement may be undone (at least once), a send never.
        """
        seen: dict[Key, list[Seen]] = {}
        stray: set[str] = set()
        for item in found:
            key = item.queue, item.group, item.id
            if power_lost and item.queue.startswith("recovered-"):
                # The power took the declaration of its queue, and left the message.
                assert not any(self.copies[mine].published for mine in self._keys[item.id])
                stray.add(item.id)
                continue
            assert key in self.copies, f"never sent: {item}"
            assert item.body == body_of(item.id), f"another body: {item}"
            seen.setdefault(key, []).append(item)
        for key, copy in self.copies.items():
            self._check_copy(key, copy, seen.get(key, []), power_lost)
        self._check_topics(seen, stray)

    def _check_copy(self, key: Key, copy: Copy, items: list[Seen], power_lost: bool) -> None:
        where = f"{key}: {copy}, found {items}"
        if not items:
            assert not copy.published or copy.settling, f"lost: {where}"
            return
        if copy.replayed:  # published again before its letter is removed: there may be several
            return
        assert len(items) == 1, f"twice: {where}"
        item = items[0]
        if copy.settled == "purge" and copy.mortal and item.dead:
            return  # it had expired before, and dead letters stay
        if not power_lost:
            assert copy.settled in ("", "dead"), f"settled and back: {where}"
            assert item.dead or not copy.settled, f"dead-lettered and back: {where}"
            assert item.attempt >= copy.claimed, f"a delivery was forgotten: {where}"
        # A delivery may have been counted and not handed out yet.
        assert item.attempt <= copy.claimed + 1, f"a delivery too many: {where}"
        if item.dead:
            spent = item.attempt >= LIMIT
            assert "dead" in copy.settling or copy.mortal or spent, f"why dead: {where}"

    def _check_topics(self, seen: dict[Key, list[Seen]], stray: set[str]) -> None:
        """A send that was not confirmed reached every group or none."""
        for id, keys in self._keys.items():
            if id in stray:
                continue
            untouched = [key for key in keys if not self.copies[key].settling]
            there = {key in seen for key in untouched}
            assert len(there) <= 1, f"only some groups have {id}: {keys}"
