"""Keep which versions a model has, each by its digest and the served model that it is, and who is
pinned to which. A change of either tells every worker.

Revision ID: 0077
Revises: 0076
"""

from __future__ import annotations

from alembic import op

from migrations.walls import share

revision = "0077"
down_revision = "0076"
branch_labels = None
depends_on = None

TOPIC = "model versions"
STATEMENTS = (
    """
    CREATE TABLE model_versions (
        id text PRIMARY KEY,
        model text NOT NULL,
        version integer NOT NULL CHECK (version > 0),
        served_by text NOT NULL,
        digest text NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now(),
        CONSTRAINT model_versions_number UNIQUE (model, version),
        CONSTRAINT model_versions_digest UNIQUE (model, digest),
        CONSTRAINT model_versions_served_by UNIQUE (served_by)
    )
    """,
    """
    CREATE TABLE model_pins (
        id text PRIMARY KEY,
        model text NOT NULL,
        scope text NOT NULL CHECK (scope IN ('installation', 'org', 'project', 'key')),
        scope_id text NOT NULL,
        version integer NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now(),
        CONSTRAINT model_pins_scope UNIQUE (model, scope, scope_id),
        CONSTRAINT model_pins_version FOREIGN KEY (model, version)
            REFERENCES model_versions (model, version)
    )
    """,
)
TABLES = ("model_versions", "model_pins")


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)
    for table in TABLES:
        share(table, readable=False, delete=True)
        op.execute(
            f"CREATE TRIGGER {table}_work AFTER INSERT OR UPDATE OR DELETE ON {table}"
            f" FOR EACH ROW EXECUTE FUNCTION tell_of_work('{TOPIC}')"
        )


def downgrade() -> None:
    for table in reversed(TABLES):
        op.execute(f"DROP TABLE {table}")
