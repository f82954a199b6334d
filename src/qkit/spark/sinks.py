"""Where a task's messages go: to a part of a bulk file, or to a broker."""

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

__all__ = ["ATTEMPTS", "BrokerSink", "BulkSink", "Sink", "is_bulk", "native_path"]

ATTEMPTS: Final = 1_000  # parts of a bulk file that one partition has for its attempts


class Sink(Protocol):
    """Takes messages until it is finished or aborted."""

    lasting: bool  # whether what was taken stays when the task fails

    def send(self, envelopes: Sequence[Envelope]) -> None:
        """Hand messages over; they are safe when ``finish`` returns, at the latest."""
        ...

    def dead_letter(self, letters: Sequence[Envelope]) -> None:
        """The same for dead letters of the channel."""
        ...

    def finish(self) -> None:
        """All was handed over."""
        ...

    def abort(self) -> None:
        """Remove what can be removed: the task failed."""
        ...


def is_bulk(plan: Plan) -> bool:
    """Whether the channel is in a native directory, which takes bulk files."""
    return plan.settings.type == "native"


def native_path(plan: Plan) -> str:
    """The directory; ``ConfigError`` for an engine in memory, which no other process sees."""
    if plan.settings.path is None:
        raise ConfigError(
            "type 'native' without a path is in the memory of one process: name the directory, "
            "option('path', …)"
        )
    return str(plan.settings.path)


class BulkSink:
    """A part of a bulk file, which counts once the driver publishes the job."""

    lasting = False

    def __init__(self, plan: Plan, route: Route, staged: str, part: int) -> None:
        self._queue = route.queue
        self._letters = plan.settings.broker_name(plan.letters)
        self._priority = plan.settings.default_priority
        self._writer = BulkWriter(native_path(plan), staged, part)
        # Everything else follows the settings of the process that owns the directory.
        config: dict[str, object] = {"broadcast": route.spec.broadcast}
        if route.spec.dead_letter != route.queue + DEAD_LETTER_SUFFIX:
            config["dead_letter"] = route.spec.dead_letter
        self._writer.declare(route.queue, config)
        self._letters_declared = False
        self._letter_config: dict[str, object] = {
            "max_depth": plan.settings.dead_letter.max_size,
            "max_deliveries": None,
            "drop_oldest": True,
            "dead_letter": None,
        }

    def send(self, envelopes: Sequence[Envelope]) -> None:
        """Add them to the part."""
        self._put(self._queue, envelopes)

    def _put(self, queue: str, envelopes: Sequence[Envelope]) -> None:
        put, usual, now = self._writer.put, self._priority, time.time()
        for item in envelopes:
            put(
                queue,
                item.body,
                priority=usual if item.priority is None else item.priority,
                headers=item.headers,
                key=item.key,
                due=item.not_before or 0.0,
                expires=item.expires_at or 0.0,
                at=now,
                message_id=item.id,
            )

    def dead_letter(self, letters: Sequence[Envelope]) -> None:
        """Add them to the part, for the dead-letter queue."""
        if not self._letters_declared:
            self._writer.declare(self._letters, self._letter_config)
            self._letters_declared = True
        self._put(self._letters, letters)

    def finish(self) -> None:
        """The part is on the disk."""
        self._writer.close()

    def abort(self) -> None:
        """The part is gone."""
        self._writer.abort()


class BrokerSink:
    """A broker: what it confirmed stays, and a task that is tried again sends it again."""

    lasting = True

    def __init__(self, plan: Plan, sender: TaskSender, route: Route) -> None:
        self._route = route
        self._sender = sender.open()
        self._plan = plan

    def send(self, envelopes: Sequence[Envelope]) -> None:
        """Confirmed when this returns."""
        self._sender.send(self._route, envelopes)

    def dead_letter(self, letters: Sequence[Envelope]) -> None:
        """Confirmed when this returns."""
        self._sender.send(self._sender.route(self._plan.letters), letters)

    def finish(self) -> None:
        """Disconnect."""
        self._sender.close()

    def abort(self) -> None:
        """Disconnect."""
        self._sender.close()
