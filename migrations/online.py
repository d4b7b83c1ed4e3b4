"""Changes of large tables beside gateways that use them, for migrations after the baseline.

Each function can be repeated after a kill at any point, which is what a migration must be able to
do that uses one: so its other statements say IF NOT EXISTS, too. What takes a strong lock reads no
row; what reads rows takes a lock that hinders no reader or writer, in a transaction of its own.
Nothing is taken away before the last release permits it (`releases.toml`). Names are the
migration's own and are not quoted.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from alembic import op
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from migrations.errors import MigrationError
from migrations.releases import last_release
from migrations.runner import BUSY

log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 600
"""Bounds the wait for a weak lock, in whose queue nobody else waits."""
BATCH_ROWS = 1000
MAX_PAUSE_S = 0.8
"""Shorter than a statement may be."""
MAX_BUSY_BATCHES = 100
"""Bounds the attempts at one batch."""
VALID = text("""
    SELECT indisvalid FROM pg_index
    WHERE indexrelid = to_regclass(:name)
""")
HAS_CONSTRAINT = text("""
    SELECT 1 FROM pg_constraint WHERE conrelid = to_regclass(:table) AND conname = :name
""")


def create_index(name: str, on: str, *, unique: bool = False) -> None:
    """Build an index. `on`: the table and what follows it, as in "files (id) WHERE size > 0"."""
    is_valid = op.get_bind().scalar(VALID, {"name": name})
    if is_valid:
        return
    if is_valid is not None:  # of a run that was cut short: writers keep it, no reader uses it
        drop_index(name)
    kind = "UNIQUE INDEX" if unique else "INDEX"
    _run_unhurried(f"CREATE {kind} CONCURRENTLY {name} ON {on}")


def drop_index(name: str) -> None:
    _run_unhurried(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")


def add_column(table: str, name: str, kind: str, *, default: str | None = None) -> None:
    """Add a column: nullable without a default, NOT NULL with one. `default`: a constant, in SQL;
    what is drawn or computed for each row would rewrite the table."""
    rest = "" if default is None else f" NOT NULL DEFAULT {default}"
    op.execute(f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS {name} {kind}{rest}")


def add_check(table: str, name: str, condition: str) -> None:
    """Add a constraint that the last release's rows meet, those that it is yet to write, too."""
    _add_constraint(table, name, f"CHECK ({condition})")


def add_foreign_key(table: str, name: str, columns: str, references: str) -> None:
    """Add a reference. `references`: as in "orgs (id)"; the constraint is as for `add_check`."""
    _add_constraint(table, name, f"FOREIGN KEY ({columns}) REFERENCES {references}")


def widen_check(table: str, name: str, condition: str) -> None:
    """Let a constraint allow more: whatever the old condition allows, `condition` must."""
    op.execute(
        f"ALTER TABLE {table} DROP CONSTRAINT IF EXISTS {name},"
        f" ADD CONSTRAINT {name} CHECK ({condition}) NOT VALID"
    )
    _run_unhurried(f"ALTER TABLE {table} VALIDATE CONSTRAINT {name}")


def backfill(table: str, key: str, assignment: str, where: str) -> None:
    """Change rows a thousand at a time, each time in a transaction of its own.

    `key`: a column with a unique index, without NULLs. `assignment`: as in UPDATE SET. `where`:
    holds for rows that still want it, so that a repeat is quick. The last release may go on to
    write such rows; a later migration that needs all of them changed does this once more.
    """
    first, next_ = (
        text(f"""
            WITH batch AS MATERIALIZED (
                SELECT {key} FROM {table} {behind} ORDER BY {key} LIMIT {BATCH_ROWS}
            ), changed AS (
                UPDATE {table} SET {assignment}
                WHERE {key} IN (SELECT {key} FROM batch) AND ({where})
            )
            SELECT {key} FROM batch ORDER BY {key} DESC LIMIT 1
        """)
        for behind in ("", f"WHERE {key} > :after")
    )
    with op.get_context().autocommit_block():
        connection = op.get_bind()
        after = _change_batch(connection, first, {})
        while after is not None:
            after = _change_batch(connection, next_, {"after": after})


def drop_column(table: str, name: str) -> None:
    _check_permitted(f"drop {table}.{name}")
    op.execute(f"ALTER TABLE {table} DROP COLUMN IF EXISTS {name}")


def drop_table(name: str) -> None:
    _check_permitted(f"drop {name}")
    op.execute(f"DROP TABLE IF EXISTS {name}")


def set_not_null(table: str, column: str) -> None:
    """Forbid NULL. Postgres reads no row under its strong lock, since a valid constraint says that
    there is none."""
    _check_permitted(f"not null {table}.{column}")
    name = f"{table}_{column}_is_set"
    add_check(table, name, f"{column} IS NOT NULL")
    op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET NOT NULL")
    op.execute(f"ALTER TABLE {table} DROP CONSTRAINT {name}")


def _add_constraint(table: str, name: str, definition: str) -> None:
    if op.get_bind().scalar(HAS_CONSTRAINT, {"table": table, "name": name}) is None:
        op.execute(f"ALTER TABLE {table} ADD CONSTRAINT {name} {definition} NOT VALID")
    _run_unhurried(f"ALTER TABLE {table} VALIDATE CONSTRAINT {name}")


def _run_unhurried(statement: str) -> None:
    """Run a statement whose lock hinders no reader or writer, for as long as it takes. What the
    migration did before is committed."""
    with op.get_context().autocommit_block():
        op.execute(f"SET lock_timeout = '{LOCK_TIMEOUT_S}s'")
        op.execute("SET statement_timeout = 0")
        try:
            op.execute(statement)
        finally:
            op.execute("RESET lock_timeout")
            op.execute("RESET statement_timeout")


def _change_batch(connection: Connection, step: Any, after: dict[str, Any]) -> Any:
    """Return the last key of a batch, None behind the last one. A pause as long as the batch leaves
    half of the time to others."""
    for attempt in range(1, MAX_BUSY_BATCHES + 1):
        begun = time.monotonic()
        try:
            last = connection.scalar(step, after)
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) not in BUSY or attempt == MAX_BUSY_BATCHES:
                raise
            log.info("rows of a batch are in use, so it is tried again")
        else:
            _pause(connection, time.monotonic() - begun)
            return last
        _pause(connection, MAX_PAUSE_S)
    return None


def _pause(connection: Connection, seconds: float) -> None:
    connection.execute(text("SELECT pg_sleep(:s)"), {"s": min(seconds, MAX_PAUSE_S)})


def _check_permitted(change: str) -> None:
    """Raises: MigrationError unless the last release permits it; the schema serves none before it
    from now on."""
    release = last_release()
    if change not in release.permits:
        raise MigrationError(
            f"{change}: the release {release.version} does not permit it (migrations/releases.toml)"
        )
    op.get_bind().execute(
        text("UPDATE schema_support SET oldest_revision = greatest(oldest_revision, :revision)"),
        {"revision": release.revision},
    )
