"""Shares what the routes of an organization have in common: reading ids and bodies, the transaction
that sees the caller's org alone, answers and their listings.

Every change runs in one transaction with its audit entry; what workers must know of is announced
once it is committed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from typing import TypeVar, cast

import msgspec
from litestar import Response
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.db import tenant
from gateway.permissions import is_bound, may_appoint, may_give
from gateway.principal import Principal, Role
from gateway.routes.shared.access import AuthenticatedRequest, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.conditional import answer
from gateway.routes.shared.pages import Listing
from gateway.tenancy.changes import changing
from gateway.tenancy.errors import NotAllowed, NotFound
from gateway.tenancy.pages import Cursor
from gateway.wire.organization.organization import (
    EmptyObject,
    ListQuery,
    OrganizationBody,
    read_body,
)

S = TypeVar("S", bound=msgspec.Struct)
B = TypeVar("B", bound=OrganizationBody)

ID_FORM = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)


def check_id(field: str, value: str) -> str:
    """Refuse a text that cannot be an id as one that nobody has. Raises: NotFound."""
    if ID_FORM.fullmatch(value) is None:
        raise NotFound(field, "no such id")
    return value


async def body_of(request: AuthenticatedRequest, kind: type[B]) -> B:
    """Read the body. Raises: BadField, EncodedBody."""
    return read_body(await plain_body(request), kind)


async def expect_nothing(request: AuthenticatedRequest) -> None:
    """Expect no body, or an empty object. Raises: BadField, EncodedBody."""
    content = await plain_body(request)
    if content.strip():
        read_body(content, EmptyObject)


def reading(request: AuthenticatedRequest) -> AbstractAsyncContextManager[AsyncConnection]:
    """Open a transaction in the caller's org after which no worker has to be told."""
    return tenant(services(request).db, request.user.org_id)


def changing_for(
    request: AuthenticatedRequest, subject: str
) -> AbstractAsyncContextManager[AsyncConnection]:
    """Open a transaction in the caller's org; then every worker forgets what it knows of `subject`,
    the id of a key, of its owner, or of a project."""
    found = services(request)
    return changing(found.db, found.redis, subject, org_id=request.user.org_id)


def show_once(request: AuthenticatedRequest, thing: msgspec.Struct) -> Response[bytes]:
    """Answer with something that holds a secret: no cache on the way keeps it."""
    return answer(request, thing, headers={"cache-control": "no-store"})


def to_cursor(query: ListQuery) -> Cursor:
    return Cursor(after=query.after, limit=query.limit)


def to_listing(data: Sequence[S], has_more: bool) -> Listing[S]:
    ids = [cast(str, getattr(each, "id", None)) for each in data]
    return Listing(
        data=list(data),
        first_id=ids[0] if ids else None,
        last_id=ids[-1] if ids else None,
        has_more=has_more,
    )


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
