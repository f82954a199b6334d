"""Sends of one turn of the loop leave together: one frame for each queue, one answer for all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from qkit.backends.socket import wire
from qkit.backends.socket.link import Link
from qkit.errors import PartialSend, PayloadTooLarge, QueueError
from qkit.message import Envelope, Sent

__all__ = ["Publishing"]

FRAME_BYTES: Final = 1 << 20  # a batch beyond this continues in another frame
ROOM: Final = 4096  # of a frame's limit, for all that is not the message


class _Call:
    """One ``publish``: its messages, and what became of them."""

    __slots__ = ("future", "ids", "queue", "results", "unknown")

    def __init__(self, queue: str, ids: list[str], future: asyncio.Future[list[Sent]]) -> None:
        self.queue = queue
        self.ids = ids
        self.future = future
        self.results: list[Sent | QueueError] = []
        self.unknown = len(ids)

    def fill(self, results: Sequence[Sent | QueueError]) -> None:
        """What became of the next of its messages; the last ends the call."""
        self.results += results
        self.unknown -= len(results)
        if self.unknown or self.future.done():
            return
        failed = [item for item in self.results if isinstance(item, QueueError)]
        if not failed:
            self.future.set_result(self.results)  # type: ignore[arg-type]  # no error among them
        elif len(failed) == len(self.results):
            self.future.set_exception(failed[0])
        else:
            self.future.set_exception(_partial(self.queue, self.results, failed))


class Publishing:
    """Gathers the sends of a turn and hands the owner's answer back to each."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._gathered: dict[str, list[tuple[_Call, list[bytes]]]] = {}
        self._limit = int(link.hello["max_frame"]) - ROOM
        self._batch = min(FRAME_BYTES, self._limit)

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Send messages; returns once the owner has accepted every one."""
        self._link.check()
        if not envelopes:
            await self._link.request(wire.PUBLISH, wire.encode_publish(queue, ()))
            return []
        encoded = [wire.encode_envelope(item) for item in envelopes]
        for item, data in zip(envelopes, encoded, strict=True):
            if len(data) > self._limit:
                raise PayloadTooLarge(
                    f"a message of {len(data)} bytes: the owner takes {self._limit}",
                    backend="native",
                    operation="publish",
                    queue=queue,
                    message_id=item.id,
                )
        if self._link.paused:
            await self._link.drained()
        future: asyncio.Future[list[Sent]] = self._loop.create_future()
        call = _Call(queue, [item.id for item in envelopes], future)
        if not self._gathered:
            self._loop.call_soon(self._flush)
        self._gathered.setdefault(queue, []).append((call, encoded))
        return await future

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, {}
        for queue, calls in gathered.items():
            batch: list[bytes] = []
            shares: list[tuple[_Call, int]] = []  # whose they are, in order
            size = 0
            for call, encoded in calls:
                share = 0
                for data in encoded:
                    if size and size + len(data) > self._batch:
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
            outcome = _outcomes(answer, len(batch))
            at = 0
            for call, share in shares:
                begin = len(call.results)
                ids = call.ids[begin : begin + share]
                call.fill(
                    [
                        Sent(id, item) if not isinstance(item, QueueError) else item
                        for id, item in zip(ids, outcome[at : at + share], strict=True)
                    ]
                )
                at += share

        try:
            self._link.ask(wire.PUBLISH, wire.encode_publish(queue, batch), answered)
        except QueueError as error:
            answered(error)


def _outcomes(answer: bytes | QueueError, count: int) -> Sequence[int | QueueError | None]:
    """A position or an error for each message of a frame."""
    if isinstance(answer, PartialSend):
        return [item if isinstance(item, QueueError) else item.position for item in answer.results]
    if isinstance(answer, QueueError):
        return [answer] * count
    return wire.decode_positions(answer)


def _partial(queue: str, results: list[Sent | QueueError], failed: list[QueueError]) -> PartialSend:
    return PartialSend(
        f"{len(failed)} of {len(results)} messages were not accepted, the first because "
        f"{failed[0].message}",
        results,
        backend="native",
        operation="publish",
        queue=queue,
    )
