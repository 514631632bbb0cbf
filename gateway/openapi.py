"""The OpenAPI description of the gateway (/openapi.json), made from the request models: it cannot say anything else."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from pydantic.json_schema import models_json_schema

from gateway.responses_schema import ResponsesRequest
from gateway.schemas import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)

# (path, summary) -> the bodies that it takes.
_POSTS: Final[Mapping[tuple[str, str], tuple[type[Body], ...]]] = {
    ("/v1/chat/completions", "Answers a chat; a stream of server-sent events with stream: true"): (ChatRequest,),
    ("/v1/completions", "Continues prompts; a stream of server-sent events with stream: true"): (CompletionRequest,),
    ("/v1/responses", "Answers as a response that is not stored; typed events with stream: true"): (ResponsesRequest,),
    ("/tokenize", "Token ids of a prompt or of a chat"): (TokenizeTextRequest, TokenizeChatRequest),
    ("/detokenize", "The text of token ids"): (DetokenizeRequest,),
}
_GETS: Final = {
    "/v1/models": "What is served",
    "/v1/models/{id}": "One of them",
    "/health": "200 while an engine serves",
    "/livez": "200 while the gateway lives",
    "/version": "The gateway's version",
    "/metrics": "Prometheus metrics",
}
_ERRORS: Final = {
    "400": "The request is wrong; param names the field",
    "401": "A key is missing or not known",
    "403": "The key does not allow it",
    "404": "There is no such model",
    "408": "The body did not come in time",
    "409": "The id is in use, or the request was aborted",
    "413": "The body is too large",
    "429": "Too many requests wait; Retry-After",
    "500": "The server's own error",
    "501": "Not served",
    "503": "No engine is available; Retry-After",
    "504": "The request did not finish in time",
}
_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@cache  # it takes 50 ms
def openapi(version: str) -> dict[str, Any]:
    """The document, OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.0)."""
    models = [model for bodies in _POSTS.values() for model in bodies]
    named, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    tops = {model.__name__: model for model in models}
    for name, schema in definitions["$defs"].items():
        if schema.get("additionalProperties") is False:
            schema["additionalProperties"] = {"type": "null"}  # which is nothing
        if model := tops.get(name):
            schema["properties"] |= dict.fromkeys(sorted(model.ignored), True)
            schema["properties"] |= {field: {"enum": [None, *idle]} for field, idle in model.unserved.items()}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    failures = {status: {"description": text, "content": error} for status, text in _ERRORS.items()}
    responses = {"200": {"description": "OK"}, **failures}
    paths: dict[str, Any] = {}
    for (path, summary), bodies in _POSTS.items():
        schemas = [named[model, "validation"] for model in bodies]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": responses}}
    for path, summary in _GETS.items():
        names = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}] if "{" in path else []
        paths[path] = {"get": {"summary": summary, "parameters": names, "responses": responses}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Fulcrum", "version": version, "description": "OpenAI's API; docs/api.md tells it by field."},
        "paths": paths,
        "components": {
            "schemas": {**definitions["$defs"], "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }
