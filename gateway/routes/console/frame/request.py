"""A request for a page of the console: who asks, what they may, the query of the page, and how it
is answered.

    request.can("admin:keys")            may they? also `can(...)` in templates
    request.org_id, request.actor        for verbs; `request.transaction()` sees the org alone
    request.range                        the time range of `?range=` or `?from=&to=`
    request.query, request.value("model")  filters
    request.cursor()                     the page of 50 that `?after=` names
    request.address(range="7d")          this page with other parameters; None drops one
    request.render("keys", table=...)    the page, or `?format=csv` of its table
    request.render(..., tables={"lanes": ...})  others of the page, `?format=csv&table=lanes`
    request.done("Revoked.", to="...")   what a form answers: go there, and say so
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from functools import cache, cached_property
from typing import Any
from urllib.parse import quote, urlencode
from zoneinfo import ZoneInfo, available_timezones

import msgspec
from litestar import Response
from litestar.datastructures import Cookie

from gateway.auth.errors import MissingScope
from gateway.auth.login.sessions import Session, principal_of
from gateway.auth.oauth.authorization import Authorization
from gateway.console import formats
from gateway.console.cells import CellWriter
from gateway.console.pages import guard_console, render
from gateway.console.ranges import CHOICES, TimeRange, read_range
from gateway.console.tables import Table
from gateway.permissions import may
from gateway.principal import MAX_LIMIT, PlanLimit
from gateway.request_errors import BadField
from gateway.routes.console.frame.navigation import PageEntry, navigation_of
from gateway.routes.shared.access import AuthenticatedRequest
from gateway.routes.shared.browser import Browser, auth_of, open_browser
from gateway.routes.shared.media_types import HTML
from gateway.routes.shared.resource import ActingRequest, org_of
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.pages import Cursor

PURPOSE = "console"
"""The form token of every page of the console: whoever may see one may post the forms of all, and
what they may is asked of their role."""
ROWS = 50
"""The rows of a page of a list."""
FLASH, THEME, ZONE = "tollgate_flash", "tollgate_theme", "tollgate_zone"
FLASH_S = 60
MAX_MESSAGE = 1000
THEMES = ("light", "dark")
MAX_DIGITS = len(str(MAX_LIMIT))
FILE_NAME = re.compile(r"[^a-z0-9]+")
OF_CSV = ("format", "table")
"""The parameters by which an address is that of a file."""
IN_ADDRESS = "/:?#@!$&'()*+,;=%-._~"
"""The characters of a `Location` that mean something there, or are quoted already (RFC 3986): all
others are quoted, for a header has no letters beyond Latin-1."""
HX_REQUEST, HX_BOOSTED, HX_URL = "hx-request", "hx-boosted", "hx-current-url"
HX_PUSH = "hx-push-url"


class Flash(msgspec.Struct, frozen=True):
    """A message that the next page shows, once."""

    text: str
    tone: str = "ok"
    """One of `gateway.console.tables.TONES`."""


class FormProblem(msgspec.Struct, frozen=True):
    """The reason why a form was refused, shown above it and beside its field."""

    field: str | None
    message: str
    status: int = 400


@dataclass(kw_only=True)
class ConsoleRequest(ActingRequest):
    http: AuthenticatedRequest
    browser: Browser
    session: Session
    page: PageEntry
    now: datetime
    form: Mapping[str, str] = field(default_factory=dict)
    """The fields of the form that was posted: a page that is shown again has them."""
    problem: FormProblem | None = None

    # who asks

    @property
    def auth(self) -> Authorization:
        return auth_of(self.http)

    @cached_property
    def org_id(self) -> str:
        """Return the organization that the page is about: their own, or on pages that say so the
        one that an operator names by `?org_id=`. Raises: NotAllowed."""
        return self._orgs[0]

    @property
    def operator_org(self) -> str | None:
        """Return the organization of an operator who names another one, as verbs want it."""
        return self._orgs[1]

    @cached_property
    def _orgs(self) -> tuple[str, str | None]:
        asked = self.query.get("org_id") if self.page.in_any_org else None
        return org_of(self.user, asked)

    def can(self, scope: str, project_id: str | None = None) -> bool:
        """Tell whether they may, by the table that the API goes by."""
        return may(self.user, scope, project_id=project_id)

    def require(self, scope: str, project_id: str | None = None) -> None:
        """Raises: MissingScope."""
        if not self.can(scope, project_id):
            raise MissingScope(scope)

    async def is_still_allowed(self) -> bool:
        """Tell whether they are still signed in, and the page still theirs: for what goes on."""
        found = (await open_browser(self.http)).session
        return found is not None and self.page.is_for(principal_of(found))

    # what is asked

    @property
    def ids(self) -> dict[str, str]:
        """Return the parameters of the path, by name."""
        return dict(self.http.path_params)

    @cached_property
    def query(self) -> dict[str, str]:
        """Return the parameters of the address; of one that is repeated, the last."""
        return {name: value for name, value in self.http.query_params.items() if "\0" not in value}

    def value(self, name: str, known: Sequence[str] | None = None) -> str:
        """Return a filter, empty where there is none. Raises: BadField for one that is not
        known."""
        found = self.query.get(name, "").strip()[:200]
        if found and known is not None and found not in known:
            raise BadField(f"must be one of {', '.join(known)}", param=name)
        return found

    @cached_property
    def range(self) -> TimeRange:
        """Raises: BadField."""
        try:
            return read_range(self.query, self.now, self.page.default_range)
        except ValueError as error:
            raise BadField(str(error), param="range") from None

    def cursor(self, order: str = "desc") -> Cursor:
        """Return the page of a list that `?after=` names, for `tenancy.pages.read_page`."""
        after = self.query.get("after") or None
        return Cursor(after=after, limit=ROWS, order=order)  # type: ignore[arg-type]

    @property
    def wants_csv(self) -> bool:
        return self.query.get("format") == "csv"

    def address(self, path: str | None = None, /, **changed: str | None) -> str:
        """Return the address of this page with some parameters changed; None drops one. `path`:
        of another page, which keeps the time range and the organization."""
        if path is None:
            kept = {name: value for name, value in self.query.items() if name not in OF_CSV}
            path = self.http.scope["path"]
            if changed.keys() & {"range", "from", "to"}:
                kept = {name: kept[name] for name in kept if name not in ("range", "from", "to")}
            if changed.keys() - {"after"}:
                kept.pop("after", None)  # another list begins at its start
        else:
            kept = {
                name: self.query[name]
                for name in ("range", "from", "to", "org_id")
                if name in self.query
            }
        wanted = {name: value for name, value in (kept | changed).items() if value}
        return f"{path}?{urlencode(wanted)}" if wanted else path

    @cached_property
    def zone(self) -> tzinfo:
        """Return the viewer's time zone, which their browser has told; UTC else."""
        name = self.http.cookies.get(ZONE, "")
        return ZoneInfo(name) if name in _zones() else UTC

    @property
    def theme(self) -> str:
        """Return the theme that they chose; empty: their system's."""
        found = self.http.cookies.get(THEME, "")
        return found if found in THEMES else ""

    def read_limits(self, limits: Iterable[PlanLimit]) -> dict[str, Any]:
        """Read the limits that the form has; an empty field is no limit. Raises: InvalidField."""
        found: dict[str, Any] = {}
        for limit in limits:
            text = self.form.get(limit.name, "").replace(",", "").replace("\u00a0", "").strip()
            is_number = text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS
            if text and not (is_number and int(text) <= MAX_LIMIT):
                raise InvalidField(limit.name, "must be a whole number, or empty for no limit")
            found[limit.name] = int(text) if text else None
        return found

    # what is answered

    def render(
        self,
        template: str,
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        table: Table | None = None,
        tables: Mapping[str, Table] | None = None,
        **values: Any,
    ) -> Response[bytes]:
        """Show a page: `templates/console/TEMPLATE.html.jinja`. `table`: what `?format=csv` answers
        with, and `table` in the template; `tables`: others by their names there, each of which
        `?format=csv&table=NAME` answers with. Raises: BadField."""
        others = tables or {}
        if self.wants_csv and table is not None and self.problem is None:
            return self.csv(others.get(self.value("table", tuple(others)), table))
        if self.problem is not None:
            status = self.problem.status
        flash = self._read_flash()
        shown = render(
            f"console/{template}",
            request=self,
            page=self.page,
            session=self.session,
            navigation=navigation_of(self.user, self.page),
            can=self.can,
            typed=self.form,
            problem=self.problem,
            flash=flash,
            form_token=self.auth.seals.form_token(self.browser.cookie, PURPOSE),
            now=self.now,
            zone=self.zone,
            ranges=CHOICES,
            table=table,
            **others,
            cells=CellWriter(self.now, self.zone),
            when=lambda moment: formats.time_tag(moment, self.now, self.zone),
            at=lambda moment: formats.moment(moment, self.zone),
            **values,
        )
        # What a form answers itself has no address to come back to: htmx leaves it as it is.
        stays = {HX_PUSH: "false"} if self.http.method == "POST" else {}
        response = Response(
            shown,
            status_code=status,
            media_type=HTML,
            headers={**guard_console(), **stays, **(headers or {})},
        )
        if flash is not None:
            response.set_cookie(self._cookie(FLASH, "", 0))
        return response

    def csv(self, table: Table) -> Response[bytes]:
        """Answer with a table as a file."""
        words = FILE_NAME.sub("-", f"tollgate {self.page.name} {table.caption}".lower()).strip("-")
        name = f"{words[:80]}-{self.now:%Y%m%d-%H%M}.csv"
        headers = {**guard_console(), "content-disposition": f'attachment; filename="{name}"'}
        return Response(table.to_csv(), media_type="text/csv; charset=utf-8", headers=headers)

    def done(self, text: str = "", *, to: str | None = None, tone: str = "ok") -> Response[bytes]:
        """Answer a form: lead to `to`, the page itself by default, which says `text` once. htmx
        follows and swaps what is new."""
        response: Response[bytes] = Response(
            b"",
            status_code=303,
            headers={**guard_console(), "location": quote(to or self.page.path, safe=IN_ADDRESS)},
        )
        if text:
            flash = Flash(text[:MAX_MESSAGE], tone)
            packed = base64.urlsafe_b64encode(msgspec.json.encode(flash)).decode()
            seal = self.auth.seals.form_token(self.browser.cookie, f"flash {packed}")
            response.set_cookie(self._cookie(FLASH, f"{packed}.{seal}", FLASH_S))
        return response

    def _read_flash(self) -> Flash | None:
        packed, _, seal = self.http.cookies.get(FLASH, "").rpartition(".")
        cookie = self.browser.cookie
        if not packed or not self.auth.seals.is_form_token(seal, cookie, f"flash {packed}"):
            return None
        return msgspec.json.decode(base64.urlsafe_b64decode(packed), type=Flash)

    def _cookie(self, name: str, value: str, max_age: int) -> Cookie:
        return Cookie(
            key=name,
            value=value,
            path="/console",
            max_age=max_age,
            httponly=True,
            secure=self.auth.secure,
            samesite="lax",
        )


@cache
def _zones() -> frozenset[str]:
    return frozenset(available_timezones())
