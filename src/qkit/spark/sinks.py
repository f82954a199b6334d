"""Destinations of a task's messages: a part of a bulk file, or a broker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, Protocol

from qkit.errors import ConfigError
from qkit.handlers.route import Route
from qkit.message import Envelope
from qkit.native.bulk import BulkWriter
from qkit.native.catalogue import DEAD_LETTER_SUFFIX
from qkit.spark.options import Plan
from qkit.spark.task_sender import TaskSender

__all__ = ["ATTEMPTS_PER_PARTITION", "BrokerSink", "BulkSink", "Sink", "is_bulk", "native_path"]

ATTEMPTS_PER_PARTITION: Final = 1_000  # part numbers reserved for the task attempts of a partition


class Sink(Protocol):
    """Destination of the messages of one task."""

    sends_are_final: bool  # whether sent messages remain if the task fails

    def send(self, envelopes: Sequence[Envelope]) -> None:
        """Send messages; they are stored by the time ``finish`` returns."""
        ...

    def dead_letter(self, letters: Sequence[Envelope]) -> None:
        """Send dead letters to the dead-letter queue of the channel."""
        ...

    def finish(self) -> None:
        """Complete the output of a successful task."""
        ...

    def abort(self) -> None:
        """Discard the output of a failed task, as far as possible."""
        ...


def is_bulk(plan: Plan) -> bool:
    """Return whether the backend is native, which accepts bulk files."""
    return plan.settings.type == "native"


def native_path(plan: Plan) -> str:
    """Return the native directory.

    Raises:
        ConfigError: The engine is in memory, where no other process can reach it.
    """
    if plan.settings.path is None:
        raise ConfigError(
            "type 'native' without a path is an engine in memory, which Spark tasks cannot reach: "
            "set option('path', directory)"
        )
    return str(plan.settings.path)


class BulkSink:
    """Writer of one part of a bulk file, which the driver publishes with the job."""

    sends_are_final = False

    def __init__(self, plan: Plan, route: Route, staged: str, part: int) -> None:
        self._queue = route.queue
        self._dead_letter_queue = plan.settings.broker_name(plan.dead_letter_name)
        self._priority = plan.settings.default_priority
        self._writer = BulkWriter(native_path(plan), staged, part)
        # All other values come from the settings of the process that owns the directory.
        config: dict[str, object] = {"broadcast": route.spec.broadcast}
        if route.spec.dead_letter != route.queue + DEAD_LETTER_SUFFIX:
            config["dead_letter"] = route.spec.dead_letter
        self._writer.declare(route.queue, config)
        self._dead_letter_queue_declared = False
        self._dead_letter_config: dict[str, object] = {
            "max_depth": plan.settings.dead_letter.max_size,
            "max_deliveries": None,
            "drop_oldest": True,
            "dead_letter": None,
        }

    def send(self, envelopes: Sequence[Envelope]) -> None:
        """Append messages to the part."""
        self._put(self._queue, envelopes)

    def _put(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        put, default_priority, now = self._writer.put, self._priority, time.time()
        for item in envelopes:
            put(
                queue,
                item.body,
                priority=default_priority if item.priority is None else item.priority,
                headers=item.headers,
                key=item.key,
                due=item.not_before or 0.0,
                expires=item.expires_at or 0.0,
                at=now,
                message_id=item.id,
            )

    def dead_letter(self, letters: Sequence[Envelope]) -> None:
        """Append dead letters to the part, for the dead-letter queue."""
        if not self._dead_letter_queue_declared:
            self._writer.declare(self._dead_letter_queue, self._dead_letter_config)
            self._dead_letter_queue_declared = True
        self._put(self._dead_letter_queue, letters)

    def finish(self) -> None:
        """Sync the part to disk."""
        self._writer.close()

    def abort(self) -> None:
        """Delete the part."""
        self._writer.abort()


class BrokerSink:
    """Sink for a broker. Confirmed messages remain, so a retried task sends duplicates."""

    sends_are_final = True

    def __init__(self, plan: Plan, sender: TaskSender, route: Route) -> None:
        self._route = route
        self._sender = sender.open()
        self._plan = plan

    def send(self, envelopes: Sequence[Envelope]) -> None:
        """Send messages and wait until the broker confirms them."""
        self._sender.send(self._route, envelopes)

    def dead_letter(self, letters: Sequence[Envelope]) -> None:
        """Send dead letters and wait until the broker confirms them."""
        self._sender.send(self._sender.route(self._plan.dead_letter_name), letters)

    def finish(self) -> None:
        """Disconnect."""
        self._sender.close()

    def abort(self) -> None:
        """Disconnect."""
        self._sender.close()
