"""/v1/admin/spend-caps: what clients write and read. Money is a decimal text in USD, exact; moments
are Unix seconds.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from billing.ledger.tags import KEY_PATTERN, VALUE_PATTERN
from gateway.principal import CapPeriod, CapScope

AmountUsd = Annotated[str, Meta(pattern=r"^[0-9]{1,7}(\.[0-9]{1,9})?\Z")]
"""`12.50`: to the nano."""
MAX_MODEL_CHARS = 256
ModelName = Annotated[str, Meta(pattern=rf"^[^\x00]{{1,{MAX_MODEL_CHARS}}}\Z")]
Tag = Annotated[str, Meta(pattern=rf"^{KEY_PATTERN}={VALUE_PATTERN}\Z")]
Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,100}\Z")]


class NewSpendCap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new cap: of the org, unless it names a project or a key of it, a model, or a tag
    (`team=search`); that of a model or a tag is soft."""

    project_id: Id | None = None
    key_id: Id | None = None
    model: ModelName | None = None
    tag: Tag | None = None
    period: CapPeriod
    amount_usd: AmountUsd
    hard: bool = True
    """False: nothing is refused."""


class SpendCapPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    amount_usd: AmountUsd | UnsetType = UNSET
    hard: bool | UnsetType = UNSET


class SpendCapView(msgspec.Struct, frozen=True, kw_only=True):
    """A cap. `by_operator`: the operator has set it, and no tenant changes it."""

    object: str = "spend_cap"
    id: str
    org_id: str
    project_id: str | None
    key_id: str | None
    model: str | None
    tag: str | None
    scope: CapScope | Literal["model", "tag"]
    period: CapPeriod
    amount_usd: str
    hard: bool
    by_operator: bool
    created_at: int
    archived_at: int | None
