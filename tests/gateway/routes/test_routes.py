"""The route table itself: what is open to the world stands here by name; every other route declares
a scope that the policy knows, and answers nobody to whom the policy does not confer it.

A new route needs nothing here unless it is open.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from litestar import Litestar
from litestar.connection import ASGIConnection
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute

from gateway.app.create import create_app
from gateway.auth.errors import InvalidKey, MissingScope
from gateway.fleet.router import Fleet
from gateway.lanes import LaneDeadlines
from gateway.permissions import ADMIN, OPERATOR, SCOPES, SCOPES_OF, may
from gateway.principal import Principal, Role
from gateway.routes.shared.access import IN_PROJECT, SCOPE
from gateway.routes.shared.guards import UNDECLARED, authenticate
from gateway.settings.load import load
from gateway.telemetry.metrics import Telemetry
from tests.budget import examples

OPEN = {
    "/",
    "/health",
    "/health/live",
    "/ping",
    "/version",
    "/load",
    "/docs",
    "/docs/assets/{name:str}",
    "/invites/accept",
    "/account/mail",
    "/passwords/reset",
    "/health/ready",
    "/metrics",
    "/oauth/account",
    "/oauth/account/admin-keys",
    "/oauth/account/password",
    "/oauth/authorize",
    "/oauth/link",
    "/oauth/login",
    "/oauth/logout",
    "/oauth/passkeys/register",
    "/oauth/passkeys/register/options",
    "/oauth/passkeys/remove",
    "/oauth/passkeys/sign-in",
    "/oauth/passkeys/sign-in/options",
    "/.well-known/oauth-authorization-server",
    "/.well-known/openid-configuration",
    "/oauth/introspect",
    "/oauth/jwks.json",
    "/oauth/revoke",
    "/oauth/token",
    "/oauth/register",
    "/oauth/register/{client_id:str}",
    "/schema",
    "/v1/admin/keys/report-leak",
    "/schema/openapi.json",
    "/schema/openapi.yaml",
    "/schema/openapi.yml",
    "/schema/{path:str}",
    "/oauth/external/{issuer_id:str}/callback",
    "/oauth/external/{issuer_id:str}/start",
    "/oauth/upstream/callback",
    "/oauth/upstream/client",
    "/oauth/upstream/{server:str}/start",
    "/.well-known/oauth-protected-resource",
    "/.well-known/oauth-protected-resource/v1",
    "/.well-known/oauth-protected-resource/mcp/{org_id:str}",
}
CONSOLE = "/console"
"""Its pages ask for a session, and that of their roles (tests/gateway/console/test_pages.py)."""
ADMINISTRATION = ("/v1/organization/", "/v1/admin/")
READS = ("admin:read", "admin:audit", "usage:read")
"""Scopes that suffice for a GET, and never for a change."""
PARAMETER = re.compile(r"\{[^}]*\}")
ROLES: tuple[Role, ...] = get_args(Role)
GOOD = "Bearer good"


class Doorkeeper:
    """An authenticator for which whoever shows the good credential is `principal`."""

    principal: Principal

    async def authenticate(self, bearer: str, *_: Any, **__: Any) -> Principal:
        if bearer != "good":
            raise InvalidKey("unknown")
        return self.principal


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Litestar:
    home: Path = tmp_path_factory.mktemp("home")
    made = create_app(load({"home": home}, {}))
    made.state.services = SimpleNamespace(
        telemetry=Telemetry(models=[]),
        authenticator=Doorkeeper(),
        mcp=None,
        generation=SimpleNamespace(fleet=Fleet([]), deadlines=LaneDeadlines()),
    )
    return made


def handlers(app: Litestar) -> Iterator[tuple[str, HTTPRouteHandler]]:
    """(path, handler) of all but OPTIONS, whose handlers Litestar makes by itself."""
    for route in app.routes:
        assert isinstance(route, HTTPRoute), f"{route.path}: the guard's opt is for HTTP routes"
        for handler in route.route_handlers:
            if handler.http_methods != {"OPTIONS"}:
                yield route.path, handler


def closed(app: Litestar) -> list[tuple[str, HTTPRouteHandler]]:
    return [
        (path, handler)
        for path, handler in handlers(app)
        if path not in OPEN and not path.startswith(CONSOLE)
    ]


def test_a_used_idempotency_key_is_said_to_be_refused_as_it_is(app: Litestar) -> None:
    """A change to the organization is refused with a 422, what else takes a key with a 400.

    (A generation has a 422 for what its upstream says.)
    """
    said: dict[str, set[str]] = {}
    for path, item in (app.openapi_schema.paths or {}).items():
        named = {each.name for each in (item.post and item.post.parameters) or [] if each.name}
        if item.post is not None and "Idempotency-Key" in named:
            said[path] = {"400", "409", "422"} & set(item.post.responses or {})
    made = {"/v1/files", "/v1/batches", "/v1/messages/batches", "/v1/conversations"}
    changes = {path for path in said if path.startswith(("/v1/admin/", "/v1/organization/"))}
    assert changes and made <= said.keys()
    assert {path for path in made | changes if "422" in said[path]} == changes
    assert all({"400", "409"} <= statuses for statuses in said.values())


def test_every_handler_declares_a_scope_that_somebody_can_have(app: Litestar) -> None:
    found = {path: handler.opt.get(SCOPE, UNDECLARED) for path, handler in handlers(app)}
    opened = {path for path, scope in found.items() if scope is None}
    assert {path for path in opened if not path.startswith(CONSOLE)} == OPEN
    for path, handler in closed(app):
        assert handler.opt.get(SCOPE, UNDECLARED) in SCOPES, f"{path} declares no known scope"


def test_administration_is_never_changed_with_a_scope_to_read(app: Litestar) -> None:
    for path, handler in closed(app):
        if path.startswith(ADMINISTRATION):
            scope, reads = handler.opt[SCOPE], handler.http_methods <= {"GET", "HEAD"}
            where = f"{handler.http_methods} {path}: {scope}"
            assert scope.startswith((ADMIN, OPERATOR)) or scope in READS, where
            assert reads or scope not in READS, where


def test_the_guard_stands_before_every_handler(app: Litestar) -> None:
    for path, handler in handlers(app):
        assert authenticate in handler.resolve_guards(), path


principals = st.builds(
    lambda scopes, role, is_operator, owned: Principal(
        org_id="org_1",
        project_id="proj_1",
        key_id="key_1",
        key_hint="",
        scopes=scopes,
        role=role,
        is_operator=is_operator,
        owned_projects=owned,
    ),
    st.frozensets(st.sampled_from(sorted(SCOPES))) | st.sampled_from(list(SCOPES_OF.values())),
    st.sampled_from((None, *ROLES)),
    st.booleans(),
    st.sampled_from((frozenset(), frozenset({"x"}), frozenset({"y"}))),
)


@settings(deadline=None, max_examples=examples(200))
@given(st.data())
def test_a_route_refuses_unless_the_policy_says_yes(app: Litestar, data: st.DataObject) -> None:
    path, handler = data.draw(st.sampled_from(closed(app)), label="route")
    app.state.services.authenticator.principal = data.draw(principals, label="principal")
    scope = handler.opt[SCOPE]
    project_id = "x" if IN_PROJECT in handler.opt else None
    who = app.state.services.authenticator.principal

    async def ask() -> None:
        transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            for method in sorted(handler.http_methods):
                url = PARAMETER.sub("x", path)
                nobody = await client.request(method, url)
                stranger = await client.request(method, url, headers={"authorization": "Bearer x"})
                assert nobody.status_code == stranger.status_code == 401, f"{method} {path}"
                if not may(who, scope, project_id=project_id):
                    refused = await client.request(method, url, headers={"authorization": GOOD})
                    assert refused.status_code == 403, f"{method} {path}"

    async def knock() -> None:
        """At the guard alone: what the handler does is not asked here."""
        connection: ASGIConnection[Any, Any, Any, Any] = ASGIConnection(
            {
                "type": "http",
                "method": next(iter(handler.http_methods)),
                "path": path,
                "path_params": {"project_id": "x"},
                "query_string": b"",
                "client": ("127.0.0.1", 1),
                "headers": [(b"authorization", GOOD.encode())],
                "litestar_app": app,
                "path_template": path,
                "state": {},
            }  # type: ignore[arg-type, typeddict-item]
        )
        if may(who, scope, project_id=project_id):
            await authenticate(connection, handler)
            assert connection.scope["user"] is who
        else:
            with pytest.raises(MissingScope):
                await authenticate(connection, handler)

    asyncio.run(ask())
    asyncio.run(knock())
