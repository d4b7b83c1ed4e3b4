"""The audit log, and answers kept for idempotency.

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

from alembic import op

from migrations.walls import ROLE_SYSTEM, ROLE_TENANT, open_wall, protect

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

AUDIT = (
    """
    CREATE TABLE audit_entries (
        org_id text NOT NULL REFERENCES orgs,
        sequence bigint NOT NULL CHECK (sequence > 0),
        id text NOT NULL UNIQUE,
        occurred_at timestamptz NOT NULL,
        action text NOT NULL,
        target text NOT NULL,
        project_id text,
        actor_kind text NOT NULL CHECK
            (actor_kind IN ('user', 'service_account', 'api_key', 'client', 'system')),
        actor_id text NOT NULL,
        on_behalf_of text,
        ip text,
        request_id text,
        before text,
        after text,
        previous bytea NOT NULL CHECK (octet_length(previous) = 32),
        hash bytea NOT NULL CHECK (octet_length(hash) = 32),
        PRIMARY KEY (org_id, sequence)
    )
    """,
    "CREATE INDEX audit_entries_action ON audit_entries (org_id, action, sequence)",
    "CREATE INDEX audit_entries_target ON audit_entries (org_id, target, sequence)",
    "CREATE INDEX audit_entries_actor ON audit_entries (org_id, actor_id, sequence)",
    "CREATE INDEX audit_entries_project ON audit_entries (org_id, project_id, sequence)",
    "CREATE INDEX audit_entries_request ON audit_entries (request_id)",
    # Apart from the entries: where their tail is cut off, it says what is missing.
    """
    CREATE TABLE audit_heads (
        org_id text PRIMARY KEY REFERENCES orgs,
        sequence bigint NOT NULL CHECK (sequence >= 0),
        hash bytea NOT NULL CHECK (octet_length(hash) = 32)
    )
    """,
    "INSERT INTO audit_heads SELECT id, 0, decode(repeat('00', 32), 'hex') FROM orgs",
    """
    CREATE FUNCTION open_audit_head() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO audit_heads VALUES (NEW.id, 0, decode(repeat('00', 32), 'hex'));
        RETURN NULL;
    END $$
    """,
    """
    CREATE TRIGGER orgs_audit_head AFTER INSERT ON orgs
        FOR EACH ROW EXECUTE FUNCTION open_audit_head()
    """,
    """
    CREATE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION 'the audit log only grows (%)', TG_TABLE_NAME;
    END $$
    """,
    """
    CREATE FUNCTION only_advance_audit_head() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.org_id = OLD.org_id AND NEW.sequence = OLD.sequence + 1 THEN
            RETURN NEW;
        END IF;
        RAISE EXCEPTION 'the audit log only grows (%)', TG_TABLE_NAME;
    END $$
    """,
    """
    CREATE TRIGGER audit_entries_append_only BEFORE UPDATE OR DELETE ON audit_entries
        FOR EACH ROW EXECUTE FUNCTION refuse_audit_change()
    """,
    """
    CREATE TRIGGER audit_heads_advance BEFORE UPDATE ON audit_heads
        FOR EACH ROW EXECUTE FUNCTION only_advance_audit_head()
    """,
    """
    CREATE TRIGGER audit_heads_keep_rows BEFORE DELETE ON audit_heads
        FOR EACH ROW EXECUTE FUNCTION refuse_audit_change()
    """,
    *(
        f"""
        CREATE TRIGGER {table}_keep BEFORE TRUNCATE ON {table}
            FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_change()
        """
        for table in ("audit_entries", "audit_heads")
    ),
)

IDEMPOTENCY = (
    """
    CREATE TABLE idempotency_keys (
        org_id text NOT NULL REFERENCES orgs,
        principal text NOT NULL,
        key_digest bytea NOT NULL CHECK (octet_length(key_digest) = 32),
        request_digest bytea NOT NULL CHECK (octet_length(request_digest) = 32),
        request_id text NOT NULL,
        claimed_at timestamptz NOT NULL DEFAULT now(),
        status smallint CHECK (status BETWEEN 100 AND 599),
        response bytea,
        secret_id text,
        CHECK ((status IS NULL) = (response IS NULL) AND (status IS NULL) = (secret_id IS NULL)),
        PRIMARY KEY (org_id, principal, key_digest)
    )
    """,
    "CREATE INDEX ix_idempotency_keys_claimed_at ON idempotency_keys (claimed_at)",
)

PLANS = (
    "ALTER TABLE plans ADD COLUMN lane text CHECK (lane IN ('interactive', 'agentic', 'batch'))",
    "ALTER TABLE plans ADD COLUMN price_list text",
    # Those of the settings file follow it; others are made and changed by the API.
    "ALTER TABLE plans ADD COLUMN in_settings boolean NOT NULL DEFAULT true",
    "ALTER TABLE plans ADD COLUMN created_at timestamptz NOT NULL DEFAULT now()",
)


def upgrade() -> None:
    for statement in (*AUDIT, *IDEMPOTENCY, *PLANS):
        op.execute(statement)
    for table in ("audit_entries", "audit_heads"):
        protect(table)
    op.execute(f"REVOKE UPDATE ON audit_entries FROM {ROLE_TENANT}, {ROLE_SYSTEM}")
    op.execute(f"REVOKE INSERT ON audit_heads FROM {ROLE_TENANT}")
    protect("idempotency_keys", delete=True)


def downgrade() -> None:
    for column in ("lane", "price_list", "in_settings", "created_at"):
        op.execute(f"ALTER TABLE plans DROP COLUMN {column}")
    op.execute("DROP TRIGGER orgs_audit_head ON orgs")
    for table in ("idempotency_keys", "audit_heads", "audit_entries"):
        open_wall(table)
        op.execute(f"DROP TABLE {table}")
    for function in ("open_audit_head", "refuse_audit_change", "only_advance_audit_head"):
        op.execute(f"DROP FUNCTION {function}")
