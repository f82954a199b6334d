"""Model of what an engine may contain after a crash.

The workload records each operation: ``("publish", queue, id, …)`` before the call, ``("published",
id)`` after it returned, and so on. After a crash at any point, ``check`` compares the recovered
messages with the model: no confirmed message is lost, no settled message reappears, and every
message was sent and exists once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from tests.support.engines import Seen

__all__ = ["LIMIT", "CrashModel", "body_of"]

LIMIT = 4  # maximum number of deliveries; the default of ``Engine.create``

Key = tuple[str, str | None, str]


def body_of(id: str) -> bytes:
    """Return the body for a message id; deriving it from the id makes it verifiable."""
    length = crc32(id.encode()) % 300
    return (f"{id} " * (length // len(id) + 1)).encode()[:length]


@dataclass
class Copy:
    """State of a message in one queue, or in one group of a topic."""

    can_expire: bool  # has a TTL
    published: bool = False
    claimed: int = 0  # attempt number of the last recorded delivery
    settling: set[str] = field(default_factory=set)  # settlements started: "ack", "dead", "purge"
    settled: str = ""  # the settlement that was confirmed
    replayed: bool = False  # a replay was started, so the message may exist twice


class CrashModel:
    """Model that records operations and checks the recovered messages against them."""

    def __init__(self) -> None:
        self.copies: dict[Key, Copy] = {}
        self._keys: dict[str, list[Key]] = {}
        self._purging: dict[str, list[Key]] = {}  # confirmed messages when the purge started
        self.confirmed = 0

    def record(self, line: Sequence[str | int | bool | None]) -> None:
        """Record the start or the end of an operation."""
        match list(line):
            case ["publish", str(queue), str(id), bool(can_expire), *groups]:
                keys: list[Key] = [(queue, str(group), id) for group in groups]
                keys = keys or [(queue, None, id)]
                self._keys[id] = keys
                for key in keys:
                    copy = self.copies[key] = Copy(can_expire)
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
                keys_of_queue = [key for key in self.copies if key[0] == queue]
                self._purging[queue] = [key for key in keys_of_queue if self.copies[key].published]
                for key in keys_of_queue:
                    self.copies[key].settling.add("purge")
            case ["purged", str(queue)]:
                self.confirmed += 1
                for key in self._purging.pop(queue):
                    self.copies[key].settled = "purge"
            case ["replay", str(queue), str(id)]:
                self.copies[queue, None, id].replayed = True
            case _:
                raise AssertionError(f"unknown operation: {line!r}")

    def restart(self, found: Iterable[Seen] = ()) -> None:
        """Continue with a new process; the outcome of unfinished operations stays unknown.

        The attempts of the recovered messages ``found`` include deliveries that the killed process
        could not record.
        """
        self._purging.clear()
        for item in found:
            copy = self.copies[item.queue, item.group, item.id]
            copy.claimed = max(copy.claimed, item.attempt)

    def check(self, found: Iterable[Seen], *, power_lost: bool = False) -> None:
        """Fail if an engine that crashed at this point must not contain these messages.

        A power loss may undo a confirmed settlement (at-least-once), but never a confirmed send.
        """
        seen: dict[Key, list[Seen]] = {}
        orphans: set[str] = set()
        for item in found:
            key = item.queue, item.group, item.id
            if power_lost and item.queue.startswith("recovered-"):
                # The power loss destroyed the declaration of the queue, but not the message.
                assert not any(self.copies[key].published for key in self._keys[item.id])
                orphans.add(item.id)
                continue
            assert key in self.copies, f"never sent: {item}"
            assert item.body == body_of(item.id), f"wrong body: {item}"
            seen.setdefault(key, []).append(item)
        for key, copy in self.copies.items():
            self._check_copy(key, copy, seen.get(key, []), power_lost)
        self._check_topics(seen, orphans)

    def _check_copy(self, key: Key, copy: Copy, items: list[Seen], power_lost: bool) -> None:
        where = f"{key}: {copy}, found {items}"
        if not items:
            assert not copy.published or copy.settling, f"lost: {where}"
            return
        if copy.replayed:  # a replay publishes before it removes the dead letter: both may exist
            return
        assert len(items) == 1, f"duplicated: {where}"
        item = items[0]
        if copy.settled == "purge" and copy.can_expire and item.dead:
            return  # it expired before the purge, which keeps dead letters
        if not power_lost:
            assert copy.settled in ("", "dead"), f"reappeared after settlement: {where}"
            assert item.dead or not copy.settled, f"in the queue after dead-lettering: {where}"
            assert item.attempt >= copy.claimed, f"an attempt was not counted: {where}"
        # The engine may have counted a delivery that the consumer has not received.
        assert item.attempt <= copy.claimed + 1, f"too many attempts: {where}"
        if item.dead:
            used_up = item.attempt >= LIMIT
            assert "dead" in copy.settling or copy.can_expire or used_up, (
                f"dead-lettered without a reason: {where}"
            )

    def _check_topics(self, seen: dict[Key, list[Seen]], orphans: set[str]) -> None:
        """Check that an unconfirmed send reached every group or none."""
        for id, keys in self._keys.items():
            if id in orphans:
                continue
            untouched = [key for key in keys if not self.copies[key].settling]
            there = {key in seen for key in untouched}
            assert len(there) <= 1, f"only some groups have {id}: {keys}"
