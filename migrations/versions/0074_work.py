"""Say in the transaction that makes work for a background task that there is some: NOTIFY with its
topic, which is heard once the transaction is committed (`gateway/worker/work_listener.py`).

Each trigger fires for rows alone: a statement that touches none says nothing, and one that touches
many says it once, since Postgres sends equal notifications of a transaction once. None stands on a
table that a request to a model writes: a transaction that notifies holds a lock of the whole
database while it commits.

Revision ID: 0074
Revises: 0073
"""

from __future__ import annotations

from typing import NamedTuple

from alembic import op

revision = "0074"
down_revision = "0073"
branch_labels = None
depends_on = None

CHANNEL = "tollgate_work"


class Work(NamedTuple):
    """Rows of a table that make work. `when`: of a row, in SQL; empty: each."""

    topic: str
    table: str
    events: str
    when: str = ""


AGAIN = "NEW.state = 'pending' AND OLD.state <> 'pending'"
WORK = (
    Work("deliveries", "alerts", "INSERT"),
    Work("deliveries", "invoice_transitions", "INSERT"),
    Work("deliveries", "top_ups", "INSERT OR UPDATE OF state"),
    Work("deliveries", "batches", "UPDATE OF status", "NEW.dispatched_at IS NULL"),
    Work("deliveries", "mcp_approvals", "INSERT"),
    Work("deliveries", "webhook_deliveries", "INSERT"),
    Work("deliveries", "webhook_deliveries", "UPDATE OF state", AGAIN),
    Work("deliveries", "mail_deliveries", "INSERT"),
    Work("deliveries", "mail_deliveries", "UPDATE OF state", AGAIN),
    Work("deliveries", "webhook_endpoints", "UPDATE OF disabled_at", "NEW.disabled_at IS NULL"),
    Work("batches", "batches", "INSERT OR UPDATE OF status"),
    Work("revocations", "revocations", "INSERT"),
    Work("signing keys", "signing_keys", "INSERT OR UPDATE OR DELETE"),
    Work("stored settings", "installation_generation", "INSERT OR UPDATE"),
    Work("credits", "credit_grants", "INSERT OR UPDATE OF revoked_at"),
    Work("superseded", "superseded_requests", "INSERT"),
    Work("erasures", "projects", "UPDATE OF archived_at, zero_retention"),
    Work("erasures", "orgs", "UPDATE OF archived_at"),
)


def name_of(work: Work) -> str:
    """Return the name of a trigger: one on a table for each topic, and for each kind of event."""
    kind = "again" if work.when == AGAIN else "work"
    return f"{work.table}_{kind}_{work.topic.replace(' ', '_')}"


def upgrade() -> None:
    op.execute(f"""
        CREATE OR REPLACE FUNCTION tell_of_work() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pg_notify('{CHANNEL}', TG_ARGV[0]);
            RETURN NULL;
        END $$
    """)
    for work in WORK:
        when = f"WHEN ({work.when})" if work.when else ""
        op.execute(
            f"CREATE OR REPLACE TRIGGER {name_of(work)} AFTER {work.events} ON {work.table}"
            f" FOR EACH ROW {when} EXECUTE FUNCTION tell_of_work('{work.topic}')"
        )


def downgrade() -> None:
    for work in WORK:
        op.execute(f"DROP TRIGGER IF EXISTS {name_of(work)} ON {work.table}")
    op.execute("DROP FUNCTION IF EXISTS tell_of_work()")
