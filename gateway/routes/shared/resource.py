"""Makes the handlers of a resource of administration from its description.

A resource says once what its routes share: the path, the tag, who may read it and who may change
it, the view that clients see and how a row is shown in it. A list and a retrieval are described; a
change is a function that does what is its own, mostly one call of a verb of `tenancy`:

    projects = AdminResource[Project](
        path="/v1/admin/projects",
        id_name="project_id",
        tag="Projects",
        change=needs("admin:projects"),
        view=ProjectView,
        show=to_view,
    )

    retrieve = projects.retrieve("One project, with its plan", verbs.get_project)

    @projects.update("Rename a project, or give it another plan", ProjectPatch)
    async def update(request: AdminRequest, values: dict[str, Any]) -> Project:
        return await verbs.update_project(
            request.db, request.redis, request.id, values, **request.change
        )

Around the function its handler reads the query, names the organization, checks the ids in the path,
reads If-Match and the body; then it shows the row that the function returns, under its ETag. A
function may answer with something else: a struct, where its route names one as `answer`, or a
response. The name of the function is that of the operation in the OpenAPI document.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec
import sqlalchemy as sa
from litestar import Response
from litestar.handlers import HTTPRouteHandler
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from foundation.structs import given
from gateway.audit.log import Actor
from gateway.db import tenant
from gateway.permissions import SCOPE_ADMIN_READ, is_bound, may, may_appoint, may_give
from gateway.principal import Principal, Role
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.conditional import Precondition, answer, if_match, tag_of, tagged
from gateway.routes.shared.operations import Said, describes
from gateway.routes.shared.pages import Listing
from gateway.routes.shared.services import Services
from gateway.tenancy.changes import changing
from gateway.tenancy.errors import NotAllowed, NotFound
from gateway.tenancy.pages import Cursor, read_page
from gateway.wire.organization.organization import EmptyObject, ListQuery
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.page_query import OrgQuery, PageQuery
from gateway.wire.shared.resource import read_body

Row = TypeVar("Row")
Page = TypeVar("Page", bound=PageQuery | ListQuery)
Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
Act = Callable[..., Awaitable[Any]]
"""A function that gets an AdminRequest and, where its route has them, the query and the body."""
Decorator = Callable[[Act], HTTPRouteHandler]

OPERATOR = "operator:orgs"
ID_FORM = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)
NO_STORE = {"cache-control": "no-store"}


def check_id(field: str, value: str) -> str:
    """Refuse a text that cannot be an id as one that nobody has. Raises: NotFound."""
    if ID_FORM.fullmatch(value) is None:
        raise NotFound(field, "no such id")
    return value


def org_of(principal: Principal, asked: str | None) -> tuple[str, str | None]:
    """Return the organization that a request is about, and the operator's where an operator asks.

    Raises: NotAllowed.
    """
    if asked is None:
        return principal.org_id, principal.org_id if principal.is_operator else None
    if not may(principal, OPERATOR):
        raise NotAllowed("org_id", "only an operator names an organization")
    return asked, principal.org_id


class ActingRequest:
    """A request of somebody who administers an organization: by the API, or on a page of the
    console. It reaches the services of the process."""

    http: AuthenticatedRequest
    if TYPE_CHECKING:  # a field of one kind of request, and computed by the other

        @property
        def org_id(self) -> str:
            """Return the caller's organization, or the one that an operator names."""

    @property
    def user(self) -> Principal:
        return self.http.user

    @property
    def services(self) -> Services:
        return services(self.http)

    @property
    def db(self) -> AsyncEngine:
        return self.services.db

    @property
    def system_db(self) -> AsyncEngine:
        return self.services.system_db

    @property
    def redis(self) -> Redis:
        return self.services.redis

    @property
    def actor(self) -> Actor:
        return actor_of(self.http)

    def transaction(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """Open a transaction that sees the organization alone."""
        return tenant(self.db, self.org_id)

    def announced(self, subject: str) -> AbstractAsyncContextManager[AsyncConnection]:
        """Open a transaction after which every worker forgets what it knows of `subject`, the id of
        a key, of its owner or of a project."""
        return changing(self.db, self.redis, subject, org_id=self.org_id)


@dataclass(frozen=True, kw_only=True)
class AdminRequest(ActingRequest):
    """A request of administration whose query, path and If-Match were read."""

    http: AuthenticatedRequest
    org_id: str
    """The caller's organization, or the one that an operator names."""
    operator_org: str | None
    """The caller's organization, if it is an operator's."""
    ids: dict[str, str]
    """The ids in the path, by their names there."""
    check: Callable[[Any], None]
    """Raises PreconditionFailed for a row that is no longer what If-Match names."""
    precondition: Precondition
    in_system: bool

    @property
    def id(self) -> str:
        """Return the last id in the path."""
        return list(self.ids.values())[-1]

    @property
    def where(self) -> dict[str, Any]:
        """Return what a function that finds the row takes: its organization and the ids."""
        return {"org_id": self.org_id, **self.ids}

    @property
    def change(self) -> dict[str, Any]:
        """Return what a verb that changes a row takes beside the ids."""
        return {"org_id": self.org_id, "actor": self.actor, "check": self.check}

    @property
    def operator_change(self) -> dict[str, Any]:
        """Return `change`, and the organization of the operator who makes it."""
        return {**self.change, "operator_org": self.operator_org}

    def reading(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """Open the connection by which rows of the resource are read."""
        return self.system_db.connect() if self.in_system else self.transaction()


def itself(view: Any) -> Any:
    return view


def show_nothing(_row: Any) -> tuple[Any, ...]:
    return ()


@dataclass(frozen=True, kw_only=True)
class AdminResource(Generic[Row]):
    """A description of what the routes of a resource share; its methods make their handlers."""

    path: str
    id_name: str = ""
    """The name of its id in the path; empty: there is one of it in an organization."""
    id_field: str = "id"
    """The field of the view by which pages go on."""
    tag: str
    read: dict[str, Any] = field(default_factory=lambda: needs(SCOPE_ADMIN_READ))
    change: dict[str, Any] = field(default_factory=dict)
    view: type[msgspec.Struct]
    show: Callable[[Row], msgspec.Struct] = itself
    """Shows a row in the view; by itself the functions return views."""
    unseen: Callable[[Row], tuple[Any, ...]] = show_nothing
    """Parts of the ETag that the view does not show, such as the version of a secret."""
    unsteady: Sequence[str] = ()
    """Fields of the view that the ETag leaves out, such as when a key was used."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of an answer with one of them."""
    in_any_org: bool = False
    """True: an operator may name another organization by `org_id`."""
    in_system: bool = False
    """True: its rows are read with the connection that sees all organizations."""
    checks_ids: bool = True

    @property
    def one(self) -> str:
        """Return the path of one of them."""
        return f"{self.path}/{{{self.id_name}:str}}" if self.id_name else self.path

    def below(
        self,
        path: str,
        view: type[msgspec.Struct],
        *,
        id_name: str = "",
        show: Callable[[Any], msgspec.Struct] = itself,
    ) -> AdminResource[Any]:
        """Describe what each of them has at `path`, read and changed with the same scopes."""
        return replace(self, path=self.one + path, id_name=id_name, view=view, show=show)

    def list_all(
        self,
        summary: str,
        query: type[Page],
        *,
        select: Callable[[str, Page], sa.Select[Any]],
        row: type[Row] | Callable[[sa.Row[Any]], Row],
        key: sa.ColumnElement[str] | None = None,
        name: str = "list_",
    ) -> HTTPRouteHandler:
        """Make the handler that lists by pages what `select` finds for an organization and a query.

        `row`: the struct of its columns, or a function that reads them. `key`: the column of ids;
        None: `id`. `name`: the operation's.
        """

        read = reader_of(row)

        async def list_(request: AdminRequest, query: Page) -> tuple[list[Row], bool]:
            selected = select(request.org_id, query)
            async with request.reading() as conn:
                rows, has_more = await read_rows(conn, selected, query, key)
                return [read(each) for each in rows], has_more

        list_.__name__ = list_.__qualname__ = name
        return self.page(summary, query)(list_)

    def page(self, summary: str, query: type[msgspec.Struct]) -> Decorator:
        """Make the handler of a list from a function that returns the rows of a page, and whether
        there are more behind them."""
        listing: Any = Listing
        return self.route(
            "GET",
            self.path,
            summary,
            query=query,
            answer=listing[self.view],
            respond=self.respond_page,
        )

    def retrieve(
        self, summary: str, find: Callable[..., Awaitable[Row]], *, name: str = "retrieve"
    ) -> HTTPRouteHandler:
        """Make the handler that shows what `find` returns for the organization and the ids."""

        async def retrieve(request: AdminRequest) -> Row:
            async with request.reading() as conn:
                return await find(conn, **request.where)

        retrieve.__name__ = retrieve.__qualname__ = name
        return self.route("GET", self.one, summary)(retrieve)

    def get(
        self,
        summary: str,
        *,
        path: str | None = None,
        query: type[msgspec.Struct] | None = None,
        answer: Any = None,
        said: Said | None = None,
    ) -> Decorator:
        """Make a handler that reads: of one of them, unless `path` says otherwise."""
        where = self.one if path is None else path
        return self.route("GET", where, summary, query=query, answer=answer, said=said)

    def create(
        self,
        summary: str,
        body: type[msgspec.Struct],
        *,
        answer: Any = None,
        status: int = 201,
        said: Said | None = None,
    ) -> Decorator:
        return self.route(
            "POST", self.path, summary, body=body, answer=answer, status=status, said=said
        )

    def update(
        self, summary: str, patch: type[msgspec.Struct], *, method: Method = "PATCH"
    ) -> Decorator:
        """Make the handler of a change, whose function gets the fields that it names."""
        return self.route(method, self.one, summary, body=patch, is_patch=True, conditional=True)

    def replace(
        self,
        summary: str,
        body: type[msgspec.Struct],
        *,
        method: Method = "PUT",
        conditional: bool = True,
    ) -> Decorator:
        return self.route(method, self.one, summary, body=body, conditional=conditional)

    def archive(self, summary: str) -> Decorator:
        return self.act("/archive", summary)

    def delete(self, summary: str, *, answer: Any = None, conditional: bool = True) -> Decorator:
        return self.route("DELETE", self.one, summary, answer=answer, conditional=conditional)

    def act(
        self,
        path: str,
        summary: str,
        *,
        needs: Mapping[str, Any] | None = None,
        body: type[msgspec.Struct] | None = None,
        body_required: bool = True,
        answer: Any = None,
        status: int = 200,
        conditional: bool = True,
    ) -> Decorator:
        """Make the handler of what else is done with one of them, by a POST to `path` below it."""
        return self.route(
            "POST",
            self.one + path,
            summary,
            needs=needs,
            body=body,
            body_required=body_required,
            answer=answer,
            status=status,
            conditional=conditional,
        )

    def route(
        self,
        method: Method,
        path: str,
        summary: str,
        *,
        needs: Mapping[str, Any] | None = None,
        query: type[msgspec.Struct] | None = None,
        body: type[msgspec.Struct] | None = None,
        body_required: bool = True,
        is_patch: bool = False,
        answer: Any = None,
        status: int = 200,
        conditional: bool = False,
        said: Said | None = None,
        respond: Callable[..., Response[bytes]] | None = None,
    ) -> Decorator:
        """Make any handler. `needs`: other scopes than the resource's; `answer`: what it answers
        with instead of one of the resource; the rest: as `describes` has it."""
        opt = needs or (self.read if method == "GET" else self.change)
        asked = query or (OrgQuery if self.in_any_org else None)
        respond = respond or (self.respond if answer is None else respond_plainly)

        def decorate(act: Act) -> HTTPRouteHandler:
            async def handle(request: AuthenticatedRequest) -> Response[Any]:
                found = None if asked is None else parse_query(request.url.query, asked)
                admin_request = self.read_request(request, found, conditional=conditional)
                arguments: list[Any] = [] if query is None else [found]
                if body is not None:
                    content = await plain_body(request)
                    wanted = read_body(content if content or body_required else b"{}", body)
                    arguments.append(given(wanted) if is_patch else wanted)
                done = await act(admin_request, *arguments)
                return done if isinstance(done, Response) else respond(request, done, status)

            handle.__name__ = act.__name__
            handle.__qualname__ = act.__qualname__
            described = describes(
                query=asked,
                body=body,
                body_required=body_required,
                answer=self.view if answer is None else answer,
                status=status,
                conditional=conditional
                or (method == "GET" and answer is None and status not in (said or ())),
                said=said,
            )
            return HTTPRouteHandler(
                path,
                http_method=method,
                opt=opt,
                status_code=status,
                tags=[self.tag],
                summary=summary,
                operation_class=described,
            )(handle)

        return decorate

    def read_request(
        self, request: AuthenticatedRequest, query: Any, *, conditional: bool
    ) -> AdminRequest:
        """Raises: BadField (If-Match), NotAllowed (org_id), NotFound (what cannot be an id)."""
        org_id, operator_org = org_of(request.user, getattr(query, "org_id", None))
        ids: dict[str, str] = dict(request.path_params)
        if self.checks_ids:
            for name, value in ids.items():
                check_id(name, value)
        precondition = if_match(request) if conditional else Precondition()
        return AdminRequest(
            http=request,
            org_id=org_id,
            operator_org=operator_org,
            ids=ids,
            check=lambda row: precondition.check_tag(self.etag(row)),
            precondition=precondition,
            in_system=self.in_system,
        )

    def etag(self, row: Row) -> str:
        return tag_of(self.steady(self.show(row)), *self.unseen(row))

    def steady(self, view: msgspec.Struct) -> msgspec.Struct:
        return msgspec.structs.replace(view, **dict.fromkeys(self.unsteady))

    def respond(self, request: AuthenticatedRequest, row: Row, status: int) -> Response[bytes]:
        """Show a row under its ETag; what the ETag leaves out is always sent."""
        if self.unsteady:
            return tagged(self.show(row), self.etag(row), status=status, headers=self.headers)
        return answer(
            request, self.show(row), unseen=self.unseen(row), status=status, headers=self.headers
        )

    def respond_once(self, once: msgspec.Struct, row: Row, *, status: int = 200) -> Response[bytes]:
        """Show a secret, in this answer alone: its ETag is that of the row without it, with which a
        later If-Match is compared, and nothing on the way keeps it."""
        return tagged(once, self.etag(row), status=status, headers=NO_STORE)

    def respond_page(
        self, request: AuthenticatedRequest, page: tuple[Sequence[Row], bool], _: int
    ) -> Response[bytes]:
        rows, has_more = page
        data = [self.show(row) for row in rows]
        ids = [getattr(each, self.id_field) for each in data]
        first, last = (ids[0], ids[-1]) if ids else (None, None)
        return answer(request, Listing(data=data, first_id=first, last_id=last, has_more=has_more))


def respond_plainly(
    request: AuthenticatedRequest, thing: msgspec.Struct, status: int
) -> Response[bytes]:
    return answer(request, thing, status=status)


async def expect_nothing(request: AdminRequest) -> None:
    """Expect no body, or an empty object. Raises: BadField, EncodedBody."""
    content = await plain_body(request.http)
    if content.strip():
        read_body(content, EmptyObject)


def show_once(
    request: AdminRequest, thing: msgspec.Struct, *, status: int = 200
) -> Response[bytes]:
    """Answer with something that holds a secret: no cache on the way keeps it."""
    return answer(request.http, thing, status=status, headers=NO_STORE)


def reader_of(row: type[Row] | Callable[[sa.Row[Any]], Row]) -> Callable[[sa.Row[Any]], Row]:
    if isinstance(row, type):
        return lambda found: row(**found._mapping)
    return row


async def read_rows(
    conn: AsyncConnection,
    selected: sa.Select[Any],
    query: PageQuery | ListQuery,
    key: sa.ColumnElement[str] | None = None,
) -> tuple[list[sa.Row[Any]], bool]:
    """Return the rows of a page, and whether there are more behind them. `key`: the column of ids;
    None: `id`."""
    column = selected.selected_columns["id"] if key is None else key
    return await read_page(conn, selected, column, to_cursor(query))


def to_cursor(query: PageQuery | ListQuery) -> Cursor:
    return Cursor(after=query.after, limit=query.limit, order=getattr(query, "order", "asc"))


def to_moment(seconds: int | None) -> datetime | None:
    return None if seconds is None else datetime.now(tz=UTC) + timedelta(seconds=seconds)


def require_appoint(principal: Principal, *roles: Role) -> None:
    """Check that nobody gives, or takes, more than they have. Raises: NotAllowed."""
    for role in roles:
        if not may_appoint(principal, role):
            detail = "this credential may not give or take this role"
            message = f"this credential may not give or take the role {role!r}"
            raise NotAllowed("role", message, detail=detail)


def require_unbound(principal: Principal) -> None:
    """Refuse a bound key: a place that somebody is given outlasts what the key is bound to. Raises:
    NotAllowed."""
    if is_bound(principal):
        raise NotAllowed("role", "a key that is bound gives nobody a place")


def require_give(principal: Principal, scopes: Sequence[str]) -> None:
    """Check that the caller may give these scopes. Raises: NotAllowed."""
    if not may_give(principal, scopes):
        raise NotAllowed("scopes", "this credential may not give all of these scopes")
