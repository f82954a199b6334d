"""The engine's commands as JSON: what a person types into ``nc -U``, and scripts send.

A request is ``{"command": "queue.publish", "payload": {…}, "id": …}``, the answer the command's
result, or ``{"error": {"type": …, "message": …}}``, with the same ``id`` if there was one.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any, Final, NoReturn, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qkit._internal.logging import logger
from qkit._internal.names import check_headers
from qkit._internal.validation import describe_errors
from qkit.errors import MessageNotFound, QueueError
from qkit.message import DeadLetter, Envelope
from qkit.native.delivery import Delivery
from qkit.native.engine import Engine

__all__ = ["CommandSession", "Commands"]

Answer: TypeAlias = dict[str, object]

MAX_PREFETCH: Final = 1_000
MAX_LIMIT: Final = 10_000
MAX_SECONDS: Final = 1 << 53
DEFAULT_PEEK_LIMIT: Final = 1
DEFAULT_DEAD_LETTER_LIMIT: Final = 100
DEFAULT_LEASE_SECONDS: Final = 30.0
EXPIRED_RECEIPT_SECONDS: Final = 60.0  # so long a lease that ran out gets its own error

_NOT_GIVEN: Any = None  # the engine's default applies; ``null`` is refused

Limit: TypeAlias = Annotated[int, Field(ge=1, le=MAX_LIMIT)]
PositiveSeconds: TypeAlias = Annotated[float, Field(gt=0, le=MAX_SECONDS)]


class BadRequest(QueueError, ValueError):
    """A command that cannot be understood; its text says what could be."""


# The payloads, one model for each command. Optional fields may be ``null``: not given.


class ListPayload(BaseModel):
    """Payload of ``queue.list``; base of the others."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class QueuePayload(ListPayload):
    """Payload of ``queue.delete``, ``.stats``, ``.purge`` and ``.purge_dead_letters``."""

    queue: str


class CreatePayload(QueuePayload):
    """Payload of ``queue.create``; the engine checks the values."""

    broadcast: bool = _NOT_GIVEN
    max_depth: int = _NOT_GIVEN
    max_priority: int = _NOT_GIVEN
    max_retries: int | None = _NOT_GIVEN  # null: no limit
    ack_deadline: float = _NOT_GIVEN
    dead_letter: bool = _NOT_GIVEN
    dead_letter_max_depth: int = _NOT_GIVEN
    backoff: float = _NOT_GIVEN
    max_backoff: float = _NOT_GIVEN
    balance: str = _NOT_GIVEN


class PeekPayload(QueuePayload):
    """Payload of ``queue.peek`` and ``queue.dead_letters``."""

    limit: Limit | None = None


class PublishPayload(QueuePayload):
    """Payload of ``queue.publish``; the engine checks the options."""

    message: Any  # any JSON value, also null
    priority: int | None = None
    delay: float | None = None
    ttl: float | None = None
    headers: dict[str, Any] | None = None
    key: str | None = None


class ConsumePayload(QueuePayload):
    """Payload of ``queue.consume``."""

    timeout: Annotated[float, Field(ge=0, le=MAX_SECONDS)] | None = None
    ack_deadline: PositiveSeconds | None = None
    prefetch: Annotated[int, Field(ge=1, le=MAX_PREFETCH)] | None = None
    group: str | None = None
    consumer: str | None = None


class AckPayload(QueuePayload):
    """Payload of ``queue.ack``; names a delivery."""

    message_id: str
    receipt: str | None = None


class NackPayload(AckPayload):
    """Payload of ``queue.nack``."""

    requeue: bool | None = None


class ExtendPayload(AckPayload):
    """Payload of ``queue.extend``."""

    seconds: PositiveSeconds | None = None


class RetryPayload(QueuePayload):
    """Payload of ``queue.retry``: without ids, all dead letters of the queue."""

    message_ids: list[str] | None = None
    message_id: str | None = None


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
        self._receipts[receipt] = delivery, now + lease + EXPIRED_RECEIPT_SECONDS
        return receipt

    def extended(self, receipt: str, lease: float) -> None:
        """A lease has a new end."""
        delivery, _ = self._receipts.pop(receipt)
        self._receipts[receipt] = (
            delivery,
            self.engine.clock.monotonic() + lease + EXPIRED_RECEIPT_SECONDS,
        )

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
        self._handlers: dict[str, tuple[type[ListPayload], Callable[[Any], Awaitable[Answer]]]] = {
            "queue.create": (CreatePayload, self._create),
            "queue.delete": (QueuePayload, self._delete),
            "queue.list": (ListPayload, self._list),
            "queue.stats": (QueuePayload, self._stats),
            "queue.peek": (PeekPayload, self._peek),
            "queue.purge": (QueuePayload, self._purge),
            "queue.publish": (PublishPayload, self._publish),
            "queue.consume": (ConsumePayload, self._consume),
            "queue.ack": (AckPayload, self._ack),
            "queue.nack": (NackPayload, self._nack),
            "queue.extend": (ExtendPayload, self._extend),
            "queue.dead_letters": (PeekPayload, self._dead_letters),
            "queue.retry": (RetryPayload, self._retry),
            "queue.purge_dead_letters": (QueuePayload, self._purge_dead_letters),
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
        found = self._handlers.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(self._handlers)
            raise BadRequest(f"command {name!r:.80} is unknown: use one of {known}")
        model, handler = found
        return await handler(_payload(str(name), model, request.get("payload", {})))

    # Queues

    async def _create(self, given: CreatePayload) -> Answer:
        options = given.model_dump(exclude={"queue"}, exclude_unset=True)
        await self._engine.create(given.queue, **options)
        return {"success": True}

    async def _delete(self, given: QueuePayload) -> Answer:
        await self._engine.delete(given.queue)
        return {"success": True}

    async def _list(self, given: ListPayload) -> Answer:
        return {"queues": await self._engine.list()}

    async def _stats(self, given: QueuePayload) -> Answer:
        return asdict(await self._engine.stats(given.queue))

    async def _peek(self, given: PeekPayload) -> Answer:
        messages = await self._engine.peek(given.queue, given.limit or DEFAULT_PEEK_LIMIT)
        return {"messages": [_peeked(item) for item in messages]}

    async def _purge(self, given: QueuePayload) -> Answer:
        return {"purged": await self._engine.purge(given.queue)}

    # Messages

    async def _publish(self, given: PublishPayload) -> Answer:
        sent = await self._engine.publish(
            given.queue,
            _as_json(given.message),
            given.priority,
            delay=given.delay,
            ttl=given.ttl,
            headers=check_headers(given.headers or {}),
            key=given.key,
        )
        return {"message_id": sent.message_id, "position": sent.position}

    async def _consume(self, given: ConsumePayload) -> Answer:
        """One message; with ``prefetch`` as many as that allows, in a list."""
        queue, prefetch = given.queue, given.prefetch
        lease = given.ack_deadline or DEFAULT_LEASE_SECONDS
        timeout = given.timeout or 0.0
        found: list[Answer] = []
        free = 1 if prefetch is None else prefetch - self._unsettled(queue)
        while len(found) < free:
            delivery = await self._engine.consume(
                queue, 0.0 if found else timeout, lease, given.consumer, group=given.group
            )
            if delivery is None:
                break
            receipt = self._commands.hold(delivery, lease)
            self._consumed[queue, delivery.message_id] = receipt
            found.append(_delivered(delivery, receipt))
        if prefetch is not None:
            return {"messages": found, "unsettled": self._unsettled(queue)}
        return found[0] if found else {"message_id": None, "message": None}

    def _unsettled(self, queue: str) -> int:
        return sum(
            name == queue and self._commands.held(receipt) is not None
            for (name, _), receipt in self._consumed.items()
        )

    async def _ack(self, given: AckPayload) -> Answer:
        key, receipt, delivery = self._delivery(given)
        await delivery.ack()
        self._settled(key, receipt)
        return {"success": True}

    async def _nack(self, given: NackPayload) -> Answer:
        key, receipt, delivery = self._delivery(given)
        action = await delivery.nack(given.requeue is not False)
        self._settled(key, receipt)
        return {"success": True, "action": action}

    async def _extend(self, given: ExtendPayload) -> Answer:
        _, receipt, delivery = self._delivery(given)
        seconds = given.seconds or DEFAULT_LEASE_SECONDS
        await delivery.extend(seconds)
        self._commands.extended(receipt, seconds)
        return {"success": True}

    def _delivery(self, given: AckPayload) -> tuple[tuple[str, str], str, Delivery]:
        """The delivery that is meant: by its receipt, or the one this connection received."""
        key = queue, message_id = given.queue, given.message_id
        receipt = given.receipt or self._consumed.get(key)
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

    async def _dead_letters(self, given: PeekPayload) -> Answer:
        limit = given.limit or DEFAULT_DEAD_LETTER_LIMIT
        letters = await self._engine.dead_letters(given.queue, limit)
        return {"dead_letters": [_dead(letter) for letter in letters]}

    async def _retry(self, given: RetryPayload) -> Answer:
        ids = given.message_ids
        if given.message_id is not None:
            ids = [*(ids or ()), given.message_id]
        return {"retried": await self._engine.retry_dead_letters(given.queue, ids)}

    async def _purge_dead_letters(self, given: QueuePayload) -> Answer:
        return {"purged": await self._engine.purge_dead_letters(given.queue)}


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


def _payload(command: str, model: type[ListPayload], payload: object) -> ListPayload:
    if not isinstance(payload, dict):
        raise BadRequest(f'{command}: payload is an object, such as {{"queue": "orders"}}')
    try:
        return model.model_validate(payload)
    except ValidationError as error:
        text = describe_errors(error, "payload")
        if any(item["type"] == "extra_forbidden" for item in error.errors()):
            text += f". It takes {', '.join(model.model_fields) or 'no fields'}"
        raise BadRequest(f"{command}: {text}") from None


def _as_json(value: object) -> bytes:
    """Return a message's body: a body without a content type is JSON."""
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can carry
        return json.dumps(value, separators=(",", ":")).encode()


def _as_value(body: bytes) -> object:
    """Return the JSON value that a body holds, else its bytes as ``{"base64": …}``.

    >>> _as_value(b'{"a":1}'), _as_value(b"\\xff")
    ({'a': 1}, {'base64': '/w=='})
    """
    try:
        return json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return {"base64": base64.b64encode(body).decode()}


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _delivered(delivery: Delivery, receipt: str) -> Answer:
    return {
        "message_id": delivery.message_id,
        "message": _as_value(delivery.body),
        "priority": delivery.priority,
        "retry_count": delivery.retry_count,
        "headers": delivery.headers,
        "receipt": receipt,
    }


def _peeked(item: Envelope) -> Answer:
    return {
        "message_id": item.id,
        "message": _as_value(item.body),
        "priority": item.priority,
        "retry_count": max(0, item.attempt - 1),
        "headers": item.headers,
    }


def _dead(letter: DeadLetter) -> Answer:
    return {
        "message_id": letter.message_id,
        "message": _as_value(letter.body),
        "headers": dict(letter.headers),
        "original_queue": letter.channel,
        "reason": letter.reason,
        "error_type": letter.error_type,
        "error": letter.error,
        "attempts": letter.attempts,
        "first_failed_at": letter.first_failed_at,
        "dead_lettered_at": letter.last_failed_at,
    }
