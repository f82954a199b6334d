"""A consumer of a Redis list: claims in batches, parks on the server, settles in gathered calls."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from qkit._internal.clock import Clock
from qkit._internal.logging import logger
from qkit.backend import Delivery, SubscriptionSpec
from qkit.backends.common.call_batcher import Gathered
from qkit.backends.redis import codec
from qkit.backends.redis.connection import Link, is_forgotten
from qkit.backends.redis.driver import Reply, Wire, Word
from qkit.backends.redis.errors import BACKEND, DRIVER_ERRORS, error_of, translated
from qkit.backends.redis.keys import Place
from qkit.backends.redis.lease_renewal import Renewals
from qkit.backends.redis.queue_scripts import DISTRIBUTE_FIRST, STALE_KEYS, QueueScripts
from qkit.backends.redis.scripts import lifecycle
from qkit.errors import AckDeadlineExceeded, MessageNotFound, QueueError, SubscriptionLost
from qkit.message import DeadLetter, Envelope, LeaseExpired, Reason, TimeToLiveExpired

__all__ = ["RedisSubscription"]

# Nobody depends on it to hear of a message: it is for what happens by itself, a lease that ends or
# a delay that is over, while whoever knew of it is busy. Retries may be a second late.
SAFETY: Final = 1.0
GLANCE: Final = 0.2  # to wait where nothing was left, before asking what is due
MOST: Final = 1_000  # messages in one claim or acknowledgement
FAREWELL: Final = 2.0  # to wake a parked command; then its connection is hung up


Bury = Callable[[Place, DeadLetter], Awaitable[None]]


class RedisSubscription:
    """A live claim on a queue: at most ``prefetch`` unsettled deliveries.

    One task fetches: it claims, or waits on the server and claims what woke it. It outlives a
    ``receive`` that was cancelled, because its answer may be a message. What was claimed for a
    ``receive`` that is gone goes back, uncharged.
    """

    def __init__(
        self,
        link: Link,
        scripts: QueueScripts,
        place: Place,
        spec: SubscriptionSpec,
        *,
        lease: float,
        clock: Clock,
        bury: Bury,
        max_deliveries: int | None,
    ) -> None:
        self._link = link
        self._scripts = scripts
        self._place = place
        self._prefetch = spec.prefetch
        self._lease = lease
        self._clock = clock
        self._bury = bury
        self._max_deliveries = max_deliveries
        self.held: dict[str, float] = {}  # when the lease of each delivery ends, as we see it
        self._claimed: list[Delivery] = []  # on their way to a receive
        self._receivers = 0
        self._fetching: asyncio.Task[None] | None = None
        self._broken: SubscriptionLost | None = None
        self._drained = False  # the last claim left nothing behind
        self._parker: Wire | None = None
        self._parker_id = 0
        self._parked_until = 0.0
        self._news = asyncio.Event()  # the fetch has ended
        self._free = asyncio.Event()  # there may be a slot
        self._settlement_callbacks: list[Callable[[str, Exception | None], None]] = []
        self._stopped = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._acks = Gathered(self._ack_all)
        self._extensions = Gathered(self._extend_all)
        self._renewals = Renewals(link.address, place, lease, self.held)

    async def open(self) -> None:
        """Connect; the parking connection must be known by its number to be woken."""
        self._parker = await self._link.address.wire()
        number, _ = await self._parker.call_all(
            [("CLIENT", "ID"), ("CLIENT", "SETNAME", self._place.client)]
        )
        if isinstance(number, Exception):
            raise number
        self._parker_id = int(number)  # a name that was refused only leaves it uncounted

    # Receive

    async def receive(self, limit: int) -> list[Delivery]:
        """Up to ``limit`` deliveries as soon as there are any; none once stopped.

        Raises ``SubscriptionLost`` when the connection breaks or the queue is deleted.
        """
        self._receivers += 1
        try:
            while not self._stopped:
                if self._claimed:
                    taken, self._claimed = self._claimed[:limit], self._claimed[limit:]
                    return taken
                if self._broken is not None:
                    raise self._broken
                if self._fetching is None and not self._fetch_soon(limit):
                    await self._wait_for_slot()
                else:
                    self._news.clear()
                    await self._news.wait()
            return []
        finally:
            self._receivers -= 1
            self._return_claimed()

    def _fetch_soon(self, limit: int) -> bool:
        """Begin to fetch, unless so much is held that nothing more may be."""
        free = min(limit, self._slots(), MOST)
        if free > 0:
            self._fetching = asyncio.create_task(self._fetch(free), name="qkit redis fetch")
        return free > 0

    async def _fetch(self, count: int) -> None:
        try:
            wait = GLANCE
            if self._drained:
                await asyncio.sleep(0)  # first whoever waits for what the last claim brought
            else:
                wait = await self._take(await self._claim(count), count)
            while self._receivers and not self._claimed and not self._stopped:
                wait = await self._take(await self._park(wait, count), count)
        except Exception as error:  # whatever it was, a receive must hear of it
            self._broken = self._lost(error)
        finally:
            self._fetching = None
            self._news.set()
            self._return_claimed()

    async def _claim(self, count: int) -> Reply:
        """Claim up to ``count`` messages."""
        arguments = count, round(self._lease * 1000)
        claim = await self._scripts.run_part(lifecycle.CLAIM, self._place, *arguments)
        if claim == DISTRIBUTE_FIRST:  # another program pushed to the topic's own name
            await self._scripts.run_whole(lifecycle.DISTRIBUTE, self._place.queue)
            claim = await self._scripts.run_part(lifecycle.CLAIM, self._place, *arguments, 1)
        return claim

    async def _park(self, seconds: float, count: int) -> Reply:
        """Wait on the server for a message, then claim: both in one round trip."""
        assert self._parker is not None
        place = self._place
        keys, levels = self._scripts.part_call(place)
        told = levels, count, round(self._lease * 1000)
        timeout = max(0.001, round(seconds, 3))
        self._parked_until = self._clock.monotonic() + seconds
        moved, claim = await self._parker.call_all(
            [
                ("BLMOVE", place.ingress, place.arrived, "LEFT", "RIGHT", timeout),
                ("EVALSHA", lifecycle.CLAIM.sha, len(keys), *keys, *told),
            ],
            longer=seconds,
        )
        if isinstance(moved, Exception):
            raise moved
        if isinstance(claim, Exception):
            if not is_forgotten(claim):
                raise claim
            return await self._claim(count)
        if claim in (STALE_KEYS, DISTRIBUTE_FIRST):
            return await self._claim(count)
        return claim

    def _lost(self, error: BaseException) -> SubscriptionLost:
        if isinstance(error, SubscriptionLost):
            return error
        said = error.message if isinstance(error, QueueError) else error_of(error, "").message
        return SubscriptionLost(
            f"the subscription broke: {said}",
            backend=BACKEND,
            operation="receive",
            queue=self._place.queue,
            cause=error,
        )

    async def _take(self, answer: Reply, count: int) -> float:
        """What a claim brought; bury what is dead. Returns how long to wait if nothing came."""
        if answer is None:
            raise SubscriptionLost(
                "the queue was deleted",
                backend=BACKEND,
                operation="receive",
                queue=self._place.queue,
            )
        now, nearest, found = answer
        self._drained = 0 < len(found) < 2 * count
        ends = self._clock.monotonic() + (self._lease or math.inf)
        dead: list[tuple[str, Envelope, bool]] = []
        for at in range(0, len(found), 2):
            token = found[at].decode()
            envelope, spent = codec.decode(found[at + 1])
            expired = envelope.expires_at is not None and envelope.expires_at * 1000 <= now
            if spent or expired:
                dead.append((token, envelope, spent))
                continue
            envelope.attempt += 1
            self.held[token] = ends
            self._claimed.append(self._delivery(envelope, token))
        if self._claimed:
            self._keep()
        if dead:
            self._news.set()  # what came with them need not wait for their funeral
        for token, envelope, spent in dead:
            await self._inter(token, envelope, spent, now / 1000)
        if dead:
            return 0.001  # there may be more behind them
        return SAFETY if nearest < 0 else min(SAFETY, nearest / 1000)

    def _delivery(self, envelope: Envelope, token: str) -> Delivery:
        return Delivery(envelope, self._place.queue, token, self._lease)

    def _keep(self) -> None:
        self._renewals.wake()

    async def _inter(self, token: str, envelope: Envelope, spent: bool, now: float) -> None:
        """A copy in the dead letters first, then the ack: a crash between them repeats it."""
        error: Exception = TimeToLiveExpired("the message was not handled within its time to live")
        if spent:
            error = LeaseExpired(
                f"the lease of delivery {envelope.attempt} of {self._max_deliveries} expired: "
                "the handler crashed, hung or outran ack_deadline"
            )
        letter = DeadLetter.of(
            envelope,
            channel=self._place.queue,
            reason=Reason.MAX_RETRIES_EXCEEDED if spent else Reason.TTL_EXPIRED,
            at=now,
            error=error,
            group=self._place.group,
        )
        try:
            await self._bury(self._place, letter)
            await self._link.run(lifecycle.ACK, self._place.held_keys, token)
        except Exception as failure:
            self._tell(failure)
            raise
        self._tell(None)

    def on_settlement(self, callback: Callable[[str, Exception | None], None]) -> None:
        """Call ``callback`` when a dead letter that is written here fails, and when one is done."""
        self._settlement_callbacks.append(callback)

    def _tell(self, error: Exception | None) -> None:
        for callback in self._settlement_callbacks:
            callback("dead letters cannot be written", error)

    def _slots(self) -> int:
        """How many more may be held; what the server has long taken back takes no slot."""
        if len(self.held) >= self._prefetch:
            # A whole lease later: while the loop was blocked the thread may have renewed it.
            past = self._clock.monotonic() - self._lease
            for token in [token for token, end in self.held.items() if end <= past]:
                del self.held[token]
        return self._prefetch - len(self.held)

    async def _wait_for_slot(self) -> None:
        self._free.clear()
        first = min(self.held.values()) + self._lease - self._clock.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.001, first)):
                await self._free.wait()

    def _return_claimed(self) -> None:
        """Nobody waits for what was claimed: give it back."""
        if self._claimed and not self._receivers:
            claimed, self._claimed = self._claimed, []
            self._settled([str(delivery.receipt) for delivery in claimed])
            self._spawn(self._put_back(self._returned(claimed)), "qkit redis return")

    def _returned(self, claimed: list[Delivery]) -> list[Word]:
        """What the script is told of deliveries that nobody saw."""
        return _as_they_were([str(delivery.receipt) for delivery in claimed])

    async def _put_back(self, arguments: list[Word]) -> None:
        if not arguments:
            return
        try:
            with translated("release", self._place.queue):
                await self._scripts.run_part(lifecycle.RELEASE, self._place, *arguments)
        except QueueError as error:  # their leases end by themselves
            logger.warning("%s: messages could not be given back: %s", self._place.queue, error)

    # Settle

    async def ack(self, delivery: Delivery) -> None:
        """The work is done: remove the message. All acks of a turn of the loop go together."""
        await self._settle("ack", delivery, self._acks.add(self._token(delivery, "ack")))

    async def ack_many(self, deliveries: Sequence[Delivery]) -> list[QueueError | None]:
        """Remove several messages in one round trip."""
        tokens = [self._token(delivery, "ack") for delivery in deliveries]
        done: list[int] = []
        for at in range(0, len(tokens), MOST):
            done += await self._ack_all(*tokens[at : at + MOST])
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
        token = self._token(delivery, "release")
        envelope = delivery.envelope
        content = codec.encode(envelope, envelope.attempt - (not count_attempt), scheduled=False)
        await self._settle("release", delivery, self._release(token, delay, content))
        due = self._clock.monotonic() + delay
        if delay > 0 and due < self._parked_until:
            await self._unblock()  # the wait was measured before this was known

    async def _release(self, token: str, delay: float, content: bytes) -> int:
        milliseconds = _ms(delay) if delay > 0 else 0
        with translated("release", self._place.queue):
            done = await self._scripts.run_part(
                lifecycle.RELEASE, self._place, token, milliseconds, content
            )
        return int(done[0]) if done else 0

    async def extend(self, delivery: Delivery, seconds: float) -> None:
        """Move the end of the lease to ``seconds`` from now."""
        token = self._token(delivery, "extend")
        if not await self._extensions.add(token, _ms(seconds)):
            raise self._late(delivery, token, "extend")
        if token in self.held:
            self.held[token] = self._clock.monotonic() + seconds

    async def _settle(self, operation: str, delivery: Delivery, done: Awaitable[int]) -> None:
        token = str(delivery.receipt)
        if not await done:
            raise self._late(delivery, token, operation)
        delivery.receipt = None
        self._settled([token])

    def _token(self, delivery: Delivery, operation: str) -> str:
        if not isinstance(delivery.receipt, str):
            raise MessageNotFound(
                "this delivery was settled before: settle each one once",
                backend=BACKEND,
                operation=operation,
                queue=delivery.queue,
                message_id=delivery.envelope.id,
            )
        return delivery.receipt

    def _late(self, delivery: Delivery, token: str, operation: str) -> AckDeadlineExceeded:
        self._settled([token])
        return AckDeadlineExceeded(
            "the lease of this delivery is lost, the message may be with another consumer: "
            "extend the lease while working, or raise ack_deadline",
            backend=BACKEND,
            operation=operation,
            queue=delivery.queue,
            message_id=delivery.envelope.id,
        )

    def _settled(self, tokens: list[str]) -> None:
        for token in tokens:
            self.held.pop(token, None)
        self._free.set()

    async def _ack_all(self, *tokens: str | int) -> list[int]:
        with translated("ack", self._place.queue):
            done: int | list[int] = await self._link.run(
                lifecycle.ACK, self._place.held_keys, *tokens
            )
        return [1] * done if isinstance(done, int) else done

    async def _extend_all(self, *arguments: str | int) -> list[int]:
        with translated("extend", self._place.queue):
            done: list[int] = await self._link.run(
                lifecycle.EXTEND, self._place.lease_keys, *arguments
            )
        return done

    # The end

    async def stop(self) -> None:
        """Fetch no more and wake a parked ``receive``; what was delivered can be settled."""
        if self._stopped:
            return
        self._stopped = True
        self._news.set()
        self._free.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL):
                while (fetching := self._fetching) is not None:
                    await self._unblock()
                    await asyncio.wait({fetching}, timeout=0.1)  # it may have come too early
        if self._fetching is not None and self._parker is not None:
            await self._parker.aclose()

    async def _unblock(self) -> None:
        with contextlib.suppress(*DRIVER_ERRORS, QueueError):
            await self._link.command("CLIENT", "UNBLOCK", self._parker_id)

    async def leave(self) -> None:
        """Stop, give back what is held, and disconnect."""
        try:
            await self.stop()
            self._return_claimed()
            await self._give_back()
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            self._renewals.close()
            if self._parker is not None:
                await self._parker.aclose()
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


def _as_they_were(tokens: list[str]) -> list[Word]:
    arguments: list[Word] = []
    for token in reversed(tokens):  # each goes to the front
        arguments += [token, 0, ""]
    return arguments
