"""TLS context for clients: verification and unusable files."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from qkit import ConfigError
from qkit.backends.common.tls import client_context


def test_without_files_the_server_is_verified_against_the_system_cas() -> None:
    context = client_context(None, None, None, backend="some", operation="start")
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("content", [None, b"not a certificate"], ids=["missing", "not PEM"])
def test_an_unusable_file_raises_config_error(
    tmp_path: Path, content: bytes | None, position: int
) -> None:
    path = tmp_path / "file.pem"
    if content is not None:
        path.write_bytes(content)
    ca_file, cert_file = (path, None) if position == 0 else (None, path)
    with pytest.raises(ConfigError, match="tls_ca_file, tls_cert_file and tls_key_file") as caught:
        client_context(ca_file, cert_file, None, backend="some", operation="start")
    assert (caught.value.backend, caught.value.operation) == ("some", "start")
    assert isinstance(caught.value.cause, OSError)
    assert content is not None or "No such file" in caught.value.message
