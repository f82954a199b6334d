"""The three questions of whoever looks after the process: alive, ready, and how is it?

``/livez`` answers 200 as long as the event loop does; a loop that is blocked cannot answer, and
under ``serve`` a thread answers 503 in its place. ``/readyz`` is 200 while the service does its
work: started, connected, every consumer alive, not asked to stop.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.responses import Response

from qkit.observability.health import Health
from qkit.service import QueueService
from qkit.web.responses import answer

__all__ = ["Probe", "health", "liveness", "readiness"]


@dataclass(frozen=True, slots=True)
class Probe:
    """The answer to a probe; ``reason`` is there when it is no."""

    status: str
    reason: str | None = None


def liveness(service: QueueService) -> Response:
    """Whether the process can still do anything: it can, for it answers."""
    return answer(Probe("alive"))


def readiness(service: QueueService) -> Response:
    """Whether it does its work now."""
    state = service.health_check()
    if state.status == "healthy":
        return answer(Probe("ready"))
    return answer(Probe("not ready", _reason(service, state)), 503)


def health(service: QueueService) -> Response:
    """All there is to know; 503 while it is not ready."""
    state = service.health_check()
    return answer(state, 200 if state.status == "healthy" else 503)


def _reason(service: QueueService, state: Health) -> str:
    """In few words, and without what an error's text may tell: every Host may ask."""
    if service.stopping:
        return "shutting down"
    if state.connection_state != "connected":
        return f"connection {state.connection_state}"
    failing = [item for item in state.consumers if item.failing]
    if failing:
        return f"{len(failing)} of {len(state.consumers)} consumers cannot settle or read messages"
    idle = [item for item in state.consumers if item.state not in ("consuming", "paused")]
    return f"{len(idle) or 'some'} of {len(state.consumers)} consumers do not consume"
