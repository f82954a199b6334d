"""TLS with server and client certificates."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from local_brokers.probes import free_port
from qkit import QueueService, Settings
from qkit.errors import BackendUnavailable
from tests.support.private_brokers import private_broker

OPENSSL = shutil.which("openssl")
pytestmark = [
    pytest.mark.broker,
    pytest.mark.skipif(OPENSSL is None, reason="openssl is needed to create certificates"),
]


def openssl(*arguments: str) -> None:
    assert OPENSSL is not None
    subprocess.run([OPENSSL, *arguments], check=True, capture_output=True)


def authority(directory: Path, name: str) -> None:
    openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"),
        *("-keyout", str(directory / f"{name}.key"), "-out", str(directory / f"{name}.pem")),
    )


def certificate(directory: Path, name: str, signer: str) -> None:
    key, request = directory / f"{name}.key", directory / f"{name}.csr"
    extensions = directory / f"{name}.ext"
    extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    openssl(
        *("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"),
        *("-keyout", str(key), "-out", str(request)),
    )
    openssl(
        *("x509", "-req", "-days", "2", "-in", str(request), "-extfile", str(extensions)),
        *("-CA", str(directory / f"{signer}.pem"), "-CAkey", str(directory / f"{signer}.key")),
        *("-CAcreateserial", "-out", str(directory / f"{name}.pem")),
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the certificates of two CAs, and of a server and a client signed by the first CA."""
    directory = tmp_path_factory.mktemp("certificates")
    for name in ("ca", "other-ca"):
        authority(directory, name)
    for name in ("server", "client"):
        certificate(directory, name, "ca")
    return directory


@pytest.fixture(scope="module")
def port(files: Path) -> Iterator[int]:
    """Yield the TLS port of a private RabbitMQ broker that requires client certificates."""
    port = free_port()
    settings = [
        f"listeners.ssl.1 = 127.0.0.1:{port}",
        f"ssl_options.cacertfile = {files / 'ca.pem'}",
        f"ssl_options.certfile = {files / 'server.pem'}",
        f"ssl_options.keyfile = {files / 'server.key'}",
        "ssl_options.verify = verify_peer",
        "ssl_options.fail_if_no_peer_cert = true",
    ]
    with private_broker("rabbitmq", settings=settings):
        yield port


def service(
    port: int, files: Path, *, ca: str = "ca", client: str | None = "client"
) -> QueueService:
    own: dict[str, Any] = {}
    if client is not None:
        own = {"tls_cert_file": files / f"{client}.pem", "tls_key_file": files / f"{client}.key"}
    settings = Settings(
        type="rabbitmq",
        url=f"amqps://guest:guest@localhost:{port}/",
        tls_ca_file=files / f"{ca}.pem",
        **own,
    )
    return QueueService(settings)


async def test_a_message_is_sent_over_tls_with_server_and_client_certificates(
    port: int, files: Path
) -> None:
    async with service(port, files) as sender:
        await sender.send("secret", "a")
        assert (await sender.stats("secret")).depth == 1


async def test_a_server_certificate_signed_by_another_ca_is_rejected(
    port: int, files: Path
) -> None:
    with pytest.raises(BackendUnavailable, match="TLS"):
        await service(port, files, ca="other-ca").start()


async def test_a_client_without_a_certificate_is_rejected(port: int, files: Path) -> None:
    with pytest.raises(BackendUnavailable):
        await service(port, files, client=None).start()
