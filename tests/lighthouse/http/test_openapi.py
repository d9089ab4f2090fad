"""GET /openapi.json is true: what it describes is what happens, whatever is sent and whoever sends it."""

from __future__ import annotations

import re

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import CHECKS, load_all_checks

from ft_hsdp.http_proof import HEADER, NONE, SignedRequest
from ft_hsdp.secret import worker_token
from tests.support.lighthouse.lighthouse_helpers import ADMIN, TOKEN
from tests.support.lighthouse.site import KEY, Site

TOKENS = {"viewer": KEY, "worker": worker_token(TOKEN), "host": TOKEN, "admin": ADMIN}


class Local:
    """The lighthouse as it stands in a process: behind its gate, called from loopback, time never short."""

    def __init__(self):
        site = Site(long_poll_s=0.005)
        self.inner, self.gate = site.app, site.gate

    async def __call__(self, scope, receive, send):
        """A request with the header "Sign ROLE" is signed here, whatever it is."""
        scope["client"] = ("127.0.0.1", 1)
        said = dict(scope["headers"]).get(b"authorization", b"")
        if not said.startswith(b"Sign "):
            return await self.gate(scope, receive, send)
        token, body, more = TOKENS[said.decode().split()[1]], b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        asked = SignedRequest(token, await self._challenge(token), scope["method"], target, body)
        rest = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
        scope["headers"] = [*rest, (b"authorization", asked.authorization.encode())]
        parts = [{"type": "http.request", "body": body}]

        async def whole():
            return parts.pop() if parts else await receive()

        return await self.gate(scope, whole, send)

    async def _challenge(self, token):
        asked = SignedRequest(token, NONE, "GET", b"/healthz")
        answer = await call("GET", "/healthz", {"Authorization": asked.authorization}, self)
        return answer.headers[HEADER].split()[0]


APP = Local()


def of(role):
    """How a request shows its role."""
    return {"headers": {"Authorization": f"Bearer {TOKENS[role]}" if role == "viewer" else f"Sign {role}"}}


async def call(method, path, headers=None, app=None):
    transport = httpx.ASGITransport(app=app or Local())
    async with httpx.AsyncClient(transport=transport, base_url="http://lighthouse") as http:
        return await http.request(method, path, headers=headers)


def operations():
    found = APP.inner.api.openapi()["paths"]
    return [
        (method.upper(), path, operation) for path, ways in found.items() for method, operation in ways.items()
    ]


def filled(path):
    return re.sub(r"{[^}]*}", "0", path)


@pytest.mark.parametrize(
    ("method", "path", "operation"), operations(), ids=lambda v: v if isinstance(v, str) else ""
)
async def test_every_route_wants_the_role_that_it_names(method, path, operation):
    named = {role for way in operation.get("security", ()) for role in way}
    if not named:
        assert path == "/healthz"
        return
    named |= TOKENS.keys() if "viewer" in named else {"host"} if "worker" in named else set()
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": TOKEN},
        {"Authorization": "Basic eDp5"},
    ):
        answer = await call(method, filled(path), headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "FT-HMAC, Bearer"
    for role in TOKENS.keys() - named:
        answer = await call(method, filled(path), **of(role))
        assert answer.status_code == 403, (role, answer.text)
        assert role in answer.json()["detail"]


# What may be sent depends on the job, too, so 422 may answer what the schema allows; and "1" is read as a number.
SKIPPED = {"positive_data_acceptance", "negative_data_rejection"}
load_all_checks()
CHECKED = [check for check in CHECKS.get_all() if check.__name__ not in SKIPPED]


def holder(case):
    """How a request shows a role that may use the operation."""
    named = [role for way in case.operation.definition.raw.get("security", ()) for role in way]
    return of(named[0]) if named else {}


@pytest.mark.parametrize("examples", [3, pytest.param(1000, marks=pytest.mark.soak)])
def test_whatever_is_sent_the_answer_is_as_described(examples):
    """The schema is read here: it takes 6 s."""

    def check(case):
        case.call_and_validate(**holder(case), checks=CHECKED)
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            answer = case.call(headers=headers)
            assert answer.status_code in (200, 401, 404, 405)
            assert (answer.status_code == 200) == (case.path == "/healthz" and case.method == "GET")

    schema = schemathesis.openapi.from_asgi("/openapi.json", APP, **of("viewer")).exclude(path="/v1/stream")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 10
    for operation in operations:
        chosen = settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
        chosen(given(case=operation.as_strategy())(check))()
