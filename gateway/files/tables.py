"""Tables of files, as their migration makes them.

A file belongs to a project. It is there from the moment when all of it is (`uploading_since` is
null) until it expires or `deleted_at` is set; then its content is swept, and its row with it.
`stored_in` says where that is: what is configured later is for later files. Names and content are
sealed (`sealing`).
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

metadata = sa.MetaData()


def _moment(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.TIMESTAMP(timezone=True), nullable=True)


def _now(name: str) -> sa.Column[Any]:
    kind = sa.TIMESTAMP(timezone=True)
    return sa.Column(name, kind, nullable=False, server_default=sa.func.now())


files = sa.Table(
    "files",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("org_id", sa.Text, nullable=False),
    sa.Column("project_id", sa.Text, nullable=False),
    sa.Column("purpose", sa.Text, nullable=False),
    sa.Column("filename", sa.Text, nullable=False),
    sa.Column("secret_id", sa.Text, nullable=True),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("stored_in", sa.Text, nullable=False, server_default="postgres"),
    _now("created_at"),
    _moment("expires_at"),
    _moment("uploading_since"),
    _moment("deleted_at"),
)

file_chunks = sa.Table(
    "file_chunks",
    metadata,
    sa.Column("file_id", sa.Text, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("org_id", sa.Text, nullable=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
    sa.Column("secret_id", sa.Text, nullable=True),
)
