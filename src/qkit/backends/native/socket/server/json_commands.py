"""JSON commands on the engine, for scripts and for people who use ``nc -U``.

A request is ``{"command": "queue.publish", "payload": {…}, "id": …}``. The response is the result
of the command or ``{"error": {"type": …, "message": …}}``, with the ``id`` of the request if it
has one.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Final, NoReturn, TypeAlias, cast

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
# How long the receipt of an expired lease is kept. During this time, settling the delivery raises
# AckDeadlineExceeded; later it raises MessageNotFound.
EXPIRED_RECEIPT_SECONDS: Final = 60.0

_NOT_GIVEN: Any = None  # field not given, so the engine's default applies; ``null`` is rejected

Limit: TypeAlias = Annotated[int, Field(ge=1, le=MAX_LIMIT)]
PositiveSeconds: TypeAlias = Annotated[float, Field(gt=0, le=MAX_SECONDS)]


class BadRequest(QueueError, ValueError):
    """Invalid command or payload."""


# Payloads of the commands. If the default of a field is ``None``, ``null`` is the same as omitting
# the field. The fields of CreatePayload are different; see ``_NOT_GIVEN``.


class ListPayload(BaseModel):
    """Payload of ``queue.list``, which has no fields; base class of the other payloads."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, frozen=True)


class QueuePayload(ListPayload):
    """Payload of ``queue.delete``, ``.stats``, ``.purge`` and ``.purge_dead_letters``."""

    queue: str


class CreatePayload(QueuePayload):
    """Payload of ``queue.create``; the engine validates the values."""

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
    """Payload of ``queue.publish``; the engine validates the options."""

    message: Any  # any JSON value, including null
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
    """Payload of ``queue.ack``."""

    message_id: str
    receipt: str | None = None


class NackPayload(AckPayload):
    """Payload of ``queue.nack``."""

    requeue: bool | None = None


class ExtendPayload(AckPayload):
    """Payload of ``queue.extend``."""

    seconds: PositiveSeconds | None = None


class RetryPayload(QueuePayload):
    """Payload of ``queue.retry``; without ids, all dead letters of the queue are retried."""

    message_ids: list[str] | None = None
    message_id: str | None = None


class Commands:
    """JSON commands on one engine.

    Each connection has its own session. A receipt is valid in every session, so that one ``nc``
    call can consume a message and another can ack it.

    Args:
        engine: Engine on which the commands run.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._receipts: dict[str, tuple[Delivery, float]] = {}

    def session(self) -> CommandSession:
        """Return the session of a new connection."""
        return CommandSession(self)

    def hold(self, delivery: Delivery, lease: float) -> str:
        """Store a delivery with a lease of ``lease`` seconds; return its receipt."""
        now = self.engine.clock.monotonic()
        for receipt, (_, until) in list(self._receipts.items()):
            if until > now:
                break  # the others are newer and usually expire later
            del self._receipts[receipt]
        receipt = secrets.token_hex(8)
        self._receipts[receipt] = delivery, now + lease + EXPIRED_RECEIPT_SECONDS
        return receipt

    def extended(self, receipt: str, lease: float) -> None:
        """Keep a receipt longer, because its lease now ends in ``lease`` seconds."""
        delivery, _ = self._receipts.pop(receipt)
        self._receipts[receipt] = (
            delivery,
            self.engine.clock.monotonic() + lease + EXPIRED_RECEIPT_SECONDS,
        )

    def held(self, receipt: str) -> Delivery | None:
        """Return a receipt's delivery; ``None`` if it was settled or its lease expired long ago."""
        entry = self._receipts.get(receipt)
        return None if entry is None else entry[0]

    def settled(self, receipt: str) -> None:
        """Remove the receipt of a settled delivery."""
        self._receipts.pop(receipt, None)


class CommandSession:
    """Session of one connection, which runs its commands and tracks its deliveries.

    Args:
        commands: Commands and receipts that all sessions share.
    """

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
        """Run the command in one line and return the response, which may be an error.

        Args:
            line: The line, or ``None`` if it was too long.
        """
        request: dict[str, Any] = {}
        try:
            if line is None:
                raise BadRequest("the line is longer than the limit: send a smaller message")
            request = _request(line)
            result = await self._run(request)
        except QueueError as error:
            result = {"error": {"type": type(error).__name__, "message": str(error)}}
        except ValueError as error:  # from the engine, for example an invalid delay or TTL
            result = {"error": {"type": "BadRequest", "message": str(error)}}
        except Exception as error:
            logger.exception("unexpected error in a JSON command")
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
            raise BadRequest(f"unknown command {name!r:.80}: use one of {known}")
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
        """Consume one message or, with ``prefetch``, as many as the connection may still hold."""
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
        """Return the key, receipt and delivery of a message to settle or extend.

        Without a receipt, the delivery that this connection consumed is used.
        """
        key = queue, message_id = given.queue, given.message_id
        receipt = given.receipt or self._consumed.get(key)
        if receipt is None:
            raise MessageNotFound(
                "this connection has not consumed this message: pass the receipt from "
                "queue.consume",
                queue=queue,
                message_id=message_id,
            )
        delivery = self._commands.held(receipt)
        if delivery is None or delivery.message_id != message_id:
            raise MessageNotFound(
                "the receipt is not valid for this message: the delivery was settled, or its "
                "lease expired long ago",
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
        request = json.loads(line, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(
            f"invalid JSON ({error}): send one object on one line, such as "
            '{"command": "queue.list"}'
        ) from error
    if not isinstance(request, dict):
        raise BadRequest('expected an object, such as {"command": "queue.list"}')
    return cast("dict[str, Any]", request)


def _payload(command: str, model: type[ListPayload], payload: object) -> ListPayload:
    if not isinstance(payload, dict):
        raise BadRequest(f'{command}: expected an object as payload, such as {{"queue": "orders"}}')
    try:
        return model.model_validate(payload)
    except ValidationError as error:
        text = describe_errors(error, "payload")
        if any(item["type"] == "extra_forbidden" for item in error.errors()):
            text += f". Allowed fields: {', '.join(model.model_fields) or 'none'}"
        raise BadRequest(f"{command}: {text}") from None


def _as_json(value: object) -> bytes:
    """Encode a message body as compact JSON, which needs no content-type header."""
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a lone surrogate must be escaped
        return json.dumps(value, separators=(",", ":")).encode()


def _as_value(body: bytes) -> object:
    """Decode a body as JSON; return ``{"base64": …}`` if it is not valid JSON.

    >>> _as_value(b'{"a":1}'), _as_value(b"\\xff")
    ({'a': 1}, {'base64': '/w=='})
    """
    try:
        return json.loads(body, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return {"base64": base64.b64encode(body).decode()}


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not valid JSON")


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
