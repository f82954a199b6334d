"""A message that was read from a partition, with its offset and the tracker of the partition."""

from __future__ import annotations

from qkit.backend import Delivery
from qkit.backends.kafka.codec import Origin, RecordAttributes
from qkit.backends.kafka.driver import Partition
from qkit.backends.kafka.offsets import OffsetTracker
from qkit.message import Envelope

__all__ = ["FetchedMessage"]


class FetchedMessage:
    """A message that was read, its partition and offset, and the delivery that holds it."""

    __slots__ = ("_attributes", "envelope", "held", "offset", "partition", "tracker")

    def __init__(
        self,
        tracker: OffsetTracker,
        partition: Partition,
        offset: int,
        envelope: Envelope,
        attributes: RecordAttributes,
    ) -> None:
        self.tracker = tracker
        self.partition = partition
        self.offset = offset
        self.envelope = envelope
        self.held: Delivery | None = None  # the delivery that is not settled yet
        self._attributes = attributes

    @property
    def attributes(self) -> RecordAttributes:
        """Attributes of its record; the origin is its own position unless the record names one."""
        if self._attributes.origin is None:
            return self._attributes._replace(origin=Origin(*self.partition, self.offset))
        return self._attributes

    @property
    def pending(self) -> bool:
        """Whether it is this consumer's to deliver: not settled, purged, or gone to another."""
        tracker = self.tracker
        return not tracker.lost and tracker.pending.get(self.offset) is self
