"""An MCP client with an API key, in front of a worker's application without a socket."""

from __future__ import annotations

from typing import Any

import httpx
from litestar import Litestar

from gateway.db import tenant
from gateway.tenancy.keys.keys import create_key
from tests.gateway.auth.browsing import new_browser
from tests.gateway.auth.conftest import ACTOR, Tenant
from tests.mcp_bridge.processes import last_of, modern


class Caller:
    """An MCP client with an API key: of ada, or (`user_id` None) of a machine."""

    def __init__(self, http: httpx.AsyncClient, org_id: str, key: str) -> None:
        self.http, self.url, self.key = http, f"/mcp/{org_id}", key

    async def call(
        self, capabilities: dict[str, Any] | None = None, **params: Any
    ) -> dict[str, Any]:
        asked = {"name": "up__whoami", "arguments": {}, **params}
        return await self.ask("tools/call", asked, capabilities)

    async def ask(
        self, method: str, params: Any = None, capabilities: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        message, headers = modern(method, params, capabilities=capabilities or {})
        answer = await self.http.post(self.url, json=message, headers=headers)
        return last_of(answer)


async def caller_of(app: Litestar, who: Tenant, user_id: str | None) -> Caller:
    services = app.state.services
    pepper_id, pepper = services.authenticator.pepper
    async with tenant(services.db, who.org_id) as conn:
        made = await create_key(
            conn,
            org_id=who.org_id,
            project_id=who.project_id,
            user_id=user_id,
            name="mcp",
            scopes=["mcp:call"],
            pepper=pepper,
            pepper_id=pepper_id,
            actor=ACTOR,
        )
    http = new_browser(app)
    http.headers["authorization"] = f"Bearer {made.secret}"
    return Caller(http, who.org_id, made.secret)


def text_of(answer: dict[str, Any]) -> str:
    assert "result" in answer, answer
    return str(answer["result"]["content"][0]["text"])
