"""Authentication and TLS: PLAIN, SCRAM, certificates, and errors of rejected logins."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaClient
from aiokafka.protocol.api import RequestStruct, Response
from aiokafka.protocol.types import (
    CompactArray,
    CompactBytes,
    CompactString,
    Int8,
    Int16,
    Int32,
    Schema,
    TaggedFields,
)

from local_brokers.probes import free_port
from qkit import ConfigError, QueueService, Settings, consume
from qkit.backends.kafka.backend import KafkaBackend
from qkit.errors import BackendUnavailable, QueueError
from tests.support.private_brokers import private_broker
from tests.support.waiting import eventually

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(240)]

CANARY = "canary-4f1c"  # a password that must not appear in any output
MODULE = "org.apache.kafka.common.security"


@dataclass(frozen=True)
class Secured:
    """Ports of a broker with a listener for each kind of login, and the certificate directory."""

    plain: int
    scram: int
    tls: int
    mutual: int
    files: Path


def certificates(directory: Path) -> None:
    """Write the certificates and keys of a CA, a server and a client."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    subject = ("-subj", "/CN=localhost", "-nodes", "-newkey", "rsa:2048")
    openssl("req", "-x509", *subject, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2")
    (directory / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for role in ("server", "client"):
        openssl("req", *subject, "-keyout", f"{role}.key", "-out", f"{role}.csr")
        openssl(
            *("x509", "-req", "-in", f"{role}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-out", f"{role}.pem", "-days", "2", "-extfile", "names"),
        )
    store = (directory / "server.key").read_text() + (directory / "server.pem").read_text()
    (directory / "server-store.pem").write_text(store)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    files = tmp_path_factory.mktemp("tls")
    certificates(files)
    site = Secured(free_port(), free_port(), free_port(), free_port(), files)
    ports = {"SPLAIN": site.plain, "SSCRAM": site.scram, "STLS": site.tls, "SMUTUAL": site.mutual}
    listeners = [f"{listener}://127.0.0.1:{port}" for listener, port in ports.items()]
    protocols = {"SPLAIN": "SASL_PLAINTEXT", "SSCRAM": "SASL_SSL", "STLS": "SSL", "SMUTUAL": "SSL"}
    tls = [
        ("ssl.keystore.type", "PEM"),
        ("ssl.keystore.location", files / "server-store.pem"),
        ("ssl.truststore.type", "PEM"),
        ("ssl.truststore.location", files / "ca.pem"),
    ]
    settings = [
        "listeners=PLAINTEXT://127.0.0.1:{kafka},CONTROLLER://127.0.0.1:{controller},"
        + ",".join(listeners),
        "advertised.listeners=PLAINTEXT://127.0.0.1:{kafka}," + ",".join(listeners),
        "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,"
        + ",".join(f"{listener}:{protocol}" for listener, protocol in protocols.items()),
        "inter.broker.listener.name=PLAINTEXT",
        "sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
        f"listener.name.splain.plain.sasl.jaas.config={MODULE}.plain.PlainLoginModule required "
        f'user_me="{CANARY}";',
        "listener.name.splain.sasl.enabled.mechanisms=PLAIN",
        f"listener.name.sscram.scram-sha-256.sasl.jaas.config={MODULE}.scram.ScramLoginModule "
        "required;",
        f"listener.name.sscram.scram-sha-512.sasl.jaas.config={MODULE}.scram.ScramLoginModule "
        "required;",
        "listener.name.sscram.sasl.enabled.mechanisms=SCRAM-SHA-256,SCRAM-SHA-512",
        "listener.name.smutual.ssl.client.auth=required",
        *(
            f"listener.name.{listener}.{name}={value}"
            for listener in ("sscram", "stls", "smutual")
            for name, value in tls
        ),
    ]
    with private_broker("kafka", settings=settings) as broker:
        add_scram_user(broker.url)
        yield site


def add_scram_user(url: str) -> None:
    """Add a SCRAM user with a raw request, because the server's jars do not include the tool."""

    async def add() -> None:
        client = AIOKafkaClient(bootstrap_servers=url)
        await client.bootstrap()
        try:
            for mechanism, kind in ((1, "sha256"), (2, "sha512")):
                request = AddScramUser(mechanism, kind)
                answer = await client.send(client.get_random_node(), request)
                assert [result[1] for result in answer.results] == [0]
        finally:
            await client.close()

    asyncio.run(add())


class AlterScramResponse(Response):  # type: ignore[misc]  # the driver has no types
    API_KEY = 51
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle", Int32),
        (
            "results",
            CompactArray(
                ("user", CompactString("utf-8")),
                ("code", Int16),
                ("text", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class AlterScramRequest(RequestStruct):  # type: ignore[misc]  # the driver has no types
    API_KEY = 51
    API_VERSION = 0
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = AlterScramResponse
    SCHEMA = Schema(
        (
            "deletions",
            CompactArray(
                ("name", CompactString("utf-8")), ("mechanism", Int8), ("tags", TaggedFields)
            ),
        ),
        (
            "upsertions",
            CompactArray(
                ("name", CompactString("utf-8")),
                ("mechanism", Int8),
                ("iterations", Int32),
                ("salt", CompactBytes),
                ("salted", CompactBytes),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class AddScramUser:
    """Request that adds the user, in the form that the driver's client expects."""

    def __init__(self, mechanism: int, kind: str) -> None:
        salt = b"0123456789abcdef"
        salted = hashlib.pbkdf2_hmac(kind, CANARY.encode(), salt, 4096)
        self._row: tuple[object, ...] = ("me", mechanism, 4096, salt, salted, {})

    def prepare(self, versions: Any) -> Any:
        return AlterScramRequest([], [self._row], {})


def login_settings(secured: Secured) -> dict[str, dict[str, Any]]:
    login = {"sasl_username": "me", "sasl_password": CANARY}
    ca_file = secured.files / "ca.pem"
    client = {
        "tls_cert_file": secured.files / "client.pem",
        "tls_key_file": secured.files / "client.key",
    }
    return {
        "plain": {"url": secured.plain, "sasl_mechanism": "PLAIN", **login},
        "scram-256": {
            "url": secured.scram, "sasl_mechanism": "SCRAM-SHA-256", "tls_ca_file": ca_file, **login
        },
        "scram-512": {
            "url": secured.scram, "sasl_mechanism": "SCRAM-SHA-512", "tls_ca_file": ca_file, **login
        },
        "tls": {"url": secured.tls, "tls_ca_file": ca_file},
        "mutual": {"url": secured.mutual, "tls_ca_file": ca_file, **client},
    }  # fmt: skip


def settings(values: dict[str, Any], **more: Any) -> Settings:
    return Settings(type="kafka", **{**values, "url": f"127.0.0.1:{values['url']}", **more})


@pytest.mark.parametrize("login", ["plain", "scram-256", "scram-512", "tls", "mutual"])
async def test_messages_are_delivered_with_each_kind_of_login(
    secured: Secured, login: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, got = f"k-{uuid.uuid4().hex[:10]}", list[str]()

    @consume(name)
    async def handle(body: str) -> None:
        got.append(body)

    with caplog.at_level(logging.DEBUG):
        service = QueueService(settings(login_settings(secured)[login]))
        service.register(handle)
        async with service:
            assert isinstance(service._backend, KafkaBackend)
            await service.send(name, "a")
            await eventually(lambda: got == ["a"])
            output = f"{service.health_check()} {service.settings!r} {service._backend.__dict__}"
    assert CANARY not in output
    assert CANARY not in caplog.text


@pytest.mark.parametrize(
    ("login", "wrong", "error"),
    [
        ("plain", {"sasl_password": "wrong"}, BackendUnavailable),
        ("plain", {"sasl_mechanism": "SCRAM-SHA-256"}, QueueError),
        ("scram-256", {"sasl_password": "wrong"}, BackendUnavailable),
        ("tls", {"tls_ca_file": None, "tls": True}, BackendUnavailable),
        ("mutual", {"tls_cert_file": None, "tls_key_file": None}, BackendUnavailable),
    ],
)
async def test_a_rejected_login_raises_an_error(
    secured: Secured,
    login: str,
    wrong: dict[str, Any],
    error: type[QueueError],
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = QueueService(settings(login_settings(secured)[login] | wrong, send_timeout=5.0))
    with pytest.raises(error) as caught:
        await service.start()
    assert CANARY not in f"{caught.value!r} {caught.value} {caplog.text}"


async def test_an_invalid_certificate_raises_config_error(tmp_path: Path) -> None:
    broken = tmp_path / "ca.pem"
    broken.write_text("not a certificate")
    service = QueueService(Settings(type="kafka", url="127.0.0.1:1", tls_ca_file=broken))
    with pytest.raises(ConfigError, match="tls_ca_file"):
        await service.start()
