"""SIGTERM and SIGINT while ``run`` runs: the first drains, the second forces.

The previous handlers are restored afterwards. After the second signal a blocked event loop gets
two seconds less a little; then the signal's own default ends the process. No ``sys.exit`` here: a
library must not decide that for its program.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

__all__ = ["catch"]

GRACE = 1.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def catch(
    first: Callable[[str], None], second: Callable[[str], None]
) -> Generator[None, None, None]:
    """Call ``first`` and then ``second`` with the signal's name; they must be thread-safe.

    Does nothing outside the main thread, where Python delivers no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    count = 0
    deadline: threading.Timer | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal count, deadline
        count += 1
        if count == 1:
            first(signal.Signals(number).name)
            return
        if deadline is None:
            # If the loop is blocked nothing else can end it: restore the default, signal again.
            signal.signal(number, signal.SIG_DFL)
            deadline = threading.Timer(GRACE, os.kill, (os.getpid(), number))
            deadline.daemon = True
            deadline.start()
            second(signal.Signals(number).name)

    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        if deadline is not None:
            deadline.cancel()
        for number, handler in previous.items():
            signal.signal(number, handler)
