"""Every error that qkit raises, and the signals a handler may raise.

The tree::

    QueueError                      root: backend, operation, queue, message_id, cause
    ├── ConfigError                 settings, declarations or capabilities that cannot work
    │   └── HandlerError            a handler whose signature cannot be filled
    ├── LifecycleError              the right call at the wrong time, or in the wrong thread
    ├── Unsupported                 this backend, or this kind of channel, cannot do that
    ├── QueueNotFound               no such queue, topic or list
    ├── MessageNotFound             no such message (settled, purged or never there)
    ├── ConsumerNotFound            no such consumer
    ├── InvalidName                 a channel or group name with characters brokers cannot share
    ├── InvalidPriority             a priority outside the channel's range
    ├── InvalidHeader               a header that could not travel on every broker
    ├── InvalidBody                 a body that is not of the channel's type
    ├── PayloadTooLarge             a body beyond max_message_bytes
    ├── DecodeError                 bytes that are not what the handler takes
    ├── QueueFull                   the queue holds max_depth messages
    ├── AckDeadlineExceeded         a late ack: the lease is lost, another may own the message
    ├── PartialSend                 some messages of a batch were accepted, others were not
    ├── SendTimeout                 no confirmation within send_timeout
    ├── HandlerTimeout              a handler ran longer than its timeout
    ├── StorageError                the disk of a native directory refused: no send was stored
    │   ├── LogLocked               another process owns the directory: its pid
    │   ├── LogVersion              files of a format that this qkit does not read
    │   ├── LogDamaged              stored records that cannot be read: where
    │   └── ReadOnly                a sync failed: reopen before anything more is written
    └── BackendUnavailable          the connection failed; trying again may help
        ├── CircuitOpen             too many connection failures: not even tried
        └── SubscriptionLost        a consumer's subscription broke and must be opened again

    Signal                          raised by handlers to say what should happen
    ├── Retry(delay)                try again, after a delay of the handler's choosing
    ├── Reject(reason)              straight to the dead letters
    ├── Unavailable(retry_after)    a dependency is down: give the message back uncharged and pause
    └── BatchError({id: exc})       settle the members of a batch one by one
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from qkit._internal.sent import Sent

__all__ = [
    "AckDeadlineExceeded",
    "BackendUnavailable",
    "BatchError",
    "CircuitOpen",
    "ConfigError",
    "ConsumerNotFound",
    "Damage",
    "DecodeError",
    "HandlerError",
    "HandlerTimeout",
    "InvalidBody",
    "InvalidHeader",
    "InvalidName",
    "InvalidPriority",
    "LifecycleError",
    "LogDamaged",
    "LogLocked",
    "LogVersion",
    "MessageNotFound",
    "PartialSend",
    "PayloadTooLarge",
    "QueueError",
    "QueueFull",
    "QueueNotFound",
    "ReadOnly",
    "Reject",
    "Retry",
    "SendTimeout",
    "Signal",
    "StorageError",
    "SubscriptionLost",
    "Unavailable",
    "Unsupported",
]


class QueueError(Exception):
    """The root of qkit's errors: what failed, where, and what to do about it.

    The text says what to do; the attributes say where it happened, for programs and logs.

    >>> error = QueueError("the queue is gone", backend="native", operation="send", queue="orders")
    >>> error.queue
    'orders'
    >>> print(error)
    the queue is gone [backend=native operation=send queue=orders]
    """

    def __init__(
        self,
        message: str,
        *,
        backend: str | None = None,
        operation: str | None = None,
        queue: str | None = None,
        message_id: str | None = None,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.backend = backend
        self.operation = operation
        self.queue = queue
        self.message_id = message_id
        if cause is not None:
            self.__cause__ = cause

    @property
    def cause(self) -> BaseException | None:
        """The error behind this one: what was given, or what ``raise … from`` named."""
        return self.__cause__

    @property
    def context(self) -> dict[str, str]:
        """The known facts about where it happened, ready for a structured log."""
        facts = {
            "backend": self.backend,
            "operation": self.operation,
            "queue": self.queue,
            "message_id": self.message_id,
        }
        return {name: value for name, value in facts.items() if value is not None}

    def located(
        self,
        *,
        backend: str | None = None,
        operation: str | None = None,
        queue: str | None = None,
        message_id: str | None = None,
    ) -> QueueError:
        """Fill in the facts that the raiser did not know, keeping those it did; return self."""
        self.backend = self.backend or backend
        self.operation = self.operation or operation
        self.queue = self.queue or queue
        self.message_id = self.message_id or message_id
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """What a copy is made of, here or in another process; Python would drop the cause."""
        return type(self), self.args, {**self.__dict__, "__cause__": self.__cause__}

    def __str__(self) -> str:
        context = " ".join(f"{name}={value}" for name, value in self.context.items())
        return f"{self.message} [{context}]" if context else self.message


class ConfigError(QueueError, ValueError):
    """Settings, declarations or capabilities that cannot work together."""


class HandlerError(ConfigError, TypeError):
    """A handler whose signature cannot be filled from a message."""


class LifecycleError(QueueError, RuntimeError):
    """The right call at the wrong time or in the wrong thread: send before start, and so on."""


class Unsupported(QueueError):
    """This backend, or this kind of channel, cannot do what was asked."""


class QueueNotFound(QueueError, LookupError):
    """No queue, topic or list of that name exists."""


class MessageNotFound(QueueError, LookupError):
    """The message is not there: settled already, purged, or never sent."""


class ConsumerNotFound(QueueError, LookupError):
    """No consumer of that name is registered on the queue."""


class InvalidName(QueueError, ValueError):
    """A channel or group name outside 1–200 characters of ``A-Za-z0-9._-``."""


class InvalidPriority(QueueError, ValueError):
    """A priority outside the channel's range."""


class InvalidHeader(QueueError, ValueError):
    """A header name or value that could not travel unchanged on every broker."""


class InvalidBody(QueueError, TypeError):
    """A body that is not of the channel's type, or that JSON cannot express."""


class PayloadTooLarge(QueueError, ValueError):
    """A body beyond ``max_message_bytes``, before or after decompression."""


class DecodeError(QueueError, ValueError):
    """The bytes of a message are not what its handler takes."""


class QueueFull(QueueError):
    """The queue holds ``max_depth`` messages; nothing was added."""


class AckDeadlineExceeded(QueueError):
    """The lease is lost: the message may already be with another consumer."""


class PartialSend(QueueError):
    """Some messages of a batch were accepted and others were not, or not for the same reason.

    ``results`` has one entry for each message, in order: its ``Sent``, or the error it met.
    """

    def __init__(
        self,
        message: str,
        results: Sequence[Sent | QueueError] = (),
        *,
        backend: str | None = None,
        operation: str | None = None,
        queue: str | None = None,
    ) -> None:
        super().__init__(message, backend=backend, operation=operation, queue=queue)
        self.results = list(results)

    @classmethod
    def of(cls, results: Sequence[Sent | QueueError], *, backend: str, queue: str) -> QueueError:
        """What a backend raises unless all were accepted.

        The first error itself if none was, for one reason. Of several reasons each may be another
        sender's, whose messages were gathered with these.
        """
        failed = [item for item in results if isinstance(item, QueueError)]
        if len(failed) == len(results) and len({type(error) for error in failed}) == 1:
            return failed[0]
        return cls(
            f"{len(failed)} of {len(results)} messages were not accepted, the first because "
            f"{failed[0].message}",
            results,
            backend=backend,
            operation="publish",
            queue=queue,
        )


class SendTimeout(QueueError, TimeoutError):
    """No confirmation came within ``send_timeout``; the message may or may not have arrived."""


class HandlerTimeout(QueueError, TimeoutError):
    """A handler ran longer than its ``timeout``."""


class StorageError(QueueError):
    """The disk refused; its ``cause`` says why.

    Nothing was stored of a send: free some space or set the permissions right, then try again; the
    engine goes on. What was settled is settled, and written as soon as there is space.
    """


class LogLocked(StorageError):
    """Another process owns the directory; ``pid`` is its number if it can be known."""

    pid: int | None = None


class LogVersion(StorageError):
    """The files are of a format that this qkit does not read."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a segment that are no record.

    ``torn``: the end of the log, of a write that a crash cut short; it was cut off. ``unsynced``:
    a hole among the last writes, none of which was synced; it was closed. ``header``: one of the
    two copies, restored from the other. ``snapshot``: not whole, and not needed. ``damaged``:
    records that had been stored are lost.
    """

    kind: Literal["torn", "unsynced", "header", "snapshot", "damaged"]
    segment: int
    offset: int
    length: int
    words: str = ""

    def __str__(self) -> str:
        text = f"segment {self.segment}, offset {self.offset}: {self.length} bytes {self.kind}"
        return f"{text} ({self.words})" if self.words else text


class LogDamaged(StorageError):
    """Records that were safely stored cannot be read; ``damage`` says where.

    No record was changed. Restore the directory from a copy, or open it with ``repair=True``: that
    keeps every record that is whole and sets the damaged files aside.
    """

    damage: Sequence[Damage] = ()


class ReadOnly(StorageError):
    """A sync failed, so it is not known what is on the disk: the log takes nothing more.

    What was confirmed before is safe. Look after the disk, then close the engine and open it again.
    """


class BackendUnavailable(QueueError, ConnectionError):
    """The connection to the broker failed; trying again may help."""


class CircuitOpen(BackendUnavailable):
    """Too many connection failures in a row: the breaker refuses to try until it has rested."""


class SubscriptionLost(BackendUnavailable):
    """A consumer's subscription broke; the consumer opens it again with backoff."""


class Signal(Exception):
    """What a handler raises to say what should happen to its message."""


class Retry(Signal):
    """Try this message again, after ``delay`` seconds (default: the channel's backoff).

    It counts as a failed attempt, so it ends in the dead letters like any other failure.
    """

    def __init__(self, reason: str = "", *, delay: float | None = None) -> None:
        if delay is not None and not delay >= 0:
            raise ValueError(f"Retry(delay={delay!r}): a delay is zero or more seconds")
        super().__init__(reason or "the handler asked for a retry")
        self.delay = delay


class Reject(Signal):
    """Send this message straight to the dead letters, with the reason ``ExplicitNack``."""

    def __init__(self, reason: str = "rejected by the handler") -> None:
        super().__init__(reason)
        self.reason = reason


class Unavailable(Signal):
    """A dependency is down: the message goes back uncharged and the channel pauses.

    After ``retry_after`` seconds (default: the channel's backoff) one message probes.
    """

    def __init__(self, reason: str = "", *, retry_after: float | None = None) -> None:
        if retry_after is not None and not retry_after >= 0:
            raise ValueError(f"Unavailable(retry_after={retry_after!r}): zero or more seconds")
        super().__init__(reason or "a dependency is unavailable")
        self.retry_after = retry_after


class BatchError(Signal):
    """Settle the members of a batch one by one.

    Members named in ``failures`` fail with their exception, all others are done.

    >>> BatchError({"0190": ValueError("bad total")}).failures["0190"]
    ValueError('bad total')
    """

    def __init__(self, failures: Mapping[str, Exception]) -> None:
        super().__init__(f"{len(failures)} of the batch failed")
        self.failures = dict(failures)

    def __reduce__(self) -> tuple[type[BatchError], tuple[dict[str, Exception]]]:
        """What it is made of, for copies and other processes: not its text."""
        return type(self), (self.failures,)
