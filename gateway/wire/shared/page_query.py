"""Reads the queries that lists and resources of administration are asked by."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.tenancy.pages import DEFAULT_LIMIT, MAX_LIMIT, Order

Cursor = Annotated[str, Meta(min_length=1, max_length=200)]
OrgId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,100}\Z")]
Limit = Annotated[int, Meta(ge=1, le=MAX_LIMIT)]


class PageQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`?after=ID&limit=20&order=asc`."""

    after: Cursor | None = None
    limit: Limit = DEFAULT_LIMIT
    order: Order = "asc"


class ArchivedPageQuery(PageQuery):
    include_archived: bool = False


class OrgQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`org_id`: for operators, another org than their own."""

    org_id: OrgId | None = None


class OrgPageQuery(PageQuery):
    """`org_id`: for operators, another org than their own."""

    org_id: OrgId | None = None


class ArchivedOrgPageQuery(OrgPageQuery):
    include_archived: bool = False
