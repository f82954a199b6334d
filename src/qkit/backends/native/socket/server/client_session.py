"""The owner's side of one client: its frames become calls of the backend, and answers."""

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
from qkit.backends.native.socket.server.subscription import (
    FRAME_BYTES,
    ServedBackend,
    ServerSubscription,
)
from qkit.backends.native.socket.write_buffer import WriteBuffer
from qkit.errors import QueueError
from qkit.message import DeadLetter

__all__ = ["ClientSession"]

MAX_ANSWERS: Final = 256  # requests of one client under way before it is read no further
MAX_EVENTS: Final = 4 << 20  # bytes that a client may leave unread before it misses events


class ClientSession:
    """One client that speaks frames; ``sessions`` are all of them, by their sessions."""

    def __init__(
        self,
        backend: ServedBackend,
        transport: asyncio.Transport,
        write_buffer: WriteBuffer,
        *,
        sessions: dict[int, ClientSession],
        max_frame: int,
    ) -> None:
        self._backend = backend
        self._transport = transport
        self._write_buffer = write_buffer
        self._sessions = sessions
        self._frames: protocol.FrameDecoder | None = None  # until the magic word was heard
        self._max_frame = max_frame
        self._session = secrets.randbits(64)
        self._subscriptions: dict[int, ServerSubscription] = {}
        self._subscribing: set[asyncio.Task[None]] = set()
        self._answering: set[asyncio.Task[None]] = set()
        self._event_flags = 0

    # The connection

    def feed(self, data: bytes) -> None:
        """Take what arrived; what is no frame ends the connection with a word why."""
        try:
            if self._frames is None:
                data = self._greet(data)
                self._frames = protocol.FrameDecoder(self._max_frame)
            for kind, number, body in self._frames.feed(data):
                self._take(kind, number, body)
        except protocol.ProtocolError as error:
            logger.warning("a client of the native directory was cut off: %s", error.message)
            self._write_buffer.frame(protocol.ERROR, 0, encode_error(error))
            self._write_buffer.close()

    def _greet(self, data: bytes) -> bytes:
        magic, rest = data[: len(protocol.MAGIC)], data[len(protocol.MAGIC) :]
        if magic != protocol.MAGIC:
            raise protocol.ProtocolError(
                f"this owner speaks version {protocol.MAGIC[-1]} of the protocol, the client "
                "does not: run the same version of qkit in both processes"
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
        """The client hung up: nothing will ever be read again."""
        return False

    def apply_backpressure(self) -> None:
        """Read no further while the client does not read, or has enough under way."""
        if self._transport.is_closing():
            return
        reading = not self._write_buffer.paused and len(self._answering) < MAX_ANSWERS
        if reading != self._transport.is_reading():
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def lost(self) -> None:
        """The connection is gone. Without a goodbye, so is the client: its attempts count."""
        self._sessions.pop(self._session, None)
        for subscription in self._subscriptions.values():
            subscription.leave(crashed=True)

    async def aclose(self, grace: float) -> None:
        """Answer what is under way, give back what the client holds."""
        if self._transport.is_reading():
            self._transport.pause_reading()
        if self._answering:
            await asyncio.wait(self._answering, timeout=grace)
        tasks = self._answering | self._subscribing
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def send_event(self, kind: int, letter: DeadLetter) -> None:
        """Tell the client of a dead letter if it asked; one that does not read misses some."""
        if (
            self._event_flags & protocol.EVENT_FLAGS[kind]
            and self._write_buffer.waiting < MAX_EVENTS
        ):
            self._write_buffer.frame(kind, 0, protocol.encode_envelope(letter.to_envelope()))

    # Frames

    def _take(self, kind: int, number: int, body: bytes) -> None:
        if kind == protocol.CREDIT:
            serial, wanted = protocol.decode_credit(body)
            if (subscription := self._subscriptions.get(number)) is not None:
                subscription.credit(serial, wanted)
        elif (work := self._request(kind, number, body)) is not None:
            self._answer(number, work)
        else:
            self._notification(kind, number, body)

    def _request(
        self, kind: int, number: int, body: bytes
    ) -> Coroutine[object, object, bytes] | None:
        """Return the work that gives the answer; ``None`` for a frame without an answer."""
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
                return _nothing(self._backend.ping())
            case _:
                return None

    def _notification(self, kind: int, number: int, body: bytes) -> None:
        match kind:
            case protocol.SUBSCRIBE:  # answered once it is open
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
                raise protocol.ProtocolError(f"{kind} is no kind of frame that this owner knows")

    def _answer(self, number: int, work: Coroutine[object, object, bytes]) -> None:
        self._start(self._answering, self._answered(number, work), "answer")
        if len(self._answering) >= MAX_ANSWERS:
            self.apply_backpressure()

    async def _answered(self, number: int, work: Awaitable[bytes]) -> None:
        try:
            body = await work
        except Exception as error:
            if not isinstance(error, QueueError):
                logger.exception("a request of a client of the native directory failed")
            self._write_buffer.frame(protocol.ERROR, number, encode_error(error))
        else:
            self._write_buffer.frame(protocol.OK, number, body)
        self._write_buffer.flush()  # the client goes on while the next request is dealt with

    def _start(
        self,
        among: set[asyncio.Task[None]],
        work: Coroutine[object, object, None],
        what: str,
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"qkit socket {what}")
        among.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
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
        """One call of ``Admin``; messages come as messages, everything else as JSON."""
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
                raise protocol.ProtocolError("a call that this owner does not know")

    def _subscribe(self, number: int, body: bytes) -> None:
        subscription = self._subscriptions[number] = ServerSubscription(number, self._write_buffer)
        self._start(self._subscribing, self._serve(number, subscription, body), "subscription")

    async def _serve(self, number: int, subscription: ServerSubscription, body: bytes) -> None:
        opened = False

        def open_it() -> None:
            nonlocal opened
            opened = True
            self._write_buffer.frame(protocol.OK, number)

        try:
            await subscription.run(
                self._backend, protocol.decode_record(SubscriptionSpec, body), open_it
            )
        except Exception as error:
            if not isinstance(error, QueueError):
                logger.exception("a subscription of a client of the native directory failed")
            kind = protocol.LOST if opened else protocol.ERROR
            self._write_buffer.frame(kind, number, encode_error(error))
        finally:
            self._subscriptions.pop(number, None)

    async def _stop(self, number: int) -> bytes:
        if (subscription := self._subscriptions.get(number)) is not None:
            await subscription.stop()
        return b""

    async def _leave(self, number: int) -> bytes:
        """The answer comes when everything is given back, so that others can have it."""
        if (subscription := self._subscriptions.get(number)) is not None:
            subscription.leave()
            await subscription.ended.wait()
        return b""

    async def _settle(self, body: bytes) -> bytes:
        """The errors of those that failed, by their places; nothing if none did."""
        number, items = protocol.decode_settlings(body)
        subscription = self._subscriptions.get(number)
        if subscription is None:
            subscription = ServerSubscription(
                number, self._write_buffer
            )  # it was left: it refuses everything
        if len(items) == 1:
            await subscription.settle(items[0])
            return b""
        results = await asyncio.gather(
            *[subscription.settle(item) for item in items], return_exceptions=True
        )
        return encode_failures(results)

    async def renew(self, leases: Sequence[tuple[int, int, float]]) -> None:
        """Extend leases that this client's loop cannot; those that were settled stay so."""
        for number, receipt, seconds in leases:
            if (subscription := self._subscriptions.get(number)) is not None:
                try:
                    await subscription.settle(
                        protocol.SettleItem(protocol.EXTEND, receipt, seconds, False, {})
                    )
                except QueueError as error:
                    logger.debug("a lease was not renewed: %s", error)


async def _nothing(work: Awaitable[None]) -> bytes:
    await work
    return b""


def _texts(values: Sequence[object]) -> list[str]:
    return [str(value) for value in values]
