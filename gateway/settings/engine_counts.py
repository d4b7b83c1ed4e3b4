"""Says how many engines a model may have: so many, within a range, or of either role."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

MAX_ENGINES = 64
RANGE_PATTERN = r"^[0-9]{1,2}\.\.[0-9]{1,2}\Z"
EngineCount = Annotated[int, Meta(ge=1, le=MAX_ENGINES)]
EngineRange = Annotated[str, Meta(pattern=RANGE_PATTERN)]
"""`least..most`: the planner decides how many there are (`gateway.fleet.planner`)."""
StartedEngines = Annotated[int, Meta(ge=0, le=MAX_ENGINES)] | EngineRange


class JoinedRoles(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`joined` of a model whose engines have roles: so many of either may join."""

    prefill: EngineCount | None = None
    decode: EngineCount | None = None


JoinedEngines = EngineCount | EngineRange | JoinedRoles
