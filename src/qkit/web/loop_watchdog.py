"""Somebody to answer while the event loop does not: a thread at the same door.

A blocked loop cannot say that it is blocked, and to a probe silence may mean anything. So a thread
watches the loop's pulse, and while there is none it takes the connections that come in and answers
503 to each. It also logs where the loop hangs, once.

A handler that blocks while it holds the interpreter's lock silences the thread too; then the
probe's own time-out has to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import sys
import threading
import traceback
from types import TracebackType
from typing import Self

from qkit._internal.logging import logger

__all__ = ["StandIn"]

PULSE = 0.5  # seconds
BLOCKED_AFTER = 3.0  # seconds without a pulse
REQUEST_LIMIT = 8_192
REQUEST_PATIENCE = 1.0


class StandIn:
    """Watches the running loop for as long as the context lasts, and answers in its place.

    ``listener`` is the socket on which the loop's server listens; both may accept from it.
    """

    def __init__(self, listener: socket.socket, *, blocked_after: float = BLOCKED_AFTER) -> None:
        self._listener = listener.dup()
        self._door = select.poll()  # not select(), which knows the first 1024 files only
        self._door.register(self._listener, select.POLLIN)
        self._allowed = max(1, round(blocked_after / PULSE))
        self._pulse = 0
        self._timer: asyncio.TimerHandle | None = None
        self._loop_thread = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="qkit stand-in", daemon=True)

    def __enter__(self) -> Self:
        """Begin to watch; in the loop's thread."""
        self._beat(asyncio.get_running_loop())
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Watch no more."""
        self._over.set()
        if self._timer is not None:
            self._timer.cancel()
        self._thread.join(2 * PULSE + REQUEST_PATIENCE)
        self._listener.close()

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pulse += 1
        self._timer = loop.call_later(PULSE, self._beat, loop)

    def _watch(self) -> None:
        # Beats are counted, not timed: a process that was stopped for an hour missed none.
        seen, missed = 0, 0
        while not self._over.wait(0 if missed > self._allowed else PULSE):
            if self._pulse != seen:
                if missed > self._allowed:
                    logger.warning("the event loop runs again after %.1f s", missed * PULSE)
                seen, missed = self._pulse, 0
                continue
            missed += 1
            if missed == self._allowed + 1:
                self._report(missed * PULSE)
            if missed > self._allowed:
                self._answer_for(PULSE, missed * PULSE)

    def _report(self, seconds: float) -> None:
        # Underlined, and yet documented, for just this use.
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        frame = frames.get(self._loop_thread)
        stack = "".join(traceback.format_stack(frame)[-8:]) if frame else ""
        logger.error(
            "the event loop has been blocked for %.1f s; not even a probe is answered. It hangs "
            "here:\n%s",
            seconds,
            stack,
        )

    def _answer_for(self, seconds: float, blocked: float) -> None:
        """Take what comes in within ``seconds``."""
        with contextlib.suppress(OSError):  # the loop came first, or the client left
            if not self._door.poll(1000 * seconds):
                return
            connection, _ = self._listener.accept()
            with connection:
                connection.settimeout(REQUEST_PATIENCE)
                self._answer(connection, blocked)

    def _answer(self, connection: socket.socket, blocked: float) -> None:
        request = b""
        while b"\r\n\r\n" not in request and len(request) < REQUEST_LIMIT:
            part = connection.recv(REQUEST_LIMIT)
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
        # Closed at once, with bytes unread, the client would see a reset instead of the answer.
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(TimeoutError):
            while connection.recv(REQUEST_LIMIT):
                pass
