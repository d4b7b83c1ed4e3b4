"""Names the columns in which files are sealed: their content in Postgres, and their names."""

from __future__ import annotations

from gateway.columns import SealedColumns
from gateway.files.tables import file_chunks, files

PURPOSE = "files"
"""`Secret` derives a key for it."""
CHUNKS = SealedColumns(
    table=file_chunks, columns=("data",), place=("org_id", "file_id", "number"), purpose=PURPOSE
)
NAMES = SealedColumns(table=files, columns=("filename",), place=("org_id", "id"), purpose=PURPOSE)
