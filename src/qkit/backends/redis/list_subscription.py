"""Subscription to a Redis list: claims in batches, blocks on the server, settles with leases."""

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
from qkit.backends.redis.queue_scripts import DISTRIBUTE_FIRST, STALE_KEYS, QueueScripts
from qkit.backends.redis.scripts import lifecycle
from qkit.errors import AckDeadlineExceeded, QueueError, SubscriptionLost
from qkit.message import Envelope

__all__ = ["ListSubscription"]

# New messages end a blocking call at once. The limit is for leases that end and delays that are
# over while no consumer waits for them. Retries may be a second late.
MAX_BLOCK_SECONDS: Final = 1.0
SHORT_BLOCK_SECONDS: Final = 0.2  # after a claim that left nothing, before asking what is due
MAX_CLAIM: Final = 1_000  # messages in one claim or acknowledgement
UNBLOCK_TIMEOUT_SECONDS: Final = 2.0  # to end a blocking command; then its connection is closed


class ListSubscription:
    """A live claim on a queue: at most ``prefetch`` unsettled deliveries.

    One task fetches: it claims, or waits on the server and claims what woke it. It outlives a
    ``receive`` that was cancelled, because its answer may be a message. What was claimed for a
    ``receive`` that is gone goes back, uncharged.
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
        self.held: dict[str, float] = {}  # when the lease of each delivery ends, as we see it
        self._arrivals: Arrivals[Delivery] = Arrivals(
            unclaimed=self._return_claimed, left=self._cancel_slot_timer
        )
        self._fetching: asyncio.Task[None] | None = None
        self._slot_timer: asyncio.TimerHandle | None = None  # set while a receive waits for a slot
        self._drained = False  # the last claim left nothing behind
        self._blocking_connection: PipelinedConnection | None = None
        self._blocking_connection_id = 0
        self._blocked_until = 0.0
        self._stopped = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lease_renewal = RedisLeaseRenewal(connection.parameters, keys, lease, self.held)

    async def open(self) -> None:
        """Connect; to unblock the blocking connection its id is needed."""
        self._blocking_connection = await self._connection.parameters.open_connection()
        number, _ = await self._blocking_connection.call_all(
            [("CLIENT", "ID"), ("CLIENT", "SETNAME", self._keys.client)]
        )
        if isinstance(number, Exception):
            raise number
        self._blocking_connection_id = int(
            number
        )  # a name that was refused only leaves it uncounted

    # Receive

    async def receive(self, limit: int) -> list[Delivery]:
        """Up to ``limit`` deliveries as soon as there are any; none once stopped.

        Raises ``SubscriptionLost`` when the connection breaks or the queue is deleted.
        """
        return await self._arrivals.take(limit, self._ask)

    def _ask(self, limit: int) -> None:
        """Start a fetch, or a timer for the first slot if the prefetch is used up."""
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
                await asyncio.sleep(0)  # first whoever waits for what the last claim brought
            else:
                wait = self._take(await self._claim(count), count)
            while self._arrivals.receivers and not self._arrivals and not self._stopped:
                wait = self._take(await self._block(wait, count), count)
        except Exception as error:  # any error has to end a receive
            self._arrivals.fail(self._lost(error), drop=False)
        finally:
            self._fetching = None
            self._arrivals.wake()
            if self._stopped:
                self._return_claimed(self._arrivals.drain())

    async def _claim(self, count: int) -> Reply:
        """Claim up to ``count`` messages."""
        arguments = count, round(self._lease * 1000)
        claim = await self._scripts.run_part(lifecycle.CLAIM, self._keys, *arguments)
        if claim == DISTRIBUTE_FIRST:  # another program pushed to the topic's own name
            await self._scripts.run_whole(lifecycle.DISTRIBUTE, self._keys.queue)
            claim = await self._scripts.run_part(lifecycle.CLAIM, self._keys, *arguments, 1)
        return claim

    async def _block(self, seconds: float, count: int) -> Reply:
        """Wait on the server for a message, then claim: both in one round trip."""
        assert self._blocking_connection is not None
        keys = self._keys
        script_keys, levels = self._scripts.part_call(keys)
        arguments = levels, count, round(self._lease * 1000)
        timeout = max(0.001, round(seconds, 3))
        self._blocked_until = self._clock.monotonic() + seconds
        moved, claim = await self._blocking_connection.call_all(
            [
                ("BLMOVE", keys.ingress, keys.arrived, "LEFT", "RIGHT", timeout),
                ("EVALSHA", lifecycle.CLAIM.sha, len(script_keys), *script_keys, *arguments),
            ],
            longer=seconds,
        )
        if isinstance(moved, Exception):
            raise moved
        if isinstance(claim, Exception):
            if not is_unknown_script(claim):
                raise claim
            return await self._claim(count)
        if claim in (STALE_KEYS, DISTRIBUTE_FIRST):
            return await self._claim(count)
        return claim

    def _lost(self, error: BaseException) -> SubscriptionLost:
        if isinstance(error, SubscriptionLost):
            return error
        said = error.message if isinstance(error, QueueError) else to_queue_error(error, "").message
        return subscription_broke(BACKEND, self._keys.queue, said, error)

    def _take(self, answer: Reply, count: int) -> float:
        """Take over a claim; return how long to wait if it brought nothing.

        What expired or crashed too often is delivered too: the service above dead-letters it.
        """
        if answer is None:
            raise SubscriptionLost(
                "the queue was deleted",
                backend=BACKEND,
                operation="receive",
                queue=self._keys.queue,
            )
        nearest, found = answer
        self._drained = 0 < len(found) < 2 * count
        ends = self._clock.monotonic() + (self._lease or math.inf)
        claimed: list[Delivery] = []
        for at in range(0, len(found), 2):
            token = found[at].decode()
            envelope = codec.decode(found[at + 1])
            envelope.attempt += 1
            self.held[token] = ends
            claimed.append(self._delivery(envelope, token))
        if claimed:
            self._keep()
            self._arrivals.put(claimed)
        return MAX_BLOCK_SECONDS if nearest < 0 else min(MAX_BLOCK_SECONDS, nearest / 1000)

    def _delivery(self, envelope: Envelope, token: str) -> Delivery:
        return Delivery(envelope, self._keys.queue, token, self._lease)

    def _keep(self) -> None:
        self._lease_renewal.wake()

    def _slots(self) -> int:
        """How many more may be held; what the server has long taken back takes no slot."""
        if len(self.held) >= self._prefetch:
            # A whole lease later: while the loop was blocked the thread may have renewed it.
            past = self._clock.monotonic() - self._lease
            for token in [token for token, end in self.held.items() if end <= past]:
                del self.held[token]
        return self._prefetch - len(self.held)

    def _return_claimed(self, claimed: list[Delivery]) -> None:
        """Give back deliveries that no ``receive`` waits for."""
        if claimed:
            self._settled([str(delivery.receipt) for delivery in claimed])
            self._spawn(self._put_back(self._returned(claimed)), "qkit redis return")

    def _returned(self, claimed: list[Delivery]) -> list[CommandArgument]:
        """Return the script's arguments for deliveries that no consumer has received."""
        return _as_they_were([str(delivery.receipt) for delivery in claimed])

    async def _put_back(self, arguments: list[CommandArgument]) -> None:
        if not arguments:
            return
        try:
            with translate_errors("release", self._keys.queue):
                await self._scripts.run_part(lifecycle.RELEASE, self._keys, *arguments)
        except QueueError as error:  # their leases end by themselves
            logger.warning("%s: messages could not be given back: %s", self._keys.queue, error)

    # Settle

    async def ack(self, delivery: Delivery) -> None:
        """Remove the message: the work is done."""
        token = delivery.receipt_of(str, BACKEND, "ack")
        await self._settle("ack", delivery, self._ack_all([token]))

    async def ack_many(self, deliveries: Sequence[Delivery]) -> list[QueueError | None]:
        """Remove several messages in one round trip."""
        tokens = [delivery.receipt_of(str, BACKEND, "ack") for delivery in deliveries]
        done: list[int] = []
        for at in range(0, len(tokens), MAX_CLAIM):
            done += await self._ack_all(tokens[at : at + MAX_CLAIM])
        results: list[QueueError | None] = [
            None if there else self._late(delivery, token, "ack")
            for delivery, token, there in zip(deliveries, tokens, done, strict=True)
        ]
        for delivery, error in zip(deliveries, results, strict=True):
            if error is None:
                delivery.receipt = None
        self._settled(tokens)
        return results

    async def release(
        self, delivery: Delivery, delay: float, *, count_attempt: bool = True
    ) -> None:
        """Give the message back with the envelope's headers, after ``delay`` seconds."""
        token = delivery.receipt_of(str, BACKEND, "release")
        envelope = delivery.envelope
        content = codec.encode(envelope, envelope.attempt - (not count_attempt), scheduled=False)
        await self._settle("release", delivery, self._release(token, delay, content))
        due = self._clock.monotonic() + delay
        if delay > 0 and due < self._blocked_until:
            await self._unblock()  # the wait was measured before this was known

    async def _release(self, token: str, delay: float, content: bytes) -> list[int]:
        milliseconds = _ms(delay) if delay > 0 else 0
        with translate_errors("release", self._keys.queue):
            done: list[int] = await self._scripts.run_part(
                lifecycle.RELEASE, self._keys, token, milliseconds, content
            )
        return done

    async def extend(self, delivery: Delivery, seconds: float) -> None:
        """Move the end of the lease to ``seconds`` from now."""
        delivery.receipt_of(str, BACKEND, "extend")
        (error,) = await self.extend_many([delivery], seconds)
        if error is not None:
            raise error

    async def extend_many(
        self, deliveries: Sequence[Delivery], seconds: float
    ) -> list[QueueError | None]:
        """Move the ends of several leases to ``seconds`` from now in one round trip."""
        results: list[QueueError | None] = []
        for at in range(0, len(deliveries), MAX_CLAIM):
            results += await self._extend_all(deliveries[at : at + MAX_CLAIM], seconds)
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

    # The end

    async def stop(self) -> None:
        """Fetch no more and wake a waiting ``receive``; what was delivered can be settled."""
        if self._stopped:
            return
        self._stopped = True
        self._arrivals.stop()
        self._return_claimed(self._arrivals.drain())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNBLOCK_TIMEOUT_SECONDS):
                while (fetching := self._fetching) is not None:
                    await self._unblock()
                    await asyncio.wait({fetching}, timeout=0.1)  # it may have come too early
        if self._fetching is not None and self._blocking_connection is not None:
            await self._blocking_connection.aclose()

    async def _unblock(self) -> None:
        with contextlib.suppress(*DRIVER_ERRORS, QueueError):
            await self._connection.command("CLIENT", "UNBLOCK", self._blocking_connection_id)

    async def leave(self) -> None:
        """Stop, give back what is held, and disconnect."""
        try:
            await self.stop()
            while self._tasks:
                await asyncio.wait(self._tasks)
            await self._give_back()  # after what was claimed later: each goes to the front
        finally:
            self._lease_renewal.close()
            if self._blocking_connection is not None:
                await self._blocking_connection.aclose()
            if self._fetching is not None:
                self._fetching.cancel()

    async def _give_back(self) -> None:
        held = list(self.held)
        self._settled(held)
        await self._put_back(_as_they_were(held))

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _as_they_were(tokens: list[str]) -> list[CommandArgument]:
    arguments: list[CommandArgument] = []
    for token in reversed(tokens):  # each goes to the front
        arguments += [token, 0, ""]
    return arguments
