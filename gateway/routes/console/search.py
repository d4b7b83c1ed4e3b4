"""Shows /console/search: finds keys, projects and people by name, by id or by its end, and pages by
their titles. What has an id of a known kind leads to its page at once."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import msgspec
from litestar import Response

from billing.queries import ask_all
from gateway.routes.console.frame.navigation import PAGES, navigation_of
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ConsoleRequest
from gateway.routes.console.requests import BATCH_PREFIXES
from gateway.tenancy.keys.key_pages import list_key_pages
from gateway.tenancy.pages import Cursor
from gateway.tenancy.project_pages import people_query, projects_query

FEW = Cursor(limit=10, order="desc")
WHERE = {
    "key_": "keys",
    "proj_": "projects",
    "user_": "people",
    "req_": "requests",
    "inv_": "billing",
}
"""The page on whose addresses an id of a prefix stands."""
BELOW = {"inv_": "/invoices"}
"""The path between the page's own and the id, where there is one."""

page = ConsolePage(name="search", title="Search")


class SearchHit(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    title: str
    about: str
    path: str


@page.get()
async def show(request: ConsoleRequest) -> Response[bytes]:
    text = request.value("q")
    whole = page_of_id(request, text)
    findings = await find(request, text) if text else []
    if whole is not None:
        findings = [whole, *(each for each in findings if each.path != whole.path)]
    return request.render("search", text=text, findings=findings)


def page_of_id(request: ConsoleRequest, text: str) -> SearchHit | None:
    """Return the page of a whole id, if it is there and theirs."""
    if text.startswith(BATCH_PREFIXES) and PAGES["requests"].is_for(request.user):
        path = f"{PAGES['requests'].path}?{urlencode({'batch': text, 'range': '30d'})}"
        return SearchHit(kind="Batch", title=text, about="its requests", path=path)
    for prefix, name in WHERE.items():
        found = PAGES.get(name)
        if not text.startswith(prefix) or len(text) < 20 or not text.isidentifier():
            continue
        if found is not None and found.is_for(request.user):
            return SearchHit(
                kind=found.title,
                title=text,
                about="",
                path=f"{found.path}{BELOW.get(prefix, '')}/{text}",
            )
    return None


async def find(request: ConsoleRequest, text: str) -> list[SearchHit]:
    async with request.transaction() as conn:
        where: dict[str, Any] = {"org_id": request.org_id, "text": text}
        keys, _ = await list_key_pages(conn, **where, now=request.now, cursor=FEW)
        projects, people = await ask_all(
            conn,
            projects_query(**where, limit=FEW.limit),
            people_query(**where, limit=FEW.limit),
        )
    places = [
        SearchHit(kind="Page", title=place.title, about="", path=place.path)
        for group in navigation_of(request.user)
        for place in group.places
        if text.casefold() in place.title.casefold()
    ]
    return [
        *places,
        *(
            SearchHit(
                kind="Project", title=each.name, about=each.id, path=f"/console/projects/{each.id}"
            )
            for each in projects
        ),
        *(
            SearchHit(
                kind="Key",
                title=each.key.name,
                about=f"{each.key.hint} {each.project_name or ''}",
                path=f"/console/keys/{each.key.id}",
            )
            for each in keys
        ),
        *(
            SearchHit(
                kind="Person",
                title=each.email,
                about=f"{each.name}, {each.role}",
                path=f"/console/people/{each.id}",
            )
            for each in people
        ),
    ]


routes = page.routes
