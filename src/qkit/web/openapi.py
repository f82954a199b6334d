"""``/openapi.json``: OpenAPI document, built from the list of endpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic.json_schema import JsonSchemaMode

from qkit.web.api import Endpoint
from qkit.web.responses import adapter
from qkit.web.schemas import ErrorResponse

__all__ = ["document"]

REFERENCE = "#/components/schemas/{model}"
Json = dict[str, Any]


def document(endpoints: Sequence[Endpoint], *, mounted_at: str = "") -> Json:
    """Return the OpenAPI 3.1 document of the given endpoints.

    Args:
        endpoints: Operations to describe.
        mounted_at: Path prefix under which the app is mounted. Default: none.
    """
    schemas: Json = {}
    paths: dict[str, Json] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "qkit",
            "version": _version(),
            "description": "Queues, messages and dead letters of one service.",
        },
        "servers": [{"url": mounted_at or "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "readToken": {"type": "http", "scheme": "bearer"},
            },
        },
    }


def _operation(endpoint: Endpoint, schemas: Json) -> Json:
    operation: Json = {
        "operationId": endpoint.handle.__name__,
        "summary": endpoint.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", endpoint.path)
        ]
        + [
            {
                "name": name,
                "in": "query",
                "description": item.description,
                "schema": dict(item.schema),
            }
            for name, item in endpoint.query.items()
        ],
        "responses": {
            str(endpoint.status): _response("Success.", endpoint.returns, schemas),
            "default": _response("The request was rejected or failed.", ErrorResponse, schemas),
        },
    }
    if endpoint.takes is not None:
        operation["requestBody"] = {
            "required": True,
            "content": _content(endpoint.takes, schemas, "validation"),
        }
    schemes = ["token", "readToken"] if endpoint.method == "GET" else ["token"]
    operation["security"] = [{scheme: []} for scheme in schemes]
    return operation


def _response(description: str, shape: type, schemas: Json) -> Json:
    return {"description": description, "content": _content(shape, schemas, "serialization")}


def _content(shape: type, schemas: Json, mode: JsonSchemaMode) -> Json:
    schema = adapter(shape).json_schema(ref_template=REFERENCE, mode=mode)
    schemas.update(schema.pop("$defs", {}))
    if "title" in schema:
        schemas[schema["title"]] = schema
        schema = {"$ref": REFERENCE.format(model=schema["title"])}
    return {"application/json": {"schema": schema}}


def _version() -> str:
    try:
        return version("qkit-messaging")
    except PackageNotFoundError:  # a checkout that is not installed
        return "unknown"
