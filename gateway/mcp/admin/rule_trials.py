"""Tries a call by an organization's rules, without making it, and says how each rule takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import sqlalchemy as sa

from billing.queries import Query
from gateway.auth.tables import oauth_clients
from gateway.mcp.tables import pins
from gateway.permissions import SCOPE_MCP_CALL
from gateway.tenancy.tables import api_keys, projects
from mcp_bridge.trust.call_records import Rules
from mcp_bridge.trust.conditions import ConditionArguments
from mcp_bridge.trust.policy import (
    CallState,
    Decision,
    ToolCall,
    ToolRule,
    concerns,
    decide,
    matching,
    names,
)

MAX_CHOICES = 200
Word = Literal["elsewhere", "other_tools", "no", "unknown", "matches"]
"""`elsewhere`: of another project or key. `other_tools`: its tools or annotations are others. `no`:
its condition does not hold. `unknown`: its condition cannot be evaluated, which counts as the
stricter answer."""


class RuleWord(msgspec.Struct, frozen=True):
    id: str
    effect: str
    word: Word


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a trial. Limits are not counted: `decision` is that of a first call."""

    decision: Decision
    words: list[RuleWord]
    is_approved: bool
    """Whether the tool is approved; else no call reaches it, whatever the rules say."""


class TrialChoice(msgspec.Struct, frozen=True):
    """A thing that a rule or a trial can name."""

    kind: Literal["project", "key", "client", "tool"]
    id: str
    name: str
    about: str
    """The project of a key, or the server of a tool."""


def choices_query(org_id: str) -> Query[list[TrialChoice]]:
    """Return the query of what an organization's rules may be about: of each kind MAX_CHOICES, the
    newest keys and clients, and the first tools by name."""

    def named(kind: str, table: sa.Table, about: Any = None) -> sa.Select[Any]:
        columns = (sa.literal(kind).label("kind"), table.c.id, table.c.name)
        found = sa.select(*columns, (sa.literal("") if about is None else about).label("about"))
        return found.where(table.c.org_id == org_id).order_by(table.c.id.desc())

    of_keys = sa.and_(projects.c.id == api_keys.c.project_id, projects.c.org_id == org_id)
    of_project = sa.func.coalesce(projects.c.name, "")
    tool = (sa.literal("tool").label("kind"), pins.c.name.label("id"), pins.c.name.label("name"))
    parts = (
        named("project", projects).where(projects.c.archived_at.is_(None)),
        named("key", api_keys, of_project)
        .outerjoin_from(api_keys, projects, of_keys)
        .where(api_keys.c.revoked_at.is_(None), api_keys.c.scopes.contains([SCOPE_MCP_CALL])),
        named("client", oauth_clients).where(oauth_clients.c.archived_at.is_(None)),
        sa.select(*tool, pins.c.server.label("about"))
        .where(pins.c.org_id == org_id, pins.c.kind == "tool")
        .order_by(pins.c.server, pins.c.name),
    )
    limited = (sa.select(part.limit(MAX_CHOICES).subquery()) for part in parts)
    return Query(
        sa.union_all(*limited),
        lambda rows: [TrialChoice(row.kind, row.id, row.name, row.about) for row in rows],
    )


def annotations_query(org_id: str, server: str, tool: str) -> Query[Mapping[str, object] | None]:
    """Return the query of a tool's hints as they were approved; None: it is not approved."""
    asked = sa.select(pins.c.body).where(
        pins.c.org_id == org_id,
        pins.c.server == server,
        pins.c.kind == "tool",
        pins.c.name == tool,
    )
    return Query(asked, lambda rows: annotations_of(rows[0].body) if rows else None)


def annotations_of(body: bytes) -> Mapping[str, object]:
    value = msgspec.json.decode(bytes(body))
    found = value.get("annotations") if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def try_call(
    rules: Rules, call: ToolCall, *, is_approved: bool, tainted_by: tuple[str, ...] = ()
) -> Trial:
    looked = ConditionArguments(call.arguments)
    return Trial(
        decision=decide(call, rules.rules, CallState(tainted_by=tainted_by)),
        words=[RuleWord(rule.id, rule.effect, word_of(rule, call, looked)) for rule in rules.rules],
        is_approved=is_approved,
    )


def word_of(rule: ToolRule, call: ToolCall, looked: ConditionArguments) -> Word:
    if not concerns(rule, call):
        return "elsewhere"
    if not names(rule, call):
        return "other_tools"
    holds = matching(rule, call, looked)
    return "unknown" if holds is None else "matches" if holds else "no"
