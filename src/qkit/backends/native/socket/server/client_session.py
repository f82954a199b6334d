"""Server side of a client's connection: calls the backend and sends the responses."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import asdict
from typing import Final

from qkit._internal.logging import logger
from qkit.backend import QueueSpec, SubscriptionSpec
from qkit.backends.native.socket import protocol
from qkit.backends.native.socket.error_codec import encode_error, encode_failures
from qkit.backends.native.socket.server.receive_budget import TRACKED_BYTES, ReceiveBudget
from qkit.backends.native.socket.server.subscription import (
    FRAME_BYTES,
    ServedBackend,
    ServerSubscription,
)
from qkit.backends.native.socket.write_buffer import WriteBuffer
from qkit.errors import QueueError
from qkit.message import DeadLetter

__all__ = ["ClientSession"]

MAX_ANSWERS: Final = 256  # running requests of a client at which reading pauses
MAX_EVENTS: Final = 4 << 20  # unsent bytes at which events for a client are dropped


class ClientSession:
    """Session of one client that sends frames.

    Args:
        backend: Backend that the client calls.
        transport: Transport of the connection.
        write_buffer: Write buffer of the connection.
        sessions: All sessions of the server by session number; this session adds itself.
        max_frame: Maximum size in bytes of a frame from the client.
        budget: Limit on the data that all clients have sent.
    """

    def __init__(
        self,
        backend: ServedBackend,
        transport: asyncio.Transport,
        write_buffer: WriteBuffer,
        *,
        sessions: dict[int, ClientSession],
        max_frame: int,
        budget: ReceiveBudget,
    ) -> None:
        self._backend = backend
        self._transport = transport
        self._write_buffer = write_buffer
        self._sessions = sessions
        self._frames: protocol.FrameDecoder | None = None  # set after the magic bytes
        self._max_frame = max_frame
        self._session = secrets.randbits(64)
        self._subscriptions: dict[int, ServerSubscription] = {}
        self._subscribing: set[asyncio.Task[None]] = set()
        self._answering: set[asyncio.Task[None]] = set()
        self._event_flags = 0
        self._budget = budget
        budget.sessions.add(self)
        self._incomplete = 0  # counted bytes of a frame that is not complete
        self._running = 0  # counted bytes of running requests

    # Connection

    def feed(self, data: bytes) -> None:
        """Handle received data; if it is invalid, send an error and close the connection."""
        try:
            if self._frames is None:
                data = self._greet(data)
                self._frames = protocol.FrameDecoder(self._max_frame)
            for kind, number, body in self._frames.feed(data):
                self._handle_frame(kind, number, body)
            self._count_incomplete(self._frames.buffered)
        except protocol.ProtocolError as error:
            self._reject(error)

    def reject(self, reason: str) -> None:
        """Send an error and close the connection."""
        self._incomplete = 0
        self._reject(protocol.ProtocolError(reason))

    def _reject(self, error: protocol.ProtocolError) -> None:
        logger.warning(
            "a client of the native directory sent invalid data; disconnecting: %s", error.message
        )
        self._write_buffer.frame(protocol.ERROR, 0, encode_error(error))
        self._write_buffer.close()

    def _count_incomplete(self, size: int) -> None:
        size = size if size >= TRACKED_BYTES else 0
        if size != self._incomplete:
            self._incomplete = size
            self._budget.update(self, size, self._running)

    def _count_running(self, change: int) -> None:
        self._running += change
        self._budget.update(self, self._incomplete, self._running)

    def _greet(self, data: bytes) -> bytes:
        magic, rest = data[: len(protocol.MAGIC)], data[len(protocol.MAGIC) :]
        if magic != protocol.MAGIC:
            raise protocol.ProtocolError(
                f"the owner requires version {protocol.MAGIC[-1]} of the protocol, but the client "
                "uses another version: run the same version of qkit in both processes"
            )
        self._sessions[self._session] = self
        hello = {
            "session": self._session,
            "max_frame": self._max_frame,
            "capabilities": self._backend.capabilities.as_dict(),
        }
        self._write_buffer.frame(protocol.HELLO, 0, protocol.encode_json(hello))
        return rest

    def end_of_input(self) -> bool:
        """Return ``False``, because a client that closed its write half does not read either."""
        return False

    def apply_backpressure(self) -> None:
        """Pause reading while the client does not read responses or many requests are running."""
        if self._transport.is_closing():
            return
        reading = (
            not self._write_buffer.paused
            and len(self._answering) < MAX_ANSWERS
            and not self._budget.exceeded
        )
        if reading != self._transport.is_reading():
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def lost(self) -> None:
        """Close all subscriptions; a client that did not send CLOSE is treated as crashed."""
        self._sessions.pop(self._session, None)
        self._budget.sessions.discard(self)
        self._count_incomplete(0)
        for subscription in self._subscriptions.values():
            subscription.leave(crashed=True)

    @property
    def idle(self) -> bool:
        """Whether no request is running and no subscription is open."""
        return not self._answering and not self._subscribing

    async def aclose(self, grace: float) -> None:
        """Wait up to ``grace`` seconds for running requests, then close all subscriptions."""
        if self._transport.is_reading():
            self._transport.pause_reading()
        if self._answering:
            await asyncio.wait(self._answering, timeout=grace)
        tasks = self._answering | self._subscribing
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def send_event(self, kind: int, letter: DeadLetter) -> None:
        """Send a dead letter to a client that listens for ``kind``, unless it reads too slowly."""
        if (
            self._event_flags & protocol.EVENT_FLAGS[kind]
            and self._write_buffer.waiting < MAX_EVENTS
        ):
            self._write_buffer.frame(kind, 0, protocol.encode_envelope(letter.to_envelope()))

    # Frames

    def _handle_frame(self, kind: int, number: int, body: bytes) -> None:
        if kind == protocol.CREDIT:
            serial, wanted = protocol.decode_credit(body)
            if (subscription := self._subscriptions.get(number)) is not None:
                subscription.credit(serial, wanted)
        elif (work := self._request(kind, number, body)) is not None:
            self._answer(number, work, len(body))
        else:
            self._handle_notification(kind, number, body)

    def _request(
        self, kind: int, number: int, body: bytes
    ) -> Coroutine[object, object, bytes] | None:
        """Return a coroutine for the response; ``None`` if ``_handle_notification`` applies."""
        match kind:
            case protocol.PUBLISH:
                return self._publish(body)
            case protocol.SETTLE:
                return self._settle(body)
            case protocol.STOP:
                return self._stop(protocol.decode_number(body))
            case protocol.LEAVE:
                return self._leave(protocol.decode_number(body))
            case protocol.DECLARE:
                return self._declare(body)
            case protocol.ADMINISTER:
                return self._administer(number, body)
            case protocol.PING:
                return _empty_answer(self._backend.ping())
            case _:
                return None

    def _handle_notification(self, kind: int, number: int, body: bytes) -> None:
        match kind:
            case protocol.SUBSCRIBE:  # the response is sent once the subscription is open
                self._subscribe(number, body)
            case protocol.LISTEN:
                self._event_flags = protocol.decode_number(body)
            case protocol.RENEW:
                session, leases = protocol.decode_renewals(body)
                if (client := self._sessions.get(session)) is not None:
                    self._start(self._answering, client.renew(leases), "renewal")
            case protocol.CLOSE:
                for subscription in self._subscriptions.values():
                    subscription.leave()
            case _:
                raise protocol.ProtocolError(f"unknown kind of frame: {kind}")

    def _answer(self, number: int, work: Coroutine[object, object, bytes], size: int) -> None:
        if size < TRACKED_BYTES:
            self._start(self._answering, self._answered(number, work), "answer")
        else:
            self._count_running(size)
            task = self._start(self._answering, self._answered(number, work), "answer")
            task.add_done_callback(lambda _: self._count_running(-size))
        if len(self._answering) >= MAX_ANSWERS:
            self.apply_backpressure()

    async def _answered(self, number: int, work: Awaitable[bytes]) -> None:
        try:
            body = await work
        except Exception as error:
            if not isinstance(error, QueueError):
                logger.exception(
                    "unexpected error in a request from a client of the native directory"
                )
            self._write_buffer.frame(protocol.ERROR, number, encode_error(error))
        else:
            self._write_buffer.frame(protocol.OK, number, body)
        self._write_buffer.flush()  # the client can continue while the next request runs

    def _start(
        self,
        tasks: set[asyncio.Task[None]],
        work: Coroutine[object, object, None],
        name: str,
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"qkit socket {name}")
        tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._subscribing.discard(task)
        if task in self._answering:
            self._answering.discard(task)
            if len(self._answering) == MAX_ANSWERS - 1:
                self.apply_backpressure()

    # Requests

    async def _publish(self, body: bytes) -> bytes:
        queue, envelopes = protocol.decode_publish(body)
        return protocol.encode_positions(await self._backend.publish(queue, envelopes))

    async def _declare(self, body: bytes) -> bytes:
        await self._backend.declare(protocol.decode_record(QueueSpec, body))
        return b""

    async def _administer(self, number: int, body: bytes) -> bytes:
        """Call a method of ``Admin``; encode messages in binary, other results as JSON."""
        backend = self._backend
        match protocol.decode_json(body):
            case ["queues"]:
                return protocol.encode_json(await backend.queues())
            case ["stats", str(queue)]:
                return protocol.encode_json(asdict(await backend.stats(queue)))
            case ["peek", str(queue), int(limit)]:
                envelopes = map(protocol.encode_envelope, await backend.peek(queue, limit))
                *parts, last = map(b"".join, protocol.split(envelopes, FRAME_BYTES))
                for part in parts:
                    self._write_buffer.frame(protocol.MORE, number, part)
                    await self._write_buffer.drained()
                return last
            case ["purge", str(queue)]:
                return protocol.encode_json(await backend.purge(queue))
            case ["remove", str(queue), *ids]:
                return protocol.encode_json(await backend.remove(queue, _texts(ids)))
            case ["delete", str(queue)]:
                await backend.delete(queue)
                return protocol.encode_json(None)
            case _:
                raise protocol.ProtocolError(f"unknown administrative call: {body[:80]!r}")

    def _subscribe(self, number: int, body: bytes) -> None:
        subscription = self._subscriptions[number] = ServerSubscription(number, self._write_buffer)
        self._start(self._subscribing, self._serve(number, subscription, body), "subscription")

    async def _serve(self, number: int, subscription: ServerSubscription, body: bytes) -> None:
        opened = False

        def confirm() -> None:
            nonlocal opened
            opened = True
            self._write_buffer.frame(protocol.OK, number)

        try:
            await subscription.run(
                self._backend, protocol.decode_record(SubscriptionSpec, body), confirm
            )
        except Exception as error:
            if not isinstance(error, QueueError):
                logger.exception(
                    "unexpected error in a client's subscription to the native directory"
                )
            kind = protocol.LOST if opened else protocol.ERROR
            self._write_buffer.frame(kind, number, encode_error(error))
        finally:
            self._subscriptions.pop(number, None)

    async def _stop(self, number: int) -> bytes:
        if (subscription := self._subscriptions.get(number)) is not None:
            await subscription.stop()
        return b""

    async def _leave(self, number: int) -> bytes:
        """Close a subscription; return once all its deliveries are released."""
        if (subscription := self._subscriptions.get(number)) is not None:
            subscription.leave()
            await subscription.ended.wait()
        return b""

    async def _settle(self, body: bytes) -> bytes:
        """Settle deliveries; return the encoded errors by index.

        If there is only one delivery, its error is raised instead.
        """
        number, items = protocol.decode_settlements(body)
        subscription = self._subscriptions.get(number)
        if subscription is None:
            # It was closed; settling on an empty subscription raises AckDeadlineExceeded.
            subscription = ServerSubscription(number, self._write_buffer)
        if len(items) == 1:
            await subscription.settle(items[0])
            return b""
        results = await asyncio.gather(
            *[subscription.settle(item) for item in items], return_exceptions=True
        )
        return encode_failures(results)

    async def renew(self, leases: Sequence[tuple[int, int, float]]) -> None:
        """Extend leases of this client, whose event loop is blocked; log errors at debug level."""
        for number, receipt, seconds in leases:
            if (subscription := self._subscriptions.get(number)) is not None:
                try:
                    await subscription.settle(
                        protocol.SettleItem(protocol.EXTEND, receipt, seconds, False, {})
                    )
                except QueueError as error:
                    logger.debug("could not renew a lease: %s", error)


async def _empty_answer(work: Awaitable[None]) -> bytes:
    await work
    return b""


def _texts(values: Sequence[object]) -> list[str]:
    return [str(value) for value in values]
