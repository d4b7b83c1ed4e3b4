"""Looks up the principal of an access token: one query from its claims to a `Principal`.

A token names its subject. The subject's rights and limits are looked up, so that a demotion, an
archived project or a new plan counts for tokens that were issued before.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from msgspec.structs import replace
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.invoices.suspension import suspended_by
from gateway import permissions as policy
from gateway.auth.errors import RevokedToken
from gateway.auth.oauth.tokens.rfc9068_access_token import AccessClaims
from gateway.auth.tables import oauth_clients, oauth_grants
from gateway.permissions import SERVICE_SCOPES
from gateway.principal import Principal
from gateway.tenancy.keys.owners import EVERYWHERE, owned_projects
from gateway.tenancy.keys.rate_limits import limits_by_model, to_plans
from gateway.tenancy.keys.restrictions import ModelPermissions
from gateway.tenancy.member_tables import project_members, service_accounts, users
from gateway.tenancy.money.plans import plan_columns, plan_of
from gateway.tenancy.money.spend_caps import hard_caps, to_spend_caps
from gateway.tenancy.tables import orgs, plans, projects

OWNERS = {"client": oauth_clients, "project": projects, "org": orgs}


async def find_principal(conn: AsyncConnection, claims: AccessClaims) -> Principal:
    """Raises: RevokedToken if a user, client, grant, ... that the claims name is gone."""
    limits = {owner: plans.alias(f"{owner}_plan") for owner in OWNERS}
    of_org = sa.and_(projects.c.id == claims.project_id, projects.c.org_id == orgs.c.id)
    joined = orgs.outerjoin(projects, of_org)
    named = (
        (users, claims.user_id, True),
        (service_accounts, claims.service_account_id, True),
        (oauth_grants, claims.grant_id, True),
        (oauth_clients, claims.client_id, False),
    )
    for table, value, has_org in named:
        found = table.c.id == value
        joined = joined.outerjoin(
            table, sa.and_(found, table.c.org_id == orgs.c.id) if has_org else found
        )
    for owner, plan in limits.items():
        joined = joined.outerjoin(plan, OWNERS[owner].c.plan == plan.c.name)
    membership = sa.and_(
        project_members.c.project_id == projects.c.id,
        project_members.c.user_id == users.c.id,
        project_members.c.removed_at.is_(None),
    )
    acting = _agents(claims)
    joined = joined.outerjoin(project_members, membership).join(acting, sa.true())
    columns: list[sa.ColumnElement[Any]] = [
        orgs.c.is_operator,
        orgs.c.name.label("org_name"),
        projects.c.name.label("project_name"),
        suspended_by(orgs.c.id, orgs.c.suspension_lifted_at).label("suspended_by"),
        limits_by_model(projects.c.id).label("model_limits"),
        hard_caps(orgs.c.id, projects.c.id).label("spend_caps"),
        orgs.c.prepaid,
        orgs.c.shows_cost,
        projects.c.id.label("project_id"),
        projects.c.models_mode,
        projects.c.models,
        projects.c.zero_retention,
        projects.c.store_content,
        users.c.id.label("user_id"),
        users.c.role.label("user_role"),
        owned_projects().label("owned_projects"),
        service_accounts.c.id.label("service_account_id"),
        service_accounts.c.role.label("service_account_role"),
        oauth_grants.c.id.label("grant_id"),
        acting.c.agent_ids,
        sa.or_(
            *(
                table.c.archived_at.is_not(None)
                for table in (orgs, projects, users, service_accounts, oauth_clients)
            ),
            oauth_grants.c.revoked_at.is_not(None),
            service_accounts.c.project_role == "none",
            _left_the_project(),
            acting.c.gone,
        ).label("gone"),
    ]
    for owner, plan in limits.items():
        columns += plan_columns(owner, plan)
    query = sa.select(*columns).select_from(joined)
    row = (await conn.execute(query.where(orgs.c.id == claims.org_id))).one_or_none()
    if row is None or row.gone or not _names_the_same(row, claims):
        raise RevokedToken(claims.jti)
    return _principal(claims, row._mapping)


def within_role(claims: AccessClaims, principal: Principal) -> AccessClaims:
    """Return the claims with the scopes that the principal's role allows now."""
    if principal.role is None:
        return claims
    held = policy.within(
        principal.role,
        claims.scopes,
        is_operator=principal.is_operator,
        owns_project=bool(principal.owned_projects),
    )
    return replace(claims, scope=" ".join(sorted(held)))


def _agents(claims: AccessClaims) -> sa.Subquery:
    """Select one row: the service accounts of the clients that act in an exchanged token, and
    whether one of them is gone. The client that the first token was issued to is no actor."""
    client_ids = [] if claims.act is None else [*claims.passed_through[1:], claims.client_id]
    accounts, clients = service_accounts.alias("agents"), oauth_clients.alias("acting")
    gone = sa.or_(accounts.c.archived_at.is_not(None), accounts.c.project_role == "none")
    found = sa.select(
        sa.func.array_agg(accounts.c.id).label("agent_ids"), sa.func.bool_or(gone).label("gone")
    ).select_from(clients.join(accounts, clients.c.service_account_id == accounts.c.id))
    found = found.where(clients.c.id.in_(client_ids), accounts.c.org_id == claims.org_id)
    return found.subquery("actors")


def _left_the_project() -> sa.ColumnElement[bool]:
    """True for a user who is no longer a member of the project. The client's own project is open to
    every user of the client."""
    everywhere = users.c.role.in_(EVERYWHERE)
    of_client = oauth_clients.c.project_id.is_not_distinct_from(projects.c.id)
    at_home = sa.or_(everywhere, of_client, project_members.c.user_id.is_not(None))
    named = sa.and_(users.c.id.is_not(None), projects.c.id.is_not(None))
    return sa.and_(named, sa.not_(at_home))


def _names_the_same(row: sa.Row[Any], claims: AccessClaims) -> bool:
    names = ("project_id", "user_id", "service_account_id", "grant_id")
    return all(getattr(row, name) == getattr(claims, name) for name in names)


def _principal(claims: AccessClaims, values: sa.RowMapping) -> Principal:
    permitted = ModelPermissions(mode=values["models_mode"], models=values["models"] or [])
    return Principal(
        org_id=claims.org_id,
        org_name=values["org_name"],
        project_id=claims.project_id or "",
        project_name=values["project_name"] or "",
        key_id=claims.client_id,
        key_hint=f"token {claims.jti[-4:]}",
        scopes=claims.scopes if claims.project_id else claims.scopes - SERVICE_SCOPES,
        client_plan=plan_of("client", values),
        project_plan=plan_of("project", values),
        org_plan=plan_of("org", values),
        model_plans=to_plans(values["model_limits"]),
        spend_caps=to_spend_caps(values["spend_caps"], claims.org_id, values["prepaid"]),
        shows_cost=values["shows_cost"],
        zero_retention=bool(values["zero_retention"]),
        store_content=bool(values["store_content"]),
        expires_at=float(claims.exp),
        kind="token",
        role=values["user_role"] or values["service_account_role"],
        owned_projects=frozenset(values["owned_projects"] or ()),
        user_id=claims.user_id,
        service_account_id=claims.service_account_id,
        client_id=claims.client_id,
        agent_ids=frozenset(values["agent_ids"] or ()),
        grant_id=claims.grant_id,
        audiences=claims.audiences,
        is_operator=values["is_operator"],
        suspended_by=values["suspended_by"],
        allowed_models=permitted.allowed,
        denied_models=permitted.denied,
    )
