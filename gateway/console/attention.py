"""Finds what waits for a person of an organization, and its budgets and those of its projects: one
statement.

What is known elsewhere (replicas, models that miss their SLO) is the page's to add.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.credits.balance import BALANCE
from billing.money import Pico
from billing.queries import Query, ask
from billing.tables import TOTAL_PICO, AnyRow
from gateway.console.budgets import Budget, budgets_sql, to_budget
from gateway.console.formats import duration, usd
from gateway.console.hidden import visible

MAX_OF_A_KIND = 5
MAX_PROJECTS = 1000
MAX_DELIVERIES = 1000
"""The newest of an endpoint, and of all e-mails, that are looked at for those that failed."""
SOON_DAYS = 14
"""A balance that lasts longer waits for nobody, unless its owner wants to be told of it."""
VERY_SOON_DAYS = 3
RATE_DAYS = 7
"""The recent days of whose spending the rate is made."""
DAY_S = 86_400
_SINCE = "lpad(to_hex(CAST(extract(epoch FROM now()) - 86400 AS bigint) * 1000), 12, '0')"
"""SQL: how the ids of yesterday's deliveries begin, behind their prefix (UUIDv7)."""
_QUERY = sa.text(f"""
    (SELECT 'approval' AS kind, created_at AS at, CAST(body AS json) AS content
        FROM mcp_approvals
        WHERE org_id = :org AND state = 'pending' AND expires_at_s > extract(epoch FROM now())
        ORDER BY created_at DESC LIMIT {MAX_OF_A_KIND})
    UNION ALL
    (SELECT 'launch', now(), json_build_object('server', server, 'digest', pins.digest)
        FROM unnest(CAST(:servers AS text[])) AS named (server)
        JOIN mcp_pins pins USING (server) WHERE pins.org_id = :org AND pins.kind = 'launch')
    UNION ALL
    (SELECT 'alert', occurred_at, json_build_object('scope', scope, 'scope_id', scope_id,
            'measure', measure, 'period', period, 'threshold', threshold, 'ceiling', ceiling,
            'used', used, 'reason', reason, 'name', name)
        FROM (
            SELECT DISTINCT ON (scope, scope_id, measure) alerts.*,
                coalesce(projects.name, api_keys.name) AS name
            FROM alerts
            LEFT JOIN projects ON projects.id = split_part(scope_id, '/', 1)
                AND projects.org_id = :org
            LEFT JOIN api_keys ON api_keys.id = split_part(scope_id, '/', 1)
                AND api_keys.org_id = :org
            WHERE alerts.org_id = :org AND occurred_at > now() - interval '24 hours'
                AND threshold >= 80 AND measure NOT LIKE 'credits%'
            ORDER BY scope, scope_id, measure, occurred_at DESC
        ) AS newest ORDER BY occurred_at DESC LIMIT {MAX_OF_A_KIND})
    UNION ALL
    (SELECT 'credit', line.watched_at, json_build_object('is_low', line.is_low,
            'left', CAST(available_pico + leased_pico - unpaid_pico AS text),
            'spent', CAST(coalesce(recent.spent_pico, 0) AS text),
            'seconds', CAST(extract(epoch FROM now() - recent.since) AS double precision))
        FROM credit_lines line JOIN orgs ON orgs.id = line.org_id AND orgs.prepaid
        CROSS JOIN LATERAL ({BALANCE}) AS balance
        CROSS JOIN LATERAL (
            SELECT sum({TOTAL_PICO}) AS spent_pico, min(day) AS since FROM usage_daily
            WHERE org = :org AND day >= date_trunc('day', now(), 'UTC') - {RATE_DAYS} * interval
                '1 day'
        ) AS recent WHERE line.org_id = :org)
    UNION ALL
    (SELECT 'invoice', due_at, json_build_object('id', id, 'number', number, 'state', state)
        FROM invoices WHERE org_id = :org AND (state IN ('past_due', 'suspended')
            OR state LIKE 'reminder%') ORDER BY due_at LIMIT {MAX_OF_A_KIND})
    UNION ALL
    (SELECT 'webhook', failed.at, json_build_object('id', endpoint.id, 'url', endpoint.url,
            'number', number)
        FROM webhook_endpoints endpoint CROSS JOIN LATERAL (
            SELECT count(*) AS number, max(ended_at) AS at FROM (
                SELECT state, ended_at FROM webhook_deliveries
                WHERE org_id = :org AND endpoint_id = endpoint.id AND id > 'whd_' || {_SINCE}
                ORDER BY id DESC LIMIT {MAX_DELIVERIES}
            ) AS newest WHERE state = 'dead'
        ) AS failed
        WHERE endpoint.org_id = :org AND endpoint.archived_at IS NULL AND number > 0
        ORDER BY number DESC LIMIT {MAX_OF_A_KIND})
    UNION ALL
    (SELECT 'mail', max(ended_at), json_build_object('number', count(*)) FROM (
            SELECT state, ended_at FROM mail_deliveries
            WHERE org_id = :org AND id > 'mail_' || {_SINCE}
            ORDER BY id DESC LIMIT {MAX_DELIVERIES}
        ) AS newest WHERE state = 'dead' HAVING count(*) > 0)
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
    UNION ALL
    (SELECT 'budget', now(), to_json(budget) FROM ({budgets_sql("org", "no_project")}) AS budget)
""").bindparams(no_project="")


class TodoItem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that waits. `tone`: of its word."""

    word: str
    tone: str = "wait"
    title: str
    text: str = ""
    at: datetime | None = None
    page: str
    """The name of the page that does something about it: who may not see that sees nothing of
    this."""
    place: str = ""
    """The end of its address, behind that page's path."""
    action: str = "Look"


class ProjectBudget(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    share: float | None = None
    """The part of its tightest budget that is spent; None: it has none."""


class Attention(msgspec.Struct, frozen=True):
    needs: Sequence[TodoItem]
    projects: Mapping[str, ProjectBudget]
    launches: Mapping[str, str]
    """By MCP server, the digest of how it may be reached."""
    budgets: Sequence[Budget] = ()
    """Those of the organization itself, without what running requests hold."""


def attention_query(org: str, servers: Collection[str] = ()) -> Query[Attention]:
    """Return the query of what waits. Its connection is of the system, for what is left of a grant
    is hidden from tenants; each part names the organization. `servers`: those whose approved way is
    wanted."""
    columns = (sa.column("kind", sa.Text), sa.column("at", sa.DateTime(timezone=True)))
    content = sa.column("content", sa.JSON)
    asked = _QUERY.bindparams(org=org, servers=list(servers)).columns(*columns, content)
    return Query(asked, _read)


async def find_attention(
    conn: AsyncConnection, org: str, servers: Collection[str] = ()
) -> Attention:
    """Find what waits. `conn`: as of `attention_query`."""
    return await ask(conn, attention_query(org, servers))


def _read(rows: Sequence[AnyRow]) -> Attention:
    needs: list[TodoItem] = []
    projects, launches, budgets = {}, {}, []
    for row in rows:
        if row.kind == "project":
            line = msgspec.convert(row.content, ProjectBudget)
            projects[line.id] = line
        elif row.kind == "launch":
            launches[row.content["server"]] = row.content["digest"]
        elif row.kind == "budget":
            budgets.append(to_budget(row.content))
        else:
            at = None if row.at is None else row.at.astimezone(UTC)
            found = _MAKERS[row.kind](row.content, at)
            needs += [] if found is None else [found]
    return Attention(needs, projects, launches, budgets)


def in_order(needs: Collection[TodoItem]) -> list[TodoItem]:
    """Sort what is wrong before what waits."""
    return sorted(needs, key=lambda each: each.tone != "err")


def changed_server(server: str, number: int) -> TodoItem:
    """Say that an MCP server offers other things than were approved. `number`: of them; 0: it is
    reached in another way."""
    text = "is reached in another way than was approved: nobody can use it"
    if number:
        things = "thing that differs" if number == 1 else "things that differ"
        text = f"offers {number} {things} from what was approved"
    name = quote(server, safe="")
    return TodoItem(
        word="Changed",
        title=visible(server),
        text=text,
        page="mcp",
        place=f"/servers/{name}/offer",
        action="Compare",
    )


def _approval(content: Mapping[str, Any], at: datetime | None) -> TodoItem:
    call = content["call"]
    return TodoItem(
        word="Approve",
        title=visible(f"{call['server']}/{content.get('tool', '')}"),
        text="waits for a yes",
        at=at,
        page="mcp/approvals",
        action="Answer",
    )


def _alert(content: Mapping[str, Any], at: datetime | None) -> TodoItem:
    scope, measure = content["scope"], content["measure"]
    owner, _, model = (content["scope_id"] or "").partition("/")
    title = content["name"] or owner or scope
    title = "The organization" if scope == "org" else f"{title}, {model}" if model else title
    page, place = place_of(scope, owner)
    word, text = "Limit", f"uses {content['threshold']} % of its limit"
    if measure == "spend":
        word, text = "Budget", f"{content['threshold']} % of its budget is spent"
        if content["reason"] == "refused":
            text = "is refused requests: its budget is spent"
    elif measure == "unusual_spend":
        word, text = "Spend", "spends more than it usually does"
    elif measure == "disputed_usage":
        word, text = "Usage", "an upstream claims more than was used, which nobody is billed"
    return TodoItem(
        word=word,
        tone="err" if content["threshold"] >= 100 and measure == "spend" else "wait",
        title=visible(str(title)),
        text=text,
        at=at,
        page=page,
        place=place,
    )


def place_of(scope: str, owner: str) -> tuple[str, str]:
    """Return the page of what an alert is about, and what follows its path."""
    if scope in ("key", "key_model"):
        return "keys", f"/{owner}"
    if scope in ("project", "model"):
        return "projects", f"/{owner}"
    if scope == "tag":
        return "usage", f"?{urlencode({'by': 'tag', 'tag': owner.partition('=')[0]})}"
    return "usage", ""


def _credit(content: Mapping[str, Any], _: datetime | None) -> TodoItem | None:
    left = int(content["left"])
    days = days_left(left, int(content["spent"]), content["seconds"])
    if not content["is_low"] and left > 0 and (days is None or days > SOON_DAYS):
        return None
    is_near = left <= 0 or (days is not None and days <= VERY_SOON_DAYS)
    return TodoItem(
        word="Credit",
        tone="err" if is_near else "wait",
        title="Credit" if left <= 0 else f"{usd(left)} of credit",
        text=credit_words(left, days),
        page="billing/credits",
        action="Credits",
    )


def days_left(left: Pico, spent: Pico, seconds: float | None) -> float | None:
    """Return how long a balance lasts at the recent rate. None: nothing was spent. `seconds`: in
    which so much was; at least a quarter of a day."""
    if spent <= 0 or seconds is None:
        return None
    return left / spent * max(seconds, DAY_S / 4) / DAY_S


def credit_words(left: Pico, days: float | None) -> str:
    if left <= 0:
        return "is used up: requests are refused"
    if days is None:
        return "is left, which is little"
    if days < 1:
        return f"is left: dry in about {duration(days * DAY_S)} at the recent rate"
    number = round(days)
    return f"is left: dry in about {number} day{'' if number == 1 else 's'} at the recent rate"


def _invoice(content: Mapping[str, Any], at: datetime | None) -> TodoItem:
    state = content["state"].replace("_", " ")
    return TodoItem(
        word="Invoice",
        tone="err",
        title=f"Invoice {content['number']}",
        text=f"is not paid ({state})",
        at=at,
        page="billing",
        place=f"/{content['id']}",
    )


def _webhook(content: Mapping[str, Any], at: datetime | None) -> TodoItem:
    number = content["number"]
    events = "event was" if number == 1 else "events were"
    return TodoItem(
        word="Webhook",
        tone="err",
        title=urlsplit(content["url"]).hostname or "An endpoint",
        text=f"{number} {events} given up in the last day",
        at=at,
        page="webhooks",
        place=f"/{content['id']}?state=dead",
        action="Which",
    )


def _mail(content: Mapping[str, Any], at: datetime | None) -> TodoItem:
    number = content["number"]
    return TodoItem(
        word="E-mail",
        tone="err",
        title=f"{number} e-mail{'' if number == 1 else 's'}",
        text="could not be sent in the last day",
        at=at,
        page="webhooks/mails",
        place="?state=dead",
        action="Which",
    )


_MAKERS: Mapping[str, Callable[[Mapping[str, Any], datetime | None], TodoItem | None]] = {
    "approval": _approval,
    "alert": _alert,
    "credit": _credit,
    "invoice": _invoice,
    "webhook": _webhook,
    "mail": _mail,
}
