"""The tables of the registry, as their migration makes them."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

from gateway.columns import moment_made, text

TOPIC = "model versions"
"""The triggers on these tables notify of this topic (`gateway.worker.work_listener`)."""
metadata = sa.MetaData()

versions = sa.Table(
    "model_versions",
    metadata,
    text("id", key=True),
    text("model"),
    sa.Column("version", sa.Integer, nullable=False),
    text("served_by"),
    text("digest"),
    moment_made(),
)

pins = sa.Table(
    "model_pins",
    metadata,
    text("id", key=True),
    text("model"),
    text("scope"),
    text("scope_id"),
    sa.Column("version", sa.Integer, nullable=False),
    moment_made(),
)

rollouts = sa.Table(
    "model_rollouts",
    metadata,
    text("id", key=True),
    text("operator_org"),
    text("model"),
    sa.Column("from_version", sa.Integer, nullable=False),
    sa.Column("to_version", sa.Integer, nullable=False),
    sa.Column("steps", ARRAY(sa.Integer), nullable=False),
    sa.Column("least", sa.Integer, nullable=False),
    sa.Column("watch", sa.Integer, nullable=False),
    text("state"),
    sa.Column("step", sa.Integer, nullable=False),
    text("reason"),
    sa.Column("progress", sa.LargeBinary, nullable=False),
    moment_made(),
)

outcomes = sa.Table(
    "model_rollout_counts",
    metadata,
    text("rollout_id", key=True),
    sa.Column("step", sa.Integer, primary_key=True),
    sa.Column("org_group", sa.Integer, primary_key=True),
    *(
        sa.Column(name, sa.BigInteger, nullable=False)
        for name in ("requests", "refused", "failed", "empty", "cut_off", "late")
    ),
)

evaluations = sa.Table(
    "model_evaluations",
    metadata,
    text("id", key=True),
    text("model"),
    sa.Column("version", sa.Integer, nullable=False),
    text("digest"),
    text("suite"),
    sa.Column("passed", sa.Boolean, nullable=False),
    text("evidence"),
    moment_made(),
)
