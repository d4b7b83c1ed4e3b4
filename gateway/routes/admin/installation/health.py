"""/v1/admin/health: how every part is that requests depend on, as the answering worker knows it.
For operators: what went wrong at an upstream is the installation's.

`/health/ready` says the same to everybody, without the errors.
"""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request

from gateway.health.component import Component, Status
from gateway.routes.shared.access import needs, services
from gateway.routes.shared.operations import RouteGroup
from gateway.wire.shared.resource import view_of

admin = RouteGroup(tag="Health", opt=needs("operator:models"))


class HealthView(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "health"
    status: Status
    missing: list[str]
    """The reasons why this worker cannot serve any request at all."""
    components: list[Component]


@admin.get("/v1/admin/health", "How the parts are that requests depend on", answer=HealthView)
async def retrieve(request: Request[Any, Any, Any]) -> HealthView:
    return view_of(HealthView, await services(request).readiness.health())


routes = [retrieve]
