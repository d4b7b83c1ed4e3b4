"""Says who decides how many engines models have, as `[fleet.planner]` has it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class PlannerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[fleet.planner]`: who decides how many engines a model has with a range of them."""

    mode: Literal["off", "dry-run", "on"] = "on"
    """`off`: each such model has as many as at the start. `dry-run`: what would be done is said,
    and stands in the audit log, but is not done."""
    interval_s: Annotated[float, Meta(ge=0.1, le=300)] = 5.0
    """Between two decisions."""
    cooldown_s: Annotated[float, Meta(ge=0, le=86_400)] = 120.0
    """Fewer are wanted once no more were needed for so long."""
    idle_s: Annotated[float, Meta(ge=1, le=7 * 86_400)] = 900.0
    """A model whose range begins at 0 has no engine any more once nothing was asked of it for so
    long."""
    starts_at_once: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """Engines of this machine that may be starting at a time, of all models together; others wait
    for their turn. None: as many as it has processors, of which each keeps about one busy."""
