"""The second wall: row-level security, in the words of the migrations.

Knows no table.

Two roles that can log in nowhere, own nothing and bypass nothing; the gateway's pools take them
(`gateway.db`). `tollgate_app` sees the rows of the org that its transaction named, and none where
it named none. `tollgate_system` sees all orgs: what must look before it knows the tenant, and what
serves them all. The owner, who migrates, is bound by neither: row security is enabled, not forced,
because a migration that silently changes no row would be worse than none.
"""

from __future__ import annotations

from alembic import op
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, text
from sqlalchemy.exc import ProgrammingError

from migrations.errors import MigrationError

ROLE_TENANT = "tollgate_app"
ROLE_SYSTEM = "tollgate_system"
TENANT = "nullif(current_setting('tollgate.org', true), '')"
"""The org of the transaction; NULL, which equals nothing, where none was set."""
WRITES = "INSERT, UPDATE"

KNOWN = text("""
    SELECT rolsuper OR rolbypassrls OR rolcanlogin AS opens_the_wall,
        CASE WHEN current_setting('server_version_num')::int < 160000
            THEN pg_has_role(current_user, oid, 'MEMBER')
            ELSE pg_has_role(current_user, oid, 'SET') END AS may_be_taken
    FROM pg_roles WHERE rolname = :role
""")
MAY_CREATE = text("SELECT rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = current_user")
WHO = text("SELECT quote_ident(current_user)")


def create_roles() -> None:
    """Roles belong to the whole cluster: another database's migration, or an administrator, may
    have made them.

    Raises: MigrationError, which says in one line what an administrator has to run.
    """
    missing = [line for role in (ROLE_TENANT, ROLE_SYSTEM) if (line := _create_role(role))]
    if missing:
        who = op.get_bind().scalar(WHO)
        raise MigrationError(
            f"the Postgres user {who} may not create roles; an administrator has to run, once: "
            + " ".join(missing)
        )
    for role in (ROLE_TENANT, ROLE_SYSTEM):
        op.execute(f"GRANT USAGE ON SCHEMA public TO {role}")


def create_roles_on(connection: Connection) -> None:
    """Create them outside of a migration, for a schema from elsewhere. Raises: MigrationError."""
    with Operations.context(MigrationContext.configure(connection)):
        create_roles()


def _create_role(role: str) -> str | None:
    """The statement that only an administrator may run, where there is one."""
    connection = op.get_bind()
    may_create, who = connection.scalar(MAY_CREATE), connection.scalar(WHO)
    known = connection.execute(KNOWN, {"role": role}).one_or_none()
    if known is None:
        if not may_create:
            return f"CREATE ROLE {role} NOLOGIN NOSUPERUSER NOBYPASSRLS ROLE {who};"
        # Another database's migration may do the same at this moment.
        op.execute(
            f"""
            DO $$ BEGIN
                CREATE ROLE {role} NOLOGIN NOSUPERUSER NOBYPASSRLS NOINHERIT;
            EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
            END $$
            """
        )
        known = connection.execute(KNOWN, {"role": role}).one()
    if known.opens_the_wall:
        raise MigrationError(f"the Postgres role {role} must not log in or bypass row security")
    if known.may_be_taken:
        return None
    try:
        with connection.begin_nested():
            connection.execute(text(f"GRANT {role} TO {who}"))
    except ProgrammingError:  # somebody else's role, and nobody made us its administrator
        return f"GRANT {role} TO {who};"
    return None


def protect(
    table: str, column: str = "org_id", *, read_only: bool = False, delete: bool = False
) -> None:
    """A tenant's table: `column` holds the org of each row. read_only: a tenant reads what the
    system wrote about it. delete: rows may be deleted."""
    deletes = ", DELETE" if delete else ""
    tenants = "SELECT" if read_only else f"SELECT, {WRITES}{deletes}"
    op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    op.execute(
        f"CREATE POLICY {table}_tenant ON {table} TO {ROLE_TENANT}"
        f" USING ({column} = {TENANT}) WITH CHECK ({column} = {TENANT})"
    )
    op.execute(
        f"CREATE POLICY {table}_system ON {table} TO {ROLE_SYSTEM} USING (true) WITH CHECK (true)"
    )
    op.execute(f"GRANT {tenants} ON {table} TO {ROLE_TENANT}")
    op.execute(f"GRANT SELECT, {WRITES}{deletes} ON {table} TO {ROLE_SYSTEM}")


def allow_update(table: str, *columns: str) -> None:
    """Let tenants change these columns of their own rows, of a table that is read-only for them: of
    `orgs` not the plan, nor whether it operates the installation."""
    op.execute(f"GRANT UPDATE ({', '.join(columns)}) ON {table} TO {ROLE_TENANT}")


def share(table: str, *, readable: bool = True, delete: bool = False) -> None:
    """A table of the whole installation, which tenants change in no case. readable: they may read
    it; where it speaks of tenants they may not."""
    deletes = ", DELETE" if delete else ""
    op.execute(f"GRANT SELECT, {WRITES}{deletes} ON {table} TO {ROLE_SYSTEM}")
    if readable:
        op.execute(f"GRANT SELECT ON {table} TO {ROLE_TENANT}")


def open_wall(table: str) -> None:
    """Undo either."""
    op.execute(f"DROP POLICY IF EXISTS {table}_tenant ON {table}")
    op.execute(f"DROP POLICY IF EXISTS {table}_system ON {table}")
    op.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
    op.execute(f"REVOKE ALL ON {table} FROM {ROLE_TENANT}, {ROLE_SYSTEM}")
