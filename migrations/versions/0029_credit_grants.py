"""Credit grants: their terms, what is leased of them, what is to be paid, and what each has paid.

What an org was credited before stays what it was, paid to what it owes; it is listed, and nothing
more can be drawn from it.

Revision ID: 0029
Revises: 0028
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, protect

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

TABLES = {
    "credit_grants": """
        id text PRIMARY KEY,
        org_id text NOT NULL,
        amount_pico numeric(38,0) NOT NULL CONSTRAINT credit_grants_amount CHECK (amount_pico > 0),
        priority smallint NOT NULL CONSTRAINT credit_grants_priority
            CHECK (priority BETWEEN 0 AND 100),
        expires_at timestamptz,
        models text[] CONSTRAINT credit_grants_models CHECK (cardinality(models) > 0),
        components text[] CONSTRAINT credit_grants_components CHECK (cardinality(components) > 0),
        created_at timestamptz NOT NULL,
        revoked_at timestamptz,
        ended_at timestamptz
    """,
    # One row an org: who holds it tops up, burns and gives back.
    "credit_lines": """
        org_id text PRIMARY KEY,
        account text NOT NULL UNIQUE GENERATED ALWAYS AS ('receivable:' || org_id) STORED,
        version bigint NOT NULL DEFAULT 0,
        told bigint NOT NULL DEFAULT 0,
        paid_pico numeric(38,0) NOT NULL CHECK (paid_pico >= 0),
        leased_until timestamptz,
        leased_at timestamptz,
        spent_pico numeric(38,0) NOT NULL DEFAULT 0
    """,
    "credit_leases": """
        grant_id text PRIMARY KEY REFERENCES credit_grants,
        org_id text NOT NULL,
        transfer_id text NOT NULL UNIQUE
    """,
    "unpaid_usage": """
        transfer_id text PRIMARY KEY,
        org_id text NOT NULL,
        event_id text NOT NULL,
        amount_pico numeric(38,0) NOT NULL CHECK (amount_pico > 0)
    """,
    "credit_burns": """
        transfer_id text NOT NULL,
        grant_id text NOT NULL REFERENCES credit_grants,
        org_id text NOT NULL,
        event_id text NOT NULL,
        version bigint NOT NULL,
        amount_pico numeric(38,0) NOT NULL CHECK (amount_pico > 0),
        PRIMARY KEY (transfer_id, grant_id, version)
    """,
}
INDEXES = (
    "CREATE INDEX credit_grants_of_org ON credit_grants (org_id, id)",
    "CREATE INDEX credit_grants_open ON credit_grants (org_id) WHERE ended_at IS NULL",
    "CREATE INDEX credit_leases_of_org ON credit_leases (org_id)",
    "CREATE INDEX unpaid_usage_of_org ON unpaid_usage (org_id, transfer_id)",
    "CREATE INDEX credit_burns_of_org ON credit_burns (org_id, grant_id)",
    "CREATE INDEX credit_burns_of_event ON credit_burns (event_id)",
)
DELETED = ("credit_leases", "unpaid_usage")


def upgrade() -> None:
    for table, columns in TABLES.items():
        op.execute(f"CREATE TABLE {table} ({columns})")
        protect(table, read_only=True, delete=table in DELETED)
    for index in INDEXES:
        op.execute(index)
    op.execute(
        "CREATE TRIGGER credit_burns_immutable BEFORE UPDATE OR DELETE ON credit_burns"
        " FOR EACH ROW EXECUTE FUNCTION refuse_to_change()"
    )
    op.execute("""
        INSERT INTO credit_grants (id, org_id, amount_pico, priority, created_at, ended_at)
        SELECT id, substr(credit, length('receivable:') + 1), amount_pico, 50, posted_at, posted_at
        FROM transfers WHERE kind = 'credit'
    """)


def downgrade() -> None:
    for table in reversed(TABLES):
        open_wall(table)
        op.execute(f"DROP TABLE {table}")
