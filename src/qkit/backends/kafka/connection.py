"""Connection parameters of the driver's clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from qkit.backends.common.tls import client_context
from qkit.backends.kafka.errors import BACKEND

__all__ = ["ConnectionParameters"]

REQUEST_TIMEOUT_SECONDS: Final = 5.0  # after this time a connection counts as lost
RETRY_BACKOFF_SECONDS: Final = 0.05


class ConnectionParameters:
    """Broker addresses, timeout, credentials and TLS files.

    Args:
        brokers: Broker addresses, ``host:port``, separated by commas.
        timeout: Seconds to wait for a response or for the confirmation of a send; 10 by default.
        sasl_mechanism: SASL mechanism; no authentication by default.
        sasl_username: SASL user name.
        sasl_password: SASL password.
        tls: Whether to use TLS; implied if a TLS file is set.
        tls_ca_file: PEM file of trusted CA certificates; those of the system by default.
        tls_cert_file: PEM file of the client certificate; none by default.
        tls_key_file: PEM file of its private key; not needed if ``tls_cert_file`` contains the key.
    """

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
        """Return the keyword arguments for a client of the driver.

        Args:
            request_timeout: Timeout of a request in seconds; by default the smaller of ``timeout``
                and ``REQUEST_TIMEOUT_SECONDS``.

        Raises:
            ConfigError: A TLS file cannot be read or is not valid.
        """
        if request_timeout is None:
            request_timeout = min(REQUEST_TIMEOUT_SECONDS, self.timeout)
        tls: dict[str, Any] = {}
        if self._tls:
            tls["ssl_context"] = client_context(*self._files, backend=BACKEND, operation="start")
        return {
            "bootstrap_servers": self.brokers,
            "client_id": "qkit",
            "request_timeout_ms": round(request_timeout * 1000),
            "retry_backoff_ms": round(RETRY_BACKOFF_SECONDS * 1000),
            "security_protocol": ("SASL_" if self._login else "")
            + ("SSL" if self._tls else "PLAINTEXT"),
            **self._login,
            **tls,
        }
