"""AsyncAPI 3 document of a service: its channels, messages and handlers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import urlsplit

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic.json_schema import JsonSchemaMode

from qkit.handlers.channel import Channel
from qkit.handlers.registry import Handler
from qkit.service import QueueService
from qkit.sync import SyncQueueService

__all__ = ["document"]

Json = dict[str, Any]

REFERENCE = "#/components/schemas/{model}"
PROTOCOLS = {"rabbitmq": "amqp", "kafka": "kafka", "redis": "redis"}
MODE: JsonSchemaMode = "validation"


def document(
    service: QueueService | SyncQueueService,
    *,
    title: str = "qkit service",
    version: str = "0.1.0",
) -> Json:
    """Return the AsyncAPI 3.0 document of a service.

    Each handler becomes a ``receive`` operation; a channel without handlers becomes a ``send``
    operation. The document contains no secrets from the settings.

    Args:
        service: The service; it need not be started.
        title: The title of the document.
        version: The version of your application.

    Returns:
        The document, ready for ``json.dumps``.

    Example:
        >>> from qkit import QueueService, Settings, consume
        >>> from qkit.asyncapi import document
        >>> @consume("audit")
        ... async def audit(entry: dict) -> None: ...
        >>> service = QueueService(Settings(type="native"))
        >>> service.register(audit)
        >>> document(service)["operations"]["receive.audit.audit"]["action"]
        'receive'
    """
    writer = _Writer(service)
    for channel in service.channels:
        writer.add(channel)
    return {
        "asyncapi": "3.0.0",
        "info": {"title": title, "version": version},
        "defaultContentType": "application/json",
        "servers": {"broker": _server(service)},
        "channels": writer.channels,
        "operations": writer.operations,
        "components": {"messages": writer.messages, "schemas": writer.schemas},
    }


class _Writer:
    """Builder of the document, channel by channel."""

    def __init__(self, service: QueueService | SyncQueueService) -> None:
        self._service = service
        self.channels: Json = {}
        self.operations: Json = {}
        self.messages: Json = {}
        # One call for all types, so that pydantic can distinguish two models with the same name.
        bodies = [kind for channel in service.channels for kind in self._bodies(channel)]
        headers = [
            param.type
            for handler in service.handlers
            for param in handler.params
            if param.kind == "header"
        ]
        self._payloads, self.schemas = _schemas([*bodies, *headers])

    def add(self, channel: Channel[object]) -> None:
        """Add a channel with its messages and operations."""
        handlers = self._handlers(channel)
        bodies = self._bodies(channel)
        names = [channel.name, *(f"{channel.name}.{number}" for number in range(2, 99))]
        for name, kind in zip(names, bodies, strict=False):
            users = [item for item in handlers if item.body_type == kind] or handlers
            self.messages[name] = self._message(kind, users)
        used = names[: len(bodies)]
        self.channels[channel.name] = self._channel(channel, used)
        for handler in handlers:
            name = used[bodies.index(handler.body_type)] if handler.body_type in bodies else used[0]
            operation = f"receive.{channel.name}.{handler.group}"
            self.operations[operation] = _operation("receive", channel.name, name)
            if summary := (inspect.getdoc(handler.call) or "").partition("\n")[0]:
                self.operations[operation]["summary"] = summary
        if not handlers:
            self.operations[f"send.{channel.name}"] = _operation("send", channel.name, used[0])

    def _handlers(self, channel: Channel[object]) -> list[Handler]:
        return [handler for handler in self._service.handlers if handler.channel == channel.name]

    def _bodies(self, channel: Channel[object]) -> list[object]:
        """Return the distinct body types of a channel; a topic's handlers may differ in type."""
        kinds: list[object] = []
        handled = [handler.body_type for handler in self._handlers(channel)]
        for kind in (self._service.body_type(channel), *handled):
            if kind is not None and kind is not object and kind not in kinds:
                kinds.append(kind)
        return kinds or [object]

    def _channel(self, channel: Channel[object], messages: Sequence[str]) -> Json:
        settings = self._service.settings
        topic = channel.options.get("broadcast", False)
        description = (
            "Every group of consumers receives a copy of each message."
            if topic
            else "Each message is handled by one consumer."
        )
        return {
            "address": settings.broker_name(channel.name),
            "description": description,
            "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
        }

    def _message(self, kind: object, handlers: Sequence[Handler]) -> Json:
        message: Json = {"payload": self._payloads[_key(kind)]}
        if kind is bytes:
            message["contentType"] = "application/octet-stream"
        else:
            message["contentType"] = "application/json"
            message["title"] = str(getattr(kind, "__name__", kind))
        headers = {
            param.header: self._payloads[_key(param.type)]
            for handler in handlers
            for param in handler.params
            if param.kind == "header" and param.header is not None
        }
        if headers:
            message["headers"] = {"type": "object", "properties": headers}
        return message


def _operation(action: str, channel: str, message: str) -> Json:
    return {
        "action": action,
        "channel": {"$ref": f"#/channels/{channel}"},
        "messages": [{"$ref": f"#/channels/{channel}/messages/{message}"}],
    }


def _server(service: QueueService | SyncQueueService) -> Json:
    """Return the server entry: address and protocol of the broker, without credentials."""
    settings = service.settings
    if settings.url is None:
        return {"host": "localhost", "protocol": "qkit", "description": "qkit's native engine"}
    url = settings.url.get_secret_value()
    hosts = url if settings.type == "kafka" else urlsplit(url).netloc.rpartition("@")[2]
    secure = settings.uses_tls
    protocol = PROTOCOLS.get(settings.type, settings.type)
    return {
        "host": hosts.split(",")[0],
        "protocol": {"amqp": "amqps", "kafka": "kafka-secure"}.get(protocol, protocol)
        if secure
        else protocol,
    }


def _key(kind: object) -> str:
    return f"{id(kind)}"


def _schemas(kinds: Sequence[object]) -> tuple[dict[str, Json], Json]:
    """Return the schema of each type by key, and the definitions that the schemas share."""
    payloads: dict[str, Json] = {}
    adapters: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]] = []
    for kind in kinds:
        if kind is object:
            payloads[_key(kind)] = {}
        elif kind is bytes:
            payloads[_key(kind)] = {"type": "string", "format": "binary"}
        elif _describable(kind):
            adapters.append((_key(kind), MODE, TypeAdapter(cast("Any", kind))))
        else:
            payloads[_key(kind)] = {"description": f"{kind!r} has no JSON schema"}
    found, shared = TypeAdapter.json_schemas(adapters, ref_template=REFERENCE)
    payloads |= {key: schema for (key, _), schema in found.items()}
    return payloads, shared.get("$defs", {})


def _describable(kind: object) -> bool:
    """Return whether pydantic can generate a JSON schema; some types it can only validate."""
    try:
        TypeAdapter(cast("Any", kind)).json_schema()
    except PydanticUserError:
        return False
    return True
