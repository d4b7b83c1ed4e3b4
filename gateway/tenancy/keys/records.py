"""A key as authentication needs it: found by its hash, with whose it is and all that limits it.

One query for all keys that are looked up at once, before the tenant is known.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.invoices.suspension import suspended_by
from gateway.principal import KEY_LIMIT_NAMES, Plan, Role, SpendCap
from gateway.tenancy.keys.keys import KeyRow, public_columns
from gateway.tenancy.keys.owners import owned_projects, owner_is_active, role_of_owner, with_owners
from gateway.tenancy.keys.rate_limits import limits_by_model, to_plans
from gateway.tenancy.keys.restrictions import ModelPermissions, narrowed, plans_by_model
from gateway.tenancy.money.plans import plan_columns, plan_of
from gateway.tenancy.money.spend_caps import hard_caps, to_spend_caps
from gateway.tenancy.tables import api_keys, orgs, plans, projects

HashedKey = tuple[str, str]
"""(pepper id, the key's hash under that pepper)."""


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    row: KeyRow
    key_hash: str
    org_name: str
    project_name: str | None
    archived: bool
    """True if its project or organization is archived."""
    role: Role | None
    """The role of the key's owner; None: the key has no owner."""
    owner_active: bool
    """True if the key's owner may use the project, or the key has no owner."""
    owned_projects: frozenset[str]
    """The projects that the key's owner is an owner of."""
    key_plan: Plan
    """The key's plan, with the key's own limits."""
    project_plan: Plan
    org_plan: Plan
    expires_at: datetime | None
    """The key, or the secret that was looked up, if that one was rotated away."""
    hint: str
    """The hint of the secret that was looked up."""
    model_plans: dict[str, Plan]
    """The project's own limits by model."""
    key_model_plans: dict[str, Plan]
    """The key's."""
    spend_caps: tuple[SpendCap, ...] = ()
    shows_cost: bool
    """By its own word, or else its org's."""
    is_operator: bool
    suspended_by: str | None = None
    project_models: ModelPermissions
    zero_retention: bool = False
    """Its project's word."""
    store_content: bool = False
    """The same."""


@lru_cache(1)
def _records() -> sa.Select[Any]:
    """Select keys, revoked or not, with their plans. To build it takes longer than to run it."""
    owners = {"key": api_keys, "project": projects, "org": orgs}
    limits = {owner: plans.alias(f"{owner}_plan") for owner in owners}
    joined = api_keys.outerjoin(projects, api_keys.c.project_id == projects.c.id)
    joined = with_owners(joined.join(orgs, api_keys.c.org_id == orgs.c.id))
    for owner, plan in limits.items():
        joined = joined.outerjoin(plan, owners[owner].c.plan == plan.c.name)
    archived = sa.or_(projects.c.archived_at.is_not(None), orgs.c.archived_at.is_not(None))
    columns = [
        *public_columns(),
        api_keys.c.key_hash,
        api_keys.c.pepper_id,
        api_keys.c.previous_hash,
        api_keys.c.previous_pepper_id,
        orgs.c.name.label("org_name"),
        projects.c.name.label("project_name"),
        archived.label("archived"),
        role_of_owner().label("role"),
        owner_is_active().label("owner_active"),
        owned_projects().label("owned_projects"),
        hard_caps(orgs.c.id, projects.c.id, api_keys.c.id).label("spend_caps"),
        orgs.c.prepaid,
        sa.func.coalesce(api_keys.c.shows_cost, orgs.c.shows_cost).label("says_cost"),
        limits_by_model(api_keys.c.project_id).label("project_model_limits"),
        orgs.c.is_operator,
        suspended_by(orgs.c.id, orgs.c.suspension_lifted_at).label("suspended_by"),
        projects.c.models_mode.label("project_mode"),
        projects.c.models.label("project_models"),
        projects.c.zero_retention,
        projects.c.store_content,
    ]
    for owner, plan in limits.items():
        columns += plan_columns(owner, plan)
    return sa.select(*columns).select_from(joined)


@lru_cache(1)
def _records_of_hashes() -> sa.Select[Any]:
    """Select the keys that have one of the `hashes`, now or before they were rotated."""
    hashes = sa.bindparam("hashes", type_=ARRAY(sa.Text))
    known = [own == sa.any_(hashes) for own in (api_keys.c.key_hash, api_keys.c.previous_hash)]
    return _records().where(sa.or_(*known))


async def find_keys(
    conn: AsyncConnection, hashes: Collection[HashedKey]
) -> dict[HashedKey, sa.RowMapping]:
    """Return what `to_record` reads of the keys with these hashes, revoked or not, in one query. A
    hash that nobody has is left out."""
    rows = await conn.execute(_records_of_hashes(), {"hashes": [each for _, each in hashes]})
    found: dict[HashedKey, sa.RowMapping] = {}
    for row in rows.mappings():
        found[row["pepper_id"], row["key_hash"]] = row
        if row["previous_hash"] is not None:
            found[row["previous_pepper_id"], row["previous_hash"]] = row
    return found


async def read_key(conn: AsyncConnection, *, org_id: str, key_id: str) -> KeyRecord | None:
    """Read the record of a key that nobody shows: for what it has asked to be done later."""
    mine = sa.and_(api_keys.c.org_id == org_id, api_keys.c.id == key_id)
    row = (await conn.execute(_records().where(mine))).one_or_none()
    return None if row is None else to_record(row._mapping, (row.pepper_id, row.key_hash))


def to_record(values: sa.RowMapping, hashed: HashedKey) -> KeyRecord:
    """Build the record; `hashed`: what was looked up."""
    _, key_hash = hashed
    key = KeyRow(**{field: values[field] for field in KeyRow.__struct_fields__})
    rotated_away = values["previous_hash"] == key_hash
    ends = [key.expires_at, key.previous_expires_at if rotated_away else None]
    return KeyRecord(
        row=key,
        key_hash=values["previous_hash"] if rotated_away else values["key_hash"],
        org_name=values["org_name"],
        project_name=values["project_name"],
        archived=values["archived"],
        role=values["role"],
        owner_active=values["owner_active"],
        owned_projects=frozenset(values["owned_projects"] or ()),
        spend_caps=to_spend_caps(values["spend_caps"], key.org_id, values["prepaid"]),
        model_plans=to_plans(values["project_model_limits"]),
        key_model_plans=plans_by_model(key.model_limits),
        key_plan=narrowed(
            plan_of("key", values), {limit: values[limit] for limit in KEY_LIMIT_NAMES}
        ),
        project_plan=plan_of("project", values),
        org_plan=plan_of("org", values),
        expires_at=min((end for end in ends if end is not None), default=None),
        hint=(key.previous_hint or key.hint) if rotated_away else key.hint,
        is_operator=values["is_operator"],
        suspended_by=values["suspended_by"],
        shows_cost=values["says_cost"],
        project_models=ModelPermissions(
            mode=values["project_mode"], models=values["project_models"] or []
        ),
        zero_retention=bool(values["zero_retention"]),
        store_content=bool(values["store_content"]),
    )
