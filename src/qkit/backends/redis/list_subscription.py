"""Subscription to a Redis list: claims messages in batches, blocks on the server, settles."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Sequence
from typing import Any, Final

from qkit._internal.clock import Clock
from qkit._internal.logging import logger
from qkit.backend import Delivery, SubscriptionSpec
from qkit.backends.common.arrivals import Arrivals
from qkit.backends.common.errors import lease_lost, subscription_broke
from qkit.backends.redis import codec
from qkit.backends.redis.connection import ReconnectingConnection, is_unknown_script
from qkit.backends.redis.driver import CommandArgument, PipelinedConnection, Reply
from qkit.backends.redis.errors import BACKEND, DRIVER_ERRORS, to_queue_error, translate_errors
from qkit.backends.redis.keys import QueueKeys
from qkit.backends.redis.lease_renewal import RedisLeaseRenewal
from qkit.backends.redis.queue_scripts import (
    DISTRIBUTE_FIRST,
    ORDERED,
    STALE_KEYS,
    QueueScripts,
)
from qkit.backends.redis.scripts import lifecycle
from qkit.backends.redis.scripts.script import Script
from qkit.errors import AckDeadlineExceeded, QueueError, SubscriptionLost
from qkit.message import Envelope

__all__ = ["ListSubscription"]

# Maximum duration of a blocking call. A new message ends the call immediately, but an expired lease
# or an elapsed delay does not, so a retry may be late by up to this time.
MAX_BLOCK_SECONDS: Final = 1.0
# Maximum duration after a claim that emptied the queue, because the next due time is unknown.
SHORT_BLOCK_SECONDS: Final = 0.2
MAX_CLAIM: Final = 1_000  # messages per claim or ack
UNBLOCK_TIMEOUT_SECONDS: Final = 2.0  # for ending a blocking call before its connection is closed


class ListSubscription:
    """Subscription to a queue or group, with at most ``prefetch`` unsettled deliveries.

    A single task fetches: it claims messages, or blocks on the server and then claims. The task
    continues after a ``receive`` is cancelled, because its reply may contain messages. These are
    returned to the queue without counting an attempt.

    Args:
        connection: Connection for commands.
        scripts: Runner of scripts on queues and topics.
        keys: Keys of the queue or group.
        spec: Specification of the subscription.
        lease: Length of a lease in seconds; 0 for no leases.
        clock: Clock of the service.
    """

    def __init__(
        self,
        connection: ReconnectingConnection,
        scripts: QueueScripts,
        keys: QueueKeys,
        spec: SubscriptionSpec,
        *,
        lease: float,
        clock: Clock,
    ) -> None:
        self._connection = connection
        self._scripts = scripts
        self._keys = keys
        self._prefetch = spec.prefetch
        self._lease = lease
        self._clock = clock
        self._claim_script: Script = lifecycle.CLAIM
        self._release_script: Script = lifecycle.RELEASE
        self._ordered_id = ""  # identifies an ordered subscription in scripts
        self.held: dict[str, float] = {}  # end of each lease on the local clock, by token
        self._arrivals: Arrivals[Delivery] = Arrivals(
            unclaimed=self._return_claimed, left=self._cancel_slot_timer
        )
        self._fetching: asyncio.Task[None] | None = None
        self._slot_timer: asyncio.TimerHandle | None = None  # set while receive waits for a slot
        self._drained = False  # whether the last claim emptied the queue
        self._blocking_connection: PipelinedConnection | None = None
        self._blocking_connection_id = 0
        self._blocked_until = 0.0
        self._stopped = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lease_renewal = RedisLeaseRenewal(connection.parameters, keys, lease, self.held)

    async def open(self) -> None:
        """Open the blocking connection and read its id for ``CLIENT UNBLOCK``."""
        self._blocking_connection = await self._connection.parameters.open_connection()
        # If SETNAME fails, the error is ignored, and stats does not count this consumer.
        client_id, _ = await self._blocking_connection.call_all(
            [("CLIENT", "ID"), ("CLIENT", "SETNAME", self._client_name)]
        )
        if isinstance(client_id, Exception):
            raise client_id
        self._blocking_connection_id = int(client_id)

    @property
    def _client_name(self) -> str:
        return self._keys.client

    # Receive

    async def receive(self, limit: int) -> list[Delivery]:
        """Wait for messages and return up to ``limit`` deliveries; an empty list once stopped.

        Raises:
            SubscriptionLost: The connection was lost or the queue was deleted.
        """
        return await self._arrivals.take(limit, self._start_fetch)

    def _start_fetch(self, limit: int) -> None:
        """Start a fetch unless one is running; if no slot is free, wake when one becomes free."""
        self._cancel_slot_timer()
        if self._fetching is not None:
            return
        count = min(limit, self._slots(), MAX_CLAIM)
        if count > 0:
            self._fetching = asyncio.create_task(self._fetch(count), name="qkit redis fetch")
            return
        first = min(self.held.values()) + self._lease - self._clock.monotonic()
        loop = asyncio.get_running_loop()
        self._slot_timer = loop.call_later(max(0.001, first), self._arrivals.wake)

    def _cancel_slot_timer(self) -> None:
        if self._slot_timer is not None:
            self._slot_timer.cancel()
            self._slot_timer = None

    async def _fetch(self, count: int) -> None:
        try:
            wait = SHORT_BLOCK_SECONDS
            if self._drained:
                await asyncio.sleep(0)  # let the receivers of the last claim run first
            else:
                wait = self._take(await self._claim(count), count)
            while self._arrivals.receivers and not self._arrivals and not self._stopped:
                wait = self._take(await self._block(wait, count), count)
        except Exception as error:  # any error must end a waiting receive
            self._arrivals.fail(self._lost(error), drop=False)
        finally:
            self._fetching = None
            self._arrivals.wake()
            if self._stopped:
                self._return_claimed(self._arrivals.drain())

    async def _claim(self, count: int) -> Reply:
        """Claim up to ``count`` messages; return the script's reply."""
        claim = await self._run_claim(count, distributed=0)
        if claim == ORDERED:
            self._claim_script = lifecycle.CLAIM_ORDERED
            claim = await self._run_claim(count, distributed=0)
        if claim == DISTRIBUTE_FIRST:  # another program pushed messages to the topic's key
            await self._scripts.run_whole(lifecycle.DISTRIBUTE, self._keys.queue)
            claim = await self._run_claim(count, distributed=1)
        return claim

    async def _run_claim(self, count: int, *, distributed: int) -> Reply:
        arguments = count, round(self._lease * 1000), distributed, self._ordered_id
        return await self._scripts.run_part(self._claim_script, self._keys, *arguments)

    async def _block(self, seconds: float, count: int) -> Reply:
        """Block on the server for up to ``seconds``, then claim, in one round trip."""
        assert self._blocking_connection is not None
        keys = self._keys
        script_keys, levels = self._scripts.part_call(keys)
        arguments = levels, count, round(self._lease * 1000), 0, self._ordered_id
        timeout = max(0.001, round(seconds, 3))
        self._blocked_until = self._clock.monotonic() + seconds
        moved, claim = await self._blocking_connection.call_all(
            [
                ("BLMOVE", keys.ingress, keys.arrived, "LEFT", "RIGHT", timeout),
                ("EVALSHA", self._claim_script.sha, len(script_keys), *script_keys, *arguments),
            ],
            longer=seconds,
        )
        if isinstance(moved, Exception):
            raise moved
        if isinstance(claim, Exception):
            if not is_unknown_script(claim):
                raise claim
            return await self._claim(count)
        if claim in (STALE_KEYS, DISTRIBUTE_FIRST, ORDERED):
            return await self._claim(count)
        return claim

    def _lost(self, error: BaseException) -> SubscriptionLost:
        if isinstance(error, SubscriptionLost):
            return error
        reason = (
            error.message if isinstance(error, QueueError) else to_queue_error(error, "").message
        )
        return subscription_broke(BACKEND, self._keys.queue, reason, error)

    def _take(self, reply: Reply, count: int) -> float:
        """Buffer the deliveries of a claim; return how many seconds the next call may block.

        Expired messages and messages that were delivered too often are delivered as well; the
        service dead-letters them.
        """
        if reply is None:
            raise SubscriptionLost(
                "the queue was deleted",
                backend=BACKEND,
                operation="receive",
                queue=self._keys.queue,
            )
        next_due_ms, found = reply
        self._drained = 0 < len(found) < 2 * count
        lease_end = self._clock.monotonic() + (self._lease or math.inf)
        claimed: list[Delivery] = []
        for i in range(0, len(found), 2):
            token = found[i].decode()
            envelope = codec.decode(found[i + 1])
            envelope.attempt += 1
            self.held[token] = lease_end
            claimed.append(self._delivery(envelope, token))
        if claimed:
            self._wake_lease_renewal()
            self._arrivals.put(claimed)
        return MAX_BLOCK_SECONDS if next_due_ms < 0 else min(MAX_BLOCK_SECONDS, next_due_ms / 1000)

    def _delivery(self, envelope: Envelope, token: str) -> Delivery:
        return Delivery(envelope, self._keys.queue, token, self._lease)

    def _wake_lease_renewal(self) -> None:
        self._lease_renewal.wake()

    def _slots(self) -> int:
        """Free the slots of expired leases; return the number of free slots."""
        if len(self.held) >= self._prefetch:
            # Keep the slot for one more lease: the thread may have renewed it while the loop was
            # blocked.
            past = self._clock.monotonic() - self._lease
            for token in [token for token, end in self.held.items() if end <= past]:
                del self.held[token]
        return self._prefetch - len(self.held)

    def _return_claimed(self, claimed: list[Delivery]) -> None:
        """Release deliveries that no ``receive`` took, without counting an attempt."""
        if claimed:
            self._drained = False  # the next claim follows the release on the same connection
            self._settled([str(delivery.receipt) for delivery in claimed])
            self._spawn(self._put_back(self._returned(claimed)), "qkit redis return")

    def _returned(self, claimed: list[Delivery]) -> list[CommandArgument]:
        """Return the RELEASE arguments for deliveries that no ``receive`` took."""
        return _uncharged([str(delivery.receipt) for delivery in claimed])

    async def _put_back(self, arguments: list[CommandArgument]) -> None:
        if not arguments:
            return
        try:
            with translate_errors("release", self._keys.queue):
                await self._scripts.run_part(self._release_script, self._keys, *arguments)
        except QueueError as error:  # leases that are not released expire
            logger.warning("%s: could not release messages: %s", self._keys.queue, error)

    # Settle

    async def ack(self, delivery: Delivery) -> None:
        """Remove the message from the queue."""
        token = delivery.receipt_of(str, BACKEND, "ack")
        await self._settle("ack", delivery, self._ack_all([token]))

    async def ack_many(self, deliveries: Sequence[Delivery]) -> list[QueueError | None]:
        """Remove several messages with few round trips; return each message's error or ``None``."""
        tokens = [delivery.receipt_of(str, BACKEND, "ack") for delivery in deliveries]
        done: list[int] = []
        for start in range(0, len(tokens), MAX_CLAIM):
            done += await self._ack_all(tokens[start : start + MAX_CLAIM])
        results: list[QueueError | None] = [
            None if acked else self._late(delivery, token, "ack")
            for delivery, token, acked in zip(deliveries, tokens, done, strict=True)
        ]
        for delivery, error in zip(deliveries, results, strict=True):
            if error is None:
                delivery.receipt = None
        self._settled(tokens)
        return results

    async def release(
        self, delivery: Delivery, delay: float, *, count_attempt: bool = True
    ) -> None:
        """Return the message to the queue after ``delay`` seconds, with the envelope's headers."""
        token = delivery.receipt_of(str, BACKEND, "release")
        envelope = delivery.envelope
        content = codec.encode(envelope, envelope.attempt - (not count_attempt), scheduled=False)
        await self._settle("release", delivery, self._release(token, delay, content))
        due = self._clock.monotonic() + delay
        if delay > 0 and due < self._blocked_until:
            await self._unblock()  # otherwise the call would still block when the message is due

    async def _release(self, token: str, delay: float, content: bytes) -> list[int]:
        milliseconds = _ms(delay) if delay > 0 else 0
        with translate_errors("release", self._keys.queue):
            done: list[int] = await self._scripts.run_part(
                self._release_script, self._keys, token, milliseconds, content
            )
        return done

    async def extend(self, delivery: Delivery, seconds: float) -> None:
        """Extend the lease so that it ends ``seconds`` from now."""
        delivery.receipt_of(str, BACKEND, "extend")
        (error,) = await self.extend_many([delivery], seconds)
        if error is not None:
            raise error

    async def extend_many(
        self, deliveries: Sequence[Delivery], seconds: float
    ) -> list[QueueError | None]:
        """Extend several leases so that they end ``seconds`` from now.

        Returns:
            For each delivery, in order, its error or ``None``.
        """
        results: list[QueueError | None] = []
        for start in range(0, len(deliveries), MAX_CLAIM):
            results += await self._extend_all(deliveries[start : start + MAX_CLAIM], seconds)
        return results

    async def _extend_all(
        self, deliveries: Sequence[Delivery], seconds: float
    ) -> list[QueueError | None]:
        tokens = [str(delivery.receipt or "") for delivery in deliveries]
        arguments = [argument for token in tokens for argument in (token, _ms(seconds))]
        with translate_errors("extend", self._keys.queue):
            done: list[int] = await self._connection.run(
                lifecycle.EXTEND, self._keys.lease_keys, *arguments
            )
        end = self._clock.monotonic() + seconds
        results: list[QueueError | None] = []
        for delivery, token, held in zip(deliveries, tokens, done, strict=True):
            if not token:
                results.append(delivery.settled_before(BACKEND, "extend"))
            elif not held:
                results.append(self._late(delivery, token, "extend"))
            else:
                if token in self.held:
                    self.held[token] = end
                results.append(None)
        return results

    async def _settle(self, operation: str, delivery: Delivery, call: Awaitable[list[int]]) -> None:
        token = str(delivery.receipt)
        done = await call
        if not done or not done[0]:
            raise self._late(delivery, token, operation)
        delivery.receipt = None
        self._settled([token])

    def _late(self, delivery: Delivery, token: str, operation: str) -> AckDeadlineExceeded:
        self._settled([token])
        return lease_lost(BACKEND, operation, delivery)

    def _settled(self, tokens: list[str]) -> None:
        for token in tokens:
            self.held.pop(token, None)
        if self._slot_timer is not None:
            self._arrivals.wake()

    async def _ack_all(self, tokens: list[str]) -> list[int]:
        with translate_errors("ack", self._keys.queue):
            done: int | list[int] = await self._connection.run(
                lifecycle.ACK, self._keys.held_keys, *tokens
            )
        return [1] * done if isinstance(done, int) else done

    # Stop and close

    async def stop(self) -> None:
        """Stop fetching and wake a waiting ``receive``; held deliveries can still be settled."""
        if self._stopped:
            return
        self._stopped = True
        self._arrivals.stop()
        self._return_claimed(self._arrivals.drain())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNBLOCK_TIMEOUT_SECONDS):
                while (fetching := self._fetching) is not None:
                    await self._unblock()
                    # Repeated, because an UNBLOCK before the blocking command has no effect.
                    await asyncio.wait({fetching}, timeout=0.1)
        if self._fetching is not None and self._blocking_connection is not None:
            await self._blocking_connection.aclose()

    async def _unblock(self) -> None:
        with contextlib.suppress(*DRIVER_ERRORS, QueueError):
            await self._connection.command("CLIENT", "UNBLOCK", self._blocking_connection_id)

    async def leave(self) -> None:
        """Stop, release all held deliveries and disconnect."""
        try:
            await self.stop()
            while self._tasks:
                await asyncio.wait(self._tasks)
            # Release these last: a release puts messages at the front of the queue, and these are
            # the oldest.
            await self._release_held()
        finally:
            self._lease_renewal.close()
            if self._blocking_connection is not None:
                await self._blocking_connection.aclose()
            if self._fetching is not None:
                self._fetching.cancel()

    async def _release_held(self) -> None:
        held = list(self.held)
        self._settled(held)
        await self._put_back(_uncharged(held))

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _uncharged(tokens: list[str]) -> list[CommandArgument]:
    """Return the RELEASE arguments that return messages without counting an attempt."""
    arguments: list[CommandArgument] = []
    for token in reversed(tokens):  # because each message goes to the front of the queue
        arguments += [token, 0, ""]
    return arguments
