"""A message that was read from a partition, with its offset and the tracker of the partition."""

from __future__ import annotations

from qkit.backend import Delivery
from qkit.backends.kafka.codec import Facts, Origin
from qkit.backends.kafka.group import Place
from qkit.backends.kafka.offsets import Tracker
from qkit.message import Envelope

__all__ = ["Item"]


class Item:
    """A message that was read: where it lies, what it is, and whether somebody works on it."""

    __slots__ = ("_facts", "envelope", "held", "offset", "place", "tracker")

    def __init__(
        self, tracker: Tracker, place: Place, offset: int, envelope: Envelope, facts: Facts
    ) -> None:
        self.tracker = tracker
        self.place = place
        self.offset = offset
        self.envelope = envelope
        self.held: Delivery | None = None  # the delivery that somebody works on
        self._facts = facts

    @property
    def facts(self) -> Facts:
        """What its record says; where it lies is where it came from, unless it was sent on."""
        if self._facts.origin is None:
            topic, partition = self.place
            return self._facts._replace(origin=Origin(topic, partition, self.offset))
        return self._facts

    @property
    def pending(self) -> bool:
        """Whether it is this consumer's to deliver: not settled, purged, or gone to another."""
        tracker = self.tracker
        return not tracker.lost and tracker.pending.get(self.offset) is self
