"""Each page of the console asks the database once or twice, whatever it shows: every GET route that
is registered below /console is opened, with much data, and the statements are counted.

The session of who asks is the frame's and counted apart; so is `set_config`, by which a transaction
names its organization or how it sums up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from gateway.console.assets import ADDRESS
from gateway.routes.console.frame import page as frame
from gateway.routes.console.frame.navigation import PAGES
from tests.gateway.console.server import ConsoleServer, Organization
from tests.gateway.console.test_pages import addresses

MOST = 2
"""The statements of a page, for what is its own."""
MOST_OF_FRAME, MOST_SETTINGS = 1, 3
MOST_OF_ENTRY = 3
"""The statements of an entry in the audit log, for a page that notes who reads it."""
NOTED = re.compile("/console/requests/[^/]+/content")
STREAMS = {"/console/requests/live"}
"""They end when the browser leaves, and read what one reader of the worker found for all."""
Sessions = Callable[[str, str], dict[str, str]]


class Statements:
    """The statements of one request, by whose they are."""

    def __init__(self) -> None:
        self.own: list[str] = []
        self.frame: list[str] = []
        self.settings: list[str] = []
        self.entry: list[str] = []
        self.is_frame = False

    def note(self, statement: str) -> None:
        if statement.strip().startswith("SELECT set_config("):
            self.settings.append(statement)
        elif "audit_heads" in statement or "INSERT INTO audit_entries" in statement:
            self.entry.append(statement)
        else:
            (self.frame if self.is_frame else self.own).append(statement)


HERE: ContextVar[Statements | None] = ContextVar("HERE", default=None)


@contextmanager
def noted(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Note the statements of every engine in the `Statements` of the request that they are for."""

    def note(_c: Any, _r: Any, statement: str, _p: Any, _x: Any, _m: Any) -> None:
        if (found := HERE.get()) is not None:
            found.note(statement)

    open_browser = frame.open_browser

    async def opened(request: Any) -> Any:
        if (found := HERE.get()) is None:
            return await open_browser(request)
        found.is_frame = True
        try:
            return await open_browser(request)
        finally:
            found.is_frame = False

    patch.setattr(frame, "open_browser", opened)
    sa.event.listen(sa.Engine, "before_cursor_execute", note)
    try:
        yield
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", note)


async def statements_of(client: httpx.AsyncClient, address: str) -> tuple[int, Statements]:
    found = Statements()
    token = HERE.set(found)
    try:
        return (await client.get(address)).status_code, found
    finally:
        HERE.reset(token)


def patterns(console: ConsoleServer) -> dict[str, re.Pattern[str]]:
    """Return the GET routes below /console but its files, each with what its addresses match."""
    return {
        route.path: re.compile(re.sub(r"\\\{[^}]*\\\}", "[^/]+", re.escape(route.path)))
        for route in console.app.routes
        if route.path.startswith("/console") and not route.path.startswith(ADDRESS)
        if "GET" in route.methods
    }


def route_of(path: str, known: dict[str, re.Pattern[str]]) -> str:
    if path in known:
        return path
    [found] = [route for route, pattern in known.items() if pattern.fullmatch(path)]
    return found


def more_addresses(org: Organization, server: str) -> list[str]:
    """Return the addresses that a browser is not led to by `addresses`."""
    invoice = f"/console/billing/invoices/inv_{org.id}_20261031"
    return [
        *("/console", "/console/badges", "/console/usage?by=key&range=7d"),
        *("/console/usage?by=tag&tag=team", "/console/overview?range=30d"),
        *("/console/requests?outcome=bad&cost=0.000001", "/console/people", "/console/plans"),
        "/console/playground/left",
        f"/console/mcp/servers/{server}/offer",
        f"{invoice}/export?as=csv",
    ]


def test_each_page_asks_the_database_twice_at_most(
    console: ConsoleServer, sessions: Sessions
) -> None:
    known = patterns(console)
    much, little = console.much, console.little
    of_much = [*addresses(console, much), *more_addresses(much, "many")]
    in_any = [page.path for page in PAGES.values() if page.in_any_org]
    named = [path for path in addresses(console, much) if path.startswith(tuple(in_any))]
    of_operator = [
        *addresses(console, little),
        *more_addresses(little, "files"),
        *(f"{each}{'&' if '?' in each else '?'}org_id={much.id}" for each in named),
    ]
    wrong, opened = [], set(STREAMS)
    with pytest.MonkeyPatch.context() as patch, noted(patch):
        for org, paths in ((much, of_much), (little, of_operator)):
            cookies = sessions(org.name, "owner")
            for path, (status, found) in console.call(partial(seen, console, cookies, paths)):
                assert status in (200, 303, 403), (path, status)
                if status != 403:
                    opened.add(route_of(path.partition("?")[0], known))
                if len(found.own) > MOST:
                    wrong.append(f"{path}: {len(found.own)} statements")
                    wrong += [f"    {' '.join(each.split())[:150]}" for each in found.own]
                assert len(found.frame) <= MOST_OF_FRAME, (path, found.frame)
                assert len(found.settings) <= MOST_SETTINGS, (path, found.settings)
                most = MOST_OF_ENTRY if NOTED.fullmatch(path) else 0
                assert len(found.entry) <= most, (path, found.entry)
    assert not wrong, "\n".join(wrong)
    assert known.keys() == opened, "a page that nobody opened here"


async def seen(
    console: ConsoleServer, cookies: dict[str, str], paths: list[str]
) -> list[tuple[str, tuple[int, Statements]]]:
    transport = httpx.ASGITransport(app=console.app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(
        transport=transport, base_url=console.url, cookies=cookies
    ) as client:
        return [(path, await statements_of(client, path)) for path in paths]
