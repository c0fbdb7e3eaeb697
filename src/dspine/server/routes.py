"""Which path leads where, and the OpenAPI document of it."""

from __future__ import annotations

from importlib import resources
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dspine.server import native
from dspine.server.bodies import (
    ApplyTemplateBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from dspine.server.completions import chat_completions, completions

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/apply-template": ApplyTemplateBody,
}
_READS = {
    "/health": "Whether answers can be made",
    "/v1/models": "The model that is served",
    "/props": "Facts of the server",
    "/slots": "What each slot does",
    "/metrics": "Counters for Prometheus",
}


_PAGE = {
    "": ("index.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
    "stream.js": ("stream.js", "text/javascript"),
}
# It loads nothing from elsewhere and no other page may frame it.
_POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'"


async def page(request: Request) -> Response:
    """The page at / and its parts."""
    name, kind = _PAGE[request.url.path.removeprefix("/")]
    content = (resources.files("dspine.server") / "page" / name).read_bytes()
    headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
    return Response(content, media_type=kind, headers=headers)


def routes() -> list[Route]:
    """All of them; completions also without /v1, as llama-server has them."""
    made = [
        Route("/health", native.health),
        Route("/v1/health", native.health),
        Route("/v1/models", native.models),
        Route("/models", native.models),
        Route("/v1/models/{name:path}", native.model),
        Route("/props", native.props),
        Route("/slots", native.slots),
        Route("/metrics", native.metrics),
        Route("/openapi.json", openapi),
        *(Route(f"/{name}", page) for name in _PAGE),
    ]
    for paths, endpoint in (
        (("/v1/chat/completions", "/chat/completions"), chat_completions),
        (("/v1/completions", "/completions"), completions),
        (("/tokenize",), native.tokenize),
        (("/detokenize",), native.detokenize),
        (("/apply-template",), native.apply_template),
    ):
        made += [Route(path, endpoint, methods=["POST"]) for path in paths]
    return made


async def openapi(_: Request) -> Response:
    """The document."""
    return JSONResponse(openapi_document())


def openapi_document() -> dict[str, Any]:
    """OpenAPI 3.1 of the routes and bodies."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    fault = {"$ref": "#/components/schemas/Error"}
    failures = {
        status: {"description": text, "content": {"application/json": {"schema": fault}}}
        for status, text in (
            ("400", "the request cannot be served"),
            ("401", "the API key is missing or wrong"),
            ("413", "the body is too large"),
            ("503", "loading, stopping, or too many requests wait"),
        )
    }
    for path, model in _BODIES.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[model.__name__] = schema
        reference = {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}
        paths[path] = {
            "post": {
                "summary": model.__doc__,
                "requestBody": {"required": True, "content": {"application/json": reference}},
                "responses": {"200": _success(path), **failures},
            }
        }
    for path, text in _READS.items():
        replies = {"200": _success(path), "401": failures["401"], "503": failures["503"]}
        paths[path] = {"get": {"summary": text, "responses": replies}}
    schemas["Error"] = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["code", "message", "type"],
                "properties": {
                    "code": {"type": "integer"},
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                },
            }
        },
    }
    security = {"bearer": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "dspine", "version": version("dspine")},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": security},
        "security": [{}, {"bearer": []}],
    }


def _success(path: str) -> dict[str, Any]:
    if path == "/metrics":
        return {"description": "text", "content": {"text/plain": {"schema": {"type": "string"}}}}
    kind: dict[str, Any] = {"type": "array" if path == "/slots" else "object"}
    content: dict[str, Any] = {"application/json": {"schema": kind}}
    if path.endswith("completions"):
        content["text/event-stream"] = {}
    return {"description": "done", "content": content}
