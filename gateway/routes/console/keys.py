"""Shows /console/keys: the API keys of the organization, what each may, and how much of its budget
is spent and held; makes, changes, rotates and revokes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import msgspec
from litestar import Response

from billing.errors import MoneyError
from billing.ledger.spend_totals import SpentByKey, spent_query
from billing.money import usd
from billing.queries import Query, ask_all
from engine.protocol import Lane
from gateway.auth.bearer.api_keys import to_principal
from gateway.console.budgets import Budget, budgets_query, with_held
from gateway.console.formats import duration
from gateway.console.tables import Table, TableColumn
from gateway.limits.live_use import LimitUse, LiveUse
from gateway.limits.outcomes import scopes_of
from gateway.limits.redis.scope_limits import ScopeLimits
from gateway.limits.redis.scripts import LimiterUnavailable
from gateway.permissions import SCOPE_MCP_CALL
from gateway.principal import PLAN_LIMITS, SCOPE_INFERENCE, Principal
from gateway.routes.admin.keys import check_given
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ConsoleRequest
from gateway.tenancy.errors import InvalidField, NotFound
from gateway.tenancy.keys.changes import DEFAULT_GRACE_S, rotate_key, update_key
from gateway.tenancy.keys.key_pages import (
    STATES,
    KeyCap,
    KeyPage,
    get_key_page,
    list_key_pages,
)
from gateway.tenancy.keys.keys import CreatedKey, KeyRow, create_key, revoke_key
from gateway.tenancy.keys.records import read_key
from gateway.tenancy.keys.restrictions import Restrictions
from gateway.tenancy.money.spend_caps import archive_spend_cap, check_amount, create_spend_cap
from gateway.tenancy.projects import select_projects

MAX_PROJECTS = 200
"""So many are offered in a choice; a key of another one is made from its project's page."""
GRACES = (("86400", "1 day"), ("3600", "1 hour"), ("604800", "7 days"), ("0", "not at all"))
EXPIRIES = (("", "never"), ("30", "in 30 days"), ("90", "in 90 days"), ("365", "in a year"))
PERIODS = (("month", "a month"), ("day", "a day"), ("total", "in all"))
KEY_LIMITS = [limit for limit in PLAN_LIMITS if limit.of_keys]

page = ConsolePage(name="keys", title="Keys and limits", letter="k")


class KeyLine(msgspec.Struct, frozen=True, kw_only=True):
    """A key as a row of the list."""

    page: KeyPage
    state: tuple[str, str]
    spent: SpentByKey
    budgets: list[Budget]

    @property
    def key(self) -> KeyRow:
        return self.page.key

    @property
    def id(self) -> str:
        return self.page.key.id

    @property
    def tightest(self) -> Budget | None:
        return max(self.budgets, key=lambda each: each.part + each.held_part, default=None)

    @property
    def budget_used(self) -> float | None:
        return None if self.tightest is None else self.tightest.part + self.tightest.held_part


NOTHING_SPENT = SpentByKey(day=0, week=0, month=0, total=0)


def state_of(found: KeyPage, now: datetime) -> tuple[str, str]:
    key = found.key
    if key.revoked_at is not None:
        return "revoked", "err"
    if key.expires_at is not None and key.expires_at <= now:
        return "expired", "wait"
    if not found.owner_may:
        return "refused: its owner left", "wait"
    return "active", "ok"


async def to_lines(
    request: ConsoleRequest,
    found: list[KeyPage],
    spent: dict[str, SpentByKey],
    shared: Iterable[Budget],
) -> tuple[list[KeyLine], list[Budget]]:
    """Add what is spent and held of each key's budgets, and of those that they share."""
    own = [to_budget(cap, each.key.id, spent) for each in found for cap in each.caps]
    held = await with_held(request.redis, request.org_id, [*own, *shared], request.now)
    lines = [
        KeyLine(
            page=each,
            state=state_of(each, request.now),
            spent=spent.get(each.key.id, NOTHING_SPENT),
            budgets=[one for one in held[: len(own)] if one.scope_id == each.key.id],
        )
        for each in found
    ]
    return lines, held[len(own) :]


def to_budget(cap: KeyCap, key_id: str, spent: dict[str, SpentByKey]) -> Budget:
    return Budget(
        id=cap.id,
        scope="key",
        scope_id=key_id,
        period=cap.period,
        amount_pico=cap.amount_pico,
        hard=cap.hard,
        used_pico=getattr(spent.get(key_id, NOTHING_SPENT), cap.period),
    )


@page.get()
async def show(request: ConsoleRequest, made: CreatedKey | None = None) -> Response[bytes]:
    project_id, state = request.value("project"), request.value("state", STATES)
    async with request.transaction() as conn:
        found, more = await list_key_pages(
            conn,
            org_id=request.org_id,
            project_id=project_id or None,
            state=state or None,  # type: ignore[arg-type]
            text=request.value("q"),
            now=request.now,
            cursor=request.cursor(),
        )
        ids = [each.key.id for each in found]
        listed = select_projects(request.org_id).limit(MAX_PROJECTS)
        spent, projects, shared = await ask_all(
            conn,
            spent_query(request.org_id, ids, request.now),
            Query(listed, lambda rows: [(each.id, each.name) for each in rows]),
            budgets_query(request.org_id, project_id),
        )
    lines, shared = await to_lines(request, found, spent, shared)
    table = Table(
        "API keys",
        lines,
        TableColumn("Name", lambda line: line.key.name, link=address_of),
        TableColumn("Key", lambda line: line.key.hint, kind="code"),
        TableColumn("Project", lambda line: line.page.project_name or "all, to administer"),
        TableColumn("State", "state", kind="tag"),
        TableColumn("Spent this month", lambda line: line.spent.month, kind="usd"),
        TableColumn("Budget", "budget_used", kind="bar", detail=budget_words),
        TableColumn("Last used", lambda line: line.key.last_used_at, kind="time"),
        TableColumn("Id", "id", kind="id"),
    )
    return request.render(
        "keys",
        table=table,
        more=found[-1].key.id if more else None,
        projects=sorted(projects, key=lambda each: each[1].casefold()),
        states=STATES,
        expiries=EXPIRIES,
        made=made,
        budgets=shared,
        project_name=dict(projects).get(project_id, project_id),
    )


def address_of(line: KeyLine) -> str:
    return f"{page.path}/{line.id}"


def budget_words(line: KeyLine) -> str | None:
    return None if line.tightest is not None else "none"


@page.post("/create", needs="admin:keys", again=show, in_project="project_id")
async def create(request: ConsoleRequest) -> Response[bytes]:
    form = request.form
    scopes = [name for name in (SCOPE_INFERENCE, SCOPE_MCP_CALL) if name in form]
    check_given(request.user, scopes)
    budget = read_budget(form) if request.can("admin:billing") else None
    pepper_id, pepper = request.services.authenticator.pepper
    async with request.transaction() as conn:
        made = await create_key(
            conn,
            org_id=request.org_id,
            project_id=form.get("project_id") or None,
            name=form.get("name", "").strip(),
            scopes=scopes,
            expires_at=expiry_of(form.get("expires", ""), request.now),
            restrictions=Restrictions(**request.read_limits(KEY_LIMITS)),
            pepper=pepper,
            pepper_id=pepper_id,
            actor=request.actor,
            by=request.user,
        )
    if budget is not None:
        await add_budget(request, made.row.id, *budget)
    request.form = {}
    return await show(request, made)


def expiry_of(days: str, now: datetime) -> datetime | None:
    """Raises: InvalidField."""
    if not days:
        return None
    if days not in dict(EXPIRIES):
        raise InvalidField("expires", "must be one of those offered")
    return now + timedelta(days=int(days))


def read_budget(form: Mapping[str, str]) -> tuple[int, Any] | None:
    """Return the amount in pico-USD and the period of a form; None: it has none. Raises:
    InvalidField."""
    amount, period = form.get("budget", "").strip(), form.get("period", "month")
    if period not in dict(PERIODS):
        raise InvalidField("period", "must be one of those offered")
    if not amount:
        return None
    try:
        amount_pico = usd(amount.removeprefix("$").replace(",", "").strip())
    except MoneyError:
        raise InvalidField("budget", "must be an amount of USD, such as 20 or 0.50") from None
    check_amount("budget", amount_pico)
    return amount_pico, period


async def add_budget(request: ConsoleRequest, key_id: str, amount_pico: int, period: Any) -> None:
    """Raises: InvalidField, NotFound, Conflict."""
    await create_spend_cap(
        request.system_db,
        request.redis,
        org_id=request.org_id,
        key_id=key_id,
        period=period,
        amount_pico=amount_pico,
        actor=request.actor,
    )


@page.get("/{key_id:str}")
async def show_one(request: ConsoleRequest, made: CreatedKey | None = None) -> Response[bytes]:
    key_id = request.ids["key_id"]
    async with request.transaction() as conn:
        found = await get_key_page(conn, org_id=request.org_id, key_id=key_id)
        spent, shared = await ask_all(
            conn,
            spent_query(request.org_id, [key_id], request.now),
            budgets_query(request.org_id, found.key.project_id),
        )
    [line], shared = await to_lines(request, [found], spent, shared)
    key = found.key
    return request.render(
        "key",
        line=line,
        key=key,
        budgets=[*line.budgets, *shared],
        limits=[(limit, getattr(key, limit.name)) for limit in KEY_LIMITS],
        graces=GRACES,
        periods=PERIODS,
        made=made,
        may_change=may_change(request, key),
        default_grace=str(DEFAULT_GRACE_S),
    )


@page.get("/{key_id:str}/use", renews=True)
async def show_use(request: ConsoleRequest) -> Response[bytes]:
    """Show what a key uses of its limits now, and of those that it shares; its page renews this."""
    key_id = request.ids["key_id"]
    async with request.transaction() as conn:
        record = await read_key(conn, org_id=request.org_id, key_id=key_id)
    if record is None:
        raise NotFound("key", "no such key")
    principal = to_principal(record)
    use: LiveUse | None = None
    with suppress(LimiterUnavailable):
        use = await request.services.generation.limiter.use_now(
            request.org_id, all_scopes_of(principal)
        )
    table = Table(
        "Its limits now",
        () if use is None else use.limits,
        TableColumn("Of", lambda each: whose(principal, each.scope)),
        *USE_COLUMNS,
    )
    return request.render("key_use", table=table, key=record.row, use=use)


def all_scopes_of(principal: Principal) -> list[ScopeLimits]:
    """Return all limits that may bind a request of a principal, whatever its model and lane."""
    found = {(each.scope, each.owner_id): each for each in scopes_of(principal, "", EVERY_LANE)}
    for model in sorted({*principal.key_model_plans, *principal.model_plans}):
        for each in scopes_of(principal, model, EVERY_LANE):
            found.setdefault((each.scope, each.owner_id), each)
    return list(found.values())


EVERY_LANE: Lane = "batch"
"""The lane in which every limit holds."""


def whose(principal: Principal, scope: ScopeLimits) -> str:
    model = scope.owner_id.partition("/")[2]
    return {
        "key": "this key",
        "key_model": f"this key, {model}",
        "project": principal.project_name or "its project",
        "model": f"{principal.project_name or 'its project'}, {model}",
        "org": "the organization",
        "client": "its application",
    }[scope.scope]


def full_again(use: LimitUse) -> str:
    if use.full_in_s is None:
        return "as requests end"
    return f"in {duration(use.full_in_s)}" if use.full_in_s > 0 else "now"


USE_COLUMNS = (
    TableColumn("Limit", lambda use: use.amount, kind="count", detail=lambda use: use.limit.title),
    TableColumn("Used", "used", kind="count", hint="What has not refilled yet."),
    TableColumn("Held", "held", kind="count", hint="By running requests, which may use it."),
    TableColumn("Left now", "left", kind="count"),
    TableColumn("Full again", full_again),
)


def may_change(request: ConsoleRequest, key: KeyRow) -> bool:
    """Tell whether they may change a key: it is live, and may do no more than they may."""
    if key.revoked_at is not None or not request.can("admin:keys", key.project_id):
        return False
    if key.project_id is None or any(scope.startswith("admin:") for scope in key.scopes):
        return key.user_id == request.session.user_id
    return True


def changing(request: ConsoleRequest) -> dict[str, Any]:
    """Return what a verb takes, with a check that nobody takes over a key that may do more than
    they may."""

    def check(row: KeyRow) -> None:
        request.require("admin:keys", row.project_id)
        check_given(request.user, row.scopes)

    return {"org_id": request.org_id, "actor": request.actor, "check": check}


@page.post("/{key_id:str}/update", again=show_one)
async def update(request: ConsoleRequest) -> Response[bytes]:
    key_id, values = request.ids["key_id"], {"name": request.form.get("name", "").strip()}
    changed = await update_key(
        request.db,
        request.redis,
        key_id,
        {**values, **request.read_limits(KEY_LIMITS)},
        **changing(request),
        by=request.user,
    )
    return request.done(f"{changed.name} is changed.", to=f"{page.path}/{key_id}")


@page.post("/{key_id:str}/rotate", again=show_one)
async def rotate(request: ConsoleRequest) -> Response[bytes]:
    grace = request.form.get("grace", str(DEFAULT_GRACE_S))
    if grace not in dict(GRACES):
        raise InvalidField("grace", "must be one of those offered")
    pepper_id, pepper = request.services.authenticator.pepper
    made = await rotate_key(
        request.db,
        request.redis,
        request.ids["key_id"],
        grace_s=int(grace),
        pepper=pepper,
        pepper_id=pepper_id,
        **changing(request),
        by=request.user,
    )
    return await show_one(request, made)


@page.post("/{key_id:str}/revoke", again=show_one)
async def revoke(request: ConsoleRequest) -> Response[bytes]:
    key_id = request.ids["key_id"]
    ended = await revoke_key(request.db, request.redis, key_id, **changing(request))
    return request.done(f"{ended.name} is revoked: every worker refuses it.")


@page.post("/{key_id:str}/budget", needs="admin:billing", again=show_one)
async def set_budget(request: ConsoleRequest) -> Response[bytes]:
    key_id, budget = request.ids["key_id"], read_budget(request.form)
    if budget is None:
        raise InvalidField("budget", "must be an amount of USD, such as 20 or 0.50")
    await add_budget(request, key_id, *budget)
    return request.done("The budget holds from now on.", to=f"{page.path}/{key_id}")


@page.post("/{key_id:str}/budget/{cap_id:str}/remove", needs="admin:billing", again=show_one)
async def remove_budget(request: ConsoleRequest) -> Response[bytes]:
    await archive_spend_cap(
        request.system_db,
        request.redis,
        request.ids["cap_id"],
        org_id=request.org_id,
        actor=request.actor,
    )
    return request.done("The budget is lifted.", to=f"{page.path}/{request.ids['key_id']}")


routes = page.routes
