"""Is this process alive, and should it be sent work? Open to everyone; says nothing about tenants.

`/health/live` answers while the event loop turns. `/health/ready` is 200 when this worker can take, run, limit and
bill a request: not draining, Redis answering, the spool writable, some replica up. It names what is missing.
"""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Response, get

from gateway.readiness import Readiness
from gateway.routes.guarding import public

CHECK_TIMEOUT_S = 2.0


@get("/health/live", opt=public, tags=["health"], summary="Is the process alive?")
async def live() -> dict[str, str]:
    return {"status": "alive"}


@get("/health/ready", opt=public, tags=["health"], summary="Should it be sent work?")
async def ready(readiness: Any) -> Response[dict[str, Any]]:
    assert isinstance(readiness, Readiness)
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            missing = await readiness.missing()
    except TimeoutError:
        missing = ["timeout"]
    body = {"status": "unready" if missing else "ready", "missing": missing}
    return Response(body, status_code=503 if missing else 200)
