"""Check the options of a send and build the envelope."""

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
    """What a send may say beside its body."""

    priority: int | None
    """0 is the lowest; the channel's ``max_priority`` (9 unless configured) the highest."""
    delay: float | None
    """Seconds before the message may be delivered."""
    ttl: float | None
    """Seconds after which it expires, unless a handler has begun with it."""
    key: str | None
    """What must stay in order on an ``ordered`` channel; the partition on Kafka."""
    headers: Mapping[str, str] | None
    """Facts beside the body, for handlers and other programs."""


def build_envelope(route: Route, body: object, clock: Clock, options: SendOptions) -> Envelope:
    """Check the options and encode the body. Raises before anything leaves the process."""
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
    """Do the same for a body that is encoded already, under an id of the caller's."""
    envelope = Envelope(id, data, headers)
    if options or route.ttl is not None:
        _apply(envelope, route, clock, **options)
    return envelope


def _apply_checked(envelope: Envelope, route: Route, clock: Clock, options: SendOptions) -> None:
    for option in options:
        if option not in SendOptions.__annotations__:
            near = difflib.get_close_matches(option, SendOptions.__annotations__, 1)
            known = near[0] if near else ", ".join(SendOptions.__annotations__)
            raise TypeError(f"a send has no option {option!r}; did you mean {known}?")
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
            f"key={key!r:.40}: a key is a str of 1 to {MAX_KEY_LENGTH} characters, none of them a "
            "control character"
        )
    return key


def _headers(given: Mapping[str, str], added: dict[str, str]) -> dict[str, str]:
    """The caller's headers with qkit's; the caller may name the type of bytes, and no more."""
    headers = check_headers(given)
    for name in headers:
        if name.lower() == CONTENT_ENCODING:
            raise InvalidHeader(
                f"header {name!r} says how qkit encoded the body: set compression in the settings"
            )
        if name.lower() == CONTENT_TYPE and CONTENT_TYPE not in added:
            raise InvalidHeader(
                f"header {name!r}: this body is sent as JSON; pass bytes to send another type"
            )
    own = {name: value for name, value in headers.items() if name.lower() != CONTENT_TYPE}
    named = [headers[name] for name in headers.keys() - own.keys()]
    return own | added | ({CONTENT_TYPE: named[0]} if named else {})


def _priority(route: Route, priority: int) -> int:
    if route.max_priority is None:
        raise Unsupported(
            f"{route.name!r} has no priorities on this backend; send to one channel per urgency",
            operation="send",
            queue=route.name,
        )
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidPriority(
            f"priority={priority!r:.40}: a whole number from 0 to {route.max_priority}",
            queue=route.name,
        )
    if not 0 <= priority <= route.max_priority:
        raise InvalidPriority(
            f"priority={priority}: {route.name!r} takes 0 (lowest) to {route.max_priority}; "
            "raise max_priority to have more",
            queue=route.name,
        )
    return priority


def _schedule(
    envelope: Envelope, route: Route, clock: Clock, delay: float | None, ttl: float | None
) -> None:
    if ttl is not None and not route.can_expire:
        raise Unsupported(
            f"{route.name!r}: this backend cannot expire a message; leave ttl out",
            operation="send",
            queue=route.name,
        )
    _check_seconds("delay", delay, zero=True)
    _check_seconds("ttl", ttl, zero=False)
    if delay and not route.can_delay:
        raise Unsupported(
            f"{route.name!r}: this backend cannot delay a message; send it when it is due",
            operation="send",
            queue=route.name,
        )
    if delay is not None and ttl is not None and delay >= ttl:
        raise ValueError(
            f"delay={delay:g} is not less than ttl={ttl:g}: the message would expire unseen"
        )
    now = clock.time()
    envelope.not_before = now + delay if delay else None
    envelope.expires_at = now + ttl if ttl is not None else None


def _check_seconds(name: str, value: float | None, *, zero: bool) -> None:
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        wanted = "zero or more" if zero else "more than zero"
        raise ValueError(f"{name}={value!r:.40}: a number of seconds, {wanted}")
