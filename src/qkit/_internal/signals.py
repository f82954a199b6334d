"""SIGTERM and SIGINT while ``run`` runs: the first drains, the second forces.

The previous handlers are restored afterwards. After the second signal a blocked event loop gets
two seconds less a little; then the signal's own default ends the process. No ``sys.exit`` here: a
library must not decide that for its program.

A signal interrupts the main thread anywhere, also inside a lock that is not re-entrant: one of
logging's streams, ``threading.Event``, the list of threads. So the handler itself takes none.
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
    """Call ``first`` and then ``second`` in ``loop``, with the signal's name.

    Does nothing outside the main thread, where Python delivers no signals.
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
            # If the loop is blocked nothing else can end it: restore the default, signal again.
            signal.signal(number, signal.SIG_DFL)
            _thread.start_new_thread(
                kill_after_delay, (number,)
            )  # threading.Timer would take locks
            call_in_loop(second, name)

    def call_in_loop(whom: Callable[[str], None], name: str) -> None:
        with suppress(RuntimeError):  # the loop is closed: the end is near in any case
            loop.call_soon_threadsafe(whom, name)

    def kill_after_delay(number: int) -> None:  # pragma: no cover  # coverage sees no such thread
        time.sleep(FORCED_EXIT_DELAY_SECONDS)
        if not over:
            os.kill(os.getpid(), number)

    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        over = True
        for number, handler in previous.items():
            # None: not set from Python, and so not to be restored from here.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
