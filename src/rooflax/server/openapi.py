"""GET /openapi.json: the routes and their fields, from the tables that check requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rooflax import __version__
from rooflax.server.fields import FieldTable

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type"],
        }
    },
    "required": ["error"],
}


def document(
    posts: Mapping[str, tuple[Any, FieldTable]], gets: Mapping[str, Any]
) -> dict[str, Any]:
    """OpenAPI 3.1.

    Args:
        posts: by path, each route's function and its fields.
        gets: by path, each route's function.
    """
    paths: dict[str, Any] = {}
    for path, (route, table) in posts.items():
        body = {"required": True, "content": {"application/json": {"schema": table.schema()}}}
        paths[path] = {"post": _operation(route) | {"requestBody": body}}
    for path, route in gets.items():
        named = path.replace("{name:path}", "{name}")
        operation = _operation(route)
        if named != path:
            operation["parameters"] = [
                {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        paths.setdefault(named, {})["get"] = operation
    keys = {"bearer": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "rooflax", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": keys},
        "security": [{}, {"bearer": []}],
    }


def _operation(route: Any) -> dict[str, Any]:
    failed = {"description": "an error", "content": {"application/json": {"schema": _ERROR}}}
    return {
        "summary": (route.__doc__ or "").strip().partition("\n")[0],
        "responses": {"200": {"description": "the answer"}, "4XX": failed, "5XX": failed},
    }
