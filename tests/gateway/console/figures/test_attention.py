"""The overview finds all that waits for a person in one statement; it leads to its page, and is
nobody else's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from msgspec.structs import replace

from billing.events import COMPONENTS
from billing.money import PICO_PER_USD
from billing.tables import AMOUNTS
from gateway.audit.log import COMMAND_LINE
from gateway.console.attention import TodoItem, changed_server, days_left, find_attention
from gateway.mcp.changed_offers import ChangedOffers, key_of, read_changed
from gateway.permissions import SCOPES_OF
from gateway.principal import Principal
from gateway.routes.console.overview import shown_needs
from gateway.tenancy.money.credits import create_credit
from gateway.tenancy.orgs import create_org
from mcp_bridge.pinning import Change
from tests.gateway.console.conftest import Visit
from tests.gateway.console.seeds import HOSTILE
from tests.gateway.console.server import ConsoleServer, Organization

DAY_S = 86_400


def found(console: ConsoleServer, org: Organization) -> list[tuple[str, str, str, str, str]]:
    async def read() -> Any:
        async with console.services.system_db.connect() as conn:
            return await find_attention(conn, org.id)

    return [(it.word, it.tone, it.title, it.text, it.page) for it in console.call(read).needs]


def run(console: ConsoleServer, *statements: str, **values: Any) -> None:
    async def execute() -> None:
        async with console.services.system_db.begin() as conn:
            for each in statements:
                await conn.execute(sa.text(each), values)

    console.call(execute)


def test_deliveries_that_were_given_up_today_lead_to_where_they_stand(
    visit: Visit, console: ConsoleServer
) -> None:
    org = console.much
    needs = found(console, org)
    webhook = next(each for each in needs if each[0] == "Webhook")
    assert webhook[2] == "hooks.example"
    assert webhook[3].endswith("events were given up in the last day"), webhook
    assert not any(each[0] == "E-mail" for each in needs)
    old = "INSERT INTO mail_deliveries (id, org_id, user_id, event_id, event_type, body, state,"
    old += " expires_at, ended_at, failure) VALUES (:id, :org, :user, :id, 'batch.failed', '{}',"
    old += " 'dead', now(), now(), :failure)"
    who = {"org": org.id, "user": org.users["owner"], "failure": HOSTILE}
    run(console, old, id="mail_0000", **who)
    assert not any(each[0] == "E-mail" for each in found(console, org)), "it is of long ago"
    run(console, old, id="mail_ffff", **who)
    assert any(each[:3] == ("E-mail", "err", "1 e-mail") for each in found(console, org))
    assert not any(each[0] == "E-mail" for each in found(console, console.little))
    tab = visit("much", "owner", "/console/overview")
    row = tab.locator("#needs-you li", has_text="could not be sent")
    row.get_by_role("link").click()
    tab.wait_for_url("**/console/webhooks/mails?state=dead")
    assert HOSTILE in tab.locator("tbody tr").first.inner_text()
    assert console.much.email("owner") in tab.locator("tbody tr").first.inner_text()


def test_what_needs_a_person_is_first_on_a_phone(visit: Visit) -> None:
    tab = visit("much", "owner", "/console/overview", narrow=True)
    needs, first = tab.locator("#needs-you").bounding_box(), tab.locator(".cards").bounding_box()
    assert needs["y"] < first["y"]
    tab = visit("much", "owner", "/console/overview")
    needs, first = tab.locator("#needs-you").bounding_box(), tab.locator(".cards").bounding_box()
    assert needs["y"] > first["y"]


def test_a_balance_says_how_long_it_lasts(console: ConsoleServer) -> None:
    """At the rate of the last days; nothing where it lasts, or nobody pays in advance."""

    async def make() -> Organization:
        services = console.services
        async with services.system_db.begin() as conn:
            org = await create_org(conn, name="dry", actor=COMMAND_LINE)
        await create_credit(
            services.system_db,
            org_id=org.id,
            amount_pico=300 * PICO_PER_USD,
            operator_org=console.little.id,
            actor=COMMAND_LINE,
        )
        return Organization(name="dry", id=org.id, project_id="", users={})

    def credit_of(org: Organization) -> tuple[str, str, str, str, str] | None:
        return next((each for each in found(console, org) if each[0] == "Credit"), None)

    org = console.call(make)
    counts = [*COMPONENTS, "num_requests", *(each for each in AMOUNTS if each != "output_pico")]
    used = f"""
        INSERT INTO usage_daily (org, day, project, key, model, tier, batch, output_pico,
            {", ".join(counts)})
        VALUES (:org, date_trunc('day', now(), 'UTC') - interval '6 days', '', 'key', 'penny',
            'default', false, :pico, {", ".join("0" for _ in counts)})
        ON CONFLICT (org, day, project, key, model, tier, batch)
            DO UPDATE SET output_pico = excluded.output_pico
    """
    line = "INSERT INTO credit_lines (org_id, paid_pico) VALUES (:org, 0) ON CONFLICT DO NOTHING"
    run(console, line, org=org.id)
    run(console, used, org=org.id, pico=1000 * PICO_PER_USD)
    assert credit_of(org) is None, "it pays by invoice"
    run(console, "UPDATE orgs SET prepaid = true WHERE id = :org", org=org.id)
    soon = credit_of(org)
    assert soon is not None and soon[1] == "err" and soon[4] == "billing/credits"
    assert soon[2] == "$\u00a0300.00 of credit"
    dry = "is left: dry in about {} days at the recent rate"
    assert soon[3] == dry.format(2)
    run(console, used, org=org.id, pico=200 * PICO_PER_USD)
    later = credit_of(org)
    assert later is not None and later[1] == "wait"
    assert later[3] in [dry.format(days) for days in (9, 10, 11)], "6 days and what today has had"
    run(console, used, org=org.id, pico=PICO_PER_USD)
    assert credit_of(org) is None, "it lasts for years"


@pytest.mark.parametrize(
    ("left", "spent", "seconds", "days"),
    [(70, 70, 7 * DAY_S, 7.0), (1, 0, 9.0, None), (5, 10, None, None), (10, 40, 60.0, 0.0625)],
)
def test_the_rate_is_that_of_the_days_that_were(
    left: int, spent: int, seconds: float | None, days: float | None
) -> None:
    assert days_left(left, spent, seconds) == days


def test_a_server_that_offers_something_else_leads_to_what_differs(
    console: ConsoleServer,
) -> None:
    org, redis = console.little, console.services.redis
    change = {"kind": "tool", "was": None, "now": None}
    changes = [
        Change(state, name=name, **change)  # type: ignore[arg-type]
        for state, name in (("changed", "a"), ("removed", "b"), ("new", "c"))
    ]

    async def note(server: str, what: list[Change]) -> dict[str, int]:
        kept = ChangedOffers(redis)
        kept.note(org.id, server, what)
        await kept.flush()
        return await read_changed(redis, org.id)

    assert console.call(lambda: note("jira", changes))["jira"] == 2, "new was never approved"
    assert "jira" not in console.call(lambda: note("jira", []))
    console.call(lambda: redis.delete(key_of(org.id)))
    item = changed_server("a/b", 2)
    assert item.place == "/servers/a%2Fb/offer" and "2 things that differ" in item.text
    assert "reached in another way" in changed_server("jira", 0).text


def test_who_may_not_see_a_page_is_not_told_of_what_waits_there() -> None:
    items = [
        TodoItem(word="Key", title="k", page="keys", place="/key_1"),
        TodoItem(word="Down", tone="err", title="penny", page="fleet"),
    ]
    reader = Principal(
        org_id="org_a",
        project_id="",
        key_id="",
        key_hint="",
        scopes=SCOPES_OF["reader"],
        kind="session",
        role="reader",
    )
    operator = replace(reader, scopes=SCOPES_OF["owner"], role="owner", is_operator=True)
    for who, places in (
        (reader, ["/console/keys/key_1"]),
        (operator, ["/console/fleet", "/console/keys/key_1"]),
    ):
        request: Any = SimpleNamespace(user=who)
        assert [to for _, to in shown_needs(request, items)] == places
