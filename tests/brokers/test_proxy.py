"""The proxy's faults are what they are called, seen from both sides of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.proxy import Proxy

END = b"end"
QUIET = 0.3  # seconds in which nothing may arrive


class Echo:
    """Says everything twice until it hears ``END``; ``ended`` tells how connections ended."""

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


def test_it_passes_on_and_counts(proxy: Proxy) -> None:
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


def test_a_half_closed_client_hears_the_end_and_may_go_on_talking(echo: Echo, proxy: Proxy) -> None:
    with client(proxy) as connection:
        talk(connection)
        proxy.half_close()
        assert connection.recv(100) == b""
        connection.sendall(b"into the void")
        assert echo.ended == []
        with client(proxy) as other:
            talk(other)
    assert "reset" in echo.wait_for_ends(1)


def test_a_black_hole_answers_nothing_and_gives_it_all_back(echo: Echo, proxy: Proxy) -> None:
    with client(proxy) as connection:
        talk(connection)
        proxy.black_hole()
        connection.sendall(b"held")
        silent(connection)
        with client(proxy) as late:  # accepted, and no more
            late.sendall(b"late")
            silent(late)
            with client(proxy):
                pass  # gives up in the hole: the server never hears of it
            proxy.heal()
            assert connection.recv(100) == b"heldheld"
            assert late.recv(100) == b"latelate"
    assert proxy.connections[0].sent == 6


def test_a_forgotten_connection_stays_silent_for_ever(echo: Echo, proxy: Proxy) -> None:
    with client(proxy) as connection:
        talk(connection)
        proxy.black_hole()
        with client(proxy) as late:
            late.sendall(b"late")
            silent(late)
            proxy.heal(forget=True)
            assert echo.wait_for_ends(1) == ["reset"]
            connection.sendall(b"is anybody there?")
            silent(connection)
            silent(late)
        with client(proxy) as fresh:
            talk(fresh)


def test_replies_are_held_and_requests_are_not(echo: Echo, proxy: Proxy) -> None:
    with client(proxy) as connection:
        talk(connection)
        proxy.hold_replies()
        connection.sendall(b"held")
        silent(connection)
        assert (proxy.connections[0].sent, proxy.connections[0].received) == (6, 4)
        proxy.heal()
        assert connection.recv(100) == b"heldheld"


def test_nobody_listens_while_it_refuses(proxy: Proxy) -> None:
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


def test_a_client_that_closes_is_gone_for_the_server(echo: Echo, proxy: Proxy) -> None:
    with client(proxy) as connection:
        talk(connection)
    assert echo.wait_for_ends(1) == ["reset"]


def test_a_server_that_closes_is_gone_for_the_client(proxy: Proxy) -> None:
    with client(proxy) as connection:
        talk(connection)
        connection.sendall(END)
        assert connection.recv(100) == b""


def test_a_client_of_a_server_that_is_not_there_is_reset(echo: Echo, proxy: Proxy) -> None:
    proxy.target = 1  # nobody may listen there but the system
    # The reset may come as early as the connection.
    with pytest.raises(ConnectionResetError), client(proxy) as connection:
        connection.recv(100)
