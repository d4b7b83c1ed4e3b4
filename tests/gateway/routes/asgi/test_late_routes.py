"""Routes that are registered when the first of them is asked for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import httpx
import pytest
from litestar.handlers import HTTPRouteHandler

from gateway.app.application import find_routes
from gateway.routes.asgi.late_routes import concerns, is_late
from gateway.routes.shared.access import HotRoute
from gateway.telemetry.metrics import Telemetry
from tests.gateway.routes import one_routing


def handlers(*, late: bool) -> list[HTTPRouteHandler]:
    found = find_routes(late=late)
    assert all(isinstance(each, HTTPRouteHandler) for each in found)
    return [each for each in found if isinstance(each, HTTPRouteHandler)]


def test_all_late_routes_are_where_they_are_looked_for() -> None:
    late = handlers(late=True)
    assert len(late) > 200
    assert [path for each in late for path in each.paths if not is_late(path)] == []
    assert not any(isinstance(each, HotRoute) for each in late), "the fast path would miss it"


def test_what_clients_of_models_ask_for_loads_none() -> None:
    paths = [path for each in handlers(late=False) for path in each.paths]
    asked = [
        path for path in paths if path.startswith(("/v1/chat", "/v1/messages", "/health", "/mcp"))
    ]
    assert len(asked) > 5 and not any(map(concerns, asked))
    assert not any(map(concerns, ("/", "/favicon.ico", "/v1/organizations/x", "/metrics", "/v1/")))


@pytest.mark.parametrize(
    "path",
    ["/v1/admin/keys", "/admin/keys", "/x/v1/organization/users", "//console/", "/v1//admin/keys"],
)
def test_what_may_be_meant_is_loaded_as_well(path: str) -> None:
    assert concerns(path)


async def test_first_requests_at_once_register_them_once() -> None:
    app = one_routing.with_early_routes(1024)
    app.state.services = SimpleNamespace(telemetry=Telemetry(models=[]))
    num_routes = len(app.routes)
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/nothing")).status_code == 404
        assert len(app.routes) == num_routes
        asked = ("/admin/keys", "/console/nothing", "/v1/organization/nothing", "/admin/keys")
        told = await asyncio.gather(*(client.get(each) for each in asked))
    assert [each.status_code for each in told] == [404] * 4
    assert told[0].json()["type"] == "urn:tollgate:problem:unknown_url", "that of '/v1/admin'"
    assert len(app.routes) == num_routes + len(
        {path for each in handlers(late=True) for path in each.paths}
    )
    paths = [route.path for route in app.routes]
    assert sorted(paths) == sorted(set(paths))
