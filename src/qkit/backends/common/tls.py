"""The TLS context of a client."""

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
    """Return a context that verifies the server.

    Args:
        ca_file: Authorities to trust, PEM; the system's by default.
        cert_file: Client certificate, PEM; none by default.
        key_file: Its key, PEM; by default ``cert_file`` holds it too.
        backend: Name of the backend, for the error.
        operation: Operation that connects, for the error.

    Raises:
        ConfigError: A file cannot be read, or is not what its setting says.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file)
    except OSError as error:  # ssl.SSLError too
        raise ConfigError(
            "the TLS files cannot be used: check tls_ca_file, tls_cert_file and tls_key_file "
            f"({error.strerror or type(error).__name__})",
            backend=backend,
            operation=operation,
            cause=error,
        ) from error
    return context
