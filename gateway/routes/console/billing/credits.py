"""Shows /console/billing/credits: what an organization has paid in advance, what is left of it, and
the top-ups that it asked for; when to be told that little is left. Operators give credit, take it
back, and say what became of a top-up."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from litestar import Response

from billing.credits.balance import balance_query, owed_query
from billing.credits.balance_watch import settings_query
from billing.credits.grants_admin import Credit, credits_of, to_credit
from billing.credits.top_ups import TopUp, to_top_up, top_ups_of
from billing.ledger.spend_totals import recent_query
from billing.money import Pico, format_usd
from billing.queries import ask_all
from billing.tables import credit_grants, top_ups
from gateway.console.attention import DAY_S, RATE_DAYS, days_left
from gateway.console.formats import duration
from gateway.console.tables import Table, TableColumn
from gateway.request_errors import BadField
from gateway.routes.admin.billing.credits import give_credit, tell
from gateway.routes.console.billing.parts import OPERATOR, orgs_query, read_form, shared
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ConsoleRequest
from gateway.tenancy.changes import unchecked
from gateway.tenancy.money import top_ups as verbs
from gateway.tenancy.money.credits import take_back_credit
from gateway.tenancy.orgs import org_query
from gateway.tenancy.pages import Cursor, page_query
from gateway.wire.admin.billing.credits import NewCredit
from gateway.wire.admin.billing.top_ups import BalanceSettingsPatch, TopUpFailure, to_values

page = ConsolePage(name="billing/credits", title="Credits", below="billing", in_any_org=True)
NEWEST = Cursor(limit=20, order="desc")
"""The top-ups that are shown."""
TONES = {"requested": "wait", "granted": "ok", "failed": "err", "expired": "plain"}


def state_of(credit: Credit, now: datetime) -> tuple[str, str]:
    if credit.revoked_at is not None:
        return "taken back", "plain"
    if credit.expires_at is not None and credit.expires_at <= now:
        return "expired", "plain"
    return ("used up", "plain") if credit.ended_at is not None else ("open", "ok")


def is_open(credit: Credit, now: datetime) -> bool:
    return state_of(credit, now)[0] == "open"


def scope_of(credit: Credit) -> str:
    parts = [*(credit.models or ()), *(each.replace("_", " ") for each in credit.components or ())]
    return ", ".join(parts) or "all usage"


def used_share(credit: Credit) -> float:
    left = credit.left_pico + credit.leased_pico
    return 1 - left / credit.amount_pico if credit.amount_pico else 0.0


@page.get()
async def show(request: ConsoleRequest) -> Response[bytes]:
    org_id, now = request.org_id, request.now
    async with request.system_db.connect() as conn:
        org, balance, owed, wanted = await ask_all(
            conn,
            org_query(org_id),
            balance_query(org_id),
            owed_query(org_id),
            settings_query(org_id),
        )
        (credits, more), (asked, _), orgs, recent = await ask_all(
            conn,
            page_query(credits_of(org_id), credit_grants.c.id, request.cursor(), to_credit),
            page_query(top_ups_of(org_id), top_ups.c.id, NEWEST, to_top_up),
            orgs_query(request),
            recent_query(org_id, RATE_DAYS, now),
        )
    seconds = None if recent.since is None else (now - recent.since).total_seconds()
    table = Table(
        "Credits",
        credits,
        TableColumn("Given", "created_at", kind="time"),
        TableColumn("Amount", "amount_pico", kind="usd"),
        TableColumn("Left", "left_pico", kind="usd"),
        TableColumn("Used", used_share, kind="bar"),
        TableColumn("State", lambda credit: state_of(credit, now), kind="tag"),
        TableColumn("Pays for", scope_of),
        TableColumn("Expires", "expires_at", kind="time"),
        TableColumn("Priority", "priority", kind="count", hint="The lowest pays first"),
        TableColumn("Id", "id", kind="id"),
    )
    return request.render(
        "billing/credits",
        table=table,
        more=credits[-1].id if more else None,
        **shared(request, orgs),
        org=org,
        balance=balance,
        owed_pico=owed,
        rate_days=RATE_DAYS,
        recent_pico=recent.amount_pico,
        lasts=lasts(balance.left_pico, days_left(balance.left_pico, recent.amount_pico, seconds)),
        wanted=wanted,
        tables={"asked": to_asked(asked)},
        is_open=lambda credit: is_open(credit, now),
        amount_text=lambda pico: "" if pico is None else format_usd(pico),
    )


def lasts(left: Pico, days: float | None) -> str:
    """Say for how long a balance is enough."""
    if left <= 0:
        return "used up"
    return "as long as nothing is spent" if days is None else duration(days * DAY_S)


def to_asked(asked: list[TopUp]) -> Table:
    return Table(
        "Top-ups",
        asked,
        TableColumn("Asked for", "requested_at", kind="time"),
        TableColumn("Amount", "amount_pico", kind="usd"),
        TableColumn("Left then", "left_pico", kind="usd"),
        TableColumn("State", lambda each: (each.state, TONES[each.state]), kind="tag"),
        TableColumn("Expires", "expires_at", kind="time"),
        TableColumn("Reason", "failure"),
        TableColumn("Id", "id", kind="id"),
    )


def here(request: ConsoleRequest) -> str:
    return request.address(page.path)


def text_of(request: ConsoleRequest, name: str) -> str | None:
    return request.form.get(name, "").strip() or None


@page.post("/settings", needs="admin:billing", again=show)
async def choose(request: ConsoleRequest) -> Response[bytes]:
    amount, below = text_of(request, "top_up_usd"), text_of(request, "below_usd")
    rule: dict[str, Any] | None = None
    if amount or below:
        rule = {"amount_usd": amount or "", "below_usd": below or "", "max_per_day": 1}
        if most := text_of(request, "max_per_day"):
            rule["max_per_day"] = read_number("max_per_day", most)
    form = {"low_usd": text_of(request, "low_usd"), "auto_top_up": rule}
    await verbs.update_wanted(
        request.system_db,
        to_values(read_form(BalanceSettingsPatch, form)),
        org_id=request.org_id,
        operator_org=request.operator_org,
        actor=request.actor,
        check=unchecked,
    )
    return request.done("The settings are in force.", to=here(request))


def read_number(name: str, text: str) -> int:
    """Raises: BadField."""
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise BadField("must be a whole number", param=name)
    return int(text)


def read_day(name: str, text: str | None) -> int | None:
    """Return the first moment of a day (UTC), in Unix seconds. Raises: BadField."""
    if text is None:
        return None
    try:
        return int(datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp())
    except ValueError:
        raise BadField("must be a day such as 2026-12-31", param=name) from None


@page.post("/give", needs=OPERATOR, again=show)
async def give(request: ConsoleRequest) -> Response[bytes]:
    models = [each for each in request.form.get("models", "").replace(",", " ").split() if each]
    form: dict[str, Any] = {
        "org_id": request.org_id,
        "amount_usd": request.form.get("amount_usd", "").strip(),
        "expires_at": read_day("expires_at", text_of(request, "expires_at")),
        "models": models or None,
    }
    made = await give_credit(request, read_form(NewCredit, form))
    return request.done(
        f"{format_usd(made.amount_pico)} USD of credit were given.", to=here(request)
    )


@page.post("/{credit_id:str}/revoke", needs=OPERATOR, again=show)
async def revoke(request: ConsoleRequest) -> Response[bytes]:
    taken = await take_back_credit(
        request.system_db,
        request.ids["credit_id"],
        org_id=request.org_id,
        operator_org=operator_of(request),
        actor=request.actor,
        check=unchecked,
    )
    tell(request, request.org_id)
    return request.done(
        f"What was left of the {format_usd(taken.amount_pico)} USD is taken back.",
        to=here(request),
    )


def operator_of(request: ConsoleRequest) -> str:
    """Return the organization of the operator who acts, which `needs` has made sure of."""
    assert request.operator_org is not None
    return request.operator_org


@page.post("/top-ups/{top_up_id:str}/grant", needs=OPERATOR, again=show)
async def grant(request: ConsoleRequest) -> Response[bytes]:
    granted = await verbs.grant_top_up(
        request.system_db,
        request.ids["top_up_id"],
        org_id=request.org_id,
        operator_org=operator_of(request),
        actor=request.actor,
        check=unchecked,
    )
    tell(request, granted.org_id)
    return request.done(
        f"The top-up of {format_usd(granted.amount_pico)} USD is granted.", to=here(request)
    )


@page.post("/top-ups/{top_up_id:str}/fail", needs=OPERATOR, again=show)
async def fail(request: ConsoleRequest) -> Response[bytes]:
    wanted = read_form(TopUpFailure, {"reason": request.form.get("reason", "").strip()})
    await verbs.fail_top_up(
        request.system_db,
        request.ids["top_up_id"],
        reason=wanted.reason,
        org_id=request.org_id,
        operator_org=operator_of(request),
        actor=request.actor,
        check=unchecked,
    )
    return request.done("The top-up is marked as failed.", to=here(request), tone="wait")


routes = page.routes
