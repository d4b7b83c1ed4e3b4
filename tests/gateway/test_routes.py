"""The route table itself: what is open to the world stands here by name, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from litestar import Litestar
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute

from gateway.app import create_app
from gateway.auth.guards import UNDECLARED, authenticate
from gateway.principal import SCOPE_INFERENCE, SCOPE_USAGE_READ
from gateway.routes.access import SCOPE
from gateway.settings import load

OPEN = {
    "/health/live",
    "/health/ready",
    "/metrics",
    "/schema",
    "/schema/openapi.json",
    "/schema/openapi.yaml",
    "/schema/openapi.yml",
    "/schema/{path:str}",
}
CLOSED = {
    "/v1/chat/completions": SCOPE_INFERENCE,
    "/v1/models": SCOPE_INFERENCE,
    "/v1/models/{model:path}": SCOPE_INFERENCE,
    "/v1/organization/costs": SCOPE_USAGE_READ,
    "/v1/organization/usage/completions": SCOPE_USAGE_READ,
}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Litestar:
    home: Path = tmp_path_factory.mktemp("home")
    return create_app(load({"home": home}, {}))


def handlers(app: Litestar) -> Iterator[tuple[str, HTTPRouteHandler]]:
    """(path, handler) of all but OPTIONS, whose handlers Litestar makes by itself."""
    for route in app.routes:
        assert isinstance(route, HTTPRoute), f"{route.path}: the guard's opt is for HTTP routes"
        for handler in route.route_handlers:
            if handler.http_methods != {"OPTIONS"}:
                yield route.path, handler


def test_every_handler_declares_its_scope(app: Litestar) -> None:
    found = {path: handler.opt.get(SCOPE, UNDECLARED) for path, handler in handlers(app)}
    assert found == {**dict.fromkeys(OPEN), **CLOSED}


def test_the_guard_stands_before_every_handler(app: Litestar) -> None:
    for path, handler in handlers(app):
        assert authenticate in handler.resolve_guards(), path
