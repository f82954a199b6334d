"""Client of RabbitMQ's management API, which lists queues; AMQP cannot."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import ssl
from typing import Final, cast
from urllib.parse import quote, unquote, urlsplit

from qkit.backends.rabbitmq.errors import BACKEND
from qkit.errors import BackendUnavailable, ConfigError, QueueError

__all__ = ["ManagementAPI"]

MAX_RESPONSE_BYTES: Final = 64 << 20


class ManagementAPI:
    """Management API of a broker.

    Args:
        url: URL of the management plugin, for example ``http://user:password@host:15672``. Without
            a user, the user of ``amqp_url`` logs in.
        amqp_url: AMQP URL of the broker, which names the vhost.
        timeout: Seconds to wait for a response.
        context: TLS context for ``https``; ``None`` for the system's certificate authorities.
    """

    def __init__(
        self, url: str, amqp_url: str, *, timeout: float, context: ssl.SSLContext | None = None
    ) -> None:
        parts, broker = urlsplit(url), urlsplit(amqp_url)
        login = parts if parts.username else broker
        credentials = f"{unquote(login.username or 'guest')}:{unquote(login.password or 'guest')}"
        self._authorization = f"Basic {base64.b64encode(credentials.encode()).decode()}"
        self._secure = parts.scheme.lower() == "https"
        self._host = parts.hostname or ""
        self._port = parts.port
        vhost = quote(unquote(broker.path[1:]) or "/", safe="")
        self._path = f"{parts.path.rstrip('/')}/api/queues/{vhost}?columns=name,exclusive"
        self._timeout = timeout
        self._context = context

    async def queues(self) -> list[str]:
        """Return the names of the queues of the vhost, except exclusive queues.

        Raises:
            BackendUnavailable: The API does not respond.
            ConfigError: The API rejects the login, or the vhost does not exist.
        """
        status, body = await asyncio.to_thread(self._get)
        if status in (401, 403):
            raise self._error(
                ConfigError,
                "rejected the login: check management_url, and give the user the tag 'management'",
            )
        if status != 200:
            kind = BackendUnavailable if status >= 500 else ConfigError
            raise self._error(kind, f"replied with the status {status}: check management_url")
        try:
            found = cast("list[dict[str, object]]", json.loads(body))
            return [str(queue["name"]) for queue in found if not queue.get("exclusive")]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            text = "did not reply with a list: check management_url"
            raise self._error(ConfigError, text) from error

    def _get(self) -> tuple[int, bytes]:
        connection = (
            http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout, context=self._context
            )
            if self._secure
            else http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        )
        try:
            connection.request("GET", self._path, headers={"Authorization": self._authorization})
            response = connection.getresponse()
            return response.status, response.read(MAX_RESPONSE_BYTES)
        except (OSError, http.client.HTTPException) as error:
            text = f"did not respond: {error}"
            raise self._error(BackendUnavailable, text) from error
        finally:
            connection.close()

    def _error(self, kind: type[QueueError], text: str) -> QueueError:
        place = f"{self._host}:{self._port}" if self._port else self._host
        return kind(
            f"the management API of RabbitMQ at {place} (management_url) {text}",
            backend=BACKEND,
            operation="queues",
        )
