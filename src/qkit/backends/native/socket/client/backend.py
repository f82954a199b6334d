"""A client of a native directory that another process owns."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
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
from qkit.errors import BackendUnavailable, PartialSend, PayloadTooLarge, QueueError
from qkit.message import DeadLetter, Envelope, Sent

__all__ = ["SocketBackend"]

FRAME_BYTES: Final = 1 << 20  # a publish of more than this is cut into several frames
FRAME_OVERHEAD_BYTES: Final = 4096  # of the owner's limit, for all that is not the message
SINCE_VERSION_0_1: Final = ("consumed", "again")  # fields of QueueSpec that it does not know


class SocketBackend:
    """``Backend``, ``Admin`` and the dead letters' sources, on the socket of a directory's owner.

    It means the same as ``NativeBackend`` in the owner. ``capabilities`` are the owner's once it
    is started; until then they are what is given here. ``on_lost`` is called when the connection
    breaks; ``start`` opens another.
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
        # A virtual clock's leases end when the test says so: no thread in real time may interfere.
        self._renews = clock is None or isinstance(clock, SystemClock)
        self._on_lost = on_lost
        self._connection: ClientConnection | None = None
        self._lease_renewal: ClientLeaseRenewal | None = None
        self._subscriptions: dict[int, SocketSubscription] = {}
        self._callbacks: dict[int, list[Callable[[DeadLetter], None]]] = {
            protocol.DEAD_LETTERED: [],
            protocol.DROPPED: [],
        }
        self.capabilities = capabilities

    # Backend

    async def start(self) -> None:
        """Connect, or raise ``BackendUnavailable``; idempotent while the connection lasts."""
        if self._connection is not None:
            return
        connection = await open_connection(self._path, self._take, self._lost)
        self._connection = connection
        self.capabilities = _capabilities(connection.hello["capabilities"])
        if self._renews:
            self._lease_renewal = ClientLeaseRenewal(self._path, int(connection.hello["session"]))
        self._listen()

    def check(self) -> None:
        """Raise ``BackendUnavailable`` unless there is a connection."""
        if self._connection is None:
            self._refuse("check", None)

    async def declare(self, spec: QueueSpec) -> None:
        """Make sure the queue exists; see ``NativeBackend.declare``.

        An owner of version 0.1 refuses fields that it does not know. It gets the rest, and decides
        by the rules of its version.
        """
        try:
            await self._ask("declare", protocol.DECLARE, protocol.encode_record(spec), spec.name)
        except QueueError as error:
            if "unexpected keyword argument" not in error.message:
                raise
            older = protocol.encode_record(spec, leave_out=SINCE_VERSION_0_1)
            await self._ask("declare", protocol.DECLARE, older, spec.name)

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Add messages in order, as many as can be; the others' errors are in ``PartialSend``."""
        connection = self._connection
        if connection is None:
            self._refuse("publish", queue)
        limit = int(connection.hello["max_frame"]) - FRAME_OVERHEAD_BYTES
        encoded, refused = _encode(queue, envelopes, limit)
        if connection.write_buffer.paused:
            await connection.write_buffer.drained()
        requests = [
            (len(frame), connection.begin(protocol.PUBLISH, protocol.encode_publish(queue, frame)))
            for frame in protocol.split(encoded, min(FRAME_BYTES, limit))
        ]
        outcomes: list[int | QueueError | None] = []  # positions and errors
        for count, (_, answer) in requests:
            try:
                outcomes += protocol.decode_positions(await answer)
            except PartialSend as error:
                outcomes += [r if isinstance(r, QueueError) else r.position for r in error.results]
            except QueueError as error:
                outcomes += [error.located(operation="publish", queue=queue)] * count
        for place, refusal in refused.items():  # in ascending order
            outcomes.insert(place, refusal)
        results = [
            outcome if isinstance(outcome, QueueError) else Sent(item.id, outcome)
            for item, outcome in zip(envelopes, outcomes, strict=True)
        ]
        if any(isinstance(item, QueueError) for item in results):
            raise PartialSend.of(results, backend=self.name, queue=queue)
        return cast("list[Sent]", results)

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[SocketSubscription]:
        """Claim messages of a queue, or of a topic's group, which is declared by this."""
        return self._subscription(spec)

    @asynccontextmanager
    async def _subscription(
        self, spec: SubscriptionSpec
    ) -> AsyncGenerator[SocketSubscription, None]:
        if self._connection is None:
            self._refuse("subscribe", spec.queue)
        subscription = SocketSubscription(self._connection, spec.queue, self._lease_renewal)
        await subscription.open(spec)
        self._subscriptions[subscription.number] = subscription
        try:
            yield subscription
        finally:
            self._subscriptions.pop(subscription.number, None)
            await subscription.leave()

    async def ping(self) -> None:
        """Raise ``BackendUnavailable`` unless the owner answers."""
        await self._ask("ping", protocol.PING)

    async def aclose(self) -> None:
        """Say goodbye, so that what is held goes back uncharged, and hang up; idempotent."""
        connection, self._connection = self._connection, None
        if self._lease_renewal is not None:
            self._lease_renewal.close()
            self._lease_renewal = None
        if connection is not None:
            connection.tell(protocol.CLOSE, 0)
            self._break(BackendUnavailable("the backend was closed", backend=self.name))
            await connection.aclose()

    # Admin

    async def queues(self) -> list[str]:
        """The names of all queues and topics of the engine."""
        return list(await self._administer("queues"))

    async def stats(self, queue: str) -> QueueStats:
        """The queue's figures now; a topic's are the sums of its groups'."""
        return QueueStats(**await self._administer("stats", queue))

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        """The next messages in order of delivery, delayed ones last."""
        body = protocol.encode_json(["peek", queue, limit])
        return protocol.decode_envelopes(await self._ask("peek", protocol.ADMINISTER, body, queue))

    async def purge(self, queue: str) -> int:
        """Delete every message that no consumer holds; return how many."""
        return int(await self._administer("purge", queue))

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Delete these messages unless a consumer holds them; return how many were there."""
        return int(await self._administer("remove", queue, *ids))

    async def delete(self, queue: str) -> None:
        """Delete the queue with all that is in it."""
        await self._administer("delete", queue)

    async def _administer(self, call: str, *arguments: str) -> Any:
        body = protocol.encode_json([call, *arguments])
        queue = arguments[0] if arguments else None
        return protocol.decode_json(await self._ask(call, protocol.ADMINISTER, body, queue))

    # DeadLetterSource and DroppedLetterSource

    def on_dead_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter that the owner's engine wrote by itself."""
        self._callbacks[protocol.DEAD_LETTERED].append(callback)
        self._listen()

    def on_dropped_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter that a full dead-letter queue pushed out."""
        self._callbacks[protocol.DROPPED].append(callback)
        self._listen()

    def _listen(self) -> None:
        wanted = sum(bit for kind, bit in protocol.EVENT_FLAGS.items() if self._callbacks[kind])
        if wanted and self._connection is not None:
            self._connection.tell(protocol.LISTEN, 0, protocol.encode_number(wanted))

    # The connection

    async def _ask(
        self, operation: str, kind: int, body: bytes = b"", queue: str | None = None
    ) -> bytes:
        if self._connection is None:
            self._refuse(operation, queue)
        try:
            return await self._connection.request(kind, body)
        except BackendUnavailable as error:
            error.located(operation=operation, queue=queue)
            raise

    def _refuse(self, operation: str, queue: str | None) -> NoReturn:
        raise BackendUnavailable(
            "there is no connection to the owner: start the backend first",
            backend=self.name,
            operation=operation,
            queue=queue,
        )

    def _take(self, kind: int, number: int, body: bytes) -> None:
        """What the owner sends without being asked."""
        if kind in self._callbacks:
            for envelope in protocol.decode_envelopes(body):
                self._tell(kind, DeadLetter.from_envelope(envelope))
            return
        subscription = self._subscriptions.get(number)
        if subscription is None:
            return  # left, while this was on its way; the owner gives it to another
        if kind == protocol.DELIVERIES:
            subscription.deliver(body)
        elif kind == protocol.LOST:
            subscription.lost(decode_error(body))

    def _tell(self, kind: int, letter: DeadLetter) -> None:
        for callback in self._callbacks[kind]:
            try:
                callback(letter)
            except Exception:
                logger.exception("a dead-letter callback failed; nothing else did")

    def _lost(self, error: BackendUnavailable) -> None:
        self._connection = None
        if self._lease_renewal is not None:
            self._lease_renewal.close()
            self._lease_renewal = None
        self._break(error)
        if self._on_lost is not None:
            self._on_lost(error)

    def _break(self, error: QueueError) -> None:
        for subscription in tuple(self._subscriptions.values()):
            subscription.lost(error)


def _encode(
    queue: str, envelopes: Sequence[Envelope], limit: int
) -> tuple[list[bytes], dict[int, QueueError]]:
    """The messages as bytes, and by their places the errors of those that cannot be sent."""
    encoded: list[bytes] = []
    refused: dict[int, QueueError] = {}
    for place, item in enumerate(envelopes):
        try:
            data = protocol.encode_envelope(item)
            if len(data) > limit:
                raise PayloadTooLarge(f"a message of {len(data)} bytes: the owner takes {limit}")
        except QueueError as error:
            error.located(backend="native", operation="publish", queue=queue, message_id=item.id)
            refused[place] = error
        else:
            encoded.append(data)
    return encoded, refused


def _capabilities(said: dict[str, str]) -> Capabilities:
    """What the owner can; a feature that this version does not know is passed over."""
    known = Capabilities().as_dict()
    return Capabilities(**{name: Support(value) for name, value in said.items() if name in known})
