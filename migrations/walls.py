"""The second wall: row-level security, in the words of the migrations.

Above: `versions/`, which call one of the two for every table they create. Below: Alembic. Knows no
table.

Two roles that can log in nowhere, own nothing and bypass nothing; the gateway's pools take them
(`gateway.db`). `tollgate_app` sees the rows of the org that its transaction named, and none where
it named none. `tollgate_system` sees all orgs: what must look before it knows the tenant, and what
serves them all. The owner, who migrates, is bound by neither: row security is enabled, not forced,
because a migration that silently changes no row would be worse than none.
"""

from __future__ import annotations

from alembic import op

ROLE_TENANT = "tollgate_app"
ROLE_SYSTEM = "tollgate_system"
TENANT = "nullif(current_setting('tollgate.org', true), '')"
"""The org of the transaction; NULL, which equals nothing, where none was set."""


def create_roles() -> None:
    """Roles belong to the whole cluster, so another database's migration may have made them."""
    for role in (ROLE_TENANT, ROLE_SYSTEM):
        op.execute(
            f"""
            DO $$ BEGIN
                CREATE ROLE {role} NOLOGIN NOSUPERUSER NOBYPASSRLS NOINHERIT;
            EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
            END $$
            """
        )
        op.execute(f"GRANT {role} TO current_user")
        op.execute(f"GRANT USAGE ON SCHEMA public TO {role}")


def protect(table: str, column: str = "org_id", *, delete: bool = False) -> None:
    """A tenant's table: `column` holds the org of each row. delete: rows may be deleted."""
    granted = "SELECT, INSERT, UPDATE" + (", DELETE" if delete else "")
    op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    op.execute(
        f"CREATE POLICY {table}_tenant ON {table} TO {ROLE_TENANT}"
        f" USING ({column} = {TENANT}) WITH CHECK ({column} = {TENANT})"
    )
    op.execute(
        f"CREATE POLICY {table}_system ON {table} TO {ROLE_SYSTEM} USING (true) WITH CHECK (true)"
    )
    op.execute(f"GRANT {granted} ON {table} TO {ROLE_TENANT}, {ROLE_SYSTEM}")


def share(table: str, *, readable: bool = True, delete: bool = False) -> None:
    """A table of the whole installation, which tenants change in no case. readable: they may read
    it; where it speaks of tenants they may not."""
    granted = "SELECT, INSERT, UPDATE" + (", DELETE" if delete else "")
    op.execute(f"GRANT {granted} ON {table} TO {ROLE_SYSTEM}")
    if readable:
        op.execute(f"GRANT SELECT ON {table} TO {ROLE_TENANT}")


def open_wall(table: str) -> None:
    """Undo either."""
    op.execute(f"DROP POLICY IF EXISTS {table}_tenant ON {table}")
    op.execute(f"DROP POLICY IF EXISTS {table}_system ON {table}")
    op.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
    op.execute(f"REVOKE ALL ON {table} FROM {ROLE_TENANT}, {ROLE_SYSTEM}")
