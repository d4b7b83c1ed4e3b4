"""Names the columns in which responses and conversations are sealed."""

from __future__ import annotations

from gateway.columns import Row, SealedColumns
from gateway.responses.kept import ResponseOwner
from gateway.responses.tables import conversation_items, conversations, responses

PURPOSE = "responses"
"""`Secret` derives a key for it."""
_OWNED = ("org_id", "project_id")


def _context(row: Row) -> bytes:
    return ResponseOwner(row["org_id"], row["project_id"]).context(row["id"])


def _context_of_item(row: Row) -> bytes:
    owner = ResponseOwner(row["org_id"], row["project_id"])
    return owner.context(row["conversation_id"], row["id"])


CONTENT = SealedColumns(
    table=responses,
    columns=("content",),
    place=(*_OWNED, "id"),
    purpose=PURPOSE,
    context=_context,
)
CONVERSATION_METADATA = SealedColumns(
    table=conversations,
    columns=("metadata",),
    place=(*_OWNED, "id"),
    purpose=PURPOSE,
    context=_context,
)
ITEMS = SealedColumns(
    table=conversation_items,
    columns=("content",),
    place=(*_OWNED, "conversation_id", "id"),
    purpose=PURPOSE,
    context=_context_of_item,
)
