"""/v1/admin/plans: what clients write and read.

Moments are Unix seconds, as OpenAI's are. A field that a change leaves out stays as it is; null
takes the limit away.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from billing.pricing.lists import ListName
from engine.protocol import Lane

MAX_LIMIT = 1_000_000_000_000
PlanName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
Limit = Annotated[int, Meta(ge=0, le=MAX_LIMIT)]
Weight = Annotated[float, Meta(ge=1 / 64, le=64)]
"""Of an org among others in a lane: twice the weight, twice the share when all wait."""


class NewPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: PlanName
    tokens_per_minute: Limit | None = None
    requests_per_minute: Limit | None = None
    max_concurrent_streams: Limit | None = None
    input_tokens_per_minute: Limit | None = None
    output_tokens_per_minute: Limit | None = None
    batch_tokens_per_day: Limit | None = None
    weight: Weight | None = None
    lane: Lane | None = None
    price_list: ListName | None = None


class PlanPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens_per_minute: Limit | None | UnsetType = UNSET
    requests_per_minute: Limit | None | UnsetType = UNSET
    max_concurrent_streams: Limit | None | UnsetType = UNSET
    input_tokens_per_minute: Limit | None | UnsetType = UNSET
    output_tokens_per_minute: Limit | None | UnsetType = UNSET
    batch_tokens_per_day: Limit | None | UnsetType = UNSET
    weight: Weight | None | UnsetType = UNSET
    lane: Lane | None | UnsetType = UNSET
    price_list: ListName | None | UnsetType = UNSET


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """A plan. `read_only`: it stands in the settings file, and is changed there."""

    object: str = "plan"
    name: str
    tokens_per_minute: int | None
    requests_per_minute: int | None
    max_concurrent_streams: int | None
    input_tokens_per_minute: int | None
    output_tokens_per_minute: int | None
    batch_tokens_per_day: int | None
    weight: float | None
    lane: str | None
    price_list: str | None
    read_only: bool
    created_at: int
    archived_at: int | None


def given(patch: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that a change names."""
    fields = msgspec.structs.asdict(patch)
    return {name: value for name, value in fields.items() if value is not UNSET}


def to_seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
