"""Message that a consumer has read from a partition."""

from __future__ import annotations

from qkit.backend import Delivery
from qkit.backends.kafka.codec import Origin, RecordAttributes
from qkit.backends.kafka.driver import Partition
from qkit.backends.kafka.offsets import OffsetTracker
from qkit.message import Envelope

__all__ = ["FetchedMessage"]


class FetchedMessage:
    """Message with its position, the tracker of its partition, and its unsettled delivery.

    Args:
        tracker: Tracker of the partition.
        partition: Partition of the record.
        offset: Offset of the record.
        envelope: The message.
        attributes: Attributes of the record.
    """

    __slots__ = ("_attributes", "envelope", "held", "offset", "partition", "tracker")

    def __init__(
        self,
        tracker: OffsetTracker,
        partition: Partition,
        offset: int,
        envelope: Envelope,
        attributes: RecordAttributes,
    ) -> None:
        self.tracker: OffsetTracker = tracker
        self.partition: Partition = partition
        self.offset: int = offset
        self.envelope: Envelope = envelope
        #: The unsettled delivery of the message; ``None`` if it is not in flight.
        self.held: Delivery | None = None
        self._attributes = attributes

    @property
    def attributes(self) -> RecordAttributes:
        """Attributes of the record; ``origin`` defaults to the position of the record."""
        if self._attributes.origin is None:
            return self._attributes._replace(origin=Origin(*self.partition, self.offset))
        return self._attributes

    @property
    def pending(self) -> bool:
        """Whether this consumer still has to settle the message.

        False after the message was settled or purged, and after this consumer lost the partition.
        """
        tracker = self.tracker
        return not tracker.lost and tracker.pending.get(self.offset) is self
