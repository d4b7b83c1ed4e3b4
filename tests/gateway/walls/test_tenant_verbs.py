"""The first wall: every verb that reaches Postgres, called by one tenant with the ids of another,
finds nothing, changes nothing and says nothing of it; with row security behind it and without.

The verbs are found by looking for them, so a new one is tried by itself. What is asked of it: it
names its org (`org_id`), and its other parameters have a value in `IDS` or `VALUES`. A verb that
names no org serves all of them, and says in `SYSTEM` whose it is. Methods of objects are tried in
`test_tenant_methods`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.exc import IntegrityError, NoResultFound
from sqlalchemy.ext.asyncio import AsyncEngine

import gateway
from billing.queries import Query, ask
from gateway.audit.log import Actor
from gateway.audit.verify import NOWHERE
from gateway.auth.bearer.revocations import Announcement
from gateway.auth.errors import InvalidKey
from gateway.auth.federation.external_login import LoginState
from gateway.auth.federation.issuers import Rules
from gateway.auth.oauth.clients.metadata import ClientMetadata
from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine, tenant
from gateway.secret import Cipher, Peppers, Secret, SecretKey
from gateway.tenancy.errors import Conflict, LastOwner, NameTaken, NotFound
from gateway.vault.envelope import Vault
from gateway.vault.errors import CannotOpen
from gateway.wire.organization.audit import AuditLogsQuery
from tests.budget import part_of
from tests.gateway.walls.two_tenants import ALICE, IDS, MALLORY, id_of, populate, rows_of_alice

Verb = Callable[..., Awaitable[Any] | Query[Any]]

ROOMS = ("tenancy", "auth", "audit", "webhooks", "files", "batches", "vault", "mcp")
SYSTEM = {
    "audit.log.record": "in the transaction of a verb, about what that found",
    "audit.log.record_all": "in the transaction of who knows the org, about what that found",
    "audit.log.record_for_both": "in the transaction of a verb, about what that found",
    "audit.verify.verify": "the command line checks the logs of all orgs, or of those it names",
    "auth.oauth.clients.store.archive_registered": "a client that registered itself is no tenant's",
    "auth.federation.external_login.find_or_add": "of the issuer that it is given",
    "auth.oauth.tokens.grants.issue_code": "of the grant that it is given",
    "auth.oauth.tokens.grants.record_revoked": "about what its caller has ended",
    "auth.oauth.tokens.grants.redeem_code": "by who has the code, before the tenant is known",
    "auth.bearer.revocations.purge": "of what refuses nothing any more, whosever it was",
    "auth.login.reset.find_reset": "whoever has the link, before the tenant is known",
    "auth.login.sign_in_links.find_link": "whoever has the link, before the tenant is known",
    "auth.login.sign_in_links.first_owner": "of the organization that runs the installation",
    "auth.login.sign_in_links.make_link": "of the user that it is given",
    "auth.login.sign_in_links.use_link": "whoever has the link, before the tenant is known",
    "auth.login.sessions.end_session": "of the session that it is given",
    "auth.login.sessions.find_session": "by who has the cookie, before the tenant is known",
    "auth.login.sessions.holds_session": "of the session that it is given",
    "auth.federation.issuer_directory.read_listed": "whose token it is, before the tenant is known",
    "auth.oauth.tokens.signing_keys.ensure_keys": "signing keys are of the whole installation",
    "auth.oauth.tokens.signing_keys.read_ring": "signing keys are of the whole installation",
    "auth.oauth.tokens.signing_keys.revoke": "signing keys are of the whole installation",
    "auth.oauth.tokens.signing_keys.rotate": "signing keys are of the whole installation",
    "tenancy.keys.changes.report_leak": "whoever shows a key, before the tenant is known",
    "tenancy.keys.keys.end_key": "of the key that it is given",
    "auth.cors_origins.all_origins": "a preflight names no tenant",
    "auth.bearer.subjects.find_principal": "of the token that it is given; its claims name the org",
    "tenancy.changes.changing": "a transaction, not a verb",
    "tenancy.members.invites.accept_invite": "whoever has the link, before the tenant is known",
    "tenancy.members.invites.find_invite": "whoever has the link, before the tenant is known",
    "tenancy.pages.page_query": "a page of the statement that it is given",
    "tenancy.pages.read_page": "a page of the statement that it is given",
    "tenancy.pages.read_all": "all rows of the statement that it is given",
    "batches.batches.forget_deleted": "of what was deleted, whosever it was",
    "batches.batches.forget_notes": "of erased projects, whosever they are",
    "batches.batches.mark_dispatched": "of the batches that it is given",
    "batches.batches.undispatched": "the sender of webhooks serves all tenants",
    "batches.lines.end": "of the lines that it leased",
    "batches.lines.lease": "the runner serves all tenants",
    "batches.lines.put_off": "of the line that it is given",
    "batches.lines.renew": "of the lines that it is given",
    "batches.results.finish": "of the batch that it is given",
    "batches.steward.attend": "of the batch that it is given",
    "batches.steward.renew": "of the batches that it is given",
    "batches.steward.take": "the runner serves all tenants",
    "batches.validation.validate": "of the batch that it is given",
    "files.files.end_files": "of what has ended, whosever it was",
    "files.files.end_files_of_projects": "of erased projects, whosever they are",
    "files.files.forget_file": "of the file that it is given",
    "mcp.call_arguments.forget_late": "the sender of webhooks serves all tenants",
    "mcp.approvals.count_waiting": "a number over all orgs, for the metrics",
    "mcp.approvals.mark_dispatched": "of the approvals that it is given",
    "mcp.approvals.undispatched": "the sender of webhooks serves all tenants",
    "mcp.service.wiring.open_approvals": "makes the store whose methods name their org",
    "tenancy.money.credits.add_credit": "operators credit tenants, in the books of the house",
    "tenancy.money.credits.create_credit": "operators credit tenants, in the books of the house",
    "tenancy.money.credits.get_credit": "with what is left of it, in the books of the house",
    "tenancy.money.credits.take_back_credit": "operators credit tenants, in the books of the house",
    "tenancy.keys.records.find_keys": "authentication, before it knows the tenant",
    "tenancy.keys.keys.find_named_key": "the command line, to learn the tenant",
    "tenancy.orgs.archive_org": "operators archive tenants",
    "tenancy.orgs.create_org": "operators make tenants",
    "tenancy.orgs.find_operator": "whose audit log tells of the installation",
    "tenancy.orgs.find_org": "by the name that people know: the command line, a login",
    "tenancy.orgs.lift_suspension": "operators serve tenants again",
    "tenancy.orgs.update_org": "operators change tenants",
    "tenancy.money.plans.archive_plan": "plans are of the whole installation",
    "tenancy.money.plans.check_price_lists": "plans are of the whole installation",
    "tenancy.money.plans.create_plan": "plans are of the whole installation",
    "tenancy.money.plans.get_plan": "plans are of the whole installation",
    "tenancy.money.plans.record_changes": "plans are of the whole installation",
    "tenancy.money.plans.sync_plans": "plans are of the whole installation",
    "tenancy.money.plans.update_plan": "plans are of the whole installation",
    "tenancy.project_pages.plans_query": "plans are of the whole installation",
    "tenancy.tables.check_plan": "plans are of the whole installation",
    "tenancy.money.top_ups.fail_top_up": "operators take the payments of tenants",
    "tenancy.money.top_ups.grant_top_up": "operators credit tenants, in the books of the house",
    "tenancy.money.top_ups.update_wanted": "what it crosses stands in the books of the house",
    "webhooks.endpoints.change_endpoint": "of the endpoint that it is given",
    "webhooks.endpoints.end_endpoint": "of the endpoint that it is given",
    "webhooks.settings_endpoints.has_endpoints": "settings name endpoints of all tenants",
    "webhooks.settings_endpoints.sync_endpoints": "settings name endpoints of all tenants",
    "webhooks.queue.add_deliveries": "of the events that it is given",
    "webhooks.queue.end_attempt": "of the delivery that it is given",
    "webhooks.queue.lease": "the sender serves all tenants",
    "webhooks.queue.sweep": "of what is old, whosever it was",
    "webhooks.mail_channel.find_people": "the sender serves all tenants",
    "vault.credentials.rewrap_credentials": "the installation's secret seals for all tenants",
    "webhooks.outbox.fan_out": "the sender serves all tenants",
}
"""Verbs that are no tenant's, and whose they are."""
SECRET = Secret(version=1, keys=(SecretKey(id="1", secret="A" * 44),))
VALUES: dict[str, object] = {
    "AuditFilter": AuditLogsQuery(),
    "LoginState": LoginState(
        issuer_id=id_of("issuers"),
        nonce="",
        code_verifier="",
        request="",
        browser="",
        expires_at=0,
    ),
    "Cipher": Cipher(SECRET, "test"),
    "Rules": Rules(
        name="taken over",
        issuer=f"https://id.example/{id_of('issuers', 'issuer')}",
        audience="over",
        default_role="reader",
        project_id=id_of("projects"),
    ),
    "Vault": Vault(SECRET),
    "action": "project.created",
    "actor": Actor(kind="system", id="test"),
    "amr": ["pwd"],
    "because": "test",
    "by": "taken over",
    "yes": True,
    "ids": [id_of("projects"), id_of("api_keys"), id_of("users")],
    "kind": id_of("mcp_pins", "kind"),
    "tool": id_of("mcp_pins", "name"),
    "start": datetime.min.replace(tzinfo=UTC),
    "end": datetime.max.replace(tzinfo=UTC),
    "description": "taken over",
    "contents": SimpleNamespace(place="postgres", writer=lambda *_: None),
    "email": "taken@over.example",
    "event_types": ["budget.threshold_reached"],
    "expires_at": None,
    "field": "x",
    "fields": {"description": "taken over"},
    "changes": {"name": "taken over"},
    "choices": {"budgets": False},
    "client": "taken over",
    "grace_s": 60,
    "model": "penny",
    "limit": 2,
    "metadata": ClientMetadata(client_name="taken over"),
    "endpoint": "/v1/chat/completions",
    "mode": "deny_list",
    "most_bytes": 1,
    "name": "taken over",
    "now": datetime.now(tz=UTC),
    "num_requests": 1,
    "password_hash": "taken over",
    "origins": ("https://taken.example",),
    "pepper": b"p" * 32,
    "pepper_id": "pepper-1",
    "peppers": Peppers(SECRET, "test"),
    "plan": None,
    "projects": [],
    "project_ids": [id_of("projects")],
    "redirect_uri": "https://taken.example/over",
    "resources": (),
    "pin_changes": (),
    "keys": [(id_of("mcp_pins", "kind"), id_of("mcp_pins", "name"))],
    "rules": (),
    "server": id_of("mcp_pins", "server"),
    "servers": [id_of("mcp_pins", "server")],
    "role": "owner",
    "scopes": ["inference"],
    "secret": SECRET,
    "state": "taken over",
    "target": "x",
    "text": "taken",
    "upstream": id_of("upstream_credentials", "upstream"),
    "url": "https://taken.example/over",
    "user_ids": [id_of("users")],
    "values": {"name": "taken over"},
    "version": 1,
    "wanted": {"tokens_per_minute": 1},
    "witness": NOWHERE,
}
"""Values for the other parameters without a default, by type or by name."""
LEFT_OUT = {
    ("tenancy.keys.keys.create_key", "service_account_id"),
    ("tenancy.money.spend_caps.create_spend_cap", "key_id"),
}
"""A key is of a user or of a service account, a cap of a project or of a key."""
OF_MESSAGES = "UPDATE batches SET endpoint = '/v1/messages'"
PAYS = """WITH people AS (UPDATE users SET role = 'owner', archived_at = NULL)
    UPDATE api_keys SET scopes = '{inference}', for_console = false, revoked_at = NULL,
    expires_at = NULL"""
FIRST = {
    "batches.batches.cancel_message_batch": OF_MESSAGES,
    "batches.batches.delete_message_batch": OF_MESSAGES,
    "tenancy.keys.console_keys.find_key_to_pay": PAYS,
    "tenancy.keys.console_keys.list_keys_to_pay": PAYS,
}
"""SQL that first gives the rows of both tenants the form that a verb is about."""
FOREIGN_KEY = "23503"
"""Postgres: foreign_key_violation."""
CONNECTIONS = ("AsyncConnection", "AsyncEngine")


def modules() -> list[ModuleType]:
    return [
        importlib.import_module(each.name)
        for each in pkgutil.walk_packages(gateway.__path__, "gateway.")
        if each.name.split(".")[1] in ROOMS
    ]


def reaches_postgres(function: Callable[..., object]) -> bool:
    first = next(iter(inspect.signature(function).parameters.values()), None)
    return first is not None and str(first.annotation).split(".")[-1] in CONNECTIONS


def makes_query(function: Callable[..., object]) -> bool:
    """Tell whether it returns a query, which a page asks together with others."""
    return str(inspect.signature(function).return_annotation).startswith("Query[")


def verbs() -> dict[str, Verb]:
    """By their names without `gateway.`."""
    return {
        f"{module.__name__.removeprefix('gateway.')}.{name}": function
        for module in modules()
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
        and (reaches_postgres(function) or makes_query(function))
    }


FOUND = verbs()
TENANTS = {name: verb for name, verb in FOUND.items() if name not in SYSTEM}
ROWS = {*IDS} - {"org_id"}
WITH_IDS = sorted(n for n, verb in TENANTS.items() if ROWS & {*inspect.signature(verb).parameters})


def test_every_verb_names_its_org_or_says_whom_it_serves() -> None:
    assert len(TENANTS) >= 6, "they are not found any more"
    assert set(SYSTEM) <= set(FOUND), "no longer there: drop it from the list"
    for name, verb in TENANTS.items():
        assert "org_id" in inspect.signature(verb).parameters, f"{name} names no org"


def test_nobody_changes_anything_by_default() -> None:
    """A verb that is not told who asks would blame whoever stands in its signature."""
    for name, verb in FOUND.items():
        actor = inspect.signature(verb).parameters.get("actor")
        assert actor is None or actor.default is actor.empty, f"{name} has an actor of its own"


async def call(name: str, pool: AsyncEngine, redis: Redis, *, org: str) -> object:
    """As a route of `org` would, with Alice's ids."""
    given: dict[str, object] = {"redis": redis, **IDS, "org_id": org, **VALUES}
    given["announcement"] = Announcement(redis, time.time)
    parameters = inspect.signature(TENANTS[name]).parameters
    async with AsyncExitStack() as stack:
        positional: list[object] = []
        named: dict[str, object] = {}
        for each in parameters.values():
            if (name, each.name) in LEFT_OUT:
                continue
            kind = str(each.annotation).split(".")[-1]
            if kind in VALUES and each.default is each.empty:
                given[each.name] = VALUES[kind]
            if kind == "AsyncConnection":
                given[each.name] = await stack.enter_async_context(tenant(pool, org))
            elif kind == "AsyncEngine":
                given[each.name] = pool
            known = each.name in given and (each.name not in VALUES or each.default is each.empty)
            if not known:
                assert each.default is not each.empty, f"say in VALUES what {each.name} is"
                assert not each.name.endswith("_id"), f"say in IDS what {each.name} is"
            elif each.kind is each.KEYWORD_ONLY:
                named[each.name] = given[each.name]
            else:
                positional.append(given[each.name])
        made: Any = TENANTS[name](*positional, **named)
        if isinstance(made, Query):
            conn = await stack.enter_async_context(tenant(pool, org))
            return await ask(conn, made)
        return await made


async def run_first(db: AsyncEngine, name: str) -> None:
    async with db.begin() as conn:
        await conn.execute(sa.text(FIRST[name]))


@pytest.mark.parametrize("role", [ROLE_TENANT, ROLE_SYSTEM])
async def test_verbs_with_another_tenants_ids_find_nothing_and_change_nothing(
    db: AsyncEngine, postgres_url: str, redis: Redis, role: str
) -> None:
    """With row security behind the verbs, and with their own WHERE alone."""
    columns = await populate(db)
    before = await rows_of_alice(db, columns)
    assert all(len(rows) == 1 for rows in before.values())
    pool = create_engine(postgres_url, role=role)
    for name in sorted(TENANTS):
        found: object = None
        if name in FIRST:
            await run_first(db, name)
            before = await rows_of_alice(db, columns)
        try:
            found = await call(name, pool, redis, org=MALLORY)
        except (NotFound, NoResultFound, InvalidKey):
            pass
        except IntegrityError as error:  # a reference names the org too
            assert getattr(error.orig, "sqlstate", None) == FOREIGN_KEY, name
        if isinstance(found, tuple):  # a page, and whether there are more
            found = found[0]
        assert ALICE not in repr(found), f"{name} says {found!r}"
        assert name not in WITH_IDS or not found, f"{name}: with Alice's ids it found {found!r}"
        assert await rows_of_alice(db, columns) == before, f"{name} changed what is Alice's"
    await pool.dispose()


@pytest.mark.parametrize("name", part_of(WITH_IDS, 12))
async def test_with_ones_own_ids_the_same_call_finds_something(
    db: AsyncEngine, redis: Redis, name: str
) -> None:
    """Or the test above would try nothing."""
    await populate(db)
    if name in FIRST:
        await run_first(db, name)
    try:
        await call(name, db, redis, org=ALICE)
    except (LastOwner, NameTaken, CannotOpen, Conflict):
        pass  # it found what it is about
