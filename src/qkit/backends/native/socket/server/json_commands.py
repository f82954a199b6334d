"""The engine's commands as JSON: what a person types into ``nc -U``, and scripts send.

A request is ``{"command": "queue.publish", "payload": {…}, "id": …}``, the answer the command's
result, or ``{"error": {"type": …, "message": …}}``, with the same ``id`` if there was one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, Final, NoReturn, TypeAlias, cast

from qkit._internal.logging import logger
from qkit._internal.names import check_headers
from qkit.backends.native.socket.server.json_arguments import (
    Arguments,
    BadRequest,
    as_json,
    as_value,
)
from qkit.errors import MessageNotFound, QueueError
from qkit.message import DeadLetter, Envelope
from qkit.native.delivery import Delivery
from qkit.native.engine import Engine

__all__ = ["CommandSession", "Commands"]

Answer: TypeAlias = dict[str, object]

DEFAULT_PREFETCH: Final = 1
MAX_PREFETCH: Final = 1_000
KEPT_FOR: Final = 60.0  # seconds for which a lease that ran out still gets its own error
OPTIONS: tuple[tuple[str, type[Any]], ...] = (
    ("broadcast", bool),
    ("max_depth", int),
    ("max_priority", int),
    ("max_retries", int),
    ("ack_deadline", float),
    ("dead_letter", bool),
    ("dead_letter_max_depth", int),
    ("backoff", float),
    ("max_backoff", float),
    ("balance", str),
)


class Commands:
    """The commands on one engine; each connection has a session of its own.

    Receipts are known to all of them: ``nc`` consumes in one connection and acks in another.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._receipts: dict[str, tuple[Delivery, float]] = {}

    def session(self) -> CommandSession:
        """The state of one connection."""
        return CommandSession(self)

    def hold(self, delivery: Delivery, lease: float) -> str:
        """A receipt for a delivery."""
        now = self.engine.clock.monotonic()
        for receipt, (_, until) in list(self._receipts.items()):
            if until > now:
                break  # leases are much alike: this is the oldest that may still be needed
            del self._receipts[receipt]
        receipt = secrets.token_hex(8)
        self._receipts[receipt] = delivery, now + lease + KEPT_FOR
        return receipt

    def extended(self, receipt: str, lease: float) -> None:
        """A lease has a new end."""
        delivery, _ = self._receipts.pop(receipt)
        self._receipts[receipt] = delivery, self.engine.clock.monotonic() + lease + KEPT_FOR

    def held(self, receipt: str) -> Delivery | None:
        """The delivery of a receipt, unless it is settled or long lost."""
        entry = self._receipts.get(receipt)
        return None if entry is None else entry[0]

    def settled(self, receipt: str) -> None:
        """Forget a receipt."""
        self._receipts.pop(receipt, None)


class CommandSession:
    """The commands of one connection, and what it consumed."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._engine = commands.engine
        self._consumed: dict[tuple[str, str], str] = {}  # queue and message id to receipt
        self._handlers: dict[str, Callable[[Arguments], Awaitable[Answer]]] = {
            "queue.create": self._create,
            "queue.delete": self._delete,
            "queue.list": self._list,
            "queue.stats": self._stats,
            "queue.peek": self._peek,
            "queue.purge": self._purge,
            "queue.publish": self._publish,
            "queue.consume": self._consume,
            "queue.ack": self._ack,
            "queue.nack": self._nack,
            "queue.extend": self._extend,
            "queue.dead_letters": self._dead_letters,
            "queue.retry": self._retry,
            "queue.purge_dead_letters": self._purge_dead_letters,
        }

    async def answer(self, line: bytes | None) -> bytes:
        """The answer to one line; it never raises, whatever the line holds."""
        request: dict[str, Any] = {}
        try:
            if line is None:
                raise BadRequest("this line is longer than the owner takes: send less at once")
            request = _request(line)
            result = await self._run(request)
        except QueueError as error:
            result = {"error": {"type": type(error).__name__, "message": str(error)}}
        except ValueError as error:  # what the engine says of a delay or a time to live
            result = {"error": {"type": "BadRequest", "message": str(error)}}
        except Exception as error:
            logger.exception("a JSON command failed")
            result = {
                "error": {"type": "QueueError", "message": f"{type(error).__name__}: {error}"}
            }
        if "id" in request:
            result = {"id": request["id"], **result}
        return json.dumps(result).encode()

    async def _run(self, request: dict[str, Any]) -> Answer:
        name = request.get("command")
        handler = self._handlers.get(name) if isinstance(name, str) else None
        if handler is None:
            known = ", ".join(self._handlers)
            raise BadRequest(f"command {name!r:.80} is unknown: use one of {known}")
        arguments = Arguments(str(name), request.get("payload", {}))
        return await handler(arguments)

    # Queues

    async def _create(self, take: Arguments) -> Answer:
        queue = take.text("queue")
        options: dict[str, Any] = {}
        for name, kind in OPTIONS:
            if name in take:
                options[name] = take.of(name, kind)
        if take.nothing("max_retries"):
            options["max_retries"] = None  # for ever
        take.done()
        await self._engine.create(queue, **options)
        return {"success": True}

    async def _delete(self, take: Arguments) -> Answer:
        queue = take.text("queue")
        take.done()
        await self._engine.delete(queue)
        return {"success": True}

    async def _list(self, take: Arguments) -> Answer:
        take.done()
        return {"queues": await self._engine.list()}

    async def _stats(self, take: Arguments) -> Answer:
        queue = take.text("queue")
        take.done()
        return asdict(await self._engine.stats(queue))

    async def _peek(self, take: Arguments) -> Answer:
        queue, limit = take.text("queue"), take.whole("limit", 1, at_least=1)
        take.done()
        return {"messages": [_peeked(item) for item in await self._engine.peek(queue, limit)]}

    async def _purge(self, take: Arguments) -> Answer:
        queue = take.text("queue")
        take.done()
        return {"purged": await self._engine.purge(queue)}

    # Messages

    async def _publish(self, take: Arguments) -> Answer:
        queue, body = take.text("queue"), as_json(take.anything("message"))
        priority = take.of("priority", int, None)
        delay, ttl = take.of("delay", float, None), take.of("ttl", float, None)
        headers, key = check_headers(take.headers()), take.of("key", str, None)
        take.done()
        sent = await self._engine.publish(
            queue, body, priority, delay=delay, ttl=ttl, headers=headers, key=key
        )
        return {"message_id": sent.message_id, "position": sent.position}

    async def _consume(self, take: Arguments) -> Answer:
        """One message; with ``prefetch`` as many as that allows, in a list."""
        queue = take.text("queue")
        timeout = take.seconds("timeout", 0.0)
        lease = take.seconds("ack_deadline", 30.0, above=True)
        many = "prefetch" in take
        prefetch = take.whole("prefetch", DEFAULT_PREFETCH, at_least=1, at_most=MAX_PREFETCH)
        group, consumer = take.of("group", str, None), take.of("consumer", str, None)
        take.done()
        found: list[Answer] = []
        free = prefetch - self._unsettled(queue) if many else 1
        while len(found) < free:
            delivery = await self._engine.consume(
                queue, 0.0 if found else timeout, lease, consumer, group=group
            )
            if delivery is None:
                break
            receipt = self._commands.hold(delivery, lease)
            self._consumed[queue, delivery.message_id] = receipt
            found.append(_delivered(delivery, receipt))
        if many:
            return {"messages": found, "unsettled": self._unsettled(queue)}
        return found[0] if found else {"message_id": None, "message": None}

    def _unsettled(self, queue: str) -> int:
        return sum(
            name == queue and self._commands.held(receipt) is not None
            for (name, _), receipt in self._consumed.items()
        )

    async def _ack(self, take: Arguments) -> Answer:
        key, receipt, delivery = self._delivery(take)
        take.done()
        await delivery.ack()
        self._settled(key, receipt)
        return {"success": True}

    async def _nack(self, take: Arguments) -> Answer:
        key, receipt, delivery = self._delivery(take)
        requeue = take.of("requeue", bool, True)
        take.done()
        action = await delivery.nack(requeue)
        self._settled(key, receipt)
        return {"success": True, "action": action}

    async def _extend(self, take: Arguments) -> Answer:
        _, receipt, delivery = self._delivery(take)
        seconds = take.seconds("seconds", 30.0, above=True)
        take.done()
        await delivery.extend(seconds)
        self._commands.extended(receipt, seconds)
        return {"success": True}

    def _delivery(self, take: Arguments) -> tuple[tuple[str, str], str, Delivery]:
        """The delivery that is meant: by its receipt, or the one this connection received."""
        key = queue, message_id = take.text("queue"), take.text("message_id")
        receipt = take.of("receipt", str, None) or self._consumed.get(key)
        if receipt is None:
            raise MessageNotFound(
                "this connection holds no such delivery: name the receipt that queue.consume gave",
                queue=queue,
                message_id=message_id,
            )
        delivery = self._commands.held(receipt)
        if delivery is None or delivery.message_id != message_id:
            raise MessageNotFound(
                "no delivery of this message has this receipt: it was settled, or its lease "
                "ended long ago",
                queue=queue,
                message_id=message_id,
            )
        return key, receipt, delivery

    def _settled(self, key: tuple[str, str], receipt: str) -> None:
        self._commands.settled(receipt)
        self._consumed.pop(key, None)

    # Dead letters

    async def _dead_letters(self, take: Arguments) -> Answer:
        queue, limit = take.text("queue"), take.whole("limit", 100, at_least=1)
        take.done()
        letters = await self._engine.dead_letters(queue, limit)
        return {"dead_letters": [_dead(letter) for letter in letters]}

    async def _retry(self, take: Arguments) -> Answer:
        """All of them, or those that ``message_ids`` or ``message_id`` names."""
        queue = take.text("queue")
        ids = take.texts("message_ids")
        if (one := take.of("message_id", str, None)) is not None:
            ids = [*(ids or ()), one]
        take.done()
        return {"retried": await self._engine.retry_dead_letters(queue, ids)}

    async def _purge_dead_letters(self, take: Arguments) -> Answer:
        queue = take.text("queue")
        take.done()
        return {"purged": await self._engine.purge_dead_letters(queue)}


def _request(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise BadRequest(
            f"this line is no JSON ({error}): send one object on one line, such as "
            '{"command": "queue.list"}'
        ) from error
    if not isinstance(request, dict):
        raise BadRequest('a request is an object, such as {"command": "queue.list"}')
    return cast("dict[str, Any]", request)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _delivered(delivery: Delivery, receipt: str) -> Answer:
    return {
        "message_id": delivery.message_id,
        "message": as_value(delivery.body),
        "priority": delivery.priority,
        "retry_count": delivery.retry_count,
        "headers": delivery.headers,
        "receipt": receipt,
    }


def _peeked(item: Envelope) -> Answer:
    return {
        "message_id": item.id,
        "message": as_value(item.body),
        "priority": item.priority,
        "retry_count": max(0, item.attempt - 1),
        "headers": item.headers,
    }


def _dead(letter: DeadLetter) -> Answer:
    return {
        "message_id": letter.message_id,
        "message": as_value(letter.body),
        "headers": dict(letter.headers),
        "original_queue": letter.channel,
        "reason": letter.reason,
        "error_type": letter.error_type,
        "error": letter.error,
        "attempts": letter.attempts,
        "first_failed_at": letter.first_failed_at,
        "dead_lettered_at": letter.last_failed_at,
    }
