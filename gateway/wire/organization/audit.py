"""GET /v1/organization/audit_logs: OpenAI's query and events.

An event names its type, and has its details under a key of that name, as OpenAI's do: `{"type":
"project.created", "project.created": {"id", "data"}}`. Beyond it, under `tollgate`: where the entry
stands in the chain, and what was there before and after.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.tenancy.audit_pages import AuditEvent
from gateway.wire.organization.usage import Filter, Number

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
Cursor = Annotated[str, Meta(min_length=1, max_length=200)]


class AuditLogsQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The query of the audit log. `effective_at` is in Unix seconds. `tenant_only` asks for events
    of an identity service that spans organizations; there are none here."""

    after: Cursor | None = None
    before: Cursor | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_LIMIT)] = DEFAULT_LIMIT
    actor_emails: Filter = []
    actor_ids: Filter = []
    event_types: Filter = []
    project_ids: Filter = []
    resource_ids: Filter = []
    tenant_only: bool = False
    effective_after: Number | None = msgspec.field(default=None, name="effective_at[gt]")
    effective_from: Number | None = msgspec.field(default=None, name="effective_at[gte]")
    effective_before: Number | None = msgspec.field(default=None, name="effective_at[lt]")
    effective_until: Number | None = msgspec.field(default=None, name="effective_at[lte]")


class EventList(msgspec.Struct, frozen=True, kw_only=True):
    """The SDK's `AuditLogListResponse`, a page of them, the newest first."""

    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def to_list(events: list[AuditEvent], *, has_more: bool) -> EventList:
    return EventList(
        data=[to_openai_event(each) for each in events],
        first_id=events[0].id if events else None,
        last_id=events[-1].id if events else None,
        has_more=has_more,
    )


def to_openai_event(event: AuditEvent) -> dict[str, Any]:
    before, after = _state(event.before), _state(event.after)
    shown: dict[str, Any] = {
        "id": event.id,
        "object": "organization.audit_log",
        "type": event.action,
        "effective_at": int(event.occurred_at.timestamp()),
        "actor": to_actor(event),
        event.action: to_details(event, after or {}),
        "tollgate": {
            "sequence": event.sequence,
            "hash": event.hash.hex(),
            "request_id": event.request_id,
            "actor": {
                "kind": event.actor_kind,
                "id": event.actor_id,
                "on_behalf_of": event.on_behalf_of,
                "ip_address": event.ip,
            },
            "target": event.target,
            "before": before,
            "after": after,
        },
    }
    if event.project_id is not None:
        shown["project"] = {"id": event.project_id, "name": event.project_name}
    return shown


def to_actor(event: AuditEvent) -> dict[str, Any]:
    """Return the actor: OpenAI knows sessions and API keys; an OAuth client stands where a key
    would."""
    if event.actor_kind in ("user", "system"):
        user = to_user(event, event.actor_id) if event.actor_kind == "user" else None
        return {"type": "session", "session": {"user": user, "ip_address": event.ip}}
    owner = event.actor_id if event.actor_kind == "service_account" else event.on_behalf_of
    key: dict[str, Any] = {"id": event.actor_id}
    if owner is not None and owner.startswith("svc_acct_"):
        key |= {"type": "service_account", "service_account": {"id": owner}}
    elif owner is not None:
        key |= {"type": "user", "user": to_user(event, owner)}
    return {"type": "api_key", "api_key": key}


def to_user(event: AuditEvent, user_id: str) -> dict[str, Any]:
    return {"id": user_id, "email": event.emails.get(user_id)}


def to_details(event: AuditEvent, after: dict[str, Any]) -> dict[str, Any]:
    """Return the details: `data` where something was made, `changes_requested` where it was
    changed, else its id."""
    verb = event.action.rpartition(".")[2]
    if event.action.startswith(("login.", "logout.")):
        return {key: after[key] for key in ("error_code", "error_message") if key in after}
    details: dict[str, Any] = {"id": event.target}
    if event.action.startswith("project.") and "name" in after:
        after = after | {"title": after["name"]}
    if verb in ("created", "sent", "added", "registered"):
        details["data"] = after
    elif verb == "updated":
        details["changes_requested"] = after
    return details


def _state(text: str | None) -> dict[str, Any] | None:
    return None if text is None else msgspec.json.decode(text, type=dict[str, Any])
