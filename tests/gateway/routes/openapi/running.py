"""One worker as it runs: its whole application on uvicorn in a thread, on a real Postgres and a
real Redis, in front of an engine without a model and of a scripted upstream.

`everything` may do all that a key can be allowed; `nothing` is good and may do nothing. `make`
gives what the parameters of a path name: things of its own for who wants to end them.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import requests
import uvicorn
from litestar import Litestar

from billing.credits.top_ups import ask_for_top_up
from billing.ingestion.ingest import ingest
from billing.invoices.accounts import BillingTerms, set_account
from billing.invoices.closing import close, finalize
from billing.invoices.invoice import latest_invoice
from billing.money import PICO_PER_USD
from engine.fake.engine import FakeCore
from engine.transport.server import EngineServer
from gateway.app.connection import ClientConnection
from gateway.app.create import create_app
from gateway.audit.log import COMMAND_LINE, Actor
from gateway.auth.oauth.rfc8414_metadata import USERINFO_PATH
from gateway.auth.oauth.tokens import rfc9068_access_token
from gateway.auth.oauth.tokens.grants import create_grant
from gateway.auth.oauth.tokens.rfc9068_access_token import AccessClaims, token_id
from gateway.db import tenant
from gateway.fleet.engine.folder_options import FILE
from gateway.fleet.joining.tokens import StoredToken
from gateway.home import Home
from gateway.mcp.approvals import PostgresApprovals
from gateway.permissions import IDENTITY_SCOPES, KEY_SCOPES
from gateway.processes import database
from gateway.processes.credentials_file import Credentials
from gateway.registry.changes import add_version, set_pin
from gateway.registry.evaluations import add_evaluation
from gateway.registry.rollout_changes import start_rollout
from gateway.registry.version_table import RegisteredVersion
from gateway.routes.shared.services import Services
from gateway.settings.load import Settings, load
from gateway.tenancy.keys.keys import create_key
from gateway.tenancy.members.members import add_member
from gateway.tenancy.members.users import create_user
from mcp_bridge.trust.approvals import ApprovedCall, requested
from tests.billing.invoices.billed import tokens
from tests.gateway.fleet.upstream.scripted_upstream import Upstream
from tests.journeys.upstreams import good

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[4]
ACTOR = Actor(kind="system", id="test")
SHOWN_SERVER = "shown"
SHOWN = f"""
[[mcp.servers]]
name = "{SHOWN_SERVER}"
url = "https://mcp.invalid/mcp"
credential = "tenant"
"""
TIMEOUT_S = 90.0
SERVER: dict[str, Any] = {
    "ws": "none",
    "lifespan": "on",
    "log_config": None,
    "access_log": False,
    "timeout_keep_alive": int(TIMEOUT_S),
}
CAPS = "/v1/admin/spend-caps"
MAX_APPROVALS = 100_000
VOCAB_SIZE = 4096
"""The vocabulary of penny, whose tokenizer reads the prompts."""
CONFIG = """
price_books = ["{folder}/book.toml"]
[[model]]
name = "near"
path = "{folder}/penny"
engine = "unix:{folder}/engine.sock"
{near}
[[model]]
name = "far"
upstream = "{upstream}"
[plan.default]
tokens_per_minute = 1000000000
"""

SEPTEMBER, OCTOBER = datetime(2026, 9, 1, tzinfo=UTC), datetime(2026, 10, 1, tzinfo=UTC)
BOOK = "".join(
    f"""
[[price]]
model = "{model}"
valid_from = "2020-01-01"
uncached_input = "0.15"
cache_read = "0.07"
cache_write = "0.2"
output = "0.6"
"""
    for model in ("near", "far")
)


class Running:
    def __init__(
        self, app: Litestar, settings: Settings, loop: asyncio.AbstractEventLoop, far: Upstream
    ) -> None:
        """`far`: what answers for the model of that name."""
        self.app, self.url, self.far = app, settings.issuer, far
        self.secret_key_file = settings.secret_key_file
        self.session = requests.Session()
        self._loop = loop
        self._numbers = count(1)

    @property
    def services(self) -> Services:
        found: Services = self.app.state.services
        return found

    @contextmanager
    def routing(self, **changes: Any) -> Iterator[None]:
        """Serve `near` as if the configuration of that model said so."""
        routes = self.services.generation.fleet._routes
        before = routes["near"]
        routes["near"] = msgspec.structs.replace(before, **changes)
        try:
            yield
        finally:
            routes["near"] = before

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """In the application's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    def settle(self, admin_key: str, beside: Running | None = None) -> None:
        """Remember who asks, and where: all that is there, in a home beside another one."""
        self.everything = admin_key
        if beside is not None:
            return
        who = self.run(self.services.authenticator.authenticate(admin_key))
        self.org_id = who.org_id
        self.project_id = self.made("/v1/organization/projects", name="web")
        self.everything = self.run(self.new_key(sorted(KEY_SCOPES)))
        self.user_id = self.make_user()
        # The role of a reader confers no use of models, and the key nothing else.
        where = {"project_id": self.project_id}
        self.nothing = self.run(
            self.new_key(["inference"], user_id=self.make_user(found=where, role="reader"))
        )

    async def new_key(self, scopes: list[str], user_id: str | None = None) -> str:
        found = self.services
        pepper_id, pepper = found.authenticator.pepper
        async with tenant(found.db, self.org_id) as conn:
            made = await create_key(
                conn,
                org_id=self.org_id,
                project_id=self.project_id,
                name="test",
                scopes=scopes,
                user_id=user_id,
                pepper=pepper,
                pepper_id=pepper_id,
                actor=ACTOR,
            )
        return made.secret

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self.everything}"}
        answer = self.session.post(self.url + path, json=body, headers=headers, timeout=TIMEOUT_S)
        assert answer.ok, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def made(self, path: str, **body: Any) -> str:
        found: str = self.post(path, **body)["id"]
        return found

    def archive_caps(self) -> None:
        """Let the organization spend again, whatever caps it was given."""
        headers = {"authorization": f"Bearer {self.everything}"}
        caps = self.session.get(
            f"{self.url}{CAPS}?limit=100", headers=headers, timeout=TIMEOUT_S
        ).json()
        for cap in caps["data"]:
            if cap["archived_at"] is None:
                self.post(f"{CAPS}/{cap['id']}/archive")

    def make(self, names: list[str], path: str) -> dict[str, str]:
        """Make what the parameters of `path` name: things that are there, and nobody else's."""
        found: dict[str, str] = {}
        for name in names:
            found[name] = getattr(self, f"make_{name.removesuffix('_id')}")(path, found)
        return found

    def make_org(self, path: str, _: dict[str, str]) -> str:
        if path.startswith("/v1/admin/orgs"):
            made = self.post("/v1/admin/orgs", name=f"org {next(self._numbers)}")
            return str(made["organization"]["id"])
        return self.org_id

    def make_project(self, *_: Any) -> str:
        return self.made("/v1/organization/projects", name=f"project {next(self._numbers)}")

    def make_user(
        self, path: str = "", found: dict[str, str] | None = None, role: str = "owner"
    ) -> str:
        async def work() -> str:
            email, org_id = f"u{next(self._numbers)}@test.example", self.org_id
            async with tenant(self.services.db, org_id) as conn:
                made = await create_user(
                    conn, org_id=org_id, email=email, name="Ann", role=role, actor=ACTOR
                )
                if found and "project_id" in found:
                    await add_member(
                        conn,
                        org_id=org_id,
                        project_id=found["project_id"],
                        user_id=made.id,
                        role="member",
                        actor=ACTOR,
                    )
            return made.id

        return self.run(work())

    def make_server(self, path: str, _: dict[str, str]) -> str:
        """That is shown a credential of the tenant."""
        headers = {"authorization": f"Bearer {self.everything}"}
        url = f"{self.url}/v1/mcp/tenant_credentials/{SHOWN_SERVER}"
        body = {"values": {"X-Key": "value"}}
        answer = self.session.put(url, json=body, headers=headers, timeout=TIMEOUT_S)
        assert answer.ok, answer.text
        return SHOWN_SERVER

    def make_invoice(self, path: str, _: dict[str, str]) -> str:
        """Make an invoice of September, with a line; final where it is to be exported."""
        db, org_id = self.services.system_db, self.org_id

        async def work() -> str:
            async with db.begin() as conn:
                await set_account(conn, org_id=org_id, terms=BillingTerms(), now=SEPTEMBER)
                standing = await latest_invoice(conn, org_id=org_id)
            if standing is None:
                await ingest(db, [tokens(SEPTEMBER, 1, 7, org=org_id)])
                standing = await close(db, org_id=org_id, now=OCTOBER)
            assert standing is not None
            if path.endswith("/export"):
                await finalize(db, org_id=org_id, invoice_id=standing.id, now=OCTOBER)
            return standing.id

        return self.run(work())

    def make_line(self, _: str, found: dict[str, str]) -> str:
        return f"{found['invoice_id']}.000001"

    def make_service_account(self, _: str, found: dict[str, str]) -> str:
        path = f"/v1/organization/projects/{found['project_id']}/service_accounts"
        return self.made(path, name=f"robot {next(self._numbers)}")

    def make_api_key(self, path: str, found: dict[str, str]) -> str:
        account = self.make_service_account(path, found)
        accounts = f"/v1/organization/projects/{found['project_id']}/service_accounts"
        return self.made(f"{accounts}/{account}/api_keys", name="key")

    def make_key(self, *_: Any) -> str:
        return self.made("/v1/organization/admin_api_keys", name="key")

    def make_invite(self, *_: Any) -> str:
        email = f"i{next(self._numbers)}@test.example"
        return self.made("/v1/organization/invites", email=email, role="reader")

    def make_client(self, path: str = "", *_: Any) -> str:
        if path.startswith("/oauth/register"):
            made = self.post("/oauth/register", redirect_uris=["https://client.example/cb"])
            self.registration = str(made["registration_access_token"])
            return str(made["client_id"])
        found: str = self.confidential_client()["id"]
        return found

    def confidential_client(self) -> dict[str, Any]:
        project: dict[str, str] = {"project_id": self.project_id}
        account = self.make_service_account("", project)
        return self.post(
            "/v1/admin/oauth/clients",
            client_name="App",
            redirect_uris=["https://client.example/cb"],
            grant_types=["authorization_code", "refresh_token", "client_credentials"],
            scopes=["inference", "openid", "mcp:call"],
            project_id=self.project_id,
            service_account_id=account,
        )

    def make_grant(self, *_: Any) -> str:
        async def work(user_id: str, client_id: str) -> str:
            async with tenant(self.services.db, self.org_id) as conn:
                made = await create_grant(
                    conn,
                    org_id=self.org_id,
                    user_id=user_id,
                    client_id=client_id,
                    project_id=self.project_id,
                    resources=[self.url],
                    scopes=["inference"],
                    actor=ACTOR,
                )
            return made.id

        return self.run(work(self.make_user(), self.make_client()))

    def make_issuer(self, *_: Any) -> str:
        number = next(self._numbers)
        return self.made(
            "/v1/admin/issuers",
            name=f"Corporate {number}",
            issuer=f"https://id{number}.example",
            audience=f"api://{number}",
            project_id=self.project_id,
            default_role="reader",
        )

    def make_approval(self, *_: Any) -> str:
        number = next(self._numbers)
        call = ApprovedCall(
            org_id=self.org_id,
            caller=f"org\nproject\nkey\n{number}",
            server="s",
            pin="sha256:0",
            arguments_digest="sha256:1",
            policy_version="1",
        )
        made_id, now_s = f"mcpapp_{number}", time.time()
        new = requested(call, approval_id=made_id, nonce="n", now_s=now_s, ttl_s=3600)
        store = PostgresApprovals(self.services.db, shown=self.services.asked_arguments)
        asking = store.insert(self.org_id, new, max_pending=MAX_APPROVALS, arguments=b'{"a":1}')
        assert self.run(asking)
        return made_id

    def make_name(self, *_: Any) -> str:
        name = f"plan-{next(self._numbers)}"
        self.post("/v1/admin/plans", name=name)
        return name

    def make_cap(self, *_: Any) -> str:
        amount = {"period": "day", "amount_usd": "1"}
        return self.made(CAPS, project_id=self.make_project(), **amount)

    def make_credit(self, *_: Any) -> str:
        return self.made("/v1/admin/credits", org_id=self.org_id, amount_usd="1")

    def make_top_up(self, *_: Any) -> str:
        db, org_id = self.services.system_db, self.org_id

        async def work() -> str | None:
            async with db.begin() as conn:
                return await ask_for_top_up(
                    conn, org_id, amount_pico=PICO_PER_USD, left_pico=0, max_per_day=10_000
                )

        found = self.run(work())
        assert found is not None
        return found

    def make_endpoint(self, *_: Any) -> str:
        url = f"https://hooks{next(self._numbers)}.example/in"
        return self.made("/v1/admin/webhooks", url=url, event_types=["budget.threshold_reached"])

    def make_delivery(self, _: str, found: dict[str, str]) -> str:
        return self.made(f"/v1/admin/webhooks/{found['endpoint_id']}/ping")

    def make_request(self, *_: Any) -> str:
        headers = {"authorization": f"Bearer {self.everything}"}
        body = {"model": "far", "messages": [{"role": "user", "content": "hi"}]}
        url = f"{self.url}/v1/chat/completions"
        answer = self.session.post(url, json=body, headers=headers, timeout=TIMEOUT_S)
        assert answer.ok, answer.text
        return str(answer.headers["x-request-id"])

    def make_response(self, path: str, _: dict[str, str]) -> str:
        runs = {"background": True} if path.endswith("/cancel") else {}
        return self.made("/v1/responses", model="near", input="hi", max_output_tokens=3, **runs)

    def make_conversation(self, *_: Any) -> str:
        return self.made("/v1/conversations", items=[{"role": "user", "content": "hi"}])

    def make_item(self, _: str, found: dict[str, str]) -> str:
        items = [{"role": "user", "content": "hi"}]
        added = self.post(f"/v1/conversations/{found['conversation_id']}/items", items=items)
        return str(added["first_id"])

    def make_model(self, *_: Any) -> str:
        return "far"

    def make_file(self, *_: Any) -> str:
        headers = {"authorization": f"Bearer {self.everything}"}
        answer = self.session.post(
            f"{self.url}/v1/files",
            data={"purpose": "batch"},
            files={"file": ("in.jsonl", b"{}")},
            headers=headers,
            timeout=TIMEOUT_S,
        )
        assert answer.ok, answer.text
        return str(answer.json()["id"])

    def make_batch(self, path: str, found: dict[str, str]) -> str:
        return self.made(
            "/v1/batches",
            input_file_id=self.make_file(),
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )

    def make_message_batch(self, *_: Any) -> str:
        requests = [{"custom_id": "a", "params": {}}]
        return self.made("/v1/messages/batches", requests=requests)

    make_rate_limit = make_model

    def make_replica(self, *_: Any) -> str:
        return "far/0"

    def make_token(self, *_: Any) -> str:
        made = StoredToken(
            id=f"join_{next(self._numbers):016x}",
            model="far",
            uses=1,
            secret_hash="0" * 64,
            created_at=1,
            expires_at=4_000_000_000,
        )
        self.services.join_tokens.keep(made)
        return made.id

    def make_version(self, *_: Any) -> str:
        return self.run(self.new_version()).id

    def make_pin(self, *_: Any) -> str:
        return self.run(self.new_pin())

    def make_evaluation(self, *_: Any) -> str:
        return self.run(self.new_evaluation())

    def make_rollout(self, *_: Any) -> str:
        return self.run(self.new_rollout())

    async def new_version(self) -> RegisteredVersion:
        model = f"model-{next(self._numbers)}"
        async with tenant(self.services.system_db, self.org_id) as conn:
            return await add_version(
                conn,
                model=model,
                served_by=f"{model}-next",
                digests={model: "a", f"{model}-next": "b"},
                operator_org=self.org_id,
                actor=COMMAND_LINE,
            )

    async def new_pin(self) -> str:
        version = await self.new_version()
        async with tenant(self.services.system_db, self.org_id) as conn:
            made = await set_pin(
                conn,
                model=version.model,
                scope="org",
                scope_id=self.org_id,
                version=version.version,
                operator_org=self.org_id,
                actor=COMMAND_LINE,
            )
        return made.id

    async def new_evaluation(self) -> str:
        version = await self.new_version()
        async with tenant(self.services.system_db, self.org_id) as conn:
            made = await add_evaluation(
                conn,
                model=version.model,
                version=version.version,
                suite="golden",
                passed=True,
                evidence="98 %",
                operator_org=self.org_id,
                actor=COMMAND_LINE,
            )
        return made.id

    async def new_rollout(self) -> str:
        version = await self.new_version()
        async with tenant(self.services.system_db, self.org_id) as conn:
            made = await start_rollout(
                conn,
                model=version.model,
                version=version.version,
                steps=(5,),
                least=1,
                watch=0,
                operator_org=self.org_id,
                actor=COMMAND_LINE,
            )
        return made.id

    def make_price_list(self, *_: Any) -> str:
        return "default"

    def make_namespace(self, *_: Any) -> str:
        return "identity"

    def make_kid(self, *_: Any) -> str:
        kid: str = self.services.authority.keys.ring.active.kid
        return kid

    def credential(self, path: str) -> str:
        """The Authorization with which the most is allowed at `path`; after `make`."""
        if path in ("/oauth/token", "/oauth/revoke", "/oauth/introspect"):
            made = self.confidential_client()
            pair = f"{made['id']}:{made['client_secret']}".encode()
            return f"Basic {base64.b64encode(pair).decode()}"
        if path.startswith("/oauth/register/"):
            return f"Bearer {self.registration}"
        return f"Bearer {self.token() if path == USERINFO_PATH else self.everything}"

    def token(self) -> str:
        """An access token of a person."""
        authority, now = self.services.authority, int(time.time())
        claims = AccessClaims(
            iss=self.url,
            sub=self.user_id,
            aud=self.url,
            client_id="app",
            jti=token_id(),
            iat=now,
            exp=now + 600,
            scope=" ".join(sorted(IDENTITY_SCOPES)),
            org_id=self.org_id,
            user_id=self.user_id,
        )
        return rfc9068_access_token.sign(authority.keys.ring, claims)


def link_penny(folder: Path) -> None:
    """Make a folder of penny's files without its `tollgate.json`, which guides calls by grammars:
    the fake engine keeps to none."""
    folder.mkdir(exist_ok=True)
    for file in (ROOT / "models" / "penny").iterdir():
        link = folder / file.name
        if file.name != FILE and not link.exists():
            link.symlink_to(file)


def key_of(made: Credentials | None, beside: Running | None) -> str:
    if beside is not None:
        return beside.everything
    assert made is not None
    return made.admin_key


def secret_of(beside: Running | None) -> dict[str, str]:
    """Return the variables by which a home has the secret key of another one."""
    if beside is None:
        return {}
    return {"TOLLGATE_SECRET_KEY_FILE": str(beside.secret_key_file)}


@contextmanager
def running(
    folder: Path,
    postgres_url: str,
    redis_url: str,
    *,
    core: FakeCore | None = None,
    near: str = "",
    more: str = "",
    beside: Running | None = None,
) -> Iterator[Running]:
    """`core`, `near`: of its engine, and what else the configuration says of its model; `more`: of
    all else. `beside`: the worker of another home on the same database."""
    listener = socket.create_server(("127.0.0.1", 0))
    # asyncio's own loop does not ask for it, as uvloop does: each answer's body waited 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ready, done = threading.Event(), threading.Event()
    found: list[Running] = []
    keys: list[str] = []

    async def live() -> None:
        upstream = Upstream()
        upstream.script = good
        far = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
        config = folder / "tollgate.toml"
        (folder / "book.toml").write_text(BOOK)
        where = f"http://127.0.0.1:{far.sockets[0].getsockname()[1]}/v1"
        link_penny(folder / "penny")
        written = CONFIG.format(folder=folder, upstream=where, near=near)
        config.write_text(written + more + SHOWN)
        engine = EngineServer(core or FakeCore(vocab_size=VOCAB_SIZE), f"unix:{folder}/engine.sock")
        await engine.start()
        environ = {
            "TOLLGATE_DATABASE_URL": postgres_url,
            "TOLLGATE_REDIS_URL": redis_url,
            "TOLLGATE_PUBLIC_URL": f"http://127.0.0.1:{listener.getsockname()[1]}",
        }
        environ |= secret_of(beside)
        settings = load({"home": folder / "home", "config": config}, environ)
        Home(settings.home).create()
        made = await database.prepare(settings, postgres_url, redis_url, settings.issuer)
        keys.append(key_of(made, beside))
        app = create_app(settings)
        config_of_server = uvicorn.Config(app, http=ClientConnection, **SERVER)
        server = uvicorn.Server(config_of_server)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        found.append(Running(app, settings, asyncio.get_running_loop(), upstream))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        ready.set()
        await asyncio.to_thread(done.wait)
        server.should_exit = True
        await serving
        await engine.close()
        far.close()
        for writer in list(upstream.writers):
            writer.transport.abort()
        await far.wait_closed()

    thread = threading.Thread(target=asyncio.run, args=(live(),), name="gateway")
    thread.start()
    try:
        assert ready.wait(TIMEOUT_S)
        found[0].settle(keys[0], beside)
        yield found[0]
    finally:
        done.set()
        if found:
            found[0].session.close()
        thread.join(TIMEOUT_S)
