"""Connection parameters that every client of the driver is created with."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, Final

from qkit.backends.kafka.errors import BACKEND
from qkit.errors import ConfigError

__all__ = ["ConnectionParameters"]

REQUEST_TIMEOUT_SECONDS: Final = 5.0  # then a request is lost, and its connection dead
RETRY_BACKOFF_SECONDS: Final = 0.05


class ConnectionParameters:
    """Addresses of the brokers, login and TLS files."""

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
        if request_timeout is None:
            request_timeout = min(REQUEST_TIMEOUT_SECONDS, self.timeout)
        return {
            "bootstrap_servers": self.brokers,
            "client_id": "qkit",
            "request_timeout_ms": round(request_timeout * 1000),
            "retry_backoff_ms": round(RETRY_BACKOFF_SECONDS * 1000),
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
