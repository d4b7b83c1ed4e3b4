"""Keeps in Postgres what cells were asked for, and which shares they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.columns import moment_made, text
from gateway.limits.cells.shares import DEFAULT, ROUND_S, ShareDecision

metadata = sa.MetaData()

cell_shares = sa.Table(
    "cell_shares",
    metadata,
    # A scope's key in Redis; "": where a scope has none.
    text("scope", key=True),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("shares", JSONB, nullable=False),
    sa.Column("before", JSONB, nullable=False),
    sa.Column("moves_left", sa.Integer, nullable=False),
    moment_made("decided_at"),
)

cell_demands = sa.Table(
    "cell_demands",
    metadata,
    text("scope", key=True),
    text("cell", key=True),
    # How much of the limit was asked for, ever; a minute of all of it is 1.
    sa.Column("asked", sa.Double, nullable=False),
    # Of the scope "": how many announcements of changes the cell's gateways have heard of.
    sa.Column("announced", sa.BigInteger, nullable=False, server_default="0"),
    moment_made("heard_at"),
)

MAX_ROWS = 4096
"""Scopes that have shares of their own; others have those of all."""
MAX_CELLS = 16
MAX_READ = 2 * MAX_ROWS * MAX_CELLS
FORGOTTEN_S = 600.0
"""A cell that was not heard of for so long is forgotten, and so is what was asked of a scope that
has no shares of its own."""

_TELL = sa.text("""
    INSERT INTO cell_demands (scope, cell, asked, announced, heard_at)
    SELECT told.key, :cell, told.value::double precision,
        CASE WHEN told.key = '' THEN cast(:announced AS bigint) ELSE 0 END, clock_timestamp()
    FROM jsonb_each_text(:told) AS told ORDER BY told.key
    ON CONFLICT (scope, cell) DO UPDATE
    SET asked = cell_demands.asked + excluded.asked,
        announced = cell_demands.announced + excluded.announced, heard_at = excluded.heard_at
""").bindparams(sa.bindparam("told", type_=JSONB))
_FORGET = sa.text("""
    DELETE FROM cell_demands d
    WHERE heard_at < now() - make_interval(secs => :forgotten_s)
        AND (scope = '' OR NOT EXISTS (SELECT FROM cell_shares s WHERE s.scope = d.scope))
""")
_SHARES = sa.text("""
    SELECT scope, version, shares, before, moves_left,
        extract(epoch FROM clock_timestamp() - decided_at)::double precision AS age_s
    FROM cell_shares ORDER BY scope LIMIT :most
""")
_DEMANDS = sa.text("""
    SELECT scope, cell, asked, announced,
        extract(epoch FROM clock_timestamp() - heard_at)::double precision AS silent_s,
        extract(epoch FROM clock_timestamp())::double precision AS now_s
    FROM cell_demands ORDER BY scope, cell LIMIT :most
""")
_BEGIN = sa.text("""
    INSERT INTO cell_shares (scope, version, shares, before, moves_left, decided_at)
    VALUES ('', 1, :shares, :shares, :moves_left, clock_timestamp())
    ON CONFLICT DO NOTHING
""").bindparams(sa.bindparam("shares", type_=JSONB))
_OPEN = sa.text("""
    INSERT INTO cell_shares (scope, version, shares, before, moves_left, decided_at)
    SELECT opened.scope, 1, d.shares, d.shares, d.moves_left, clock_timestamp()
    FROM unnest(cast(:scopes AS text[])) AS opened (scope), cell_shares d
    WHERE d.scope = '' AND d.version = :version
        AND d.decided_at < clock_timestamp() - make_interval(secs => :round_s)
    ON CONFLICT DO NOTHING
""")
_CLOSE = sa.text("""
    DELETE FROM cell_shares s USING cell_shares d
    WHERE s.scope = :scope AND s.version = :of_scope AND d.scope = '' AND d.version = :version
        AND s.shares = d.shares
""")
_CLOSE_DEMANDS = sa.text("DELETE FROM cell_demands WHERE scope = :scope")


class CellDemand(msgspec.Struct, frozen=True):
    """Says what one cell was asked for of a scope, ever, and how long ago it was heard of last.
    `announced`: of the scope DEFAULT, how many changes its gateways have heard of, ever."""

    asked: float
    silent_s: float
    announced: int = 0


class CellsSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what Postgres knows. `demands`: by scope and cell. `now_s`: its clock."""

    decisions: dict[str, ShareDecision]
    demands: dict[tuple[str, str], CellDemand]
    now_s: float


class SharesUnknown(Exception):
    """Says that the shares of cells could not be read."""


class CellStore:
    """The shares of cells in Postgres. `db`: of a role that sees every org's rows."""

    def __init__(self, db: AsyncEngine) -> None:
        # A decision is committed by the statement that makes it: nothing waits in between.
        self._db = db.execution_options(isolation_level="AUTOCOMMIT")

    async def exchange(
        self, cell: str, told: Mapping[str, float], announced: int = 0
    ) -> CellsSnapshot:
        """Tell what a gateway of a cell was asked for since it told last, and how many changes it
        has heard of, and read what is known.

        Raises: SQLAlchemyError, OSError, SharesUnknown.
        """
        async with self._db.connect() as conn:
            asked = {DEFAULT: 0.0, **told}
            await conn.execute(_TELL, {"cell": cell, "told": asked, "announced": announced})
            shares = (await conn.execute(_SHARES, {"most": MAX_READ})).all()
            demands = (await conn.execute(_DEMANDS, {"most": MAX_READ})).all()
        if len(shares) >= MAX_READ or len(demands) >= MAX_READ or not demands:
            raise SharesUnknown(f"{len(shares)} scopes have shares")
        return CellsSnapshot(
            decisions={
                row.scope: ShareDecision(
                    version=row.version,
                    shares=row.shares,
                    before=row.before,
                    moves_left=row.moves_left,
                    age_s=row.age_s,
                )
                for row in shares
            },
            demands={
                (row.scope, row.cell): CellDemand(row.asked, row.silent_s, row.announced)
                for row in demands
            },
            now_s=demands[0].now_s,
        )

    async def begin(self, first: ShareDecision) -> None:
        """Make the first decision of all, if nobody has."""
        async with self._db.connect() as conn:
            told = {"shares": first.shares, "moves_left": first.moves_left}
            await conn.execute(_BEGIN, told)

    async def open(self, scopes: Sequence[str], version: int) -> None:
        """Give scopes shares of their own, which are at first those of all, if these are still of
        this version and everybody knows them."""
        async with self._db.connect() as conn:
            told = {"scopes": list(scopes), "version": version, "round_s": ROUND_S}
            await conn.execute(_OPEN, told)

    async def replace(self, scope: str, decision: ShareDecision) -> bool:
        """Put a decision in the place of the one before it. False: another one is there."""
        own = cell_shares.c
        changed = (
            sa.update(cell_shares)
            .where(own.scope == scope, own.version == decision.version - 1)
            .values(
                version=decision.version,
                shares=decision.shares,
                before=decision.before,
                moves_left=decision.moves_left,
                decided_at=sa.func.clock_timestamp(),
            )
        )
        async with self._db.connect() as conn:
            return bool((await conn.execute(changed)).rowcount)

    async def close(self, scope: str, of_scope: int, version: int) -> None:
        """Let a scope have the shares of all again, which are equal to its own. `of_scope`: the
        version of its shares, `version` that of all."""
        async with self._db.connect() as conn:
            told = {"scope": scope, "of_scope": of_scope, "version": version}
            if (await conn.execute(_CLOSE, told)).rowcount:
                await conn.execute(_CLOSE_DEMANDS, {"scope": scope})

    async def forget(self) -> None:
        """Forget cells and scopes that were not heard of for long."""
        async with self._db.connect() as conn:
            await conn.execute(_FORGET, {"forgotten_s": FORGOTTEN_S})


STORE_ERRORS = (SQLAlchemyError, OSError, SharesUnknown)
