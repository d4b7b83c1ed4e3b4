"""/v1/admin/plans: what clients write and read.

Moments are Unix seconds, as OpenAI's are. A field that a change leaves out stays as it is; null
takes the limit away.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from foundation.structs import patch_of, with_fields
from gateway.principal import LIMIT_NAMES, Plan

PlanName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]


class NewPlan(Plan, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: PlanName


@patch_of(NewPlan, without=("name",))
class PlanPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


@with_fields(LIMIT_NAMES, int | None, after="name")
class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """A plan. `read_only`: it stands in the settings file, and is changed there."""

    object: str = "plan"
    name: str
    weight: float | None
    lane: str | None
    price_list: str | None
    read_only: bool
    created_at: int
    archived_at: int | None
