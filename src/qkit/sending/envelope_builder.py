"""Construction of envelopes from a body and the options of a send."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import TypedDict

from qkit._internal.clock import Clock
from qkit._internal.ids import new_id
from qkit._internal.names import check_headers
from qkit._internal.text import is_plain_text
from qkit.errors import InvalidHeader, InvalidPriority, QueueError, Unsupported
from qkit.handlers.route import Route
from qkit.message import CONTENT_ENCODING, CONTENT_TYPE, Envelope

__all__ = ["SendOptions", "build_encoded_envelope", "build_envelope"]

MAX_KEY_LENGTH = 1_024


class SendOptions(TypedDict, total=False):
    """Options for sending a message.

    ``send``, ``send_many`` and ``publish`` take them as keyword arguments.

    Attributes:
        priority: From 0, the lowest, to the channel's ``max_priority`` (9 unless configured).
            Default: 5, or ``max_priority`` if that is lower.
        delay: Seconds from the send until the message may be delivered. Default: none.
        ttl: Seconds from the send until the message expires, unless a handler has already started.
            Default: the ``ttl`` of the channel.
        key: Messages with the same key keep their order in an ``ordered`` channel. On Kafka the key
            also selects the partition. 1 to 1024 characters. Default: no key.
        headers: Names and text values for handlers and other programs. Default: none.

    Example:
        >>> import asyncio
        >>> from qkit import QueueService, SendOptions, Settings
        >>> options: SendOptions = {"priority": 8, "headers": {"tenant": "acme"}}
        >>> async def main() -> None:
        ...     async with QueueService(Settings(type="native")) as service:
        ...         await service.send("orders", {"id": 1}, **options)
        ...         print((await service.peek("orders"))[0].headers["tenant"])
        >>> asyncio.run(main())
        acme
    """

    priority: int | None
    delay: float | None
    ttl: float | None
    key: str | None
    headers: Mapping[str, str] | None


def build_envelope(route: Route, body: object, clock: Clock, options: SendOptions) -> Envelope:
    """Check the options, encode the body and return the envelope; raise if either is invalid."""
    try:
        data, headers = route.codec.encode(body)
        envelope = Envelope(new_id(), data, headers)
        if options or route.ttl is not None:
            _apply_checked(envelope, route, clock, options)
    except QueueError as error:
        error.located(backend=route.backend, operation="send", queue=route.name)
        raise
    return envelope


def build_encoded_envelope(
    route: Route, id: str, data: bytes, headers: dict[str, str], clock: Clock, options: SendOptions
) -> Envelope:
    """Check the options and return the envelope of an encoded body with a given id."""
    envelope = Envelope(id, data, headers)
    if options or route.ttl is not None:
        _apply(envelope, route, clock, **options)
    return envelope


def _apply_checked(envelope: Envelope, route: Route, clock: Clock, options: SendOptions) -> None:
    for option in options:
        if option not in SendOptions.__annotations__:
            near = difflib.get_close_matches(option, SendOptions.__annotations__, 1)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"the options are {', '.join(SendOptions.__annotations__)}"
            )
            raise TypeError(f"unknown send option {option!r}; {hint}")
    _apply(envelope, route, clock, **options)


def _apply(
    envelope: Envelope,
    route: Route,
    clock: Clock,
    *,
    priority: int | None = None,
    delay: float | None = None,
    ttl: float | None = None,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> None:
    if headers is not None:
        envelope.headers = _headers(headers, envelope.headers)
    if priority is not None:
        envelope.priority = _priority(route, priority)
    if key is not None:
        envelope.key = _key(key)
    ttl = route.ttl if ttl is None else ttl
    if delay is not None or ttl is not None:
        _schedule(envelope, route, clock, delay, ttl)


def _key(key: str) -> str:
    if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_LENGTH or not is_plain_text(key):
        raise ValueError(
            f"key={key!r:.40}: expected a str of 1 to {MAX_KEY_LENGTH} characters without control "
            "characters"
        )
    return key


def _headers(given: Mapping[str, str], added: dict[str, str]) -> dict[str, str]:
    """Merge the caller's headers with those that qkit adds.

    Of the latter, the caller may set only the content type of a ``bytes`` body.
    """
    headers = check_headers(given)
    for name in headers:
        if name.lower() == CONTENT_ENCODING:
            raise InvalidHeader(
                f"header {name!r} is set by qkit: set compression in the settings instead"
            )
        if name.lower() == CONTENT_TYPE and CONTENT_TYPE not in added:
            raise InvalidHeader(
                f"header {name!r}: this body is sent as JSON; pass bytes to set another type"
            )
    own = {name: value for name, value in headers.items() if name.lower() != CONTENT_TYPE}
    named = [headers[name] for name in headers.keys() - own.keys()]
    return own | added | ({CONTENT_TYPE: named[0]} if named else {})


def _priority(route: Route, priority: int) -> int:
    if route.max_priority is None:
        raise Unsupported(
            f"{route.name!r}: this backend does not support priorities; use one channel per "
            "priority",
            operation="send",
            queue=route.name,
        )
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidPriority(
            f"priority={priority!r:.40}: expected an integer from 0 to {route.max_priority}",
            queue=route.name,
        )
    if not 0 <= priority <= route.max_priority:
        raise InvalidPriority(
            f"priority={priority}: {route.name!r} accepts 0 (lowest) to {route.max_priority}; "
            "raise max_priority to use higher priorities",
            queue=route.name,
        )
    return priority


def _schedule(
    envelope: Envelope, route: Route, clock: Clock, delay: float | None, ttl: float | None
) -> None:
    if ttl is not None and not route.can_expire:
        raise Unsupported(
            f"{route.name!r}: this backend does not support TTLs; omit ttl",
            operation="send",
            queue=route.name,
        )
    _check_seconds("delay", delay, zero=True)
    _check_seconds("ttl", ttl, zero=False)
    if delay and not route.can_delay:
        raise Unsupported(
            f"{route.name!r}: this backend does not support delays; send the message when it is "
            "due",
            operation="send",
            queue=route.name,
        )
    if delay is not None and ttl is not None and delay >= ttl:
        raise ValueError(
            f"delay={delay:g} must be less than ttl={ttl:g}: the message would expire before its "
            "delivery"
        )
    now = clock.time()
    envelope.not_before = now + delay if delay else None
    envelope.expires_at = now + ttl if ttl is not None else None


def _check_seconds(name: str, value: float | None, *, zero: bool) -> None:
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        minimum = "0 or more" if zero else "more than 0"
        raise ValueError(f"{name}={value!r:.40}: expected a number of seconds, {minimum}")
