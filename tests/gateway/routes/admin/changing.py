"""One call of each route that changes something, by method and path: what `test_every_change` walks
the route table with. A new route needs one here; what it needs to be there first, `Maker` makes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import msgspec
import sqlalchemy as sa

from billing.credits.top_ups import ask_for_top_up
from billing.invoices.accounts import BillingTerms, set_account
from billing.invoices.closing import close, finalize
from billing.invoices.invoice import latest_invoice
from billing.invoices.states import DRAFT
from billing.money import PICO_PER_USD
from gateway.audit.log import COMMAND_LINE
from gateway.auth.oauth.tokens.grants import create_grant
from gateway.auth.tables import signing_keys
from gateway.db import tenant
from gateway.ids import uuid7_text
from gateway.mcp.approvals import PostgresApprovals
from gateway.mcp.calls import RedisCalls
from gateway.settings.models import ModelConfig, ReplicaConfig
from gateway.tenancy.members import users
from mcp_bridge.caller import Caller
from mcp_bridge.trust.approvals import ApprovedCall, requested
from tests.billing.invoices.billed import ACCOUNT_MADE, book, close_and_finalize, tokens
from tests.gateway.routes.admin.conftest import World

ADMIN, ORG = "/v1/admin", "/v1/organization"


class Change(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    body: Any = None


STORED_MODEL = {"upstream": "https://models.example/v1"}
STORED_SERVER = {"url": "https://tools.example/mcp"}
MADE = itertools.count(1)
"""One after the other for all makers, who may share a database."""


class Maker:
    """Makes what a change is about, each time another one."""

    def __init__(self, world: World, org_id: str, project_id: str) -> None:
        self.world, self.org_id, self.project_id = world, org_id, project_id

    def name(self) -> str:
        return f"n{next(MADE)}"

    def email(self) -> str:
        return f"{self.name()}@x.example"

    async def post(self, path: str, body: Any = None) -> Any:
        answer = await self.world.call("POST", path, body)
        assert answer.is_success, f"POST {path}: {answer.text}"
        return answer.json()

    async def project(self) -> str:
        made = await self.post(f"{ORG}/projects", {"name": self.name()})
        return f"{ORG}/projects/{made['id']}"

    async def user(self) -> str:
        async with tenant(self.world.db, self.org_id) as conn:
            made = await users.create_user(
                conn,
                org_id=self.org_id,
                email=self.email(),
                name="u",
                role="reader",
                actor=COMMAND_LINE,
            )
        return made.id

    async def member(self) -> str:
        path, user_id = await self.project(), await self.user()
        await self.post(f"{path}/users", {"user_id": user_id, "role": "member"})
        return f"{path}/users/{user_id}"

    async def account(self) -> str:
        path = await self.project()
        made = await self.post(f"{path}/service_accounts", {"name": "ci"})
        return f"{path}/service_accounts/{made['id']}"

    async def project_key(self) -> str:
        path = await self.account()
        made = await self.post(f"{path}/api_keys", {})
        return f"{path.partition('/service_accounts')[0]}/api_keys/{made['id']}"

    async def key(self) -> str:
        body = {"name": "k", "project_id": (await self.project()).rpartition("/")[2]}
        return f"{ADMIN}/keys/{(await self.post(f'{ADMIN}/keys', body))['id']}"

    def join_token_body(self) -> dict[str, Any]:
        """Let one of its models be joined, as its settings do not."""
        self.world.services.join_tokens.joinable = lambda: ("far",)
        return {"model": "far"}

    async def join_token(self) -> str:
        made = await self.post(f"{ADMIN}/join_tokens", self.join_token_body())
        return f"{ADMIN}/join_tokens/{made['id']}"

    def issuer_body(self) -> dict[str, Any]:
        name = self.name()
        return {
            "name": name,
            "issuer": f"https://{name}.example",
            "audience": f"aud-{name}",
            "default_role": "reader",
            "project_id": self.project_id,
        }

    async def issuer(self) -> str:
        made = await self.post(f"{ADMIN}/issuers", self.issuer_body())
        return f"{ADMIN}/issuers/{made['id']}"

    def client_body(self) -> dict[str, Any]:
        return {"client_name": self.name(), "redirect_uris": ["https://app.example/back"]}

    async def client(self) -> str:
        made = await self.post(f"{ADMIN}/oauth/clients", self.client_body())
        return f"{ADMIN}/oauth/clients/{made['id']}"

    def endpoint_body(self) -> dict[str, Any]:
        url = f"https://hooks.example/{self.name()}"
        return {"url": url, "event_types": ["budget.threshold_reached"]}

    async def endpoint(self) -> str:
        made = await self.post(f"{ADMIN}/webhooks", self.endpoint_body())
        return f"{ADMIN}/webhooks/{made['id']}"

    async def delivery(self) -> str:
        path = await self.endpoint()
        return f"{path}/deliveries/{(await self.post(f'{path}/ping'))['id']}"

    async def approval(self) -> str:
        """Asked for by somebody else."""
        name = self.name()
        call = ApprovedCall(
            org_id=self.org_id,
            caller=Caller(
                org_id=self.org_id, project_id=self.project_id, subject="u", client=name
            ).principal,
            server="s",
            pin="sha256:0",
            arguments_digest=f"sha256:{name}",
            policy_version="1",
        )
        new = requested(
            call,
            approval_id=f"mcpapp_{uuid7_text()}",
            nonce="n",
            now_s=time.time(),
            ttl_s=600,
            tool="look",
        )
        assert await PostgresApprovals(self.world.db).insert(self.org_id, new, max_pending=1_000)
        return f"{ADMIN}/mcp/approvals/{new.approval.id}"

    async def taint(self) -> str:
        """Make a taint of a client of an app."""
        client = self.name()
        caller = Caller(org_id=self.org_id, project_id=self.project_id, subject="u", client=client)
        await RedisCalls(self.world.services.redis).taint(caller, "s")
        return f"{ADMIN}/mcp/taints/{client}"

    async def grant(self) -> str:
        client_id = (await self.client()).rpartition("/")[2]
        user_id = await self.user()
        async with tenant(self.world.db, self.org_id) as conn:
            made = await create_grant(
                conn,
                org_id=self.org_id,
                user_id=user_id,
                client_id=client_id,
                project_id=None,
                resources=[],
                scopes=["openid"],
                actor=COMMAND_LINE,
            )
        return f"{ADMIN}/oauth/grants/{made.id}"

    async def org(self) -> str:
        made = await self.post(f"{ADMIN}/orgs", {"name": self.name()})
        return f"{ADMIN}/orgs/{made['organization']['id']}"

    async def plan(self) -> str:
        return f"{ADMIN}/plans/{(await self.post(f'{ADMIN}/plans', {'name': self.name()}))['name']}"

    async def served_model(self) -> str:
        """Return the name of an upstream that this worker serves from now on, by `far`'s replicas,
        which are listed once."""
        services, name = self.world.services, self.name()
        fleet, configuration = services.generation.fleet, services.configuration
        far = fleet.route_of("far")
        assert far is not None and configuration is not None
        upstream = ReplicaConfig(upstream=f"https://{name}.example/v1", upstream_model=name)
        models = (*configuration.settings.models, ModelConfig(name=name, replicas=(upstream,)))
        configuration.settings = msgspec.structs.replace(configuration.settings, models=models)
        fleet.replace([*fleet.routes, msgspec.structs.replace(far, model=name, parent="far")])
        return name

    async def version_body(self) -> dict[str, Any]:
        model = await self.served_model()
        return {"model": model, "served_by": await self.served_model()}

    async def version(self) -> str:
        made = await self.post(f"{ADMIN}/models/versions", await self.version_body())
        return f"{ADMIN}/models/versions/{made['id']}"

    async def pin_body(self) -> dict[str, Any]:
        made = await self.post(f"{ADMIN}/models/versions", await self.version_body())
        return {"model": made["model"], "version": 1, "scope": "org", "scope_id": self.org_id}

    async def pin(self) -> str:
        made = await self.post(f"{ADMIN}/models/pins", await self.pin_body())
        return f"{ADMIN}/models/pins/{made['id']}"

    async def rollout_body(self) -> dict[str, Any]:
        made = await self.post(f"{ADMIN}/models/versions", await self.version_body())
        return {"model": made["model"], "version": 2, "steps": [5, 50], "watch": 100}

    async def evaluation_body(self) -> dict[str, Any]:
        made = await self.post(f"{ADMIN}/models/versions", await self.version_body())
        return {"model": made["model"], "version": 2, "suite": "golden", "passed": True}

    async def rollout(self) -> str:
        made = await self.post(f"{ADMIN}/models/rollouts", await self.rollout_body())
        return f"{ADMIN}/models/rollouts/{made['id']}"

    async def paused_rollout(self) -> str:
        path = await self.rollout()
        await self.world.call("POST", f"{path}/pause", {})
        return path

    async def stored(self, part: str, content: dict[str, Any]) -> str:
        """Return the path of a stored setting, of models or of MCP servers."""
        path = f"{ADMIN}/settings/{part}"
        made = await self.post(path, {"name": self.name(), "content": content})
        return f"{path}/{made['id']}"

    async def stored_model(self) -> str:
        return await self.stored("models", STORED_MODEL)

    async def stored_server(self) -> str:
        return await self.stored("mcp_servers", STORED_SERVER)

    def prices_body(self) -> dict[str, Any]:
        price = {"model": self.name(), "valid_from": "2027-01-01", "output": "0.4"}
        return {"name": self.name(), "content": {"price": [price]}}

    async def free_lane(self) -> str:
        """Return a lane that has no deadline stored."""
        await self.world.call("DELETE", f"{ADMIN}/settings/deadlines/batch")
        return "batch"

    async def stored_deadline(self) -> str:
        lane = await self.free_lane()
        await self.post(f"{ADMIN}/settings/deadlines", {"name": lane, "content": {"seconds": 9}})
        return f"{ADMIN}/settings/deadlines/{lane}"

    async def cap_body(self) -> dict[str, Any]:
        project_id = (await self.project()).rpartition("/")[2]
        return {"project_id": project_id, "period": "day", "amount_usd": "1"}

    async def cap(self) -> str:
        made = await self.post(f"{ADMIN}/spend-caps", await self.cap_body())
        return f"{ADMIN}/spend-caps/{made['id']}"

    async def invoice(self) -> str:
        """A final one, of the next month, over more than all credit that others have given."""
        db, org_id = self.world.db, self.org_id
        begun = await self.next_month()
        await book(db, tokens(begun, 10_000, 10**10, org=org_id))
        made = await close_and_finalize(db, begun + timedelta(days=31), org_id)
        return f"{ADMIN}/invoices/{made.id}"

    async def draft(self) -> str:
        """Make a draft of the next month."""
        begun = await self.next_month()
        made = await close(self.world.db, org_id=self.org_id, now=begun + timedelta(days=31))
        assert made is not None
        return f"{ADMIN}/invoices/{made.id}"

    async def next_month(self) -> datetime:
        """When it begins. A draft is finalized, so that there may be another one."""
        async with self.world.db.begin() as conn:
            await set_account(conn, org_id=self.org_id, terms=BillingTerms(), now=ACCOUNT_MADE)
            newest = await latest_invoice(conn, org_id=self.org_id)
        if newest is None:
            return ACCOUNT_MADE
        if newest.state == DRAFT:
            later = newest.period_end + timedelta(days=31)
            await finalize(self.world.db, org_id=self.org_id, invoice_id=newest.id, now=later)
        return newest.period_end

    async def rerating_body(self) -> dict[str, Any]:
        """As it was shown."""
        span = {"starts_at": int(self.name()[1:]), "ends_at": 4_000_000_000}
        query = "&".join(f"{name}={value}" for name, value in span.items())
        shown = await self.world.call("GET", f"{ADMIN}/reratings/preview?{query}")
        assert shown.status_code == 200, shown.text
        return {**span, "digest": shown.json()["digest"]}

    async def signing_key(self) -> str:
        """The next one was published long ago, so that it may sign."""
        async with self.world.db.begin() as conn:
            long_ago = signing_keys.c.created_at - timedelta(days=1)
            await conn.execute(sa.update(signing_keys).values(created_at=long_ago))
            active = sa.select(signing_keys.c.kid).where(signing_keys.c.retired_at.is_(None))
            kid = await conn.scalar(active.where(signing_keys.c.activated_at.is_not(None)))
        return f"{ADMIN}/signing_keys/{kid}"


Recipe = Callable[[Maker], Awaitable[Change]]


def at(make: Callable[[Maker], Awaitable[str]], tail: str = "", body: Any = None) -> Recipe:
    """On what `make` makes; a callable body is asked for one."""

    async def change(maker: Maker) -> Change:
        path = await make(maker) + tail
        return Change(path=path, body=body(maker) if callable(body) else body)

    return change


def always(path: str, body: Any) -> Recipe:
    """On what is there."""

    async def change(_maker: Maker) -> Change:
        return Change(path=path, body=body)

    return change


def new(path: str, body: Callable[[Maker], Any]) -> Recipe:
    async def change(maker: Maker) -> Change:
        return Change(path=path, body=body(maker))

    return change


async def credit(maker: Maker) -> Change:
    body = {"org_id": maker.org_id, "amount_usd": "1"}
    return Change(path=f"{ADMIN}/credits", body=body)


async def credit_of(maker: Maker) -> str:
    made = await maker.post(f"{ADMIN}/credits", {"org_id": maker.org_id, "amount_usd": "1"})
    return f"{ADMIN}/credits/{made['id']}"


async def top_up(maker: Maker) -> str:
    async with maker.world.db.begin() as conn:
        made = await ask_for_top_up(
            conn, maker.org_id, amount_pico=PICO_PER_USD, left_pico=0, max_per_day=1000
        )
    return f"{ADMIN}/top-ups/{made}"


async def balance_settings(maker: Maker) -> str:
    return f"{ADMIN}/balance/settings"


async def new_rerating(maker: Maker) -> Change:
    return Change(path=f"{ADMIN}/reratings", body=await maker.rerating_body())


async def new_cap(maker: Maker) -> Change:
    return Change(path=f"{ADMIN}/spend-caps", body=await maker.cap_body())


async def add_member(maker: Maker) -> Change:
    path, user_id = await maker.project(), await maker.user()
    return Change(path=f"{path}/users", body={"user_id": user_id, "role": "member"})


async def make_key(maker: Maker) -> Change:
    project_id = (await maker.project()).rpartition("/")[2]
    return Change(path=f"{ADMIN}/keys", body={"name": "k", "project_id": project_id})


async def make_version(maker: Maker) -> Change:
    return Change(path=f"{ADMIN}/models/versions", body=await maker.version_body())


async def make_pin(maker: Maker) -> Change:
    return Change(path=f"{ADMIN}/models/pins", body=await maker.pin_body())


async def make_evaluation(maker: Maker) -> Change:
    return Change(path=f"{ADMIN}/models/evaluations", body=await maker.evaluation_body())


async def make_rollout(maker: Maker) -> Change:
    return Change(path=f"{ADMIN}/models/rollouts", body=await maker.rollout_body())


async def admin_key(maker: Maker) -> str:
    made = await maker.post(f"{ORG}/admin_api_keys", {"name": "k"})
    return f"{ORG}/admin_api_keys/{made['id']}"


async def invite(maker: Maker) -> str:
    made = await maker.post(f"{ORG}/invites", {"email": maker.email(), "role": "reader"})
    return f"{ORG}/invites/{made['id']}"


async def restricted(maker: Maker) -> str:
    path = await maker.project() + "/model_permissions"
    await maker.post(path, {"mode": "deny_list", "model_ids": ["far"]})
    return path


async def own_project(maker: Maker) -> str:
    return (await maker.project()).replace(ORG, ADMIN)


async def own_user(maker: Maker) -> str:
    return f"{ADMIN}/users/{await maker.user()}"


async def org_user(maker: Maker) -> str:
    return f"{ORG}/users/{await maker.user()}"


async def deadline(maker: Maker) -> Change:
    body = {"name": await maker.free_lane(), "content": {"seconds": 9}}
    return Change(path=f"{ADMIN}/settings/deadlines", body=body)


async def rotate_signing_key(maker: Maker) -> Change:
    await maker.signing_key()
    return Change(path=f"{ADMIN}/signing_keys/rotate")


async def change_issuer(maker: Maker) -> Change:
    body = maker.issuer_body()
    made = await maker.post(f"{ADMIN}/issuers", body)
    return Change(path=f"{ADMIN}/issuers/{made['id']}", body={**body, "name": maker.name()})


async def organization(maker: Maker) -> str:
    return f"{ADMIN}/organization"


async def issuer_with_a_secret(maker: Maker) -> Change:
    body = {**maker.issuer_body(), "client_id": "app", "client_secret": maker.name()}
    made = await maker.post(f"{ADMIN}/issuers", body)
    other = {**body, "client_secret": maker.name()}
    return Change(path=f"{ADMIN}/issuers/{made['id']}", body=other)


async def tool_rules(_maker: Maker) -> str:
    return f"{ADMIN}/mcp/rules"


ENDPOINT = f"{ADMIN}/webhooks/{{endpoint_id}}"
PROJECT = f"{ORG}/projects/{{project_id}}"
ACCOUNT = f"{PROJECT}/service_accounts/{{service_account_id}}"
CLIENT = f"{ADMIN}/oauth/clients/{{client_id}}"
BY_ITS_SERVER = {
    ("POST", f"{ADMIN}/mcp/servers/{{server}}/{verb}"): "`tests/gateway/mcp/test_bills.py`"
    for verb in ("approve", "revoke")
}
"""Changes of what an MCP server offers, which is asked for it; and where they are tried."""
RECIPES: dict[tuple[str, str], Recipe] = {
    ("POST", f"{ADMIN}/invites"): new(
        f"{ADMIN}/invites", lambda m: {"email": m.email(), "role": "developer"}
    ),
    ("POST", f"{ADMIN}/issuers"): new(f"{ADMIN}/issuers", Maker.issuer_body),
    ("PUT", f"{ADMIN}/issuers/{{issuer_id}}"): change_issuer,
    ("POST", f"{ADMIN}/mcp/approvals/{{approval_id}}/approve"): at(Maker.approval, "/approve"),
    ("POST", f"{ADMIN}/mcp/approvals/{{approval_id}}/deny"): at(Maker.approval, "/deny"),
    ("POST", f"{ADMIN}/mcp/taints/{{client_id}}/lift"): at(Maker.taint, "/lift"),
    ("PUT", f"{ADMIN}/mcp/rules"): at(
        tool_rules, body=lambda m: {"rules": [{"id": m.name(), "effect": "ask"}]}
    ),
    ("DELETE", f"{ADMIN}/issuers/{{issuer_id}}"): at(Maker.issuer),
    ("POST", f"{ADMIN}/join_tokens"): new(f"{ADMIN}/join_tokens", Maker.join_token_body),
    ("POST", f"{ADMIN}/join_tokens/{{token_id}}/revoke"): at(Maker.join_token, "/revoke"),
    ("POST", f"{ADMIN}/keys"): make_key,
    ("PATCH", f"{ADMIN}/fleet/{{replica}}"): always(f"{ADMIN}/fleet/far/0", {"drained": False}),
    ("POST", f"{ADMIN}/models/versions"): make_version,
    ("DELETE", f"{ADMIN}/models/versions/{{version_id}}"): at(Maker.version),
    ("POST", f"{ADMIN}/models/pins"): make_pin,
    ("DELETE", f"{ADMIN}/models/pins/{{pin_id}}"): at(Maker.pin),
    ("POST", f"{ADMIN}/models/evaluations"): make_evaluation,
    ("POST", f"{ADMIN}/models/rollouts"): make_rollout,
    ("POST", f"{ADMIN}/models/rollouts/{{rollout_id}}/pause"): at(Maker.rollout, "/pause"),
    ("POST", f"{ADMIN}/models/rollouts/{{rollout_id}}/resume"): at(Maker.paused_rollout, "/resume"),
    ("POST", f"{ADMIN}/models/rollouts/{{rollout_id}}/abort"): at(Maker.rollout, "/abort"),
    ("POST", f"{ADMIN}/models/rollouts/{{rollout_id}}/complete"): at(Maker.rollout, "/complete"),
    ("PATCH", f"{ADMIN}/keys/{{key_id}}"): at(Maker.key, body={"name": "other"}),
    ("POST", f"{ADMIN}/keys/{{key_id}}/revoke"): at(Maker.key, "/revoke"),
    ("POST", f"{ADMIN}/keys/{{key_id}}/rotate"): at(Maker.key, "/rotate"),
    ("POST", f"{ADMIN}/oauth/clients"): new(f"{ADMIN}/oauth/clients", Maker.client_body),
    ("POST", CLIENT): at(Maker.client, body=Maker.client_body),
    ("DELETE", CLIENT): at(Maker.client),
    ("POST", f"{CLIENT}/rotate-secret"): at(Maker.client, "/rotate-secret", {}),
    ("POST", f"{ADMIN}/oauth/grants/{{grant_id}}/revoke"): at(Maker.grant, "/revoke"),
    ("PATCH", f"{ADMIN}/organization"): at(
        organization, body=lambda m: {"cors_origins": [f"https://{m.name()}.example"]}
    ),
    ("POST", f"{ADMIN}/orgs"): new(f"{ADMIN}/orgs", lambda m: {"name": m.name()}),
    ("PATCH", f"{ADMIN}/orgs/{{org_id}}"): at(Maker.org, body={"plan": "gold"}),
    ("POST", f"{ADMIN}/orgs/{{org_id}}/archive"): at(Maker.org, "/archive"),
    ("POST", f"{ADMIN}/orgs/{{org_id}}/lift-suspension"): at(Maker.org, "/lift-suspension"),
    ("POST", f"{ADMIN}/plans"): new(f"{ADMIN}/plans", lambda m: {"name": m.name()}),
    ("PATCH", f"{ADMIN}/plans/{{name}}"): at(Maker.plan, body={"lane": "batch"}),
    ("POST", f"{ADMIN}/plans/{{name}}/archive"): at(Maker.plan, "/archive"),
    ("POST", f"{ADMIN}/projects"): new(f"{ADMIN}/projects", lambda m: {"name": m.name()}),
    ("PATCH", f"{ADMIN}/projects/{{project_id}}"): at(own_project, body={"plan": "gold"}),
    ("POST", f"{ADMIN}/settings/models"): new(
        f"{ADMIN}/settings/models", lambda m: {"name": m.name(), "content": STORED_MODEL}
    ),
    ("PUT", f"{ADMIN}/settings/models/{{name}}"): at(
        Maker.stored_model, body={"content": {**STORED_MODEL, "context_window": 4096}}
    ),
    ("DELETE", f"{ADMIN}/settings/models/{{name}}"): at(Maker.stored_model),
    ("POST", f"{ADMIN}/settings/mcp_servers"): new(
        f"{ADMIN}/settings/mcp_servers", lambda m: {"name": m.name(), "content": STORED_SERVER}
    ),
    ("PUT", f"{ADMIN}/settings/mcp_servers/{{name}}"): at(
        Maker.stored_server, body={"content": {**STORED_SERVER, "taints": True}}
    ),
    ("DELETE", f"{ADMIN}/settings/mcp_servers/{{name}}"): at(Maker.stored_server),
    ("POST", f"{ADMIN}/settings/price_books"): new(
        f"{ADMIN}/settings/price_books", Maker.prices_body
    ),
    ("POST", f"{ADMIN}/settings/deadlines"): deadline,
    ("PUT", f"{ADMIN}/settings/deadlines/{{name}}"): at(
        Maker.stored_deadline, body={"content": {"seconds": None}}
    ),
    ("DELETE", f"{ADMIN}/settings/deadlines/{{name}}"): at(Maker.stored_deadline),
    ("POST", f"{ADMIN}/signing_keys/rotate"): rotate_signing_key,
    ("POST", f"{ADMIN}/signing_keys/{{kid}}/revoke"): at(Maker.signing_key, "/revoke"),
    ("POST", f"{ADMIN}/billing-account"): new(
        f"{ADMIN}/billing-account", lambda m: {"net_days": int(m.name()[1:]) % 365}
    ),
    ("POST", f"{ADMIN}/fx-rates"): new(
        f"{ADMIN}/fx-rates",
        lambda m: {
            "currency": "EUR",
            "usd_per_unit": "1.1",
            "valid_from": int(m.name()[1:]),
            "source": "bank",
        },
    ),
    ("POST", f"{ADMIN}/invoices/{{invoice_id}}/payments"): at(
        Maker.invoice, "/payments", {"amount": "0.5", "reference": "wire 7"}
    ),
    ("POST", f"{ADMIN}/invoices/{{invoice_id}}/credit-notes"): at(
        Maker.invoice, "/credit-notes", {"reason": "it was slow"}
    ),
    ("POST", f"{ADMIN}/invoices/{{invoice_id}}/finalize"): at(Maker.draft, "/finalize"),
    ("POST", f"{ADMIN}/reratings"): new_rerating,
    ("POST", f"{ADMIN}/credits"): credit,
    ("POST", f"{ADMIN}/credits/{{credit_id}}/revoke"): at(credit_of, "/revoke"),
    ("PATCH", f"{ADMIN}/balance/settings"): at(
        balance_settings, body=lambda m: {"low_usd": m.name()[1:]}
    ),
    ("POST", f"{ADMIN}/top-ups/{{top_up_id}}/grant"): at(top_up, "/grant"),
    ("POST", f"{ADMIN}/top-ups/{{top_up_id}}/fail"): at(top_up, "/fail", {"reason": "no funds"}),
    ("POST", f"{ADMIN}/spend-caps"): new_cap,
    ("PATCH", f"{ADMIN}/spend-caps/{{cap_id}}"): at(Maker.cap, body={"amount_usd": "2.5"}),
    ("POST", f"{ADMIN}/spend-caps/{{cap_id}}/archive"): at(Maker.cap, "/archive"),
    ("POST", f"{ADMIN}/users/{{user_id}}/password-reset"): at(own_user, "/password-reset"),
    ("PATCH", f"{ADMIN}/users/{{user_id}}"): at(own_user, body={"role": "billing"}),
    ("POST", f"{ADMIN}/webhooks"): new(f"{ADMIN}/webhooks", Maker.endpoint_body),
    ("PATCH", ENDPOINT): at(
        Maker.endpoint,
        body=lambda m: {"description": m.name(), "event_types": ["rate_limit.threshold_reached"]},
    ),
    ("POST", f"{ENDPOINT}/archive"): at(Maker.endpoint, "/archive"),
    ("POST", f"{ENDPOINT}/rotate-secret"): at(Maker.endpoint, "/rotate-secret", {}),
    ("POST", f"{ENDPOINT}/ping"): at(Maker.endpoint, "/ping"),
    ("POST", f"{ENDPOINT}/deliveries/{{delivery_id}}/redeliver"): at(Maker.delivery, "/redeliver"),
    ("POST", f"{ORG}/admin_api_keys"): new(f"{ORG}/admin_api_keys", lambda m: {"name": "k"}),
    ("DELETE", f"{ORG}/admin_api_keys/{{key_id}}"): at(admin_key),
    ("POST", f"{ORG}/invites"): new(
        f"{ORG}/invites", lambda m: {"email": m.email(), "role": "reader"}
    ),
    ("DELETE", f"{ORG}/invites/{{invite_id}}"): at(invite),
    ("POST", f"{ORG}/projects"): new(f"{ORG}/projects", lambda m: {"name": m.name()}),
    ("POST", PROJECT): at(Maker.project, body=lambda m: {"name": m.name()}),
    ("POST", f"{PROJECT}/archive"): at(Maker.project, "/archive"),
    ("POST", f"{PROJECT}/api_keys/{{api_key_id}}"): at(
        Maker.project_key, body={"expires_in_seconds": 60}
    ),
    ("DELETE", f"{PROJECT}/api_keys/{{api_key_id}}"): at(Maker.project_key),
    ("POST", f"{PROJECT}/model_permissions"): at(
        Maker.project, "/model_permissions", {"mode": "allow_list", "model_ids": ["far"]}
    ),
    ("DELETE", f"{PROJECT}/model_permissions"): at(restricted),
    ("POST", f"{PROJECT}/rate_limits/{{rate_limit_id}}"): at(
        Maker.project, "/rate_limits/rl-far", {"max_requests_per_1_minute": 3}
    ),
    ("POST", f"{PROJECT}/service_accounts"): at(Maker.project, "/service_accounts", {"name": "ci"}),
    ("POST", ACCOUNT): at(Maker.account, body={"name": "other"}),
    ("DELETE", ACCOUNT): at(Maker.account),
    ("POST", f"{ACCOUNT}/api_keys"): at(Maker.account, "/api_keys", {}),
    ("POST", f"{PROJECT}/users"): add_member,
    ("POST", f"{PROJECT}/users/{{user_id}}"): at(Maker.member, body={"role": "owner"}),
    ("DELETE", f"{PROJECT}/users/{{user_id}}"): at(Maker.member),
    ("POST", f"{ORG}/users/{{user_id}}"): at(org_user, body={"role": "owner"}),
    ("DELETE", f"{ORG}/users/{{user_id}}"): at(org_user),
}

ISSUER = f"{ADMIN}/issuers/{{issuer_id}}"
KEY = f"{PROJECT}/api_keys/{{api_key_id}}"
UNSEEN: dict[str, tuple[tuple[str, str], Recipe]] = {
    "scopes of a key": (("POST", KEY), at(Maker.project_key, body={"scopes": ["mcp:call"]})),
    "secret of a client": (
        ("POST", f"{CLIENT}/rotate-secret"),
        at(Maker.client, "/rotate-secret", {"grace_s": 60}),
    ),
    "secret of a webhook": (
        ("POST", f"{ENDPOINT}/rotate-secret"),
        at(Maker.endpoint, "/rotate-secret", {}),
    ),
    "secret at an issuer": (("PUT", ISSUER), issuer_with_a_secret),
}
"""Changes of what the thing, as it is shown, leaves out."""
