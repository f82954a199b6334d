"""Watchdog thread that responds with 503 while the event loop is blocked.

A blocked loop cannot respond to a probe. The thread counts the heartbeats of the loop. While there
are none, it accepts connections on the server's socket and responds to each with 503. It logs the
stack of the blocked loop once.

A handler that blocks while holding the GIL also blocks this thread. In that case, only the probe's
timeout detects it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Self

from qkit._internal.logging import Lines, logger

__all__ = ["LoopWatchdog"]

HEARTBEAT_SECONDS = 0.5
BLOCKED_AFTER_SECONDS = 3.0  # without a heartbeat
MAX_REQUEST_BYTES = 8_192
REQUEST_TIMEOUT_SECONDS = 1.0


class LoopWatchdog:
    """Context manager that watches the running loop and responds in its place if it is blocked.

    Args:
        listener: Socket on which the loop's server listens; both accept connections from it.
        blocked_after: Seconds without a heartbeat after which the loop counts as blocked.
            Default: 3.
    """

    def __init__(
        self, listener: socket.socket, *, blocked_after: float = BLOCKED_AFTER_SECONDS
    ) -> None:
        self._listener = listener.dup()
        self._listener_poll = select.poll()  # select() supports only descriptors below 1024
        self._listener_poll.register(self._listener, select.POLLIN)
        self._allowed = max(1, round(blocked_after / HEARTBEAT_SECONDS))
        self._heartbeats = 0
        self._timer: asyncio.TimerHandle | None = None
        self._loop_thread = threading.get_ident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="qkit loop watchdog", daemon=True)

    def __enter__(self) -> Self:
        """Start the thread; must be called in the loop's thread."""
        self._heartbeat(asyncio.get_running_loop())
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the thread."""
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()
        self._thread.join(2 * HEARTBEAT_SECONDS + REQUEST_TIMEOUT_SECONDS)
        self._listener.close()

    def _heartbeat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._heartbeats += 1
        self._timer = loop.call_later(HEARTBEAT_SECONDS, self._heartbeat, loop)

    def _watch(self) -> None:
        # Count heartbeats instead of measuring time: a suspended process misses none.
        seen, missed = 0, 0
        while not self._stopped.wait(0 if missed > self._allowed else HEARTBEAT_SECONDS):
            if self._heartbeats != seen:
                if missed > self._allowed:
                    blocked = missed * HEARTBEAT_SECONDS
                    logger.warning(
                        "the event loop runs again after it was blocked for %.1f s", blocked
                    )
                seen, missed = self._heartbeats, 0
                continue
            missed += 1
            if missed == self._allowed + 1:
                self._report(missed * HEARTBEAT_SECONDS)
            if missed > self._allowed:
                self._answer_for(HEARTBEAT_SECONDS, missed * HEARTBEAT_SECONDS)

    def _report(self, seconds: float) -> None:
        # The function has a private name, but is documented for debugging.
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        frame = frames.get(self._loop_thread)
        stack = "".join(traceback.format_stack(frame)[-8:]) if frame else ""
        logger.error(
            "the event loop has been blocked for %.1f s and does not respond to probes; it is "
            "blocked here:\n%s",
            seconds,
            Lines(stack),
        )

    def _answer_for(self, seconds: float, blocked: float) -> None:
        """Wait up to ``seconds`` for one connection and respond to it."""
        with contextlib.suppress(OSError):  # the loop accepted it first, or the client disconnected
            if not self._listener_poll.poll(1000 * seconds):
                return
            connection, _ = self._listener.accept()
            with connection:
                connection.settimeout(REQUEST_TIMEOUT_SECONDS)
                self._answer(connection, blocked)

    def _answer(self, connection: socket.socket, blocked: float) -> None:
        request = b""
        deadline = time.monotonic() + REQUEST_TIMEOUT_SECONDS  # also for one byte at a time
        while b"\r\n\r\n" not in request and len(request) < MAX_REQUEST_BYTES:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = connection.recv(MAX_REQUEST_BYTES)
            if not part:
                return
            request += part
        reason = f"the event loop has been blocked for {blocked:.1f} s"
        body = json.dumps({"status": "blocked", "reason": reason}).encode()
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\n"
            "X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        # Closing with unread bytes would reset the connection before the client reads the response.
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(TimeoutError):
            while time.monotonic() < deadline and connection.recv(MAX_REQUEST_BYTES):
                pass
