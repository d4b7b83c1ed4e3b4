"""Finds what waits for a person of an organization, and the budgets of its projects: one query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

MAX_OF_A_KIND = 5
MAX_PROJECTS = 1000
_QUERY = sa.text(f"""
    (SELECT 'approval' AS kind, created_at AS at, CAST(body AS json) AS content
        FROM mcp_approvals
        WHERE org_id = :org AND state = 'pending' AND expires_at_s > extract(epoch FROM now())
        ORDER BY created_at DESC LIMIT {MAX_OF_A_KIND})
    UNION ALL
    (SELECT 'alert', occurred_at, json_build_object('scope', scope, 'scope_id', scope_id,
            'measure', measure, 'period', period, 'threshold', threshold, 'ceiling', ceiling,
            'used', used, 'reason', reason, 'name', name)
        FROM (
            SELECT DISTINCT ON (scope, scope_id, measure) alerts.*,
                coalesce(projects.name, api_keys.name) AS name
            FROM alerts
            LEFT JOIN projects ON projects.id = scope_id AND projects.org_id = :org
            LEFT JOIN api_keys ON api_keys.id = scope_id AND api_keys.org_id = :org
            WHERE alerts.org_id = :org AND occurred_at > now() - interval '24 hours'
                AND threshold >= 80
            ORDER BY scope, scope_id, measure, occurred_at DESC
        ) AS newest ORDER BY occurred_at DESC LIMIT {MAX_OF_A_KIND})
    UNION ALL
    (SELECT 'credit', watched_at, json_build_object() FROM credit_lines
        WHERE org_id = :org AND is_low)
    UNION ALL
    (SELECT 'invoice', due_at, json_build_object('number', number, 'state', state)
        FROM invoices WHERE org_id = :org AND (state IN ('past_due', 'suspended')
            OR state LIKE 'reminder%') ORDER BY due_at LIMIT {MAX_OF_A_KIND})
    UNION ALL
    (SELECT 'project', projects.created_at, json_build_object('id', projects.id,
            'name', projects.name, 'share', max(coalesce(spent_pico, 0) / cap.amount_pico)
                FILTER (WHERE cap.amount_pico > 0))
        FROM projects
        LEFT JOIN spend_caps cap ON cap.org_id = :org AND cap.project_id = projects.id
            AND cap.scope = 'project' AND cap.archived_at IS NULL
        LEFT JOIN spend_to_date spent ON spent.org_id = :org AND spent.scope = 'project'
            AND spent.scope_id = projects.id AND spent.period = cap.period
            AND (cap.period = 'total' OR spent.period_start = date_trunc(cap.period, now(), 'UTC'))
        WHERE projects.org_id = :org GROUP BY projects.id LIMIT {MAX_PROJECTS})
""")


class TodoItem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that waits. `tone`: of its word."""

    word: str
    tone: str = "wait"
    title: str
    text: str = ""
    at: datetime | None = None
    to: str = ""
    """The page that does something about it."""
    action: str = "Look"


class ProjectBudget(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    share: float | None = None
    """The part of its tightest budget that is spent; None: it has none."""


class Attention(msgspec.Struct, frozen=True):
    needs: Sequence[TodoItem]
    projects: Mapping[str, ProjectBudget]


async def find_attention(conn: AsyncConnection, org: str) -> Attention:
    """Find what waits. `conn`: sees the org's rows."""
    needs, projects = [], {}
    for row in await conn.execute(_QUERY, {"org": org}):
        if row.kind == "project":
            line = msgspec.convert(row.content, ProjectBudget)
            projects[line.id] = line
        else:
            needs.append(_MAKERS[row.kind](row.content, row.at.astimezone(UTC)))
    return Attention(needs, projects)


def _approval(content: Mapping[str, Any], at: datetime) -> TodoItem:
    call = content["call"]
    return TodoItem(
        word="Approve",
        title=f"{call['server']}/{content.get('tool', '')}",
        text="waits for a person's yes",
        at=at,
        to="/console/mcp",
    )


def _alert(content: Mapping[str, Any], at: datetime) -> TodoItem:
    who = content["name"] or content["scope_id"] or content["scope"]
    used = f"{content['threshold']} % of its limit is used"
    if content["measure"] == "spend":
        used = f"{content['threshold']} % of its budget is spent"
        if content["reason"] == "refused":
            used = "requests are refused: its budget is spent"
    elif content["measure"] == "unusual_spend":
        used = "spends more than it usually does"
    elif content["measure"].startswith("credits"):
        who, used = "Credit", "is running low"
    elif content["measure"] == "disputed_usage":
        used = "an upstream claims more than was used"
    tone = "err" if content["threshold"] >= 100 else "wait"
    return TodoItem(
        word="Alert", tone=tone, title=str(who), text=used, at=at, to="/console/billing"
    )


def _credit(content: Mapping[str, Any], at: datetime) -> TodoItem:
    return TodoItem(
        word="Credit", title="Credit", text="is running low", at=at, to="/console/billing"
    )


def _invoice(content: Mapping[str, Any], at: datetime) -> TodoItem:
    state = content["state"].replace("_", " ")
    title = f"Invoice {content['number']}"
    text = f"is not paid ({state})"
    return TodoItem(
        word="Invoice", tone="err", title=title, text=text, at=at, to="/console/billing"
    )


_MAKERS = {"approval": _approval, "alert": _alert, "credit": _credit, "invoice": _invoice}
