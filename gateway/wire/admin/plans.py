"""/v1/admin/plans: what clients write and read.

Moments are Unix seconds, as OpenAI's are. A field that a change leaves out stays as it is; null
takes the limit away.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from billing.pricing.lists import ListName
from engine.protocol import Lane
from foundation.structs import patch_of

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


@patch_of(NewPlan, without=("name",))
class PlanPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


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


def to_seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
