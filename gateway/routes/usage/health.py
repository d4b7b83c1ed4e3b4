"""Tells whether this process is alive, whether it should be sent work, and what it has measured.
Open: nothing here names a tenant.

`/health/live` answers while the event loop turns, and `/` as well: Claude Code asks for its head
before anything else. A browser, which asks for a page, is led from there to the console.
`/health/ready` is 200 when this worker can take, run, limit and bill a request, and otherwise says
what is missing; a worker that serves, but not all as it should, names what is degraded. What was
wrong there in detail is for operators (`gateway.routes.admin.installation.health`).
`/health` and `/ping` say the same by their status alone, `/version` whose program this is and
`/load` how much it has under way, as vLLM's clients ask. `/metrics` speaks for all workers, in
the format that Prometheus asks for, on a listener of its own if the settings name one.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec
from litestar import Request, Response
from litestar.exceptions import NotFoundException

from gateway.console.pages import CONSOLE, guarded
from gateway.health.component import Health, Kind, State, Status
from gateway.mcp.service.service import own_version
from gateway.routes.shared.access import PUBLIC, services
from gateway.routes.shared.media_types import HTML, JSON
from gateway.routes.shared.operations import RouteGroup
from gateway.routes.shared.request_state import BY_METRICS_LISTENER
from gateway.telemetry.exposition import OPENMETRICS, PROTOBUF, TEXT, media
from gateway.wire.shared.resource import view_of

CHECK_TIMEOUT_S = 2.0
health = RouteGroup(tag="Health", opt=PUBLIC)


class Liveness(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["alive"]


class DegradedPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One part that is not as it should be. `since`: Unix seconds."""

    kind: Kind
    name: str
    state: State
    since: int | None = None
    detail: str | None = None


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """`missing`: why no request is served here. `degraded`: what would not be served, or is at
    risk, while others are served."""

    status: Status
    missing: list[str]
    degraded: list[DegradedPart] = []


@health.get("/health/live", "Report whether the process is alive", answer=Liveness)
async def live() -> dict[str, str]:
    return {"status": "alive"}


@health.get(
    "/",
    "Report whether the process is alive; who asks for a page is led to the console",
    answer=Liveness,
    said={303: {}},
)
async def root(request: Request[Any, Any, Any]) -> Response[Any]:
    if HTML not in request.headers.get("accept", ""):
        return Response(await live.fn())
    return Response(b"", status_code=303, headers={**guarded(), "location": CONSOLE})


class Version(msgspec.Struct, frozen=True, kw_only=True):
    version: str


@health.get(["/health", "/ping"], "Should it be sent work? By the status", said={200: {}, 503: {}})
async def status(request: Request[Any, Any, Any]) -> Response[bytes]:
    return Response(b"", status_code=503 if (await find_health(request)).missing else 200)


@health.get("/version", "The version of the program", answer=Version)
async def program_version() -> Version:
    return Version(version=own_version())


class Load(msgspec.Struct, frozen=True, kw_only=True):
    server_load: int
    """Requests for a model under way, of all workers: this one's now, the others' of a second
    ago."""


@health.get("/load", "How many requests are under way", answer=Load)
async def load(request: Request[Any, Any, Any]) -> Load:
    found = services(request)
    found.observe()
    return Load(server_load=found.telemetry.num_open_calls())


@health.get("/health/ready", "Should it be sent work?", answer=Ready, said={503: {JSON: Ready}})
async def ready(request: Request[Any, Any, Any]) -> Response[Ready]:
    found = await find_health(request)
    degraded = [view_of(DegradedPart, each) for each in found.components if not each.is_good]
    body = Ready(status=found.status, missing=found.missing, degraded=degraded)
    return Response(body, status_code=503 if found.missing else 200)


async def find_health(request: Request[Any, Any, Any]) -> Health:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            return await services(request).readiness.health()
    except TimeoutError:
        return Health(status="unready", missing=["timeout"], components=[])


@health.get(
    "/metrics",
    "Prometheus metrics",
    said={200: {"text/plain": str, media(OPENMETRICS): str, media(PROTOBUF): bytes}},
    options={"media_type": TEXT},
)
async def metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
    has_listener = request.app.state.get("metrics_port") is not None
    if has_listener and not request.scope["state"].get(BY_METRICS_LISTENER):
        raise NotFoundException  # as any path that is not there
    found = services(request)
    found.observe()
    # With a hundred models it takes some milliseconds, which requests would wait for.
    accept = request.headers.get("accept", "")
    exposition = await asyncio.to_thread(found.telemetry.render, accept)
    return Response(exposition.content, media_type=exposition.media_type)


routes = [live, root, status, ready, program_version, load, metrics]
