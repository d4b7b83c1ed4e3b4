"""Every list of administration, found in the route table, is walked by pages without loss: `ROWS`
by `LIMIT` and `after`, which is all that a client of the official SDK does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from iso4217 import Currency
from litestar.routes import HTTPRoute

from billing.alerts.alerts import CeilingUse, note_ceilings
from billing.corrections.cache_leases import Lease, grant
from billing.currency import USD
from billing.events import DisputedUsage
from billing.ingestion.ingest import ingest
from billing.invoices.accounts import BillingTerms, set_account
from billing.invoices.closing import close, finalize, recount
from billing.invoices.invoice import latest_invoice
from gateway.auth.federation.issuers import MAX_ISSUERS_PER_ORG
from gateway.auth.tables import signing_keys
from gateway.ids import uuid7
from gateway.routes.shared.idempotency import PREFIXES
from gateway.webhooks.tables import mails
from gateway.wire.organization.usage import NOT_SOLD
from tests.billing.invoices.billed import tokens
from tests.billing.samples import an_attempt, an_event
from tests.budget import cycles
from tests.gateway.routes.admin.changing import ADMIN, ORG, STORED_MODEL, Maker, admin_key, top_up
from tests.gateway.routes.admin.conftest import World

ROWS, LIMIT, MAX_PAGES = cycles(25, 9), cycles(7, 4), 300
CURRENCIES = sorted(
    each.code for each in Currency if each.exponent is not None and each.code != USD
)
NO_LIST = {
    f"{ADMIN}/planner": "one thing",
    f"{ADMIN}/balance": "one thing",
    f"{ADMIN}/health": "one thing",
    f"{ADMIN}/balance/settings": "one thing",
    f"{ADMIN}/reratings/preview": "one thing",
    f"{ADMIN}/forecast": "one thing",
    f"{ADMIN}/billing-account": "one thing",
    f"{ADMIN}/organization": "one thing",
    f"{ADMIN}/mcp/approvals/{{approval_id}}/arguments": "one thing",
    f"{ADMIN}/mcp/rules": "one thing",
    f"{ADMIN}/mcp/servers": "all that the settings have",
    f"{ADMIN}/settings": "one thing",
    f"{ADMIN}/mcp/taints": "the newest, for an hour; `tests/gateway/mcp/test_stores.py`",
    f"{ADMIN}/invoices/{{invoice_id}}/export": "one document",
    f"{ADMIN}/journal": "one document",
    f"{ORG}/projects/{{project_id}}/model_permissions": "one thing",
    f"{ORG}/cache_report": "pages of buckets; `tests/gateway/cache_report/test_report.py`",
    f"{ORG}/costs": "pages of buckets, as OpenAI's; `tests/billing`",
    **{
        f"{ORG}/usage/{kind}": "pages of buckets, as OpenAI's; `tests/billing`"
        for kind in ("completions", "embeddings", *NOT_SOLD)
    },
}
Fill = Callable[[Maker, str], Awaitable[None]]
"""One more row in the list at this path."""


def posts(body: Callable[[Maker], Any]) -> Fill:
    async def fill(maker: Maker, path: str) -> None:
        await maker.post(path, body(maker))

    return fill


async def add_user(maker: Maker, _path: str) -> None:
    await maker.user()


async def add_version(maker: Maker, _path: str) -> None:
    await maker.version()


async def add_pin(maker: Maker, _path: str) -> None:
    await maker.pin()


async def add_evaluation(maker: Maker, path: str) -> None:
    await maker.post(path, await maker.evaluation_body())


async def add_rollout(maker: Maker, _path: str) -> None:
    await maker.rollout()


async def add_member(maker: Maker, path: str) -> None:
    await maker.post(path, {"user_id": await maker.user(), "role": "member"})


async def add_project_key(maker: Maker, path: str) -> None:
    accounts = path.replace("/api_keys", "/service_accounts")
    await maker.post(accounts, {"name": "ci"})


async def add_key(maker: Maker, path: str) -> None:
    await maker.post(path, {"name": "k", "project_id": maker.project_id})


async def add_grant(maker: Maker, _path: str) -> None:
    await maker.grant()


async def add_delivery(maker: Maker, path: str) -> None:
    await maker.post(path.replace("/deliveries", "/ping"))


async def add_alert(maker: Maker, _path: str) -> None:
    used = {"scope": "key", "scope_id": maker.name(), "minute": 0, "tokens": 50, "limit": 100}
    use = CeilingUse(org_id=maker.org_id, measure="tokens_per_minute", **used)  # type: ignore[arg-type]
    await note_ceilings(maker.world.db, [use])


async def add_disputed(maker: Maker, _path: str) -> None:
    disputed = DisputedUsage("big/0", 1, 0)
    event = an_event(an_attempt(str(uuid7()), org=maker.org_id), disputed=disputed)
    await ingest(maker.world.db, [event])


async def add_mail(maker: Maker, _path: str) -> None:
    row = {
        "id": f"mail_{uuid7().hex}",
        "org_id": maker.org_id,
        "user_id": await maker.user(),
        "event_id": maker.name(),
        "event_type": "credits.low",
        "body": "{}",
        "state": "dead",
        "expires_at": datetime.now(UTC),
    }
    async with maker.world.db.begin() as conn:
        await conn.execute(sa.insert(mails).values(**row))


async def add_admin_key(maker: Maker, _path: str) -> None:
    await admin_key(maker)


async def add_signing_key(maker: Maker, _path: str) -> None:
    """A retired one, like the newest there is."""
    async with maker.world.db.begin() as conn:
        row = (await conn.execute(sa.select(signing_keys).limit(1))).one()._mapping
        then = row["created_at"]
        old = {"kid": maker.name(), "activated_at": then, "retired_at": then, "verify_until": then}
        await conn.execute(sa.insert(signing_keys).values(**{**row, **old}))


async def add_credit(maker: Maker, path: str) -> None:
    await maker.post(path, {"org_id": maker.org_id, "amount_usd": "1"})


async def add_lease(maker: Maker, _path: str) -> None:
    lease = Lease(
        id=f"{maker.name()}:0",
        org_id=maker.org_id,
        event_id=maker.name(),
        model="penny",
        engine="here",
        engine_id="one",
        ttl="5m",
        num_tokens=1024,
        end_tokens=1024,
        prefix=maker.name().encode(),
        granted_at=0.0,
        asked_at=0.0,
    )
    await grant(maker.world.db, lease)


async def add_top_up(maker: Maker, _path: str) -> None:
    """One that has ended: of open ones there is one."""
    path = await top_up(maker)
    ended = await maker.world.call("POST", f"{path}/fail", {"reason": "no funds"})
    assert ended.status_code == 200, ended.text


async def add_cap(maker: Maker, _path: str) -> None:
    await maker.cap()


async def add_event(maker: Maker, at: datetime, project: str = "proj_a") -> None:
    """Add an event with an hour and a project of its own, so that it makes a line and an hour of
    its own."""
    event = tokens(at, 1, 7, org=maker.org_id, project=project)
    assert (await ingest(maker.world.db, [event])).inserted == 1


async def make_invoice(maker: Maker) -> str:
    """The path of a draft with one line, of September 2026, before all others."""
    async with maker.world.db.begin() as conn:
        made = datetime(2026, 9, 1, tzinfo=UTC)
        await set_account(conn, org_id=maker.org_id, terms=BillingTerms(), now=made)
    await add_event(maker, datetime(2026, 9, 1, tzinfo=UTC))
    now = datetime(2026, 10, 1, tzinfo=UTC)
    await close(maker.world.db, org_id=maker.org_id, now=now)
    return f"{ADMIN}/invoices/{await recounted(maker)}"


async def recounted(maker: Maker) -> str:
    """The draft, with what was booked since."""
    draft = f"inv_{maker.org_id}_20260901T0000"
    await recount(maker.world.db, org_id=maker.org_id, invoice_id=draft)
    return draft


async def add_invoice(maker: Maker, path: str) -> None:
    """Add an invoice of the next month."""
    async with maker.world.db.connect() as conn:
        newest = await latest_invoice(conn, org_id=maker.org_id)
    assert newest is not None
    then = newest.period_end + timedelta(days=40)
    await finalize(maker.world.db, org_id=maker.org_id, invoice_id=newest.id, now=then)
    await close(maker.world.db, org_id=maker.org_id, now=then)


async def add_line(maker: Maker, _path: str) -> None:
    """Behind the first one."""
    await add_event(maker, datetime(2026, 9, 2, tzinfo=UTC), f"proj_{maker.name()}")
    await recounted(maker)


async def add_hour(maker: Maker, _path: str) -> None:
    """Add an hour to the first line, within its month."""
    hours = int(maker.name()[1:]) % 600
    await add_event(maker, datetime(2026, 9, 1, tzinfo=UTC) + timedelta(hours=hours))
    await recounted(maker)


async def add_tagged(maker: Maker, _path: str) -> None:
    """Add usage to the first line, with a tag of its own."""
    event = tokens(datetime(2026, 9, 1, tzinfo=UTC), 1, 7, org=maker.org_id)
    attempt = msgspec.structs.replace(event.attempt, tags={"team": maker.name()})
    await ingest(maker.world.db, [msgspec.structs.replace(event, attempt=attempt)])
    await recounted(maker)


async def add_rerating(maker: Maker, path: str) -> None:
    await maker.post(path, await maker.rerating_body())


async def final_invoice(maker: Maker) -> str:
    """The path of the newest one, over 100 USD."""
    db, org_id = maker.world.db, maker.org_id
    async with db.connect() as conn:
        newest = await latest_invoice(conn, org_id=org_id)
    assert newest is not None
    if newest.state == "draft":
        await ingest(db, [tokens(newest.period_start, 10_000, 10**10, org=org_id)])
        then = newest.period_end + timedelta(days=40)
        await finalize(db, org_id=org_id, invoice_id=newest.id, now=then)
    return f"{ADMIN}/invoices/{newest.id}"


async def add_payment(maker: Maker, _path: str) -> None:
    path = await final_invoice(maker)
    await maker.post(f"{path}/payments", {"amount": "0.01", "reference": "wire"})


async def add_note(maker: Maker, _path: str) -> None:
    path = await final_invoice(maker)
    lines = (await maker.world.call("GET", f"{path}/lines")).json()["data"]
    [line] = [each["id"] for each in lines if each["quantity"] == 10_000]
    await maker.post(f"{path}/credit-notes", {"reason": "slow", "lines": {line: "0.01"}})


async def add_rate(maker: Maker, path: str) -> None:
    """Add a rate, each of another currency."""
    currency = CURRENCIES[int(maker.name()[1:]) % len(CURRENCIES)]
    rate = {"usd_per_unit": "1", "valid_from": 0, "source": "bank"}
    await maker.post(path, {"currency": currency, **rate})


async def nothing(maker: Maker, _path: str) -> None:
    """There are as many as the settings name, or as others have made."""


async def add_approval(maker: Maker, _path: str) -> None:
    await maker.approval()


HERE = f"{ORG}/projects/{{project_id}}"
LISTS: dict[str, Fill] = {
    f"{ADMIN}/alerts": add_alert,
    f"{ADMIN}/disputed-usage": add_disputed,
    f"{ADMIN}/mail-deliveries": add_mail,
    f"{ADMIN}/invoices/{{invoice_id}}/credits": nothing,
    f"{ADMIN}/invoices/{{invoice_id}}/lines": add_line,
    f"{ADMIN}/invoices/{{invoice_id}}/lines/{{line_id}}/hours": add_hour,
    f"{ADMIN}/invoices/{{invoice_id}}/lines/{{line_id}}/requests": add_hour,
    f"{ADMIN}/invoices/{{invoice_id}}/lines/{{line_id}}/tags": add_tagged,
    f"{ADMIN}/invoices": add_invoice,
    f"{ADMIN}/issuers": posts(Maker.issuer_body),
    f"{ADMIN}/join_tokens": posts(Maker.join_token_body),
    f"{ADMIN}/keys": add_key,
    f"{ADMIN}/mcp/approvals": add_approval,
    f"{ADMIN}/fleet": nothing,
    f"{ADMIN}/models": nothing,
    f"{ADMIN}/models/evaluations": add_evaluation,
    f"{ADMIN}/models/pins": add_pin,
    f"{ADMIN}/models/rollouts": add_rollout,
    f"{ADMIN}/models/versions": add_version,
    f"{ADMIN}/oauth/clients": posts(Maker.client_body),
    f"{ADMIN}/oauth/grants": add_grant,
    f"{ADMIN}/orgs": posts(lambda maker: {"name": maker.name()}),
    f"{ADMIN}/plans": posts(lambda maker: {"name": maker.name()}),
    f"{ADMIN}/price_lists": nothing,
    f"{ADMIN}/price_lists/{{price_list}}/prices": nothing,
    f"{ADMIN}/projects": posts(lambda maker: {"name": maker.name()}),
    f"{ADMIN}/settings/models": posts(
        lambda maker: {"name": maker.name(), "content": STORED_MODEL}
    ),
    f"{ADMIN}/settings/mcp_servers": nothing,
    f"{ADMIN}/settings/price_books": nothing,
    f"{ADMIN}/settings/deadlines": nothing,
    f"{ADMIN}/signing_keys": add_signing_key,
    f"{ADMIN}/spend-caps": add_cap,
    f"{ADMIN}/top-ups": add_top_up,
    f"{ADMIN}/webhooks": posts(Maker.endpoint_body),
    f"{ADMIN}/webhooks/{{endpoint_id}}/deliveries": add_delivery,
    f"{ADMIN}/cache-leases": add_lease,
    f"{ADMIN}/credits": add_credit,
    f"{ORG}/admin_api_keys": add_admin_key,
    f"{ORG}/audit_logs": nothing,
    f"{ORG}/invites": posts(lambda maker: {"email": maker.email(), "role": "reader"}),
    f"{ORG}/projects": posts(lambda maker: {"name": maker.name()}),
    f"{HERE}/api_keys": add_project_key,
    f"{HERE}/rate_limits": nothing,
    f"{HERE}/service_accounts": posts(lambda maker: {"name": maker.name()}),
    f"{HERE}/users": add_member,
    f"{ORG}/users": add_user,
    f"{ADMIN}/reratings": add_rerating,
    f"{ADMIN}/fx-rates": add_rate,
    f"{ADMIN}/payments": add_payment,
    f"{ADMIN}/credit-notes": add_note,
}
"""By path, what adds a row."""
AT_MOST = {f"{ADMIN}/issuers": MAX_ISSUERS_PER_ORG}
"""Lists that are bounded below ROWS; more than one page all the same."""
FEW = {path for path, fill in LISTS.items() if fill is nothing} - {f"{ORG}/audit_logs"}


def in_table(world: World) -> set[str]:
    return {
        route.path_format
        for route in world.app.routes
        if isinstance(route, HTTPRoute) and route.path_format.startswith(PREFIXES)
        if "GET" in route.methods and not route.path_format.endswith("}")
    }


async def test_every_list_stands_here(world: World) -> None:
    assert in_table(world) == set(LISTS) | set(NO_LIST)


async def walk(world: World, path: str) -> list[str]:
    """Ids, page by page."""
    found: list[str] = []
    after = ""
    for _ in range(MAX_PAGES):
        answer = await world.call("GET", f"{path}?limit={LIMIT}{after}")
        assert answer.status_code == 200, answer.text
        page = answer.json()
        ids = [each.get("id", each.get("name")) for each in page["data"]]
        found += ids
        assert len(ids) <= LIMIT and page["object"] == "list"
        if not page["has_more"]:
            return found
        assert len(ids) == LIMIT, "a page that is not full, and more behind it"
        after = f"&after={page['last_id']}"
    raise AssertionError("it has no end")


@pytest.fixture
def maker(world: World, org_id: str, project_id: str) -> Maker:
    return Maker(world, org_id, project_id)


async def test_every_list_is_walked_without_loss(world: World, maker: Maker) -> None:
    for template, fill in sorted(LISTS.items(), key=lambda each: each[0] == f"{ORG}/audit_logs"):
        path = template.replace("{project_id}", maker.project_id).replace("{price_list}", "default")
        if "{endpoint_id}" in path:
            path = path.replace(f"{ADMIN}/webhooks/{{endpoint_id}}", await maker.endpoint())
        if "{invoice_id}" in path:
            made = await make_invoice(maker)
            path = path.replace(f"{ADMIN}/invoices/{{invoice_id}}", made)
            path = path.replace("{line_id}", f"{made.rpartition('/')[2]}.000001")
        rows = min(ROWS, AT_MOST.get(template, ROWS))
        for _ in range(rows):
            await fill(maker, path)
        whole = (await world.call("GET", f"{path}?limit=100")).json()
        ids = [each.get("id", each.get("name")) for each in whole["data"]]
        assert template in FEW or len(ids) >= rows, f"{path}: too few to be tried"
        walked = await walk(world, path)
        assert walked[: len(ids)] == ids and len(set(walked)) == len(walked), path
        if not whole["has_more"]:
            assert walked == ids, path
        for bad in ("limit=0", "limit=101", "limit=x"):
            refused = await world.call("GET", f"{path}?{bad}")
            assert refused.status_code == 400, f"{path}?{bad}: {refused.text}"
