"""Reads the query that every list is asked by."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.tenancy.pages import DEFAULT_LIMIT, MAX_LIMIT, Order

Cursor = Annotated[str, Meta(min_length=1, max_length=200)]
Limit = Annotated[int, Meta(ge=1, le=MAX_LIMIT)]


class PageQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`?after=ID&limit=20&order=asc`."""

    after: Cursor | None = None
    limit: Limit = DEFAULT_LIMIT
    order: Order = "asc"
