"""Alerts of budgets and rate limits, and the webhooks that tell of them.

An alert is raised once per cap or rate limit, period and threshold, which its unique constraint
enforces whoever raises it; the row itself is the outbox, until `dispatched_at` says that its
deliveries are written. Money is numeric(38,0) of pico-USD, tokens are counted.

Revision ID: 0019
Revises: 0018
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, protect

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

ALERTS = (
    """
    CREATE TABLE alerts (
        id text PRIMARY KEY,
        org_id text NOT NULL,
        scope text NOT NULL,
        scope_id text NOT NULL,
        measure text NOT NULL CONSTRAINT alerts_measure CHECK (measure IN
            ('spend', 'tokens_per_minute', 'input_tokens_per_minute', 'output_tokens_per_minute')),
        period text NOT NULL CONSTRAINT alerts_period CHECK
            (period IN ('hour', 'day', 'month', 'total')),
        period_start timestamptz NOT NULL,
        cap_id text NOT NULL,
        threshold smallint NOT NULL CONSTRAINT alerts_threshold CHECK (threshold BETWEEN 1 AND 100),
        ceiling numeric(38,0) NOT NULL,
        used numeric(38,0) NOT NULL,
        occurred_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        dispatched_at timestamptz,
        CONSTRAINT alerts_once
            UNIQUE (org_id, scope, scope_id, measure, cap_id, period, period_start, threshold)
    )
    """,
    "CREATE INDEX alerts_of_org ON alerts (org_id, id)",
    "CREATE INDEX alerts_outbox ON alerts (id) WHERE dispatched_at IS NULL",
    "CREATE INDEX alerts_of_hours ON alerts (occurred_at) WHERE period = 'hour'",
    # What was spent in a period, kept for scopes that have, or had, a cap.
    """
    CREATE TABLE spend_to_date (
        org_id text NOT NULL,
        scope text NOT NULL,
        scope_id text NOT NULL,
        period text NOT NULL,
        period_start timestamptz NOT NULL,
        spent_pico numeric(38,0) NOT NULL,
        PRIMARY KEY (org_id, scope, scope_id, period, period_start)
    )
    """,
    # Tokens of a minute over all gateways, kept for hours.
    """
    CREATE TABLE ceiling_minutes (
        org_id text NOT NULL,
        scope text NOT NULL,
        scope_id text NOT NULL,
        measure text NOT NULL,
        minute timestamptz NOT NULL,
        used bigint NOT NULL,
        PRIMARY KEY (org_id, scope, scope_id, measure, minute)
    )
    """,
    "CREATE INDEX ceiling_minutes_age ON ceiling_minutes (minute)",
)
WEBHOOKS = (
    """
    CREATE TABLE webhook_endpoints (
        id text PRIMARY KEY,
        org_id text NOT NULL REFERENCES orgs,
        url text NOT NULL,
        description text,
        event_types text[] NOT NULL,
        secret_sealed bytea NOT NULL,
        secret_id text NOT NULL,
        older_secret_sealed bytea,
        older_secret_id text,
        older_secret_expires_at timestamptz,
        version bigint NOT NULL DEFAULT 1,
        created_at timestamptz NOT NULL DEFAULT now(),
        disabled_at timestamptz,
        archived_at timestamptz,
        CONSTRAINT webhook_endpoints_of_org UNIQUE (org_id, id),
        CONSTRAINT webhook_endpoints_url CHECK (length(url) BETWEEN 1 AND 2048),
        CONSTRAINT webhook_endpoints_types CHECK (cardinality(event_types) > 0)
    )
    """,
    """
    CREATE TABLE webhook_deliveries (
        id text PRIMARY KEY,
        org_id text NOT NULL REFERENCES orgs,
        endpoint_id text NOT NULL,
        event_id text NOT NULL,
        event_type text NOT NULL,
        body text NOT NULL,
        state text NOT NULL DEFAULT 'pending' CONSTRAINT webhook_deliveries_state CHECK
            (state IN ('pending', 'delivered', 'dead')),
        attempts integer NOT NULL DEFAULT 0,
        due_at timestamptz NOT NULL DEFAULT now(),
        expires_at timestamptz NOT NULL,
        leased_by text,
        leased_until timestamptz,
        status smallint,
        failure text,
        created_at timestamptz NOT NULL DEFAULT now(),
        ended_at timestamptz,
        CONSTRAINT webhook_deliveries_once UNIQUE (endpoint_id, event_id),
        CONSTRAINT webhook_deliveries_endpoint
            FOREIGN KEY (org_id, endpoint_id) REFERENCES webhook_endpoints (org_id, id)
    )
    """,
    "CREATE INDEX webhook_deliveries_due ON webhook_deliveries (due_at) WHERE state = 'pending'",
    "CREATE INDEX webhook_deliveries_of ON webhook_deliveries (org_id, endpoint_id, id)",
    "CREATE INDEX webhook_deliveries_age ON webhook_deliveries (created_at)",
)
READ_ONLY = {"alerts": True, "spend_to_date": False, "ceiling_minutes": True}
"""Written by the system about a tenant; whether rows may be deleted, once they are old."""


def upgrade() -> None:
    for statement in (*ALERTS, *WEBHOOKS):
        op.execute(statement)
    for table, delete in READ_ONLY.items():
        protect(table, read_only=True, delete=delete)
    protect("webhook_endpoints")
    protect("webhook_deliveries", delete=True)


def downgrade() -> None:
    for table in ("webhook_deliveries", "webhook_endpoints", *READ_ONLY):
        open_wall(table)
        op.execute(f"DROP TABLE {table}")
