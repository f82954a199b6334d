"""Exceptions that qkit raises, and signals that a handler may raise.

The hierarchy::

    QueueError                      root: backend, operation, queue, message_id, cause
    ├── ConfigError                 invalid settings, declarations or capabilities
    │   └── HandlerError            a handler whose signature qkit cannot fill
    ├── LifecycleError              a call at the wrong time, or in the wrong thread
    ├── Unsupported                 a feature that the backend or the channel does not have
    ├── QueueNotFound               no such queue, topic or list
    ├── MessageNotFound             no such message (settled, purged or never sent)
    ├── ConsumerNotFound            no such consumer
    ├── InvalidName                 a channel or group name with characters that brokers reject
    ├── InvalidPriority             a priority outside the channel's range
    ├── InvalidHeader               a header that some broker cannot carry
    ├── InvalidBody                 a body that does not have the channel's type
    ├── PayloadTooLarge             a body larger than max_message_bytes
    ├── DecodeError                 a body that does not decode to the handler's type
    ├── QueueFull                   the queue holds max_depth messages
    ├── AckDeadlineExceeded         a late settlement: the lease has expired
    ├── PartialSend                 only some messages of a batch were accepted
    ├── SendTimeout                 no confirmation within send_timeout
    ├── HandlerTimeout              a handler ran longer than its timeout
    ├── StorageError                the native engine could not write to its directory
    │   ├── LogLocked               another process owns the directory
    │   ├── LogVersion              files in a format that this version does not read
    │   ├── LogDamaged              stored records that cannot be read
    │   └── ReadOnly                a sync failed: reopen the engine before further writes
    └── BackendUnavailable          the connection failed; a retry may help
        ├── CircuitOpen             too many connection failures: the call was not attempted
        └── SubscriptionLost        a subscription broke and must be reopened

    Signal                          raised by handlers to control what happens to a message
    ├── Retry(delay)                retry the message, optionally after a given delay
    ├── Reject(reason)              dead-letter the message without further attempts
    ├── Unavailable(retry_after)    a dependency is down: release the message and pause the channel
    └── BatchError({id: exc})       settle the messages of a batch individually
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
    """Base class of all qkit errors.

    The message says what went wrong and what to do. The attributes say where it happened.

    Args:
        message: What went wrong.
        backend: Name of the backend, if known.
        operation: Operation that failed, such as ``send`` or ``ack``, if known.
        queue: Name of the channel or queue, if known.
        message_id: Id of the message, if the error concerns a single one.
        cause: Underlying error, for example of the broker's client library.

    Example:
        >>> error = QueueError("no such queue", backend="native", operation="send", queue="orders")
        >>> error.queue
        'orders'
        >>> print(error)
        no such queue [backend=native operation=send queue=orders]
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
            self.__cause__: BaseException | None = cause

    @property
    def cause(self) -> BaseException | None:
        """Underlying error: the ``cause`` argument, or the error named by ``raise … from``.

        Example:
            >>> QueueError("could not connect", cause=OSError("connection refused")).cause
            OSError('connection refused')
        """
        return self.__cause__

    @property
    def context(self) -> dict[str, str]:
        """Where the error happened, as far as known, for structured logs.

        Example:
            >>> QueueError("no such queue", backend="native", queue="orders").context
            {'backend': 'native', 'queue': 'orders'}
        """
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
        """Fill in the fields of the context that are not set yet.

        Args:
            backend: Name of the backend.
            operation: Operation that failed.
            queue: Name of the channel or queue.
            message_id: Id of the message.

        Returns:
            The error itself.

        Example:
            >>> error = QueueError("no such queue", queue="orders")
            >>> error.located(backend="native", queue="other").context
            {'backend': 'native', 'queue': 'orders'}
        """
        self.backend = self.backend or backend
        self.operation = self.operation or operation
        self.queue = self.queue or queue
        self.message_id = self.message_id or message_id
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the cause in copies and pickles; by default Python drops it."""
        return type(self), self.args, {**self.__dict__, "__cause__": self.__cause__}

    def __str__(self) -> str:
        context = " ".join(f"{name}={value}" for name, value in self.context.items())
        return f"{self.message} [{context}]" if context else self.message


class ConfigError(QueueError, ValueError):
    """Settings, declarations or capabilities that are invalid or contradict each other.

    Example:
        >>> from qkit import Settings
        >>> try:
        ...     Settings(type="rabbitmq")
        ... except ConfigError as error:
        ...     print(error.message.splitlines()[0])
        1 problem in the settings:
    """


class HandlerError(ConfigError, TypeError):
    """A handler whose signature cannot be filled from a message.

    Example:
        >>> from qkit import QueueService, Settings, consume
        >>> @consume("audit")
        ... def audit(user: str, action: str) -> None: ...
        >>> try:
        ...     QueueService(Settings(type="native")).register(audit)
        ... except HandlerError:
        ...     print("a handler has one parameter for the body")
        a handler has one parameter for the body
    """


class LifecycleError(QueueError, RuntimeError):
    """A call at the wrong time or in the wrong thread, such as a send before ``start``.

    Example:
        >>> import asyncio
        >>> from qkit import QueueService, Settings
        >>> async def main() -> None:
        ...     try:
        ...         await QueueService(Settings(type="native")).send("orders", 1)
        ...     except LifecycleError:
        ...         print("not started")
        >>> asyncio.run(main())
        not started
    """


class Unsupported(QueueError):
    """A feature that the backend, or this kind of channel, does not have.

    Example:
        >>> raise Unsupported("cannot delay messages", backend="kafka")
        Traceback (most recent call last):
        qkit.errors.Unsupported: cannot delay messages [backend=kafka]
    """


class QueueNotFound(QueueError, LookupError):
    """No queue, topic or list has this name.

    Example:
        >>> import asyncio
        >>> from qkit import QueueService, Settings
        >>> async def main() -> None:
        ...     async with QueueService(Settings(type="native")) as service:
        ...         try:
        ...             await service.stats("orders")
        ...         except QueueNotFound as error:
        ...             print(error.queue)
        >>> asyncio.run(main())
        orders
    """


class MessageNotFound(QueueError, LookupError):
    """The message does not exist: it was settled, purged or never sent.

    Example:
        >>> raise MessageNotFound("already settled", queue="orders", message_id="0190")
        Traceback (most recent call last):
        qkit.errors.MessageNotFound: already settled [queue=orders message_id=0190]
    """


class ConsumerNotFound(QueueError, LookupError):
    """No consumer of this name is registered on the queue.

    Example:
        >>> raise ConsumerNotFound("no consumer of this channel", queue="orders")
        Traceback (most recent call last):
        qkit.errors.ConsumerNotFound: no consumer of this channel [queue=orders]
    """


class InvalidName(QueueError, ValueError):
    """A channel or group name that is not 1–200 characters of ``A-Za-z0-9._-``.

    Example:
        >>> from qkit import Channel
        >>> try:
        ...     Channel("new orders")
        ... except InvalidName:
        ...     print("invalid")
        invalid
    """


class InvalidPriority(QueueError, ValueError):
    """A priority outside the channel's range.

    Example:
        >>> import asyncio
        >>> from qkit import QueueService, Settings
        >>> async def main() -> None:
        ...     async with QueueService(Settings(type="native", max_priority=9)) as service:
        ...         try:
        ...             await service.send("orders", 1, priority=10)
        ...         except InvalidPriority:
        ...             print("invalid")
        >>> asyncio.run(main())
        invalid
    """


class InvalidHeader(QueueError, ValueError):
    """A header name or value that some broker cannot carry unchanged.

    Example:
        >>> import asyncio
        >>> from qkit import QueueService, Settings
        >>> async def main() -> None:
        ...     async with QueueService(Settings(type="native")) as service:
        ...         try:
        ...             await service.send("orders", 1, headers={"qkit-tenant": "acme"})
        ...         except InvalidHeader:
        ...             print("invalid")
        >>> asyncio.run(main())
        invalid
    """


class InvalidBody(QueueError, TypeError):
    """A body that does not have the channel's type, or that JSON cannot represent.

    Example:
        >>> import asyncio
        >>> from qkit import Channel, QueueService, Settings
        >>> async def main() -> None:
        ...     async with QueueService(Settings(type="native")) as service:
        ...         try:
        ...             await service.send(Channel("numbers", int), "three")
        ...         except InvalidBody:
        ...             print("invalid")
        >>> asyncio.run(main())
        invalid
    """


class PayloadTooLarge(QueueError, ValueError):
    """A body larger than ``max_message_bytes``, compressed or decompressed.

    Example:
        >>> import asyncio
        >>> from qkit import QueueService, Settings
        >>> async def main() -> None:
        ...     async with QueueService(Settings(type="native", max_message_bytes=10)) as service:
        ...         try:
        ...             await service.send("orders", "a long text")
        ...         except PayloadTooLarge:
        ...             print("too large")
        >>> asyncio.run(main())
        too large
    """


class DecodeError(QueueError, ValueError):
    """A body that does not decode to the type that the handler takes.

    Example:
        >>> raise DecodeError("expected int as JSON", queue="numbers", message_id="0190")
        Traceback (most recent call last):
        qkit.errors.DecodeError: expected int as JSON [queue=numbers message_id=0190]
    """


class QueueFull(QueueError):
    """The queue holds ``max_depth`` messages; nothing was added.

    Example:
        >>> import asyncio
        >>> from qkit import QueueService, Settings
        >>> async def main() -> None:
        ...     async with QueueService(Settings(type="native", max_depth=1)) as service:
        ...         await service.send("orders", 1)
        ...         try:
        ...             await service.send("orders", 2)
        ...         except QueueFull as error:
        ...             print(error.queue)
        >>> asyncio.run(main())
        orders
    """


class AckDeadlineExceeded(QueueError):
    """The lease has expired: another consumer may already have the message.

    Example:
        >>> raise AckDeadlineExceeded("the lease has expired", operation="ack", queue="orders")
        Traceback (most recent call last):
        qkit.errors.AckDeadlineExceeded: the lease has expired [operation=ack queue=orders]
    """


class PartialSend(QueueError):
    """Only some messages of a batch were accepted, or all failed for different reasons.

    Args:
        message: What went wrong.
        results: For each message, in order, its ``Sent`` or its error.
        backend: Name of the backend, if known.
        operation: Operation that failed, if known.
        queue: Name of the channel or queue, if known.

    Example:
        >>> from qkit import Sent
        >>> error = PartialSend("1 of 2 failed", [Sent("0190"), QueueFull("the queue is full")])
        >>> [isinstance(result, Sent) for result in error.results]
        [True, False]
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
        self.results: list[Sent | QueueError] = list(results)

    @classmethod
    def of(cls, results: Sequence[Sent | QueueError], *, backend: str, queue: str) -> QueueError:
        """Build the error that a backend raises when not all messages were accepted.

        Args:
            results: For each message, in order, its ``Sent`` or its error; at least one error.
            backend: Name of the backend.
            queue: Name of the queue.

        Returns:
            The first error, if every message failed with the same type of error; otherwise a
            ``PartialSend``, because the messages of several senders may share one publish.

        Example:
            >>> full = QueueFull("the queue is full")
            >>> PartialSend.of([full, full], backend="native", queue="orders") is full
            True
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
    """No confirmation within ``send_timeout``; the message may or may not have arrived.

    Example:
        >>> raise SendTimeout("not confirmed within 10 s", operation="send", queue="orders")
        Traceback (most recent call last):
        qkit.errors.SendTimeout: not confirmed within 10 s [operation=send queue=orders]
    """


class HandlerTimeout(QueueError, TimeoutError):
    """A handler ran longer than its ``timeout``.

    Example:
        >>> raise HandlerTimeout("took longer than 5 s", queue="orders")
        Traceback (most recent call last):
        qkit.errors.HandlerTimeout: took longer than 5 s [queue=orders]
    """


class StorageError(QueueError):
    """The native engine could not write to its directory; see ``cause``.

    No message of the failed send was stored. Free some space or correct the permissions, then
    send again; the engine keeps running. Settled messages remain settled: the engine records the
    settlements as soon as it can write.

    Example:
        >>> error = StorageError("could not write", cause=OSError(28, "No space left on device"))
        >>> error.cause
        OSError(28, 'No space left on device')
    """


class LogLocked(StorageError):
    """Another process owns the directory.

    Attributes:
        pid: Process id of the owner, ``None`` if unknown.

    Example:
        >>> LogLocked("the directory is in use").pid is None
        True
    """

    pid: int | None = None


class LogVersion(StorageError):
    """The files have a format that this version of qkit does not read.

    Example:
        >>> raise LogVersion("unknown format 9: upgrade qkit")
        Traceback (most recent call last):
        qkit.errors.LogVersion: unknown format 9: upgrade qkit
    """


@dataclass(frozen=True, slots=True)
class Damage:
    """A range of bytes in a segment that does not hold a valid record.

    Attributes:
        kind: ``torn``: the last write, interrupted by a crash; it was truncated. ``unsynced``: a
            gap among the last writes, none of which was synced; it was closed. ``header``: one of
            the two header copies, restored from the other. ``snapshot``: an incomplete snapshot,
            which is not needed. ``damaged``: stored records that are lost.
        segment: Number of the segment.
        offset: Position of the first byte in the segment.
        length: Number of bytes.
        words: Human-readable details; empty by default.

    Example:
        >>> print(Damage("torn", segment=3, offset=4096, length=17))
        segment 3, offset 4096: 17 bytes torn
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
    """Stored records cannot be read.

    No record was changed. Restore the directory from a backup, or open it with ``repair=True``,
    which keeps every valid record and sets the damaged files aside.

    Attributes:
        damage: The ranges that cannot be read.

    Example:
        >>> error = LogDamaged("cannot read segment 3")
        >>> error.damage = [Damage("damaged", segment=3, offset=4096, length=17)]
        >>> print(error.damage[0])
        segment 3, offset 4096: 17 bytes damaged
    """

    damage: Sequence[Damage] = ()


class ReadOnly(StorageError):
    """A sync failed, so the log accepts no further writes.

    It is unknown which of the last writes are on disk. Messages that were confirmed before the
    failure are safe. Check the disk, then close the engine and open it again.

    Example:
        >>> raise ReadOnly("a sync failed: close the engine and open it again")
        Traceback (most recent call last):
        qkit.errors.ReadOnly: a sync failed: close the engine and open it again
    """


class BackendUnavailable(QueueError, ConnectionError):
    """The connection to the broker failed; a retry may help.

    Example:
        >>> raise BackendUnavailable("connection refused", backend="redis", operation="ping")
        Traceback (most recent call last):
        qkit.errors.BackendUnavailable: connection refused [backend=redis operation=ping]
    """


class CircuitOpen(BackendUnavailable):
    """The circuit breaker is open after repeated connection failures; the call was not attempted.

    Example:
        >>> raise CircuitOpen("5 connection failures in a row", backend="redis")
        Traceback (most recent call last):
        qkit.errors.CircuitOpen: 5 connection failures in a row [backend=redis]
    """


class SubscriptionLost(BackendUnavailable):
    """A consumer's subscription broke; the consumer reopens it with backoff.

    Example:
        >>> raise SubscriptionLost("the connection was closed", queue="orders")
        Traceback (most recent call last):
        qkit.errors.SubscriptionLost: the connection was closed [queue=orders]
    """


class Signal(Exception):
    """Base class of the exceptions with which a handler controls what happens to its message.

    Example:
        >>> [issubclass(kind, Signal) for kind in (Retry, Reject, Unavailable, BatchError)]
        [True, True, True, True]
    """


class Retry(Signal):
    """Retry this message.

    The attempt counts as failed; after the last allowed attempt the message is dead-lettered.

    Args:
        reason: Why the message is retried, for logs and dead letters.
        delay: Seconds until the next attempt; by default the channel's backoff.

    Raises:
        ValueError: ``delay`` is negative or not a number.

    Example:
        >>> def charge(order: int) -> None:
        ...     raise Retry("the card issuer is busy", delay=5)
        >>> charge(1)
        Traceback (most recent call last):
        qkit.errors.Retry: the card issuer is busy
    """

    def __init__(self, reason: str = "", *, delay: float | None = None) -> None:
        if delay is not None and not delay >= 0:
            raise ValueError(f"Retry(delay={delay!r}): expected zero or more seconds")
        super().__init__(reason or "retry requested by the handler")
        self.delay = delay


class Reject(Signal):
    """Dead-letter this message without further attempts, with the reason ``ExplicitNack``.

    Args:
        reason: Why the message is rejected, for logs and the dead letter.

    Example:
        >>> def charge(total: int) -> None:
        ...     if total < 0:
        ...         raise Reject("negative total")
        >>> charge(-1)
        Traceback (most recent call last):
        qkit.errors.Reject: negative total
    """

    def __init__(self, reason: str = "rejected by the handler") -> None:
        super().__init__(reason)
        self.reason = reason


class Unavailable(Signal):
    """Release this message without counting an attempt, and pause its channel.

    Raise it when a dependency of the handler is down. After the pause, one message is tried; if it
    succeeds, the channel resumes.

    Args:
        reason: What is unavailable, for logs.
        retry_after: Length of the pause in seconds; by default the channel's backoff.

    Raises:
        ValueError: ``retry_after`` is negative or not a number.

    Example:
        >>> def charge(order: int) -> None:
        ...     raise Unavailable("the card issuer is down", retry_after=30)
        >>> charge(1)
        Traceback (most recent call last):
        qkit.errors.Unavailable: the card issuer is down
    """

    def __init__(self, reason: str = "", *, retry_after: float | None = None) -> None:
        if retry_after is not None and not retry_after >= 0:
            raise ValueError(
                f"Unavailable(retry_after={retry_after!r}): expected zero or more seconds"
            )
        super().__init__(reason or "a dependency is unavailable")
        self.retry_after = retry_after


class BatchError(Signal):
    """Settle the messages of a batch individually.

    Args:
        failures: The exception of each failed message, by message id. All other messages of the
            batch are acknowledged.

    Example:
        >>> BatchError({"0190": ValueError("bad total")}).failures["0190"]
        ValueError('bad total')
    """

    def __init__(self, failures: Mapping[str, Exception]) -> None:
        super().__init__(f"{len(failures)} of the batch failed")
        self.failures: dict[str, Exception] = dict(failures)

    def __reduce__(self) -> tuple[type[BatchError], tuple[dict[str, Exception]]]:
        """Rebuild copies and pickles from the failures, not from the text."""
        return type(self), (self.failures,)
