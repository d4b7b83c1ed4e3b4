"""An e-mail address finds the provider of its organization where several have some, and nothing
tells whether the address itself is known."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE
from gateway.auth.federation import external_login
from gateway.auth.federation.issuers import CIPHER_PURPOSE, Rules, archive_issuer, create_issuer
from gateway.auth.tables import issuers
from gateway.secret import Cipher
from gateway.tenancy.changes import changing
from gateway.tenancy.member_tables import users
from tests.gateway.a_secret import a_secret
from tests.gateway.auth.browsing import SharedApplication, desk_of, hidden
from tests.gateway.auth.conftest import Tenant, make_user
from tests.shared_application import on_one_loop

BUTTON = "Sign in with your organization's provider"
ASKS = "The name of your organization"


class Providers:
    """Lists and withdraws providers of organizations, and knows the addresses that start there."""

    def __init__(self, application: SharedApplication) -> None:
        self._application = application
        self.listed: dict[str, str] = {}

    async def list_for(self, org: Tenant) -> None:
        async with self._changing(org) as conn:
            rules = Rules(
                name=f"Directory of {org.org_name}", issuer=f"https://{org.org_id}.example.com",
                audience="api://x", project_id=org.project_id,
                client_id="tollgate", default_role="developer",
            )  # fmt: skip
            cipher = Cipher(a_secret("s1"), CIPHER_PURPOSE)
            made = await create_issuer(
                conn, cipher, org_id=org.org_id, rules=rules, actor=COMMAND_LINE
            )
        self.listed[org.org_id] = made.id
        self._forget()

    async def withdraw(self, org_id: str) -> None:
        stores = self._application
        issuer = self.listed.pop(org_id)
        async with changing(stores.tenant_db, stores.redis, issuer, org_id=org_id) as conn:
            await archive_issuer(conn, org_id=org_id, issuer_id=issuer, actor=COMMAND_LINE)
        self._forget()

    def _forget(self) -> None:
        """Forget what it knew, as its worker would within a second."""
        desk_of(self._application.app).external._directory._snapshot = None

    def start_of(self, org: Tenant) -> str:
        return f'href="/oauth/external/{self.listed[org.org_id]}/start?'

    def _changing(self, org: Tenant) -> Any:
        stores = self._application
        return changing(stores.tenant_db, stores.redis, "*", org_id=org.org_id)


@on_one_loop()
async def providers(
    application: SharedApplication, app: Litestar, ada: Tenant, other: Tenant
) -> AsyncIterator[Providers]:
    """List a provider of ada's organization and one of another."""
    made = Providers(application)
    for org in (ada, other):
        await made.list_for(org)
    yield made
    for org_id in list(made.listed):
        await made.withdraw(org_id)


async def asked(browser: httpx.AsyncClient, **typed: str) -> httpx.Response:
    shown = await browser.get("/oauth/login")
    form = {**hidden(shown.text), "email": "", "password": "", "org": "", "provider": "find"}
    return await browser.post("/oauth/login", data=form | typed)


@contextmanager
def statements(app: Litestar) -> Iterator[list[tuple[str, str]]]:
    """Note what is asked of Postgres about domains, with the values."""
    found: list[tuple[str, str]] = []

    def note(_conn: Any, _cursor: Any, statement: str, given: Any, *_: Any) -> None:
        if "split_part" in statement:
            found.append((statement, repr(given)))

    engine = desk_of(app).system_db.sync_engine
    sa.event.listen(engine, "before_cursor_execute", note)
    yield found
    sa.event.remove(engine, "before_cursor_execute", note)


async def test_an_address_leads_to_the_provider_of_its_organization(
    browser: httpx.AsyncClient, ada: Tenant, other: Tenant, providers: Providers
) -> None:
    first = (await browser.get("/oauth/login")).text
    assert BUTTON in first and "/oauth/external/" not in first, "nothing is told of either"
    for org in (ada, other):
        shown = await asked(browser, email=org.email.upper())
        assert shown.status_code == 200 and providers.start_of(org) in shown.text
        assert shown.text.count("/oauth/external/") == 1 and "Sign in another way" in shown.text


async def test_where_it_goes_on_stays_with_the_link(
    browser: httpx.AsyncClient, ada: Tenant, providers: Providers
) -> None:
    going = "next=%2Fconsole%2Fusage"
    shown = await browser.get(f"/oauth/login?{going}")
    form = {**hidden(shown.text), "email": ada.email, "provider": "find"}
    found = (await browser.post("/oauth/login", data=form)).text
    assert providers.start_of(ada) + going in found and f'href="/oauth/login?{going}"' in found


async def test_the_answer_is_the_same_for_an_address_that_nobody_has(
    app: Litestar, browser: httpx.AsyncClient, ada: Tenant, providers: Providers
) -> None:
    """It is so word for word, after the same question to Postgres: so in the same time, too."""
    nobody = ada.email.replace("ada@", "eve@")
    answers, questions = [], []
    for email in (ada.email, nobody):
        with statements(app) as seen:
            shown = (await asked(browser, email=email)).text
        answers.append(shown.replace(email, "EMAIL"))
        questions.append(seen)
    assert providers.start_of(ada) in answers[0]
    assert answers[0] == answers[1]
    assert len(questions[0]) == 1 and questions[0] == questions[1]


async def test_the_name_is_asked_where_none_or_too_many_know_the_domain(
    browser: httpx.AsyncClient,
    ada: Tenant,
    other: Tenant,
    providers: Providers,
    db: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    domain = ada.email.partition("@")[2]
    for email in ("who@nowhere.example", "no address", "", "a@b@c", "é" * 400):
        shown = (await asked(browser, email=email)).text
        assert ASKS in shown and "/oauth/external/" not in shown
    await make_user(db, other.org_id, f"bo@{domain}", role="reader")
    both = (await asked(browser, email=ada.email)).text
    assert {f"{each.org_id}.example.com" for each in (ada, other)} == set(
        re.findall("Sign in with ([a-z0-9_.]+)</a>", both)
    ), "the provider tells which"
    monkeypatch.setattr(external_login, "MAX_ORGS_OF_DOMAIN", 1)
    assert ASKS in (await asked(browser, email=ada.email)).text
    for name in (ada.org_name, ada.org_id):
        shown = await asked(browser, email=ada.email, org=f" {name} ")
        assert providers.start_of(ada) in shown.text
    shown = await asked(browser, email=ada.email, org="who")
    assert "No organization of this name signs in through a provider." in shown.text
    async with db.begin() as conn:
        gone = sa.update(users).where(users.c.org_id == other.org_id)
        await conn.execute(gone.values(archived_at=sa.func.now()))
    assert providers.start_of(ada) in (await asked(browser, email=ada.email)).text


async def test_where_one_organization_has_providers_they_are_there_at_once(
    browser: httpx.AsyncClient, ada: Tenant, other: Tenant, providers: Providers, db: AsyncEngine
) -> None:
    async with db.connect() as conn:
        live = sa.select(issuers.c.id).where(issuers.c.archived_at.is_(None))
        assert {*await conn.scalars(live)} == {*providers.listed.values()}, "left by another test"
    await providers.withdraw(other.org_id)
    shown = (await browser.get("/oauth/login")).text
    assert providers.start_of(ada) in shown and BUTTON not in shown


async def test_who_tries_domains_waits(
    browser: httpx.AsyncClient, ada: Tenant, providers: Providers
) -> None:
    tried = [await asked(browser, email=f"x@{number}.example") for number in range(21)]
    assert {each.status_code for each in tried[:20]} == {200}
    assert tried[20].status_code == 429 and "retry-after" in tried[20].headers
    assert providers.start_of(ada) not in (await asked(browser, email=ada.email)).text


@pytest.mark.parametrize("query", ["users by domain", "users by address"])
async def test_users_are_found_by_an_index(db: AsyncEngine, ada: Tenant, query: str) -> None:
    """A sequential scan would read a million users."""
    where = "split_part(email, '@', 2) = 'x.example' AND archived_at IS NULL"
    where += " AND org_id = 'org_x'" if query == "users by domain" else " AND email = 'a@x.example'"
    async with db.begin() as conn:
        await conn.execute(sa.text("SET LOCAL enable_seqscan = off"))
        plan = [*await conn.scalars(sa.text(f"EXPLAIN SELECT FROM users WHERE {where}"))]
    assert any("users_live_domain" in each for each in plan), plan
