"""How to reach the brokers, and every error of the driver turned into ours."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
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

__all__ = ["BACKEND", "DRIVER_ERRORS", "Address", "error_of", "translated"]

BACKEND: Final = "kafka"
REQUEST: Final = 5.0  # seconds until a request counts as lost, and its connection as dead
BACKOFF: Final = 0.05

DRIVER_ERRORS: Final = (
    errors.KafkaError,
    errors.ConsumerStoppedError,
    errors.IllegalOperation,
    OSError,
    TimeoutError,
)


class Address:
    """Where the brokers are, and how to log in."""

    def __init__(
        self,
        brokers: str,
        *,
        timeout: float = 10.0,
        sasl_mechanism: str | None = None,
        sasl_username: str | None = None,
        sasl_password: str | None = None,
        tls: bool = False,
        tls_ca_file: str | Path | None = None,
        tls_cert_file: str | Path | None = None,
        tls_key_file: str | Path | None = None,
    ) -> None:
        self.brokers = brokers
        self.timeout = timeout
        self._login: dict[str, Any] = {}
        if sasl_mechanism is not None:
            self._login = {
                "sasl_mechanism": sasl_mechanism,
                "sasl_plain_username": sasl_username,
                "sasl_plain_password": sasl_password,
            }
        self._files = (tls_ca_file, tls_cert_file, tls_key_file)
        self._tls = tls or any(path is not None for path in self._files)

    def options(self, request_timeout: float | None = None) -> dict[str, Any]:
        """What every client of the driver is made with.

        Raises ``ConfigError`` for certificates that cannot be read.
        """
        request = min(REQUEST, self.timeout) if request_timeout is None else request_timeout
        return {
            "bootstrap_servers": self.brokers,
            "client_id": "qkit",
            "request_timeout_ms": round(request * 1000),
            "retry_backoff_ms": round(BACKOFF * 1000),
            "security_protocol": ("SASL_" if self._login else "")
            + ("SSL" if self._tls else "PLAINTEXT"),
            **self._login,
            **({"ssl_context": self._context()} if self._tls else {}),
        }

    def _context(self) -> ssl.SSLContext:
        ca_file, cert_file, key_file = self._files
        try:
            context = ssl.create_default_context(cafile=ca_file)
            if cert_file is not None:
                context.load_cert_chain(cert_file, key_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"the TLS files cannot be read: {error}; check tls_ca_file, tls_cert_file and "
                "tls_key_file",
                backend=BACKEND,
                operation="start",
            ) from error
        return context


@asynccontextmanager
async def translated(operation: str, queue: str | None = None) -> AsyncGenerator[None, None]:
    """Inside it no error of the driver escapes: each becomes a ``QueueError`` with its cause."""
    try:
        yield
    except QueueError:
        raise
    except DRIVER_ERRORS as error:
        raise error_of(error, operation, queue) from error


def error_of(error: BaseException, operation: str, queue: str | None = None) -> QueueError:
    """What an error of the driver means here; the most specific kinds come first."""
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
