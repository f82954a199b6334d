"""Translation of the driver's errors into ``QueueError`` and its subclasses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from qkit._internal.text import error_text
from qkit.backends.common.error_translation import ErrorTranslator
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

DRIVER_ERRORS: Final[tuple[type[Exception], ...]] = (
    errors.KafkaError,
    errors.ConsumerStoppedError,
    errors.IllegalOperation,
    OSError,
    TimeoutError,
)


def _meaning(error: BaseException) -> tuple[type[QueueError], str]:
    """Return the class and the text of the ``QueueError`` for a driver error."""
    retriable = bool(getattr(error, "retriable", False))
    kind, text = next(
        (meaning for kinds, meaning in _MEANINGS.items() if isinstance(error, kinds)),
        (BackendUnavailable, "Kafka cannot process the request now")
        if retriable
        else (QueueError, "Kafka rejected the request"),
    )
    detail = error_text(error)[:300] or type(error).__name__
    return kind, f"{text} ({detail})"


translate_errors: Final = ErrorTranslator(BACKEND, DRIVER_ERRORS, _meaning)
to_queue_error: Final = translate_errors.error

# The first match applies, so subclasses come before their base classes.
_MEANINGS: Final[Mapping[Any, tuple[type[QueueError], str]]] = {
    (errors.MessageSizeTooLargeError, errors.RecordListTooLargeError, errors.RecordTooLargeError): (
        PayloadTooLarge,
        "the message is larger than the topic allows: increase max.message.bytes of the topic",
    ),
    (errors.UnknownTopicOrPartitionError,): (
        QueueNotFound,
        "the topic does not exist: declare it, or send to it first",
    ),
    (errors.SaslAuthenticationFailed, errors.AuthenticationFailedError): (
        BackendUnavailable,
        "Kafka rejected the login: check sasl_username and sasl_password",
    ),
    (
        errors.UnsupportedSaslMechanismError,
        errors.IllegalSaslStateError,
        errors.AuthenticationMethodNotSupported,
    ): (ConfigError, "Kafka does not support this login mechanism: check sasl_mechanism"),
    (
        errors.TopicAuthorizationFailedError,
        errors.GroupAuthorizationFailedError,
        errors.ClusterAuthorizationFailedError,
        errors.TransactionalIdAuthorizationFailed,
    ): (
        ConfigError,
        "the Kafka user lacks a permission: grant the permission, or use another user",
    ),
    (errors.InvalidTopicError,): (
        ConfigError,
        "Kafka does not allow this topic name: choose another name or prefix",
    ),
    (errors.InvalidReplicationFactorError,): (
        ConfigError,
        "replicas exceeds the number of running brokers: add brokers, or decrease replicas",
    ),
    (
        errors.InvalidPartitionsError,
        errors.InvalidConfigurationError,
        errors.PolicyViolationError,
        errors.InvalidReplicationAssignmentError,
    ): (ConfigError, "Kafka rejected the configuration of the topic"),
    (
        errors.InconsistentGroupProtocolError,
        errors.InvalidGroupIdError,
        errors.InvalidSessionTimeoutError,
    ): (
        ConfigError,
        "Kafka rejected the consumer group: another program may use it; set another group_prefix",
    ),
    (errors.UnsupportedCodecError,): (
        ConfigError,
        "a compressed batch cannot be read: install cramjam, which the extra 'kafka' includes, and "
        "restart the service; no message is skipped",
    ),
    (errors.CorruptRecordException,): (
        QueueError,
        "a batch in the log cannot be read: it is corrupt, or aiokafka does not support its format",
    ),
    (errors.UnsupportedVersionError, errors.IncompatibleBrokerVersion): (
        ConfigError,
        "this Kafka version does not support the request: upgrade the brokers",
    ),
    (
        errors.CommitFailedError,
        errors.IllegalGenerationError,
        errors.UnknownMemberIdError,
        errors.RebalanceInProgressError,
    ): (AckDeadlineExceeded, "the partition was assigned to another consumer"),
    (errors.KafkaTimeoutError,): (SendTimeout, "Kafka did not confirm the messages in time"),
    (errors.NotEnoughReplicasError, errors.NotEnoughReplicasAfterAppendError): (
        BackendUnavailable,
        "too few replicas are in sync",
    ),
    (errors.RequestTimedOutError, TimeoutError): (
        BackendUnavailable,
        "Kafka did not respond in time",
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
    ): (BackendUnavailable, "the connection was closed and will be reopened"),
    (
        errors.KafkaConnectionError,
        errors.NoBrokersAvailable,
        errors.NodeNotReadyError,
        errors.BrokerNotAvailableError,
        errors.KafkaUnavailableError,
        OSError,
    ): (BackendUnavailable, "the connection to Kafka failed"),
}
