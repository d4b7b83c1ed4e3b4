"""The models as Anthropic's clients list them.

Pure shapes, and the page that a query asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gateway.request_errors import BadField
from gateway.wire.anthropic.reports import to_rfc3339

MAX_PAGE = 1000
PAGE = 20


class ModelsQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The query of `GET /v1/models` from a client that names Anthropic's version."""

    before_id: str | None = None
    after_id: str | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = PAGE
    beta: bool | None = None
    """Older SDKs say so of their beta namespace, whose models are the same."""


class AnthropicModel(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    """RFC 3339."""
    lifecycle: Literal["active"] = "active"


class AnthropicModelPage(msgspec.Struct, frozen=True, kw_only=True):
    data: Sequence[AnthropicModel]
    has_more: bool
    """In the direction that was asked for."""
    first_id: str | None
    last_id: str | None


def to_model(name: str, created: int) -> AnthropicModel:
    """Return a model as Anthropic shows it. `created`: Unix seconds."""
    return AnthropicModel(id=name, display_name=name, created_at=to_rfc3339(created))


def to_page(names: Sequence[str], created: int, query: ModelsQuery) -> AnthropicModelPage:
    """Raises BadField."""
    begin, end = 0, len(names)
    if query.after_id is not None:
        begin = place_of(query.after_id, names, "after_id") + 1
    if query.before_id is not None:
        end = place_of(query.before_id, names, "before_id")
    within = names[begin:end]
    backwards = query.before_id is not None and query.after_id is None
    shown = within[-query.limit :] if backwards else within[: query.limit]
    return AnthropicModelPage(
        data=[to_model(name, created) for name in shown],
        has_more=len(shown) < len(within),
        first_id=shown[0] if shown else None,
        last_id=shown[-1] if shown else None,
    )


def place_of(name: str, names: Sequence[str], param: str) -> int:
    if name not in names:
        raise BadField(f"Invalid value for '{param}': no model has that name.", param=param)
    return names.index(name)
