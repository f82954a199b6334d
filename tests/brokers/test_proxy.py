"""Faults that the proxy injects, as the client and the server see them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.proxy import Proxy

END = b"end"
QUIET = 0.3  # seconds without data after which a connection counts as silent


class Echo:
    """Server that echoes data twice until ``END``, and records how each connection ended."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.ended: list[str] = []
        self.some_ended = threading.Condition()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(peer,), daemon=True).start()

    def _echo(self, peer: socket.socket) -> None:
        how = "closed"
        with peer:
            try:
                while (data := peer.recv(1_000)) not in (b"", END):
                    peer.sendall(data * 2)
            except OSError:
                how = "reset"
        with self.some_ended:
            self.ended.append(how)
            self.some_ended.notify_all()

    def wait_for_ends(self, count: int) -> list[str]:
        with self.some_ended:
            assert self.some_ended.wait_for(lambda: len(self.ended) >= count, 60)
        return self.ended

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(echo.port) as proxy:
        yield proxy


@contextmanager
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as connection:
        yield connection


def talk(connection: socket.socket, word: bytes = b"ab") -> None:
    connection.sendall(word)
    assert connection.recv(100) == word * 2


def silent(connection: socket.socket) -> None:
    connection.settimeout(QUIET)
    with pytest.raises(TimeoutError):
        connection.recv(100)
    connection.settimeout(30)


def test_data_is_forwarded_and_counted(proxy: Proxy) -> None:
    with client(proxy) as one, client(proxy) as two:
        talk(one)
        talk(one)
        talk(two, b"xyz")
        assert [(way.sent, way.received) for way in proxy.connections] == [(4, 8), (3, 6)]
        assert proxy.open_connections == 2


def test_a_reset_reaches_both_sides_and_new_connections_work(echo: Echo, proxy: Proxy) -> None:
    with client(proxy) as connection:
        talk(connection)
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            connection.recv(100)
    assert echo.wait_for_ends(1) == ["reset"]
    with client(proxy) as connection:
        talk(connection)
        assert proxy.open_connections == 1


def test_a_half_closed_client_reads_end_of_file_and_can_still_send(
    echo: Echo, proxy: Proxy
) -> None:
    with client(proxy) as connection:
        talk(connection)
        proxy.half_close()
        assert connection.recv(100) == b""
        connection.sendall(b"into the void")
        assert echo.ended == []
        with client(proxy) as other:
            talk(other)
    assert "reset" in echo.wait_for_ends(1)


def test_a_black_hole_holds_data_back_until_it_ends(echo: Echo, proxy: Proxy) -> None:
    with client(proxy) as connection:
        talk(connection)
        proxy.black_hole()
        connection.sendall(b"held")
        silent(connection)
        with client(proxy) as late:  # accepted, but no data is forwarded
            late.sendall(b"late")
            silent(late)
            with client(proxy):
                pass  # closed during the fault, so the server never sees this connection
            proxy.heal()
            assert connection.recv(100) == b"heldheld"
            assert late.recv(100) == b"latelate"
    assert proxy.connections[0].sent == 6


def test_a_forgotten_connection_receives_no_more_data(echo: Echo, proxy: Proxy) -> None:
    with client(proxy) as connection:
        talk(connection)
        proxy.black_hole()
        with client(proxy) as late:
            late.sendall(b"late")
            silent(late)
            proxy.heal(forget=True)
            assert echo.wait_for_ends(1) == ["reset"]
            connection.sendall(b"no reply expected")
            silent(connection)
            silent(late)
        with client(proxy) as fresh:
            talk(fresh)


def test_hold_replies_forwards_requests_and_holds_replies_back(echo: Echo, proxy: Proxy) -> None:
    with client(proxy) as connection:
        talk(connection)
        proxy.hold_replies()
        connection.sendall(b"held")
        silent(connection)
        assert (proxy.connections[0].sent, proxy.connections[0].received) == (6, 4)
        proxy.heal()
        assert connection.recv(100) == b"heldheld"


def test_refuse_resets_connections_and_refuses_new_ones(proxy: Proxy) -> None:
    with client(proxy) as connection:
        talk(connection)
        proxy.refuse()
        with pytest.raises(ConnectionResetError):
            connection.recv(100)
    with pytest.raises(ConnectionRefusedError), client(proxy):
        pass
    proxy.heal()
    with client(proxy) as connection:
        talk(connection)


def test_a_client_that_closes_resets_its_server_connection(echo: Echo, proxy: Proxy) -> None:
    with client(proxy) as connection:
        talk(connection)
    assert echo.wait_for_ends(1) == ["reset"]


def test_a_server_that_closes_ends_its_client_connection(proxy: Proxy) -> None:
    with client(proxy) as connection:
        talk(connection)
        connection.sendall(END)
        assert connection.recv(100) == b""


def test_a_client_is_reset_if_the_server_is_down(echo: Echo, proxy: Proxy) -> None:
    proxy.target = 1  # a privileged port without a server
    # The reset may arrive while the client connects.
    with pytest.raises(ConnectionResetError), client(proxy) as connection:
        connection.recv(100)
