"""Translation of the driver's errors into ``QueueError`` and its subclasses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from qkit._internal.text import error_text
from qkit.backends.kafka.driver import errors
from qkit.errors import (
    AckDeadlineExceeded,
    BackendUnavailable,
    ConfigError,
    PayloadTooLarge,
    QueueError,
    QueueNotFound,
    SendTimeout,
)

__all__ = ["BACKEND", "DRIVER_ERRORS", "to_queue_error", "translate_errors"]

BACKEND: Final = "kafka"

DRIVER_ERRORS: Final = (
    errors.KafkaError,
    errors.ConsumerStoppedError,
    errors.IllegalOperation,
    OSError,
    TimeoutError,
)


@asynccontextmanager
async def translate_errors(operation: str, queue: str | None = None) -> AsyncGenerator[None, None]:
    """Raise each error of the driver inside the block as a ``QueueError`` with its cause."""
    try:
        yield
    except QueueError:
        raise
    except DRIVER_ERRORS as error:
        raise to_queue_error(error, operation, queue) from error


def to_queue_error(error: BaseException, operation: str, queue: str | None = None) -> QueueError:
    """Return the ``QueueError`` for an error of the driver; the most specific kinds come first."""
    retriable = bool(getattr(error, "retriable", False))
    kind, text = next(
        (meaning for kinds, meaning in _MEANINGS.items() if isinstance(error, kinds)),
        (BackendUnavailable, "Kafka cannot do it now") if retriable else (QueueError, "refused"),
    )
    said = error_text(error)[:300] or type(error).__name__
    return kind(f"{text} ({said})", backend=BACKEND, operation=operation, queue=queue, cause=error)


_MEANINGS: Final[Mapping[Any, tuple[type[QueueError], str]]] = {
    (errors.MessageSizeTooLargeError, errors.RecordListTooLargeError, errors.RecordTooLargeError): (
        PayloadTooLarge,
        "the message is larger than the topic takes: raise its max.message.bytes",
    ),
    (errors.UnknownTopicOrPartitionError,): (
        QueueNotFound,
        "there is no such topic: declare it, or send to it first",
    ),
    (errors.SaslAuthenticationFailed, errors.AuthenticationFailedError): (
        BackendUnavailable,
        "Kafka refuses the login: check sasl_username and sasl_password",
    ),
    (
        errors.UnsupportedSaslMechanismError,
        errors.IllegalSaslStateError,
        errors.AuthenticationMethodNotSupported,
    ): (ConfigError, "Kafka does not take this way to log in: check sasl_mechanism"),
    (
        errors.TopicAuthorizationFailedError,
        errors.GroupAuthorizationFailedError,
        errors.ClusterAuthorizationFailedError,
        errors.TransactionalIdAuthorizationFailed,
    ): (ConfigError, "the user may not do this on Kafka: grant it, or use another user"),
    (errors.InvalidTopicError,): (
        ConfigError,
        "Kafka takes no topic of this name: choose another, or a prefix",
    ),
    (errors.InvalidReplicationFactorError,): (
        ConfigError,
        "replicas is more than the brokers that run: add brokers, or lower it",
    ),
    (
        errors.InvalidPartitionsError,
        errors.InvalidConfigurationError,
        errors.PolicyViolationError,
        errors.InvalidReplicationAssignmentError,
    ): (ConfigError, "Kafka refuses a topic like this"),
    (
        errors.InconsistentGroupProtocolError,
        errors.InvalidGroupIdError,
        errors.InvalidSessionTimeoutError,
    ): (
        ConfigError,
        "another program consumes with this group: set another group_prefix",
    ),
    (errors.UnsupportedCodecError,): (
        ConfigError,
        "a batch is compressed and the codec to read it is not installed: install the library "
        "cramjam, which the extra 'kafka' includes, and start again; nothing is skipped",
    ),
    (errors.CorruptRecordException,): (
        QueueError,
        "a batch in the log cannot be read: it is damaged, or written in a form that aiokafka does "
        "not know",
    ),
    (errors.UnsupportedVersionError, errors.IncompatibleBrokerVersion): (
        ConfigError,
        "this Kafka is too old for that",
    ),
    (
        errors.CommitFailedError,
        errors.IllegalGenerationError,
        errors.UnknownMemberIdError,
        errors.RebalanceInProgressError,
    ): (AckDeadlineExceeded, "the partition went to another consumer"),
    (errors.KafkaTimeoutError,): (SendTimeout, "Kafka did not confirm in time"),
    (errors.NotEnoughReplicasError, errors.NotEnoughReplicasAfterAppendError): (
        BackendUnavailable,
        "too few replicas are in sync",
    ),
    (errors.RequestTimedOutError, TimeoutError): (
        BackendUnavailable,
        "Kafka did not answer in time",
    ),
    (
        errors.ProducerClosed,
        errors.ProducerFenced,
        errors.OutOfOrderSequenceNumber,
        errors.UnknownProducerId,
        errors.InvalidProducerEpoch,
        errors.InvalidProducerIdMapping,
        errors.ConsumerStoppedError,
        errors.IllegalStateError,
    ): (BackendUnavailable, "the connection was given up and is made anew"),
    (
        errors.KafkaConnectionError,
        errors.NoBrokersAvailable,
        errors.NodeNotReadyError,
        errors.BrokerNotAvailableError,
        errors.KafkaUnavailableError,
        OSError,
    ): (BackendUnavailable, "the connection to Kafka failed"),
}
