"""Sends of one turn of the loop leave together: one frame for each queue, one answer for all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from qkit.backends.native.socket import protocol
from qkit.backends.native.socket.client.connection import ClientConnection
from qkit.errors import PartialSend, PayloadTooLarge, QueueError
from qkit.message import Envelope, Sent

__all__ = ["Publisher"]

FRAME_BYTES: Final = 1 << 20  # a batch beyond this continues in another frame
FRAME_OVERHEAD_BYTES: Final = 4096  # of a frame's limit, for all that is not the message


class _Call:
    """One ``publish``: its messages, and what became of them."""

    __slots__ = ("envelopes", "future", "queue", "results")

    def __init__(
        self, queue: str, envelopes: Sequence[Envelope], future: asyncio.Future[list[Sent]]
    ) -> None:
        self.queue = queue
        self.envelopes = envelopes
        self.future = future
        self.results: list[Sent | QueueError] = []

    def done(self, positions: Sequence[int | None]) -> None:
        """All of its messages were accepted, in one frame."""
        if not self.future.done():
            pairs = zip(self.envelopes, positions, strict=True)
            self.future.set_result([Sent(item.id, position) for item, position in pairs])

    def fill(self, outcomes: Sequence[int | QueueError | None]) -> None:
        """What became of the next of its messages; the last ends the call."""
        results, begin = self.results, len(self.results)
        for place, item in enumerate(outcomes, begin):
            if isinstance(item, QueueError):
                results.append(item)
            else:
                results.append(Sent(self.envelopes[place].id, item))
        if len(results) < len(self.envelopes) or self.future.done():
            return
        if any(isinstance(item, QueueError) for item in results):
            error = PartialSend.of(results, backend="native", queue=self.queue)
            self.future.set_exception(error)
        else:
            self.future.set_result(results)  # type: ignore[arg-type]  # no error among them


class Publisher:
    """Batch the sends of one loop iteration and give each its part of the answer."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._gathered: dict[str, list[tuple[_Call, list[bytes]]]] = {}
        self._limit = int(connection.hello["max_frame"]) - FRAME_OVERHEAD_BYTES
        self._batch = min(FRAME_BYTES, self._limit)

    def publish(self, queue: str, envelopes: Sequence[Envelope]) -> asyncio.Future[list[Sent]]:
        """Send messages with this turn's others; done once the owner has accepted every one."""
        self._connection.check()
        encoded = [protocol.encode_envelope(item) for item in envelopes]
        if sum(map(len, encoded)) > self._limit:
            self._check_sizes(queue, envelopes, encoded)
        future: asyncio.Future[list[Sent]] = self._loop.create_future()
        gathered = self._gathered
        if not gathered:
            self._loop.call_soon(self._flush)
        call = _Call(queue, envelopes, future)
        if queue in gathered:
            gathered[queue].append((call, encoded))
        else:
            gathered[queue] = [(call, encoded)]
        return future

    def _check_sizes(self, queue: str, envelopes: Sequence[Envelope], encoded: list[bytes]) -> None:
        for item, data in zip(envelopes, encoded, strict=True):
            if len(data) > self._limit:
                raise PayloadTooLarge(
                    f"a message of {len(data)} bytes: the owner takes {self._limit}",
                    backend="native",
                    operation="publish",
                    queue=queue,
                    message_id=item.id,
                )

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, {}
        for queue, calls in gathered.items():
            batch: list[bytes] = []
            shares: list[tuple[_Call, int]] = []  # whose they are, in order
            size = 0
            for call, encoded in calls:
                share = 0
                for data in encoded:
                    if batch and size + len(data) > self._batch:
                        if share:
                            shares.append((call, share))
                        self._send(queue, batch, shares)
                        batch, shares, size, share = [], [], 0, 0
                    batch.append(data)
                    size += len(data)
                    share += 1
                shares.append((call, share))
            self._send(queue, batch, shares)

    def _send(self, queue: str, batch: list[bytes], shares: list[tuple[_Call, int]]) -> None:
        def answered(answer: bytes | QueueError) -> None:
            positions: list[int | None] = []
            outcomes: Sequence[int | QueueError | None]
            if isinstance(answer, QueueError):
                outcomes = _failures(answer, len(batch))
            else:
                outcomes = positions = protocol.decode_positions(answer)
            at = 0
            for call, share in shares:
                end = at + share
                if positions and share == len(call.envelopes):
                    call.done(positions[at:end])
                else:
                    call.fill(outcomes[at:end])
                at = end

        try:
            self._connection.ask(protocol.PUBLISH, protocol.encode_publish(queue, batch), answered)
        except QueueError as error:
            answered(error)


def _failures(error: QueueError, count: int) -> Sequence[int | QueueError | None]:
    """A position or an error for each message of a frame that was not accepted whole."""
    if isinstance(error, PartialSend):
        return [item if isinstance(item, QueueError) else item.position for item in error.results]
    error.located(operation="publish")
    return [error] * count
