"""Selects the owner of an API key, in SQL.

A key may be a user's, a service account's, or nobody's; it is good for nothing while whose it is
may not use its project.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import array

from gateway.tenancy.member_tables import project_members, service_accounts, users
from gateway.tenancy.tables import api_keys

MAX_OWNED = 1_000
"""A user's owned projects beyond this number are left out, in the order of their ids."""
EVERYWHERE = ("owner", "admin")
"""Roles of an org that are at home in each of its projects."""


def owner_is_active() -> sa.ColumnElement[bool]:
    """Select whether the owner is active, in a statement over `with_owners`.

    An owner or admin of the org needs no membership.
    """
    no_user = api_keys.c.user_id.is_(None)
    everywhere = sa.or_(users.c.role.in_(EVERYWHERE), api_keys.c.project_id.is_(None))
    member = sa.and_(project_members.c.user_id.is_not(None), project_members.c.removed_at.is_(None))
    live_user = sa.and_(users.c.archived_at.is_(None), sa.or_(everywhere, member))
    no_account = api_keys.c.service_account_id.is_(None)
    live_account = sa.and_(
        service_accounts.c.archived_at.is_(None), service_accounts.c.project_role != "none"
    )
    return sa.and_(sa.or_(no_user, live_user), sa.or_(no_account, live_account))


def owned_projects() -> sa.ColumnElement[list[str] | None]:
    """Select, in a statement over `users` and `service_accounts`, ids of the projects that the one
    or the other is an owner of, MAX_OWNED at most; NULL: none."""
    theirs = project_members.alias("theirs")
    owned = sa.select(theirs.c.project_id).where(theirs.c.user_id == users.c.id)
    owned = owned.where(theirs.c.role == "owner", theirs.c.removed_at.is_(None)).correlate(users)
    first = owned.order_by(theirs.c.project_id).limit(MAX_OWNED).subquery("owned")
    of_user = sa.select(sa.func.array_agg(first.c.project_id)).scalar_subquery()
    own = sa.and_(service_accounts.c.id.is_not(None), service_accounts.c.project_role == "owner")
    return sa.case((own, array([service_accounts.c.project_id])), else_=of_user)


def role_of_owner() -> sa.ColumnElement[str | None]:
    """Select the owner's role, in a statement over `with_owners`; NULL: nobody's."""
    return sa.func.coalesce(users.c.role, service_accounts.c.role)


def with_owners(keys: sa.Table | sa.Join) -> sa.Join:
    """Join `keys`, which holds `api_keys`, with whose each is."""
    joined = keys.outerjoin(users, api_keys.c.user_id == users.c.id)
    joined = joined.outerjoin(
        service_accounts, api_keys.c.service_account_id == service_accounts.c.id
    )
    membership = sa.and_(
        project_members.c.project_id == api_keys.c.project_id,
        project_members.c.user_id == api_keys.c.user_id,
    )
    return joined.outerjoin(project_members, membership)
