"""Declares a page of the console: its place, what one must be allowed for it, and its handlers.

    page = ConsolePage(name="keys", title="Keys and limits", letter="k")

    @page.get()
    async def show(request: ConsoleRequest) -> Response[bytes]:
        async with request.transaction() as conn:
            ...
        return request.render("keys", table=table)

    @page.post("/{key_id:str}/revoke", needs="admin:keys", again=show)
    async def revoke(request: ConsoleRequest) -> Response[bytes]:
        await verbs.revoke_key(request.db, request.redis, request.ids["key_id"], ...)
        return request.done("The key was revoked.")

    routes = page.routes

`name` is its path below /console and its place in `navigation.GROUPS`. A refusal of a verb shows
`again` with `problem` and the fields as they were typed, and the error's own status; without it, a
page that says so. Who is not signed in is led to the login and back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from litestar import Request, Response
from litestar.handlers import HTTPRouteHandler

from foundation.errors import LocatedError
from gateway.audit.errors import CredentialInAudit
from gateway.auth.errors import AuthUnavailable, MissingScope
from gateway.auth.login.sessions import principal_of
from gateway.console.pages import guard_console, is_place
from gateway.http_errors.table import to_http_error
from gateway.permissions import PROJECT_OWNER, SCOPES
from gateway.request_errors import BadField
from gateway.routes.console.frame.navigation import PageEntry
from gateway.routes.console.frame.request import (
    HX_BOOSTED,
    HX_REQUEST,
    HX_URL,
    PURPOSE,
    ConsoleRequest,
    FormProblem,
)
from gateway.routes.shared.access import PUBLIC
from gateway.routes.shared.browser import (
    BadForm,
    check_token,
    open_browser,
    read_form,
    refuse_other_sites,
)
from gateway.routes.shared.media_types import FORM

LOGIN = "/oauth/login"
MAX_FIELDS = 64
MAX_FORM_BYTES = 256 * 1024
TOKEN_HEADER = "x-form-token"

Act = Callable[[ConsoleRequest], Awaitable[Response[Any]]]
A = TypeVar("A", bound=Callable[..., Awaitable[Response[Any]]])
REFUSALS = (LocatedError, BadField, CredentialInAudit, MissingScope, AuthUnavailable)
"""The errors of verbs and of our own checks, which people can read."""


@dataclass(kw_only=True)
class ConsolePage(PageEntry):
    routes: list[HTTPRouteHandler] = field(default_factory=list)

    def get(
        self, path: str = "", *, needs: str | None = None, renews: bool = False
    ) -> Callable[[A], A]:
        """Declare what a GET of the page, or of `path` below it, shows.

        `renews`: a part that a script asks for again by itself (with HX-Request). Where the session
        has ended it stays as it is, and leads nobody away who is in the middle of something.
        """
        return self._route("GET", path, needs, None, renews=renews)

    def post(
        self,
        path: str,
        *,
        needs: str | None = None,
        again: Act | None = None,
        in_project: str = "",
        max_bytes: int = MAX_FORM_BYTES,
    ) -> Callable[[A], A]:
        """Declare what a form does that is posted to `path` below the page.

        `needs`: the scope that it takes beside the page's own. `request.form` has its fields; a
        script may post JSON in their place, with the page's form token in the header X-Form-Token.
        `again`: the page that shows a refusal. `in_project`: the name in the path, or the field,
        of the project whose owners may, too.
        """
        return self._route("POST", path, needs, again, in_project, max_bytes)

    def _route(
        self,
        method: Any,
        path: str,
        needs: str | None,
        again: Act | None,
        in_project: str = "",
        max_bytes: int = MAX_FORM_BYTES,
        *,
        renews: bool = False,
    ) -> Callable[[A], A]:
        assert needs is None or needs in SCOPES, f"{needs}: nothing confers it"
        assert not in_project or needs in PROJECT_OWNER

        def decorate(act: A) -> A:
            async def handle(request: Request[Any, Any, Any]) -> Response[Any]:
                opened = await self._open(request, method, renews=renews)
                if isinstance(opened, Response):
                    return opened
                try:
                    if method == "POST":
                        opened.form = await read_console_form(opened)
                    if needs is not None:
                        ids = opened.ids | dict(opened.form)
                        opened.require(needs, ids.get(in_project) if in_project else None)
                    return await act(opened)
                except BadForm:
                    return refused(opened, FormProblem(None, STALE, 403))
                except REFUSALS as error:
                    return await refuse(opened, error, again)

            handle.__name__ = handle.__qualname__ = f"{self.name}_{act.__name__}"
            self.routes.append(
                HTTPRouteHandler(
                    self.path + path,
                    http_method=method,
                    opt=PUBLIC,
                    include_in_schema=False,
                    status_code=200,
                    request_max_body_size=max_bytes,
                )(handle)
            )
            return act

        return decorate

    async def _open(
        self, request: Request[Any, Any, Any], method: str, *, renews: bool
    ) -> ConsoleRequest | Response[Any]:
        """Return the request of somebody who is signed in and may see the page, or an answer."""
        browser = await open_browser(request)
        if browser.session is None and renews and HX_REQUEST in request.headers:
            return Response(b"", status_code=204, headers=guard_console())
        if browser.session is None:
            return to_login(request, method)
        request.scope["user"] = principal_of(browser.session)
        opened = ConsoleRequest(
            http=request,
            browser=browser,
            session=browser.session,
            page=self,
            now=datetime.now(tz=UTC),
        )
        if not self.is_for(opened.user):
            return refused(opened, FormProblem(None, NOT_YOURS, 403))
        return opened


STALE = "This form is too old, or did not come from this site. Load the page again and repeat it."
NOT_YOURS = "Your role does not show you this page. Ask who administers your organization."


async def read_console_form(request: ConsoleRequest) -> dict[str, str]:
    """Read the fields of a form of ours; of a script's JSON, none. Raises: BadForm."""
    http, token = request.http, request.http.headers.get(TOKEN_HEADER)
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    form: dict[str, str] = {}
    if token is None or kind == FORM:
        form = await read_form(http, MAX_FIELDS)
        token = form.pop("form_token", token or "")
    else:
        refuse_other_sites(http)
    check_token(request.auth, request.browser, token, PURPOSE)
    return form


async def refuse(request: ConsoleRequest, error: Exception, again: Act | None) -> Response[Any]:
    """Show what was refused, on the page of the form where there is one."""
    http_error = to_http_error(error)
    name = getattr(error, "param", None)
    message = getattr(error, "message", None) or http_error.body.message
    if isinstance(error, MissingScope):
        message = "Your role does not allow this."
    problem = FormProblem(name, sentence(name, message), http_error.status)
    if again is None or isinstance(error, MissingScope | AuthUnavailable):
        return refused(request, problem)
    request.problem = problem
    try:
        return await again(request)
    except REFUSALS:
        return refused(request, problem)


def sentence(name: str | None, message: str) -> str:
    """Make a sentence of an error, which names its field first."""
    text = f"{name.replace('_', ' ')}: {message}" if name else message
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"


def refused(request: ConsoleRequest, problem: FormProblem) -> Response[bytes]:
    """Show a page that says why not."""
    request.problem = problem
    return request.render("refused")


def to_login(request: Request[Any, Any, Any], method: str) -> Response[bytes]:
    """Lead to the login, and from there back to the page where somebody was.

    A script is told by the header at which htmx leaves the page as a whole.
    """
    headers, partial = guard_console(), HX_REQUEST in request.headers
    where = sent_from(request, method, partial=partial)
    login = f"{LOGIN}?next={quote(where, safe='')}" if where else LOGIN
    if partial:
        return Response(b"", status_code=200, headers={**headers, "hx-redirect": login})
    return Response(b"", status_code=303, headers={**headers, "location": login})


def sent_from(request: Request[Any, Any, Any], method: str, *, partial: bool) -> str:
    """Return the page where somebody was, as they see its address; empty: unknown."""
    if method == "GET" and (not partial or HX_BOOSTED in request.headers):
        query = request.scope["query_string"].decode("latin-1")
        path = quote(request.scope["path"], safe="/:@!$&'()*+,;=-._~")
        found = f"{path}?{query}" if query else path
    else:
        sent = request.headers.get(HX_URL) or request.headers.get("referer") or ""
        try:
            parts = urlsplit(sent)
        except ValueError:
            return ""
        found = f"{parts.path}?{parts.query}" if parts.query else parts.path
    return found if is_place(found) else ""
