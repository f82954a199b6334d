"""Readiness probes in the protocol of each server; a probe raises until the server is ready."""

from __future__ import annotations

import random
import socket
import struct
from pathlib import Path

HOST = "127.0.0.1"
TIMEOUT_SECONDS = 5.0


class NotReady(Exception):
    """The server accepted the connection but is not ready yet."""


def redis(port: int) -> None:
    """Check that the server replies to PING; it replies -LOADING while it loads its data."""
    with _connect(port) as connection:
        connection.sendall(b"PING\r\n")
        answer = connection.recv(128)
    if not answer.startswith(b"+PONG"):
        raise NotReady(f"Redis replied {answer!r} to PING")


def amqp(port: int, user: str = "guest", password: str = "guest") -> None:
    """Check that RabbitMQ sends connection.tune, which means that it accepts the credentials."""
    with _connect(port) as connection:
        connection.sendall(b"AMQP\x00\x00\x09\x01")
        _expect_connection_method(connection, 10, "connection.start")
        response = f"\0{user}\0{password}".encode()
        arguments = (
            struct.pack(">HHI", 10, 11, 0)  # connection.start-ok, empty client properties
            + b"\x05PLAIN"
            + struct.pack(">I", len(response))
            + response
            + b"\x05en_US"
        )
        frame = struct.pack(">BHI", 1, 0, len(arguments)) + arguments + b"\xce"
        connection.sendall(frame)
        _expect_connection_method(connection, 30, "connection.tune")


def kafka(port: int) -> None:
    """Check that the metadata lists a broker; a node lists itself when it is no longer fenced."""
    client = b"qkit-probe"
    header = struct.pack(">hhih", 3, 1, 1, len(client)) + client  # Metadata, version 1
    request = header + struct.pack(">i", 0)  # no topics
    with _connect(port) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", _read(connection, 4))
        _correlation, brokers = struct.unpack(">ii", _read(connection, size)[:8])
    if brokers < 1:
        raise NotReady("Kafka lists no broker yet")


def free_port() -> int:
    """Return a free port below the ephemeral range, which outgoing connections use.

    In the ephemeral range, another program's connection could take the port of a stopped broker,
    and a client that keeps connecting to a closed port can end up connected to itself.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    first, last = (10_000, lowest - 1) if lowest > 11_000 else (20_000, 60_000)
    for _ in range(1_000):
        port = random.randint(first, last)
        if is_free(port):
            return port
    raise OSError(f"no free port between {first} and {last}")


def is_free(port: int) -> bool:
    with socket.socket() as candidate:
        # Like servers, ignore connections of an earlier server in TIME_WAIT.
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((HOST, port))
        except OSError:
            return False
    return True


def _connect(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=TIMEOUT_SECONDS)


def _expect_connection_method(connection: socket.socket, method: int, name: str) -> None:
    _type, _channel, size = struct.unpack(">BHI", _read(connection, 7))
    class_id, method_id = struct.unpack(">HH", _read(connection, size + 1)[:4])
    if (class_id, method_id) != (10, method):
        raise NotReady(f"RabbitMQ sent method {class_id}.{method_id} instead of {name}")


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise NotReady("the server closed the connection")
        data += chunk
    return data
