"""qkit over HTTP: probes, metrics, a JSON API and the dashboard, as one ASGI app.

Serve it beside a worker, or mount it in an application that there is already::

    async with serve(service, port=8710, token=token):       # the pages end after the service
        await service.run()

    app = FastAPI(lifespan=lifespan(service))                 # starts and drains the service
    app.mount("/queues", create_app(service, token=token))

It needs the extra: ``pip install 'qkit[web]'``.
"""

from qkit.errors import ConfigError

try:
    import prometheus_client as _prometheus_client  # noqa: F401  # to say what is missing, at once
    import starlette as _starlette  # noqa: F401  # likewise
except ModuleNotFoundError as error:
    raise ConfigError(
        f"qkit.web needs {error.name}: pip install 'qkit[web]'", cause=error
    ) from error

from qkit.web.app import create_app
from qkit.web.lifespan import lifespan
from qkit.web.server import serve

__all__ = ["create_app", "lifespan", "serve"]
