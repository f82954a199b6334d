"""TLS contexts for connections to brokers."""

from __future__ import annotations

import ssl
from pathlib import Path

from qkit.errors import ConfigError

__all__ = ["client_context"]


def client_context(
    ca_file: str | Path | None,
    cert_file: str | Path | None,
    key_file: str | Path | None,
    *,
    backend: str,
    operation: str,
) -> ssl.SSLContext:
    """Return a TLS context that verifies the server's certificate.

    Args:
        ca_file: PEM file of trusted CA certificates; ``None`` for those of the system.
        cert_file: PEM file of the client certificate; ``None`` for no client certificate.
        key_file: PEM file of its private key; ``None`` if ``cert_file`` contains the key.
        backend: Name of the backend, for the error.
        operation: Name of the operation that connects, for the error.

    Raises:
        ConfigError: A file cannot be read or is not valid.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file)
    except OSError as error:  # includes ssl.SSLError
        raise ConfigError(
            f"could not load the TLS files ({error.strerror or type(error).__name__}): check "
            "tls_ca_file, tls_cert_file and tls_key_file",
            backend=backend,
            operation=operation,
            cause=error,
        ) from error
    return context
