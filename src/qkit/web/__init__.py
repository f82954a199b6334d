"""qkit over HTTP: probes, metrics, a JSON API and the dashboard in one ASGI app.

Serve it beside a worker, or mount it in an existing application::

    async with serve(service, port=8710, token=token):       # serves until the service has stopped
        await service.run()

    app = FastAPI(lifespan=lifespan(service))                 # starts and drains the service
    app.mount("/queues", create_app(service, token=token))

Requires the extra ``web``; see docs/install.md.
"""

from qkit.errors import ConfigError

try:
    from qkit.web.app import create_app
    from qkit.web.lifespan import lifespan
    from qkit.web.probes import readiness
    from qkit.web.server import serve
except ModuleNotFoundError as _error:
    if (_error.name or "").partition(".")[0] not in {
        "h11",
        "prometheus_client",
        "starlette",
        "uvicorn",
    }:
        raise
    raise ConfigError(
        f"qkit.web needs {_error.name}: install the extra 'web', see docs/install.md", cause=_error
    ) from _error

__all__ = ["create_app", "lifespan", "readiness", "serve"]
