"""Records what suites of evaluation said of versions, and asks for those that a rollout needs.

A suite is run by whoever has it, against the served model of the version. What it said is of the
digest that was asked, so that a version of other weights has to pass anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.ids import uuid7_hex
from gateway.registry.changes import find_version
from gateway.registry.tables import evaluations
from gateway.registry.version_table import RegisteredVersion
from gateway.tenancy.errors import Conflict, InvalidField, NotFound

MAX_EVIDENCE = 4000
"""Characters."""
MAX_EVALUATIONS = 100_000


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what a suite said of a version, once."""

    id: str
    model: str
    version: int
    digest: str
    """The digest of the version, when it was asked."""
    suite: str
    passed: bool
    evidence: str
    """As whoever ran it gave it: its score, the end of what it wrote, or where its report is."""
    created_at: datetime


def to_evaluation(row: sa.Row[Any]) -> Evaluation:
    return Evaluation(**row._mapping)


async def add_evaluation(
    conn: AsyncConnection,
    *,
    model: str,
    version: int,
    suite: str,
    passed: bool,
    evidence: str,
    operator_org: str,
    actor: Actor,
) -> Evaluation:
    """Record that a suite was passed or not. The last word of a suite counts. Raises: NotFound,
    InvalidField."""
    found = await find_version(conn, model, version)
    counted = sa.select(sa.func.count()).select_from(evaluations)
    if (await conn.scalar(counted) or 0) >= MAX_EVALUATIONS:
        raise InvalidField("model", f"there may be {MAX_EVALUATIONS} evaluations")
    values = {
        "id": f"mevl_{uuid7_hex()}",
        "model": model,
        "version": version,
        "digest": found.digest,
        "suite": suite,
        "passed": passed,
        "evidence": evidence,
    }
    added = sa.insert(evaluations).values(**values).returning(evaluations)
    made = to_evaluation((await conn.execute(added)).one())
    await record(
        conn,
        org_id=operator_org,
        actor=actor,
        action="model_evaluation.created",
        target=made.id,
        after={name: values[name] for name in ("model", "version", "digest", "suite", "passed")},
    )
    return made


async def get_evaluation(conn: AsyncConnection, evaluation_id: str) -> Evaluation:
    """Raises: NotFound."""
    asked = sa.select(evaluations).where(evaluations.c.id == evaluation_id)
    row = (await conn.execute(asked)).one_or_none()
    if row is None:
        raise NotFound("evaluation_id", f"no evaluation {evaluation_id!r}")
    return to_evaluation(row)


async def check_passed(
    conn: AsyncConnection, version: RegisteredVersion, suites: Sequence[str]
) -> None:
    """Refuse a version whose digest has not passed all suites when it was last asked. Raises:
    Conflict."""
    if not suites:
        return
    asked = (
        sa.select(evaluations.c.suite, evaluations.c.passed)
        .ext(distinct_on(evaluations.c.suite))
        .where(evaluations.c.model == version.model, evaluations.c.digest == version.digest)
        .order_by(evaluations.c.suite, evaluations.c.created_at.desc(), evaluations.c.id.desc())
    )
    said = {row.suite: row.passed for row in await conn.execute(asked)}
    what = f"version {version.version} of {version.model!r}"
    for suite in suites:
        if suite not in said:
            raise Conflict("version", f"{what} was not asked by the evaluation {suite!r}")
        if not said[suite]:
            raise Conflict("version", f"{what} did not pass the evaluation {suite!r}")
