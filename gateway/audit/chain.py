"""The chain itself: an entry, its canonical form, its hash. Pure.

An entry's hash is SHA-256 over the canonical JSON of all its columns but the hash: RFC 8785's, but
that keys are ordered by their UTF-8 bytes. `previous` is one of the columns, so each hash stands
for all entries before it.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

import msgspec

GENESIS = bytes(32)
"""`previous` of an org's first entry."""
FORMAT = "tollgate-audit/1"


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `audit_entries`, without its hash."""

    org_id: str
    sequence: int
    """From 1, without gaps."""
    id: str
    occurred_at: datetime
    action: str
    target: str
    project_id: str | None
    actor_kind: str
    actor_id: str
    on_behalf_of: str | None
    ip: str | None
    request_id: str | None
    before: str | None
    """Canonical JSON, as is `after`."""
    after: str | None
    previous: bytes


def canonical(value: Any) -> bytes:
    """Return the fields as JSON with sorted keys, no space, and nothing escaped that need not
    be."""
    return msgspec.json.encode(value, order="sorted")


def digest(entry: AuditEntry) -> bytes:
    fields: dict[str, Any] = msgspec.structs.asdict(entry)
    fields["occurred_at"] = entry.occurred_at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    fields["previous"] = entry.previous.hex()
    return hashlib.sha256(canonical(fields | {"format": FORMAT})).digest()
