"""Is the server ready? Each probe speaks the server's own protocol and raises until it is."""

from __future__ import annotations

import random
import socket
import struct
from pathlib import Path

HOST = "127.0.0.1"
TIMEOUT_SECONDS = 5.0


class NotReady(Exception):
    """The server answered, but not (yet) as a server that can take work."""


def redis(port: int) -> None:
    """PING; a server that still loads its append-only file answers -LOADING."""
    with _connect(port) as connection:
        connection.sendall(b"PING\r\n")
        answer = connection.recv(128)
    if not answer.startswith(b"+PONG"):
        raise NotReady(f"Redis said {answer!r}")


def amqp(port: int, user: str = "guest", password: str = "guest") -> None:
    """Log in as far as connection.tune, which RabbitMQ sends only to accepted credentials."""
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
    """Ask for metadata; ready means that the node lists itself as a broker that is not fenced."""
    client = b"qkit-probe"
    header = struct.pack(">hhih", 3, 1, 1, len(client)) + client  # Metadata, version 1
    request = header + struct.pack(">i", 0)  # of no topics
    with _connect(port) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", _read(connection, 4))
        _correlation, brokers = struct.unpack(">ii", _read(connection, size)[:8])
    if brokers < 1:
        raise NotReady("Kafka lists no broker yet")


def free_port() -> int:
    """A free port below the range that the kernel gives to outgoing connections.

    From inside that range another program's connection could take a stopped broker's port, and a
    client that keeps dialling a dead port there can end up connected to itself.
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
        # As servers do: connections of a former server that linger in TIME_WAIT do not matter.
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
