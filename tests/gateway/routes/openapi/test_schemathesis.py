"""The whole OpenAPI document, tried on a running worker by schemathesis: what it describes is sent,
and what it does not; no answer is a 5xx, and each is one that the document describes.

Every operation stands in a test of its own, first with a credential that may do everything, then
with none and with one that may do nothing. Nothing is left to chance: the same examples each time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from litestar import Litestar
from litestar.routes import HTTPRoute
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from gateway.app.create import create_app
from gateway.routes.shared.access import SCOPE
from gateway.settings.load import load
from tests.budget import cycles
from tests.gateway.routes.openapi.running import CAPS, TIMEOUT_S, Running

PAGE = "a page for people, whose form holds a token that only the page before it gives"
SCRIPT = "for the script of such a page, with that token"
DOCUMENT = "the document itself"
LEFT_OUT = {
    "/invites/accept": PAGE,
    "/oauth/account": PAGE,
    "/oauth/account/admin-keys": PAGE,
    "/oauth/account/password": PAGE,
    "/oauth/login": PAGE,
    "/oauth/logout": PAGE,
    "/oauth/passkeys/remove": PAGE,
    "/account/mail": PAGE,
    "/passwords/reset": PAGE,
    "/oauth/link": PAGE,
    "/oauth/passkeys/register": SCRIPT,
    "/oauth/passkeys/register/options": SCRIPT,
    "/oauth/passkeys/sign-in": SCRIPT,
    "/oauth/passkeys/sign-in/options": SCRIPT,
    "/oauth/external/{issuer_id}/callback": "a browser comes back here from another provider",
    "/oauth/external/{issuer_id}/start": "a link on the login page, which leads to that provider",
    "/oauth/upstream/callback": "a browser comes back here from an MCP server's issuer",
    "/oauth/upstream/client": "RFC 7591 metadata, as issuers read it that know clients by a URL",
    "/oauth/upstream/{server}/start": "a link of such a page, which leads to that issuer",
    "/docs": "the page that shows the document",
    "/docs/assets/{name}": "a file of that page",
    "/schema": DOCUMENT,
    "/schema/openapi.json": DOCUMENT,
    "/schema/openapi.yaml": DOCUMENT,
    "/schema/openapi.yml": DOCUMENT,
    "/schema/{path}": DOCUMENT,
}
"""Routes that the document does not describe, and why."""
CONSOLE = "/console"
"""The document describes no page of the console: each is a page of that kind, or a file of one."""
VERBS = frozenset(
    {
        *("archive", "cancel", "finalize", "grant", "lift", "lift-suspension"),
        *("password-reset", "ping", "redeliver", "revoke", "rotate", "approve", "deny"),
        *("pause", "resume", "abort", "complete"),
    }
)
"""At the end of a path: what is done to what it names, without any word more."""
BODYLESS = {"POST /oauth/userinfo"}
"""OpenID Connect's, which takes what the GET takes."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]
EXAMPLES = {
    GenerationMode.POSITIVE: cycles(8, daily=2),
    GenerationMode.NEGATIVE: cycles(4, daily=1),
}
OF_REAL_THINGS = 3
"""This many of four requests name objects that exist."""

app: Litestar = create_app(load({"home": Path("/nowhere")}, {}))
document: dict[str, Any] = json.loads(json.dumps(app.openapi_schema.to_schema()))
operations: dict[str, APIOperation[Any, Any, Any, Any]] = {
    found.ok().label: found.ok()
    for found in schemathesis.openapi.from_dict(document).get_all_operations()
}


def routes() -> dict[str, Any]:
    """The handler of each (method and path); OPTIONS is Litestar's own."""
    return {
        f"{method} {route.path_format}": handler
        for route in app.routes
        if isinstance(route, HTTPRoute)
        for handler in route.route_handlers
        for method in map(str, handler.http_methods)
        if method != "OPTIONS"
    }


def guarded() -> list[str]:
    return [label for label, handler in routes().items() if handler.opt[SCOPE] is not None]


def names_in(operation: APIOperation[Any, Any, Any, Any]) -> list[str]:
    said = document["paths"][operation.path][operation.method].get("parameters", [])
    return [each["name"] for each in said if each["in"] == "path"]


def send(worker: Running, case: Case, authorization: str | None) -> Any:
    headers = {} if authorization is None else {"authorization": authorization}
    return case.call(worker.url, worker.session, headers=headers, timeout=TIMEOUT_S)


def test_no_route_is_left_out() -> None:
    left_out = {label for label in routes() if label.split(" ")[1] in LEFT_OUT}
    assert {label.split(" ")[1] for label in left_out} == set(LEFT_OUT)
    pages = {label for label in routes() if label.split(" ")[1].startswith(CONSOLE)}
    assert set(operations) == set(routes()) - left_out - pages
    assert set(guarded()) <= set(operations)


def test_whatever_takes_a_body_says_which() -> None:
    """All that is described is tried below, with such bodies and with others."""
    bodyless = {
        f"{method.upper()} {path}"
        for path, by_method in document["paths"].items()
        for method, said in by_method.items()
        if method in ("post", "put", "patch") and "requestBody" not in said
    }
    assert {label for label in bodyless if label.rpartition("/")[2] not in VERBS} == BODYLESS


def test_what_can_no_longer_be_read_is_described() -> None:
    """A secret that was removed, a store that lost something: nothing here brings them about."""
    said = {
        f"{method.upper()} {path}"
        for path, by_method in document["paths"].items()
        for method, operation in by_method.items()
        if "410" in operation["responses"]
    }
    assert said >= {
        "POST /v1/responses",
        "GET /v1/responses/{response_id}",
        "GET /v1/conversations/{conversation_id}/items",
        "GET /v1/files/{file_id}/content",
        "GET /v1/messages/batches/{message_batch_id}/results",
    }
    assert not {each for each in said if "/chat/" in each or "/admin/" in each}


def test_the_worker_serves_this_document(worker: Running) -> None:
    served = worker.session.get(f"{worker.url}/schema/openapi.json", timeout=TIMEOUT_S).json()
    assert served == document


@pytest.mark.slow
@pytest.mark.parametrize("label", sorted(operations))
def test_what_it_answers_is_described(worker: Running, label: str) -> None:
    operation = operations[label]
    there = worker.make(names_in(operation), operation.path)
    authorization = worker.credential(operation.path)
    for mode, examples in EXAMPLES.items():

        @settings(
            max_examples=examples,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(generation_mode=mode), st.integers(0, OF_REAL_THINGS))
        def ask(case: Case, real: int) -> None:
            if there and real:
                case.path_parameters = dict(there)
            answer = send(worker, case, authorization)
            case.validate_response(answer, checks=CHECKS)

        ask()
    if operation.path.startswith(CAPS):
        worker.archive_caps()


@pytest.mark.parametrize("label", sorted(guarded()))
def test_who_may_not_is_refused_as_described(worker: Running, label: str) -> None:
    operation = operations[label]
    named = dict.fromkeys(names_in(operation), "x")
    if "org_id" in named:
        named["org_id"] = worker.org_id
    case = operation.Case(path_parameters=named)
    for authorization, status in ((None, 401), (f"Bearer {worker.nothing}", 403)):
        answer = send(worker, case, authorization)
        assert answer.status_code == status, answer.text
        case.validate_response(answer, checks=CHECKS)
