"""The OpenAPI description of the routes, true to what they do, and the errors that all of them share.

Routes that read their body themselves are described here, from the protocol's dataclasses; the others describe
themselves. The roles that may use a route are taken from its `auth.Bearer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from ft_hsdp.config.running import MAX_REPLICAS
from ft_hsdp.core import incarnation
from ft_hsdp.core.commit import MAX_PARTS, MAX_ROWS, MAX_WEIGHT
from ft_hsdp.core.grant import CatchUp, Continue, Finish, Grant, Refused
from ft_hsdp.core.ledger import MAX_UNIT
from ft_hsdp.http_proof import SCHEME
from ft_hsdp.protocol import ProcessReport, QuorumRequest, SupervisorReply, Telemetry, Wait, tag_of
from lighthouse.http import quorum_route
from lighthouse.http.access import Bearer, Keys, Role, may
from lighthouse.http.schemas import Error

ROLES: tuple[Role, ...] = ("viewer", "worker", "admin")
REFS = "#/components/schemas/{model}"

Document = dict[str, Any]


class Body(NamedTuple):
    """What a route takes and gives, if it reads its body itself."""

    takes: tuple[type, ...] = ()  # the protocol's messages
    gives: tuple[type, ...] = ()
    plain: bool = False  # messages without a tag, too


_NUMBER: Document = {"minimum": 0, "maximum": 2**53}
_REPLICA: Document = {"minimum": 0, "maximum": MAX_REPLICAS - 1}
_ID: Document = {"pattern": f"^{incarnation.PATTERN}$"}
_HASH: Document = {"pattern": "^[0-9a-f]{32}$"}
_HOSTS: Document = {
    "maxItems": 64,
    "items": {"type": "string", "pattern": "^[0-9a-fA-F.:\\[\\]]{2,45}:[0-9]{1,5}$"},
}
_TOLD: Document = {"maxProperties": 64, "additionalProperties": {"type": "string", "maxLength": 256}}
# What `lighthouse.validation` checks for every job; limits that depend on the job are in no schema.
_BOUNDS: dict[str, Document] = {
    "Ask": {
        "ring": _HOSTS,
        "state": _HOSTS,
        **{key: {"maxLength": 256} for key in ("config_hash", "layout", "numerics", "frozen")},
        "rules": _TOLD,
        "data": _TOLD,
    },
    "Report": {
        **dict.fromkeys(("step", "epoch", "after", "max_term", "saved", "number"), _NUMBER),
        "replica": _REPLICA,
        "incarnation": _ID,
    },
    "StateId": {"commit_epoch": _NUMBER, "step": _NUMBER, "lineage": _HASH},
    "AttemptId": dict.fromkeys(("epoch", "step", "attempt"), _NUMBER),
    "CommitRecord": {
        **dict.fromkeys(("epoch", "step", "attempt", "chunk_bytes", "wanted", "retries"), _NUMBER),
        **{key: {"maxItems": MAX_REPLICAS * MAX_ROWS} for key in ("contributions", "spoiled")},
        "prev": _HASH,
    },
    "Contribution": {
        **dict.fromkeys(("replica", "shard"), _REPLICA),
        "weight": {"minimum": 0, "maximum": MAX_UNIT * MAX_WEIGHT},
        "index": {"minimum": 0, "maximum": MAX_UNIT - 1},
        "units": {"minimum": 1, "maximum": MAX_UNIT},
        "part": {"minimum": 0, "maximum": MAX_PARTS - 1},
    },
}
_ASK: Document = {  # the one route that the framework does not know
    "summary": "Quorum",
    "description": "A replica asks for a step; the ask is withdrawn if it goes away.",
    "operationId": "quorum_v1_quorum_post",
    "security": [{"worker": []}],
}
_BODIES = {
    "/v1/quorum": Body((QuorumRequest,), (Grant, Continue, CatchUp, Finish, Refused, Wait)),
    "/v1/processes": Body((ProcessReport,), (SupervisorReply,), plain=True),
    "/v1/telemetry": Body((Telemetry,)),
}
_ERRORS = {
    400: "no HTTP request, another body than was signed, or the connection closed within it",
    401: "no token, an unknown one, or a challenge that is not valid",
    403: "a token of another role",
    408: "the body did not come in time",
    413: "the body is too large",
    422: "what was sent cannot be true, or cannot be read",
    429: "too many requests; Retry-After says when there is room again",
    431: "the head of the request is too large",
    503: "the store took no write, or another lighthouse leads; ask again",
}


def describe(app: FastAPI, keys: Keys) -> None:
    """Add GET /openapi.json to ``app``, for viewers, and give errors of the framework the common form."""

    @app.get("/openapi.json", dependencies=[Depends(Bearer(keys, "viewer"))])
    async def description() -> Document:
        """The description of all routes."""
        return app.openapi()

    @app.exception_handler(RequestValidationError)
    async def unreadable(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part)[:80] for part in first["loc"])
        return JSONResponse({"detail": f"{where}: {str(first['msg'])[:160]}"}, 422)

    def document() -> Document:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI) -> Document:
    made: Document = get_openapi(
        title="lighthouse",
        version="1",
        summary="Who is healthy, who contributes, and what happened: one job's lighthouse",
        routes=app.routes,
    )
    ok = {"200": {"description": "Successful Response"}}
    made["paths"][quorum_route.PATH] = {"post": {**_ASK, "responses": ok}}
    parts = made.setdefault("components", {})
    schemas = parts.setdefault("schemas", {})
    schemas["Error"] = Error.model_json_schema()
    parts["securitySchemes"] = {
        "viewer": {"type": "http", "scheme": "bearer", "description": "the viewer's key"},
        **{
            role: {"type": "http", "scheme": SCHEME, "description": f"signed, as the {role}"} for role in ROLES[1:]
        },
    }
    for path, operations in made["paths"].items():
        for operation in operations.values():
            role = next((name for way in operation.get("security", ()) for name in way), None)
            if role is not None:
                operation["security"] = [{other: []} for other in ROLES if may(other, role)]
            _bodies(path, operation, schemas)
            _errors(operation, role)
    for name, bounds in _BOUNDS.items():
        for field, bound in bounds.items():
            schemas[name]["properties"][field] |= bound
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return made


def _bodies(path: str, operation: Document, schemas: Document) -> None:
    """Describe what a route takes and gives that reads its body itself."""
    ok: Document = operation["responses"].get("200", {})
    body = _BODIES.get(path)
    if body is None:
        return
    if body.takes:
        schema = _messages(body.takes, body.plain, "validation", schemas)
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if body.gives:
        schema = _messages(body.gives, body.plain, "serialization", schemas)
        ok["content"] = {"application/json": {"schema": schema}}


def _messages(kinds: Iterable[type], plain: bool, mode: JsonSchemaMode, schemas: Document) -> Document:
    forms: list[Document] = []
    for kind in kinds:
        made = TypeAdapter(kind).json_schema(ref_template=REFS, mode=mode)
        schemas.update(made.pop("$defs", {}))
        name = tag_of(kind)
        schemas[name] = {**made, "title": name}
        fields = {"$ref": REFS.format(model=name)}
        tag = {"type": "string", "const": name}
        forms.append({"type": "object", "required": ["type", "body"], "properties": {"type": tag, "body": fields}})
        if plain:
            forms.append(fields)
    return forms[0] if len(forms) == 1 else {"anyOf": forms}


def _errors(operation: Document, role: Role | None) -> None:
    content = {"application/json": {"schema": {"$ref": REFS.format(model="Error")}}}
    for status, why in _ERRORS.items():
        if _possible(status, operation, role):
            answer: Document = {"description": why, "content": content}
            if status == 429:
                answer["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "seconds"}}
            operation["responses"][str(status)] = answer
        elif status == 422:
            operation["responses"].pop("422", None)


def _possible(status: int, operation: Mapping[str, Any], role: Role | None) -> bool:
    if status in (401, 403):
        return role is not None
    if status == 408:
        return "requestBody" in operation
    if status == 422:
        return "requestBody" in operation or bool(operation.get("parameters"))
    return True
