"""Walls: row-level security behind the queries, two roles that own nothing.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

from alembic import op

from migrations.walls import allow_update, create_roles, open_wall, protect, share

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

TENANTS = {"projects": "org_id", "api_keys": "org_id"}
"""Tables with a tenant's rows, and the column that says whose."""
ABOUT_TENANTS = {"orgs": "id", "usage_events": "org", "usage_hourly": "org"}
"""Likewise, but written by the system: who is there, and what they used."""
READABLE = ("plans", "price_keys", "prices")
HIDDEN = ("usage_conflicts", "accounts", "transfers", "balances", "entries")
"""The books of the house: they speak of all tenants."""


def upgrade() -> None:
    create_roles()
    op.execute("ALTER TABLE api_keys ADD COLUMN org_id text REFERENCES orgs")
    op.execute("UPDATE api_keys SET org_id = p.org_id FROM projects p WHERE p.id = project_id")
    op.execute("ALTER TABLE api_keys ALTER COLUMN org_id SET NOT NULL")
    # A key's org is its project's: what a tenant may write it cannot hang on another's project.
    op.execute("ALTER TABLE projects ADD CONSTRAINT projects_org_id_id UNIQUE (org_id, id)")
    op.execute(
        "ALTER TABLE api_keys DROP CONSTRAINT api_keys_project_id_fkey,"
        " ADD CONSTRAINT api_keys_of_project FOREIGN KEY (org_id, project_id)"
        " REFERENCES projects (org_id, id)"
    )
    op.execute("ALTER TABLE orgs ADD COLUMN is_operator boolean NOT NULL DEFAULT false")
    op.execute("UPDATE orgs SET is_operator = true WHERE id = (SELECT min(id) FROM orgs)")
    for table, column in TENANTS.items():
        protect(table, column)
    for table, column in ABOUT_TENANTS.items():
        protect(table, column, read_only=True)
    allow_update("orgs", "name")
    for table in READABLE:
        share(table)
    for table in HIDDEN:
        share(table, readable=False)


def downgrade() -> None:
    for table in (*TENANTS, *ABOUT_TENANTS, *READABLE, *HIDDEN):
        if table == "entries":
            op.execute("REVOKE ALL ON entries FROM tollgate_app, tollgate_system")
        else:
            open_wall(table)
    op.execute("ALTER TABLE orgs DROP COLUMN is_operator")
    op.execute(
        "ALTER TABLE api_keys DROP CONSTRAINT api_keys_of_project, DROP COLUMN org_id,"
        " ADD CONSTRAINT api_keys_project_id_fkey FOREIGN KEY (project_id) REFERENCES projects"
    )
    op.execute("ALTER TABLE projects DROP CONSTRAINT projects_org_id_id")
