"""Handling of SIGTERM and SIGINT while a service runs.

The first signal drains the service, the second forces it to stop. The previous signal handlers are
restored afterwards. If the event loop is still blocked ``FORCED_EXIT_DELAY_SECONDS`` after the
second signal, the default action of the signal ends the process. This module does not call
``sys.exit``; that is up to the application.

A signal can interrupt the main thread anywhere, even while it holds a lock that is not reentrant
(in logging, in ``threading.Event``, in the list of threads). So the signal handler takes no lock.
"""

from __future__ import annotations

import _thread
import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType

__all__ = ["handle_signals"]

FORCED_EXIT_DELAY_SECONDS = 1.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def handle_signals(
    loop: asyncio.AbstractEventLoop, first: Callable[[str], None], second: Callable[[str], None]
) -> Generator[None, None, None]:
    """Call ``first`` and then ``second`` in an event loop on SIGTERM and SIGINT.

    Does nothing outside the main thread, because Python delivers signals only there.

    Args:
        loop: Event loop in which the functions are called.
        first: Called with the name of the first signal.
        second: Called with the name of the second signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    count = 0
    over = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        name = signal.Signals(number).name
        if count == 1:
            call_in_loop(first, name)
        elif count == 2:
            # If the loop is blocked, ``second`` never runs. So restore the default action, and
            # send the signal again after a delay.
            signal.signal(number, signal.SIG_DFL)
            _thread.start_new_thread(kill_after_delay, (number,))  # threading.Timer takes locks
            call_in_loop(second, name)

    def call_in_loop(function: Callable[[str], None], name: str) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(function, name)

    def kill_after_delay(number: int) -> None:  # pragma: no cover  # coverage misses this thread
        time.sleep(FORCED_EXIT_DELAY_SECONDS)
        if not over:
            os.kill(os.getpid(), number)

    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        over = True
        for number, handler in previous.items():
            # None means that the handler was not installed from Python and cannot be restored.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
