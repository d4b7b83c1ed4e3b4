"""The queries for a kept response, and for the items of a response or a conversation.

Pure shapes.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.tenancy.pages import DEFAULT_LIMIT, MAX_LIMIT, Order
from gateway.wire.openai_responses.request import MAX_INCLUDES, Included
from gateway.wire.shared.refusals import MAX_INT64


class IncludeQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A query with `include`: what it names is in the answer if it was asked for when that was
    made."""

    include: Annotated[list[Included], Meta(max_length=MAX_INCLUDES)] = []


class RetrieveQuery(IncludeQuery, kw_only=True, forbid_unknown_fields=True):
    stream: bool = False
    include_obfuscation: bool = False
    starting_after: Annotated[int, Meta(ge=0, le=MAX_INT64)] | None = None
    """With `stream`: the number of the event behind which it goes on."""


class ItemsQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    after: str | None = None
    include: Annotated[list[Included], Meta(max_length=MAX_INCLUDES)] = []
    limit: Annotated[int, Meta(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT
    order: Order = "desc"
