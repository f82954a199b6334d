"""Native backend on a directory that another process owns."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from qkit._internal.clock import Clock, SystemClock
from qkit._internal.logging import logger
from qkit.backend import (
    BALANCES,
    Capabilities,
    QueueSpec,
    QueueStats,
    SubscriptionSpec,
    Support,
)
from qkit.backends.capability_matrix import MATRIX
from qkit.backends.native.socket import protocol
from qkit.backends.native.socket.client.connection import ClientConnection, open_connection
from qkit.backends.native.socket.client.lease_renewal import ClientLeaseRenewal
from qkit.backends.native.socket.client.subscription import SocketSubscription
from qkit.backends.native.socket.error_codec import decode_error
from qkit.errors import BackendUnavailable, LifecycleError, PartialSend, PayloadTooLarge, QueueError
from qkit.message import DeadLetter, Envelope, Sent

__all__ = ["SocketBackend"]

FRAME_BYTES: Final = 1 << 20  # a larger publish is split into several frames
FRAME_OVERHEAD_BYTES: Final = 4096  # reserved in each frame for the queue name and lengths
SINCE_VERSION_0_1: Final = ("consumed", "again")  # QueueSpec fields added after version 0.1


class SocketBackend:
    """Implementation of ``Backend`` and ``Admin`` as a client of a directory's owner.

    It behaves like the owner's ``NativeBackend``. After the connection is lost, ``start`` opens a
    new one.

    Args:
        path: Path of the socket.
        clock: Clock of the service; the system clock by default. With any other clock, no thread
            renews leases.
        capabilities: Capabilities to report before ``start``, which replaces them with the
            owner's.
        on_lost: Called with the error when the connection is lost.
    """

    name: str = "native"
    balances = BALANCES

    def __init__(
        self,
        path: Path,
        *,
        clock: Clock | None = None,
        capabilities: Capabilities = MATRIX["native-memory"],
        on_lost: Callable[[BackendUnavailable], None] | None = None,
    ) -> None:
        self._path = path
        # With a virtual clock, tests decide when leases end; a thread must not renew them.
        self._renews = clock is None or isinstance(clock, SystemClock)
        self._on_lost = on_lost
        self._connection: ClientConnection | None = None
        self._lease_renewal: ClientLeaseRenewal | None = None
        self._subscriptions: dict[int, SocketSubscription] = {}
        self._callbacks: dict[int, list[Callable[[DeadLetter], None]]] = {
            protocol.DEAD_LETTERED: [],
            protocol.DROPPED: [],
        }
        self.capabilities: Capabilities = capabilities

    # Backend

    async def start(self) -> None:
        """Connect to the owner if not connected; raise ``BackendUnavailable`` on failure."""
        if self._connection is not None:
            return
        connection = await open_connection(self._path, self._handle_push, self._lost)
        self._connection = connection
        self.capabilities = _capabilities(connection.hello["capabilities"])
        if self._renews:
            self._lease_renewal = ClientLeaseRenewal(self._path, int(connection.hello["session"]))
        self._listen()

    def check(self) -> None:
        """Raise ``BackendUnavailable`` unless connected."""
        if self._connection is None:
            self._raise_not_connected("check", None)

    async def declare(self, spec: QueueSpec) -> None:
        """Declare the queue as ``NativeBackend.declare`` does.

        An owner that runs qkit 0.1 rejects fields that it does not know. The declaration is then
        sent again without them, and the owner applies the rules of its version.
        """
        try:
            await self._request(
                "declare", protocol.DECLARE, protocol.encode_record(spec), spec.name
            )
        except QueueError as error:
            if "unexpected keyword argument" not in error.message:
                raise
            older = protocol.encode_record(spec, leave_out=SINCE_VERSION_0_1)
            await self._request("declare", protocol.DECLARE, older, spec.name)

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Add messages in order.

        Raises:
            PartialSend: Some messages were not added; ``results`` has the outcome of each message.
        """
        connection = self._connection
        if connection is None:
            self._raise_not_connected("publish", queue)
        limit = int(connection.hello["max_frame"]) - FRAME_OVERHEAD_BYTES
        encoded, rejected = _encode(queue, envelopes, limit)
        if connection.write_buffer.paused:
            await connection.write_buffer.drained()
        requests = [
            (len(frame), connection.begin(protocol.PUBLISH, protocol.encode_publish(queue, frame)))
            for frame in protocol.split(encoded, min(FRAME_BYTES, limit))
        ]
        outcomes: list[int | QueueError | None] = []  # position or error of each message
        for count, (_, answer) in requests:
            try:
                outcomes += protocol.decode_positions(await answer)
            except PartialSend as error:
                outcomes += [r if isinstance(r, QueueError) else r.position for r in error.results]
            except QueueError as error:
                outcomes += [error.located(operation="publish", queue=queue)] * count
        for index, rejection in rejected.items():  # in ascending order, so indexes stay valid
            outcomes.insert(index, rejection)
        results = [
            outcome if isinstance(outcome, QueueError) else Sent(item.id, outcome)
            for item, outcome in zip(envelopes, outcomes, strict=True)
        ]
        if any(isinstance(item, QueueError) for item in results):
            raise PartialSend.of(results, backend=self.name, queue=queue)
        return cast("list[Sent]", results)

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[SocketSubscription]:
        """Subscribe to a queue or to a group of a topic; create the group if it does not exist."""
        return self._subscription(spec)

    @asynccontextmanager
    async def _subscription(
        self, spec: SubscriptionSpec
    ) -> AsyncGenerator[SocketSubscription, None]:
        if self._connection is None:
            self._raise_not_connected("subscribe", spec.queue)
        subscription = SocketSubscription(self._connection, spec.queue, self._lease_renewal)
        await subscription.open(spec)
        self._subscriptions[subscription.number] = subscription
        try:
            yield subscription
        finally:
            self._subscriptions.pop(subscription.number, None)
            await subscription.leave()

    async def ping(self) -> None:
        """Check that the owner responds; raise ``BackendUnavailable`` otherwise."""
        await self._request("ping", protocol.PING)

    async def aclose(self) -> None:
        """Disconnect; idempotent.

        The owner releases this client's deliveries without counting an attempt.
        """
        connection, self._connection = self._connection, None
        if self._lease_renewal is not None:
            self._lease_renewal.close()
            self._lease_renewal = None
        if connection is not None:
            with suppress(LifecycleError):  # in a forked child; the connection is its parent's
                connection.send(protocol.CLOSE, 0)
            self._lose_subscriptions(
                BackendUnavailable("the backend was closed", backend=self.name)
            )
            await connection.aclose()

    # Admin

    async def queues(self) -> list[str]:
        """Return the names of all queues and topics."""
        return list(await self._administer("queues"))

    async def stats(self, queue: str) -> QueueStats:
        """Return the queue's statistics; for a topic, the sums over its groups."""
        return QueueStats(**await self._administer("stats", queue))

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        """Return up to ``limit`` messages in delivery order, scheduled messages last."""
        body = protocol.encode_json(["peek", queue, limit])
        answer = await self._request("peek", protocol.ADMINISTER, body, queue)
        return protocol.decode_envelopes(answer)

    async def purge(self, queue: str) -> int:
        """Delete every message that is not in flight; return the number deleted."""
        return int(await self._administer("purge", queue))

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Delete the messages with these ids that are not in flight; return the number deleted."""
        return int(await self._administer("remove", queue, *ids))

    async def delete(self, queue: str) -> None:
        """Delete the queue and everything in it."""
        await self._administer("delete", queue)

    async def _administer(self, call: str, *arguments: str) -> Any:
        body = protocol.encode_json([call, *arguments])
        queue = arguments[0] if arguments else None
        return protocol.decode_json(await self._request(call, protocol.ADMINISTER, body, queue))

    # DeadLetterSource and DroppedLetterSource

    def on_dead_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each message that the owner's engine dead-letters."""
        self._callbacks[protocol.DEAD_LETTERED].append(callback)
        self._listen()

    def on_dropped_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter dropped because its queue was full."""
        self._callbacks[protocol.DROPPED].append(callback)
        self._listen()

    def _listen(self) -> None:
        flags = sum(bit for kind, bit in protocol.EVENT_FLAGS.items() if self._callbacks[kind])
        if flags and self._connection is not None:
            self._connection.send(protocol.LISTEN, 0, protocol.encode_number(flags))

    # Connection

    async def _request(
        self, operation: str, kind: int, body: bytes = b"", queue: str | None = None
    ) -> bytes:
        if self._connection is None:
            self._raise_not_connected(operation, queue)
        try:
            return await self._connection.request(kind, body)
        except BackendUnavailable as error:
            error.located(operation=operation, queue=queue)
            raise

    def _raise_not_connected(self, operation: str, queue: str | None) -> NoReturn:
        raise BackendUnavailable(
            "not connected to the owner: start the backend first",
            backend=self.name,
            operation=operation,
            queue=queue,
        )

    def _handle_push(self, kind: int, number: int, body: bytes) -> None:
        """Handle a frame that the owner sends without a request."""
        if kind in self._callbacks:
            for envelope in protocol.decode_envelopes(body):
                self._run_callbacks(kind, DeadLetter.from_envelope(envelope))
            return
        subscription = self._subscriptions.get(number)
        if subscription is None:
            return  # closed in the meantime; the owner releases its deliveries
        if kind == protocol.DELIVERIES:
            subscription.deliver(body)
        elif kind == protocol.LOST:
            subscription.lost(decode_error(body))

    def _run_callbacks(self, kind: int, letter: DeadLetter) -> None:
        for callback in self._callbacks[kind]:
            try:
                callback(letter)
            except Exception:
                logger.exception("a dead-letter callback failed; the dead letter is not affected")

    def _lost(self, error: BackendUnavailable) -> None:
        self._connection = None
        if self._lease_renewal is not None:
            self._lease_renewal.close()
            self._lease_renewal = None
        self._lose_subscriptions(error)
        if self._on_lost is not None:
            self._on_lost(error)

    def _lose_subscriptions(self, error: QueueError) -> None:
        for subscription in tuple(self._subscriptions.values()):
            subscription.lost(error)


def _encode(
    queue: str, envelopes: Sequence[Envelope], limit: int
) -> tuple[list[bytes], dict[int, QueueError]]:
    """Encode messages; return the encoded ones and, by index, the errors of the others."""
    encoded: list[bytes] = []
    rejected: dict[int, QueueError] = {}
    for index, item in enumerate(envelopes):
        try:
            data = protocol.encode_envelope(item)
            if len(data) > limit:
                raise PayloadTooLarge(
                    f"the message has {len(data)} bytes, but the owner's limit is {limit}: send a "
                    "smaller message, or raise the owner's max_message_bytes"
                )
        except QueueError as error:
            error.located(backend="native", operation="publish", queue=queue, message_id=item.id)
            rejected[index] = error
        else:
            encoded.append(data)
    return encoded, rejected


def _capabilities(features: dict[str, str]) -> Capabilities:
    """Return the owner's capabilities; ignore features that this version does not know."""
    known = Capabilities().as_dict()
    return Capabilities(
        **{name: Support(value) for name, value in features.items() if name in known}
    )
