"""Leads into the console: `/console`, its files, and what stands on every page: the theme,
signing out, what waits for a person."""

from __future__ import annotations

from functools import partial
from typing import Any

from litestar import Request, Response, get
from litestar.datastructures import Cookie
from litestar.exceptions import NotFoundException
from markupsafe import Markup

from gateway.auth.login.sessions import end_session
from gateway.console.assets import ADDRESS, by_address
from gateway.console.pages import CONSOLE, guard_console
from gateway.routes.console.frame.navigation import PAGES, navigation_of
from gateway.routes.console.frame.page import LOGIN, ConsolePage, sent_from
from gateway.routes.console.frame.request import THEME, THEMES, ConsoleRequest
from gateway.routes.shared.access import PUBLIC
from gateway.routes.shared.browser import signed_out
from gateway.routes.shared.conditional import KeptContent
from gateway.routes.shared.media_types import HTML

ACCOUNT = "/oauth/account"
FOR_GOOD = "public, max-age=31536000, immutable"
THEME_S = 365 * 86_400

front = ConsolePage(name="", title="Console", visible=lambda _: True)


@front.get()
async def show_first(request: ConsoleRequest) -> Response[bytes]:
    """Lead to the first page that is theirs."""
    places = [place for group in navigation_of(request.user) for place in group.places]
    to = places[0].path if places else ACCOUNT
    return Response(b"", status_code=303, headers={**guard_console(), "location": to})


@front.post("/theme")
async def choose_theme(request: ConsoleRequest) -> Response[bytes]:
    theme = request.form.get("theme", "")
    response = request.done(to=sent_from(request.http, "POST", partial=False) or CONSOLE)
    if theme in THEMES:
        kept = Cookie(
            key=THEME,
            value=theme,
            path="/",
            max_age=THEME_S,
            httponly=True,
            secure=request.auth.secure,
            samesite="lax",
        )
        response.set_cookie(kept)
    return response


@front.post("/sign-out")
async def sign_out(request: ConsoleRequest) -> Response[bytes]:
    async with request.transaction() as conn:
        await end_session(conn, request.session, actor=request.actor)
    return signed_out(request.done(to=LOGIN), request.auth)


@front.get("/badges", renews=True)
async def show_badges(request: ConsoleRequest) -> Response[bytes]:
    """Answer htmx with the counts beside the pages' names, each for its own place."""
    shown = Markup("")
    for page in PAGES.values():
        if page.badge is not None and page.is_for(request.user):
            number = await page.badge(request)
            shown += Markup(
                '<span class="count" id="badge-{}" hx-swap-oob="true">{}</span>'
            ).format(page.name, number or "")
    return Response(shown.encode(), media_type=HTML, headers=guard_console())


@get(ADDRESS + "/{name:str}", opt=PUBLIC, include_in_schema=False)
async def show_asset(request: Request[Any, Any, Any]) -> Response[bytes]:
    kept = ASSETS.get(request.path_params["name"])
    if kept is None:
        raise NotFoundException
    return await kept.answer(request)


ASSETS = {
    name: KeptContent(partial(bytes, each.content), each.media_type, cache_control=FOR_GOOD)
    for name, each in by_address().items()
}
routes = [*front.routes, show_asset]
