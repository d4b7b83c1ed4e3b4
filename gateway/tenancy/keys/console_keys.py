"""Keeps what the console spends under for somebody who is signed in: their own key in a project, or
another one that they may manage.

Their own is on its project's bill and under its limits like any other, but nobody has its secret.
It is made when it is first needed, with a hard cap that administrators change like any other. It is
good for nothing while its user may not use the project, and revoked when they leave. What an
administrator has revoked is not made again.
"""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.money import PICO_PER_USD, Pico
from billing.pricing.entries import DEFAULT_LIST
from gateway.audit.log import Actor
from gateway.db import tenant
from gateway.permissions import ADMIN, SCOPE_MCP_CALL, SCOPES_OF, SERVICE_SCOPES
from gateway.principal import SCOPE_INFERENCE, CapPeriod, Role
from gateway.tenancy.errors import NotFound
from gateway.tenancy.keys.keys import KeyRow, create_key, public_columns
from gateway.tenancy.keys.owners import EVERYWHERE
from gateway.tenancy.keys.restrictions import ModelPermissions
from gateway.tenancy.member_tables import ProjectRole, project_members, users
from gateway.tenancy.money.spend_caps import add_spend_cap
from gateway.tenancy.tables import api_keys, orgs, plans, projects, spend_caps

DEFAULT_CAP_PICO: Pico = PICO_PER_USD
DEFAULT_CAP_PERIOD: CapPeriod = "day"
"""The hard cap of one's own key, until an administrator says otherwise."""
NAME = "Console"
MAX_LISTED = 100


class Payer(msgspec.Struct, frozen=True, kw_only=True):
    """A key that somebody may spend under, or their own one in a project, made or not."""

    id: str
    """The id of the key, or of the project whose own one it is."""
    key_id: str | None
    """The id of the key; None: it is not made yet."""
    name: str
    """The name of the key; empty: one's own."""
    hint: str
    project_id: str
    project_name: str
    user_id: str | None
    """The user that owns the key; None: nobody does, or a service account."""
    calls_tools: bool
    """Never under a key of somebody else: servers would be shown the credentials of its owner."""
    permitted: ModelPermissions
    """The models that the project permits."""
    key_models: list[str] | None
    """The models that the key is bound to; None: all."""
    cap: tuple[CapPeriod, Pico] | None
    """The smallest hard cap of the key itself."""
    price_list: str

    @property
    def is_own(self) -> bool:
        return not self.name

    def may_use(self, model: str) -> bool:
        allowed, listed = self.permitted.allowed, self.key_models
        held = allowed is None or model in allowed
        return held and model not in self.permitted.denied and (listed is None or model in listed)


async def list_own_payers(conn: AsyncConnection, *, org_id: str, user_id: str) -> list[Payer]:
    """Return the first MAX_LISTED projects by their names, less those where an administrator has
    ended one's own key."""
    c = api_keys.c
    own = sa.and_(c.project_id == projects.c.id, c.user_id == users.c.id, c.for_console)
    found = sa.select(projects.c.id, *_columns()).join_from(users, projects, _same_org())
    found = found.outerjoin(api_keys, own).where(c.revoked_at.is_(None), _is_live(org_id, user_id))
    found = found.where(users.c.role.in_(roles_with(SCOPE_INFERENCE)))
    found = found.where(sa.or_(users.c.role.in_(EVERYWHERE), _membership()))
    rows = await conn.execute(found.order_by(projects.c.name, projects.c.id).limit(MAX_LISTED))
    return [_to_payer(row, own=True) for row in rows]


async def list_keys_to_pay(conn: AsyncConnection, *, org_id: str, user_id: str) -> list[Payer]:
    """Return the MAX_LISTED that were used last."""
    found = _usable_keys(org_id, user_id)
    found = found.order_by(api_keys.c.last_used_at.desc().nulls_last(), api_keys.c.id.desc())
    rows = await conn.execute(found.limit(MAX_LISTED))
    return [_to_payer(row) for row in rows]


async def find_key_to_pay(
    conn: AsyncConnection, *, org_id: str, key_id: str, user_id: str
) -> Payer:
    """Raises: NotFound, for what is not there and for what they may not manage alike."""
    found = _usable_keys(org_id, user_id).where(api_keys.c.id == key_id)
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise NotFound("key_id", f"no key {key_id!r} that you may spend under")
    return _to_payer(row)


def roles_with(scope: str) -> list[Role]:
    return [role for role, scopes in SCOPES_OF.items() if scope in scopes]


def _usable_keys(org_id: str, user_id: str) -> sa.Select[Any]:
    """Select the live keys for inference that a user may manage, by their role, as an owner of the
    project, or as their owner."""
    c = api_keys.c
    found = sa.select(c.id, *_columns()).join_from(users, projects, _same_org())
    found = found.join(api_keys, c.project_id == projects.c.id)
    found = found.where(_is_live(org_id, user_id), c.revoked_at.is_(None), sa.not_(c.for_console))
    found = found.where(sa.or_(c.expires_at.is_(None), c.expires_at > sa.func.now()))
    found = found.where(c.scopes.contains([SCOPE_INFERENCE]))
    manages_all = users.c.role.in_(roles_with(f"{ADMIN}keys"))
    return found.where(sa.or_(manages_all, c.user_id == users.c.id, _membership(role="owner")))


def _same_org() -> sa.ColumnElement[bool]:
    return sa.and_(projects.c.org_id == users.c.org_id, projects.c.archived_at.is_(None))


def _is_live(org_id: str, user_id: str) -> sa.ColumnElement[bool]:
    mine = sa.and_(users.c.org_id == org_id, users.c.id == user_id)
    return sa.and_(mine, users.c.archived_at.is_(None))


def _membership(*, role: ProjectRole | None = None) -> sa.ColumnElement[bool]:
    """Select whether the user is a member, in a statement over `users` and `projects`."""
    c = project_members.c
    member = sa.exists().where(c.project_id == projects.c.id, c.user_id == users.c.id)
    member = member.where(c.removed_at.is_(None))
    return member if role is None else member.where(c.role == role)


def _columns() -> list[sa.ColumnElement[Any]]:
    """Select what a payer tells, in a statement over `users`, `projects` and `api_keys`."""
    c, caps = api_keys.c, spend_caps.c
    pair = sa.func.jsonb_build_array(caps.period, caps.amount_pico.cast(sa.Text), type_=JSONB)
    cap = sa.select(pair)
    cap = cap.where(caps.org_id == users.c.org_id, caps.key_id == c.id, caps.hard)
    cap = cap.where(caps.archived_at.is_(None)).order_by(caps.amount_pico).limit(1)
    prices = sa.select(plans.c.price_list).join(orgs, orgs.c.plan == plans.c.name)
    prices = prices.where(orgs.c.id == users.c.org_id).correlate(users)
    return [
        *(c.id.label("key_id"), c.name, c.prefix, c.last_four, c.models.label("key_models")),
        *(c.user_id, c.scopes, users.c.id.label("me")),
        *(projects.c.id.label("project_id"), projects.c.name.label("project_name")),
        *(projects.c.models_mode, projects.c.models),
        cap.correlate(users, api_keys).scalar_subquery().label("cap"),
        prices.scalar_subquery().label("price_list"),
    ]


def _to_payer(row: sa.Row[Any], *, own: bool = False) -> Payer:
    cap = None if row.cap is None else (row.cap[0], int(row.cap[1]))
    if row.key_id is None:
        cap = (DEFAULT_CAP_PERIOD, DEFAULT_CAP_PICO)
    return Payer(
        id=row.id,
        key_id=row.key_id,
        name="" if own else row.name,
        hint="" if own else f"{row.prefix}...{row.last_four}",
        project_id=row.project_id,
        project_name=row.project_name,
        user_id=row.me if own else row.user_id,
        calls_tools=own or (SCOPE_MCP_CALL in row.scopes and row.user_id in (None, row.me)),
        permitted=ModelPermissions(mode=row.models_mode, models=row.models or []),
        key_models=row.key_models,
        cap=cap,
        price_list=row.price_list or DEFAULT_LIST,
    )


async def ensure_console_key(
    db: AsyncEngine,
    *,
    org_id: str,
    project_id: str,
    user_id: str,
    pepper: bytes,
    pepper_id: str,
    actor: Actor,
) -> KeyRow:
    """Return a user's key in a live project that they may use; one that was revoked, too. `db`: of
    the system, which alone may write what a cap tells.

    Raises: NotFound.
    """
    async with tenant(db, org_id) as conn:
        known = await find_console_key(conn, org_id=org_id, project_id=project_id, user_id=user_id)
        if known is not None:
            return known
        await _lock_member(conn, org_id=org_id, project_id=project_id, user_id=user_id)
        # Under the lock once more: two first requests of one person make one key.
        known = await find_console_key(conn, org_id=org_id, project_id=project_id, user_id=user_id)
        if known is not None:
            return known
        made = await create_key(
            conn,
            org_id=org_id,
            project_id=project_id,
            user_id=user_id,
            name=NAME,
            scopes=SERVICE_SCOPES,
            pepper=pepper,
            pepper_id=pepper_id,
            for_console=True,
            actor=actor,
        )
        await add_spend_cap(
            conn,
            org_id=org_id,
            key_id=made.row.id,
            period=DEFAULT_CAP_PERIOD,
            amount_pico=DEFAULT_CAP_PICO,
            actor=actor,
        )
    return made.row


async def find_console_key(
    conn: AsyncConnection, *, org_id: str, project_id: str, user_id: str
) -> KeyRow | None:
    found = sa.select(*public_columns()).where(api_keys.c.org_id == org_id, api_keys.c.for_console)
    found = found.where(api_keys.c.project_id == project_id, api_keys.c.user_id == user_id)
    row = (await conn.execute(found)).one_or_none()
    return None if row is None else KeyRow(**row._mapping)


async def _lock_member(
    conn: AsyncConnection, *, org_id: str, project_id: str, user_id: str
) -> None:
    """Lock somebody who may use a project: no other transaction makes a key for them meanwhile.
    Raises: NotFound."""
    found = sa.select(users.c.id).join_from(users, projects, _same_org())
    found = found.where(_is_live(org_id, user_id), projects.c.id == project_id)
    found = found.where(sa.or_(users.c.role.in_(EVERYWHERE), _membership()))
    if await conn.scalar(found.with_for_update(of=users, key_share=True)) is None:
        raise NotFound("project_id", f"no project {project_id!r} that {user_id!r} may use")
