"""Probes: liveness, readiness and health of a service.

``/livez`` returns 200 while the event loop runs. If the loop is blocked, a thread started by
``serve`` returns 503 in its place. ``/readyz`` returns 200 while the service is ready: started,
connected, not stopping, and all consumers consuming or paused.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.responses import Response

from qkit.observability.health import Health
from qkit.service import QueueService
from qkit.web.responses import json_response

__all__ = ["Probe", "health", "liveness", "readiness"]


@dataclass(frozen=True, slots=True)
class Probe:
    """Response to a probe; ``reason`` is set if it fails."""

    status: str
    reason: str | None = None


def liveness(service: QueueService) -> Response:
    """Return 200, because this function can run only if the event loop does."""
    return json_response(Probe("alive"))


def readiness(service: QueueService) -> Response:
    """Return the response to a readiness probe, for a route of your own application.

    Args:
        service: Service to check.

    Returns:
        200 if the service is ready, otherwise 503. The JSON body has ``status`` and ``reason``. The
        reason contains no error texts, because probes are public.

    Example:
        >>> from qkit import QueueService, Settings
        >>> response = readiness(QueueService(Settings(type="native")))  # not started
        >>> response.status_code
        503
        >>> response.body
        b'{"status":"not ready","reason":"connection disconnected"}'
    """
    state = service.health_check()
    if state.status == "healthy":
        return json_response(Probe("ready"))
    return json_response(Probe("not ready", _reason(service, state)), 503)


def health(service: QueueService) -> Response:
    """Return the full health report, with status 503 if the service is not ready."""
    state = service.health_check()
    return json_response(state, 200 if state.status == "healthy" else 503)


def _reason(service: QueueService, state: Health) -> str:
    """Return a short reason without error texts, because probes are public."""
    if service.stopping:
        return "shutting down"
    if state.connection_state != "connected":
        return f"connection {state.connection_state}"
    failing = [item for item in state.consumers if item.failing]
    if failing:
        return f"{len(failing)} of {len(state.consumers)} consumers cannot settle or read messages"
    idle = [
        item for item in state.consumers if item.state not in ("consuming", "standby", "paused")
    ]
    return f"{len(idle) or 'some'} of {len(state.consumers)} consumers are not consuming"
