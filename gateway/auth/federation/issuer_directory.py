"""Caches, in each worker, the external issuers that all tenants list.

It is one snapshot, so that tokens of unlisted issuers cost no query, however many come. A change
reaches it within a second, as with API keys (`api_keys`): it is announced, and a snapshot that is
older than the listener's last heartbeat is read again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.invoices.suspension import suspended_by
from foundation.tasks import SharedTasks
from gateway.auth.errors import AuthUnavailable
from gateway.auth.federation.issuers import COLUMNS, Issuer
from gateway.auth.tables import issuers
from gateway.db import DATABASE_ERRORS
from gateway.principal import Plan
from gateway.tenancy import changes
from gateway.tenancy.changes import EVERYTHING, ChangeListener
from gateway.tenancy.keys.rate_limits import limits_by_model, to_plans
from gateway.tenancy.money.plans import plan_columns, plan_of
from gateway.tenancy.tables import orgs, plans, projects

MAX_LISTED = 10_000
"""The maximum in the whole installation: of more, the newest are ignored."""
REFRESH_S = 30.0
"""A snapshot is read again after it: plans change without an announcement."""
READ_TIMEOUT_S = 5.0
MAX_READS = 3
"""The maximum per request; a read is repeated only if a change was announced during it, or it was
slow."""
SUBJECT_PREFIXES = ("issuer_", "proj_", "org_")


class ListedIssuer(msgspec.Struct, frozen=True, kw_only=True):
    """A live issuer of a live project, with the tenant's data for a principal."""

    issuer: Issuer
    project_plan: Plan
    org_plan: Plan
    model_plans: Mapping[str, Plan]
    is_operator: bool
    org_name: str
    suspended_by: str | None
    project: Mapping[str, Any]
    """The project's row."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    by_issuer: Mapping[str, tuple[ListedIssuer, ...]]
    by_id: Mapping[str, ListedIssuer]
    as_of: float


class IssuerDirectory:
    """The issuers that one process knows. `db` sees all orgs. `redis` must not decode responses.
    `clock`: monotonic seconds."""

    def __init__(
        self, *, db: AsyncEngine, redis: Redis, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._db = db
        self._clock = clock
        self._listener = ChangeListener(redis, self._changed, clock=clock)
        self._snapshot: Snapshot | None = None
        self._changes = 0
        self._reads: SharedTasks[None, None] = SharedTasks("read issuers")

    async def start(self) -> None:
        await self._listener.start()

    async def close(self) -> None:
        await self._listener.close()
        await self._reads.close()

    async def snapshot(self) -> Snapshot:
        """Return the issuers as Postgres has them, or had them less than a second ago. Raises:
        AuthUnavailable."""
        for _ in range(MAX_READS):
            found = self._snapshot
            if found is not None and self._is_trusted(found):
                return found
            await self._reads.run(None, self._read)
        raise AuthUnavailable("no read that is new enough")

    def _is_trusted(self, snapshot: Snapshot) -> bool:
        now = self._clock()
        as_of = max(snapshot.as_of, self._listener.as_of)
        return now - as_of <= changes.MAX_STALENESS_S and now - snapshot.as_of <= REFRESH_S

    def _changed(self, subject: str) -> None:
        if subject == EVERYTHING or subject.startswith(SUBJECT_PREFIXES):
            self._changes += 1
            self._snapshot = None

    async def _read(self) -> None:
        """Read a snapshot, and keep it unless a change was announced meanwhile.

        Raises: AuthUnavailable.
        """
        try:
            async with asyncio.timeout(READ_TIMEOUT_S), self._db.connect() as conn:
                as_of, changes = self._clock(), self._changes
                found = await read_listed(conn)
        except DATABASE_ERRORS as error:
            raise AuthUnavailable(type(error).__name__) from error
        if changes != self._changes:
            return
        by_issuer: dict[str, tuple[ListedIssuer, ...]] = {}
        for each in found:
            name = each.issuer.issuer
            by_issuer[name] = (*by_issuer.get(name, ()), each)
        by_id = {each.issuer.id: each for each in found}
        self._snapshot = Snapshot(by_issuer=by_issuer, by_id=by_id, as_of=as_of)


async def read_listed(conn: AsyncConnection) -> list[ListedIssuer]:
    limits = {owner: plans.alias(f"{owner}_plan") for owner in ("project", "org")}
    joined = issuers.join(projects, issuers.c.project_id == projects.c.id)
    joined = joined.join(orgs, issuers.c.org_id == orgs.c.id)
    joined = joined.outerjoin(limits["project"], projects.c.plan == limits["project"].c.name)
    joined = joined.outerjoin(limits["org"], orgs.c.plan == limits["org"].c.name)
    columns = [*COLUMNS, orgs.c.is_operator.label("is_operator"), orgs.c.name.label("org_name")]
    columns.append(limits_by_model(projects.c.id).label("model_limits"))
    suspension = suspended_by(orgs.c.id, orgs.c.suspension_lifted_at)
    columns.append(suspension.label("suspended_by"))
    columns += [column.label(f"of_project_{column.name}") for column in projects.c]
    for owner, plan in limits.items():
        columns += plan_columns(owner, plan)
    live = [each.archived_at.is_(None) for each in (issuers.c, projects.c, orgs.c)]
    found = sa.select(*columns).select_from(joined).where(*live)
    rows = await conn.execute(found.order_by(issuers.c.id).limit(MAX_LISTED))
    return [to_listed(dict(row._mapping)) for row in rows]


def to_listed(values: Mapping[str, Any]) -> ListedIssuer:
    return ListedIssuer(
        issuer=Issuer(**{name: values[name] for name in Issuer.__struct_fields__}),
        project_plan=plan_of("project", values),
        org_plan=plan_of("org", values),
        model_plans=to_plans(values["model_limits"]),
        is_operator=values["is_operator"],
        org_name=values["org_name"],
        suspended_by=values["suspended_by"],
        project={column.name: values[f"of_project_{column.name}"] for column in projects.c},
    )
