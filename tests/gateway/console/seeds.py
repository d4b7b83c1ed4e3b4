"""Fills the organizations of `server`: each function of SEEDS makes what some pages show.

To add a page to all tests of pages: append a function here that makes its rows, and where the page
has more addresses than its own, name them in ADDRESSES.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gateway.audit.log import COMMAND_LINE
from gateway.db import tenant
from gateway.tenancy.keys.keys import create_key
from gateway.tenancy.projects import create_project
from tests.gateway.console.server import ConsoleServer, Organization

HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>'{{7*7}}${7*7} =cmd|' /C"
"""A name that attacks whoever shows it unescaped."""
MANY = 1000


async def keys(server: ConsoleServer) -> None:
    await make_keys(server, server.little, ["web", "nightly-eval"])
    await make_keys(server, server.much, [HOSTILE[:100], *(f"key {n}" for n in range(MANY))])


async def make_keys(server: ConsoleServer, org: Organization, names: list[str]) -> None:
    pepper_id, pepper = server.services.authenticator.pepper
    async with tenant(server.services.db, org.id) as conn:
        for name in names:
            await create_key(
                conn,
                org_id=org.id,
                project_id=org.project_id,
                name=name,
                scopes=["inference"],
                pepper=pepper,
                pepper_id=pepper_id,
                actor=COMMAND_LINE,
            )


async def projects(server: ConsoleServer) -> None:
    async with tenant(server.services.db, server.much.id) as conn:
        for name in (HOSTILE[:100], *(f"project {n}" for n in range(60))):
            await create_project(conn, org_id=server.much.id, name=name, actor=COMMAND_LINE)


SEEDS: list[Callable[[ConsoleServer], Awaitable[None]]] = [keys, projects]
ADDRESSES: list[Callable[[ConsoleServer, Organization], list[str]]] = []
"""Each returns addresses below /console that are looked at beside those of all pages."""


async def sow(server: ConsoleServer) -> None:
    for each in SEEDS:
        await each(server)
