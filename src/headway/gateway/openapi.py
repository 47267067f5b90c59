"""The OpenAPI description, made from the Structs that validate and write the wire."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import msgspec

from headway import __version__
from headway.gateway.openai import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from headway.gateway.wire import (
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    Detokenized,
    ErrorBody,
    ModelBody,
    ModelList,
    Tokens,
)

_BODIES: Final = (
    ChatBody,
    CompletionBody,
    TokenizeBody,
    DetokenizeBody,
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    ModelList,
    ModelBody,
    Tokens,
    Detokenized,
    ErrorBody,
)
_ERROR: Final = {
    "description": "A refusal",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}},
}
_OBJECT: Final = {"application/json": {"schema": {"type": "object"}}}


@cache
def document() -> bytes:
    """Return /openapi.json."""
    _, components = msgspec.json.schema_components(_BODIES, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {
        "/v1/chat/completions": _post(ChatBody, ChatAnswer, "Answer a conversation", stream=True),
        "/v1/completions": _post(CompletionBody, CompletionAnswer, "Continue a text", stream=True),
        "/v1/models": _get(ModelList, "The served models"),
        "/v1/models/{id}": _get(ModelBody, "One served model", name="id"),
        "/tokenize": _post(TokenizeBody, Tokens, "Text or a conversation to token ids"),
        "/detokenize": _post(DetokenizeBody, Detokenized, "Token ids to text"),
        "/v1/requests/{id}/timing": _get(None, "Where a recent request's time went", name="id"),
        "/metrics": _plain("text/plain", "Prometheus metrics"),
        "/health/live": _get(None, "The engine's steps advance", unavailable=True),
        "/health/ready": _get(None, "A request sent now would be run", unavailable=True),
        "/health/load": _get(None, "How busy the server is"),
        "/debug/steps": _get(None, "The engine's last steps: what ran, what was predicted, what it took"),
        "/openapi.json": _get(None, "This description"),
        "/": _plain("text/html", "A page with links"),
    }
    for path, kind in (("embeddings", "embedding"), ("rerank", "reranking"), ("moderations", "moderation")):
        paths[f"/v1/{path}"] = {
            "post": {"summary": f"Refused: no {kind} model is served", "responses": {"404": _ERROR, "default": _ERROR}}
        }
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "headway",
                "version": __version__,
                "description": "OpenAI's wire; unknown fields are tolerated, null means the default.",
            },
            "paths": paths,
            "components": {"schemas": components},
        }
    )


def _ref(body: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}


def _post(body: type, answer: type, summary: str, *, stream: bool = False) -> dict[str, Any]:
    content = _ref(answer)
    if stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": _ref(body)},
            "responses": {"200": {"description": "The answer", "content": content}, "default": _ERROR},
        }
    }


def _get(answer: type | None, summary: str, *, name: str = "", unavailable: bool = False) -> dict[str, Any]:
    responses: dict[str, Any] = {
        "200": {"description": "The answer", "content": _OBJECT if answer is None else _ref(answer)},
        "default": _ERROR,
    }
    if unavailable:
        responses["503"] = {"description": "No, with the reason", "content": _OBJECT}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if name:
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    return {"get": operation}


def _plain(kind: str, summary: str) -> dict[str, Any]:
    text = {kind: {"schema": {"type": "string"}}}
    return {"get": {"summary": summary, "responses": {"200": {"description": "Text", "content": text}}}}
