"""GET /openapi.json is true: what it describes is what happens, whatever is sent and whoever sends it."""

from __future__ import annotations

import itertools
import re

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS, load_all_checks

from lighthouse.http.access import Keys, RequestGate, view_key
from lighthouse.http.app import create_app
from lighthouse.http.rate_limits import Rates
from lighthouse.journal.database import MemoryDatabase
from lighthouse.journal.journal import JobJournal
from lighthouse.overview.overview import JobInfo
from lighthouse.quorum.state import Policy
from lighthouse.service import Service
from tests.support.lighthouse.lighthouse_helpers import ADMIN, TOKEN, MemoryStore

TOKENS = {"viewer": view_key(TOKEN), "worker": TOKEN, "admin": ADMIN}
ERRORS = ("400", "401", "403", "408", "413", "422", "429", "431", "503")


class Local:
    """The lighthouse as it stands in a process: behind its gate, called from loopback, time never short."""

    def __init__(self):
        store = MemoryStore()
        service = Service(store.load(Policy(slots=2, steps=10)), store, TOKEN, lambda _: None, long_poll_s=0.005)
        keys = Keys(TOKEN, ADMIN)
        journal = JobJournal(MemoryDatabase(), JobInfo("job", 2, 1, 10))
        self.inner = create_app(service, keys, journal)
        self.gate = RequestGate(self.inner, keys, Rates(), itertools.count(0, 10).__next__)

    async def __call__(self, scope, receive, send):
        scope["client"] = ("127.0.0.1", 1)
        await self.gate(scope, receive, send)


APP = Local()


def bearer(role):
    return {"Authorization": f"Bearer {TOKENS[role]}"}


async def call(method, path, headers=None, **arguments):
    transport = httpx.ASGITransport(app=Local())
    async with httpx.AsyncClient(transport=transport, base_url="http://lighthouse", headers=headers) as http:
        return await http.request(method, path, **arguments)


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
        assert path == "/healthz" or path == "/" or path.startswith("/assets/")
        return
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": TOKEN},
        {"Authorization": "Basic eDp5"},
    ):
        answer = await call(method, filled(path), headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    for role in TOKENS.keys() - named:
        answer = await call(method, filled(path), bearer(role))
        assert answer.status_code == 403, (role, answer.text)
        assert role in answer.json()["detail"]


# What may be sent depends on the job, too, so 422 may answer what the schema allows; and "1" is read as a number.
SKIPPED = {"positive_data_acceptance", "negative_data_rejection"}
load_all_checks()
CHECKED = [check for check in CHECKS.get_all() if check.__name__ not in SKIPPED]
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP, headers=bearer("viewer")).exclude(path="/v1/stream")


def holder(case):
    """A token with which the operation may be used."""
    named = [role for way in case.operation.definition.raw.get("security", ()) for role in way]
    return bearer(named[0]) if named else {}


@SCHEMA.parametrize()
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_is_sent_the_answer_is_as_described(case):
    case.call_and_validate(headers=holder(case), checks=CHECKED)


@pytest.mark.soak
@SCHEMA.parametrize()
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_is_sent_for_long_the_answer_is_as_described(case):
    case.call_and_validate(headers=holder(case), checks=CHECKED)
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        answer = case.call(headers=headers)
        assert answer.status_code in (200, 401, 404, 405)
        assert (answer.status_code == 200) == (case.path == "/healthz" and case.method == "GET")
