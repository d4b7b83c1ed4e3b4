"""A person with a browser in front of the live application: one worker's whole ASGI app on a real
Postgres and Redis, and httpx with cookies that follows no redirect by itself."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import msgspec
import redis.asyncio
import sqlalchemy as sa
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.app.create import create_app, open_services
from gateway.auth.oauth.authorization import Authorization
from gateway.auth.oauth.clients.metadata import from_document
from gateway.auth.oauth.clients.store import CreatedClient, create_client
from gateway.db import tenant
from gateway.secret import Secret
from gateway.settings.load import load
from gateway.tenancy.member_tables import users
from tests.gateway.auth.conftest import ACTOR, Clock, Tenant

ISSUER = "https://tollgate.example"
CALLBACK = "https://client.example/cb"
VERIFIER = "v" * 43
CHALLENGE = base64.urlsafe_b64encode(hashlib.sha256(VERIFIER.encode()).digest()).decode()[:-1]
PASSWORD = "correct horse battery"
HIDDEN = re.compile(r'<input type="hidden" name="(\w+)"[^>]* value="([^"]*)">')


@asynccontextmanager
async def live_app(
    home: Path,
    postgres_url: str,
    redis_url: str,
    clock: Clock | None,
    upstream: str = "http://127.0.0.1:1/v1",
    **settings: str,
) -> AsyncIterator[Litestar]:
    """clock: None for the wall's."""
    config = home / "tollgate.toml"
    config.write_text(f'[[model]]\nname = "b"\nupstream = "{upstream}"')
    Secret.load_or_create(home / "secret.json")
    flags: dict[str, Any] = {
        "home": home,
        "config": config,
        "secret_key_file": home / "secret.json",
        "database_url": postgres_url,
        "redis_url": redis_url,
        "public_url": ISSUER,
        **settings,
    }
    made = load(flags, {})
    app = create_app(made)
    async with AsyncExitStack() as stack:
        services = await open_services(made, stack, worker_id="0", metrics=None)
        if clock is not None:
            desk = msgspec.structs.replace(services.authorization, clock=clock)
            desk.login._clock = desk.passkeys._clock = clock
            services = msgspec.structs.replace(services, authorization=desk)
        app.state.services = services
        yield app


class SharedApplication(NamedTuple):
    """An application that serves many tests, its time, and what it stands on."""

    app: Litestar
    clock: Clock
    db: AsyncEngine
    tenant_db: AsyncEngine
    system_db: AsyncEngine
    redis: redis.asyncio.Redis


def desk_of(app: Litestar) -> Authorization:
    desk: Authorization = app.state.services.authorization
    return desk


def new_browser(app: Litestar, *, base_url: str = ISSUER, address: str = "192.0.2.7") -> Any:
    transport = httpx.ASGITransport(app=app, client=(address, 1234))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url=base_url)


async def register(
    db: AsyncEngine, app: Litestar, owner: Tenant, *, scopes: tuple[str, ...] = (), **document: Any
) -> CreatedClient:
    metadata = from_document({"client_name": "App", "redirect_uris": [CALLBACK], **document})
    async with tenant(db, owner.org_id) as conn:
        return await create_client(
            conn,
            desk_of(app).clients.peppers,
            metadata=metadata,
            scopes=scopes or ("openid", "inference", "mcp:call", "admin:*"),
            actor=ACTOR,
            org_id=owner.org_id,
        )


def query_of(client_id: str, **more: Any) -> dict[str, Any]:
    """Return the query of a good request; None leaves a parameter out."""
    sent = {
        "response_type": "code",
        "client_id": client_id,
        "redirect_uri": CALLBACK,
        "scope": "openid inference",
        "state": "xyz",
        "code_challenge": CHALLENGE,
        "code_challenge_method": "S256",
        **more,
    }
    return {name: value for name, value in sent.items() if value is not None}


def authorize_url(query: dict[str, Any]) -> str:
    return f"/oauth/authorize?{urlencode(query, doseq=True)}"


def hidden(text: str) -> dict[str, str]:
    return {name: html.unescape(value) for name, value in HIDDEN.findall(text)}


def answer_of(response: httpx.Response) -> dict[str, str]:
    """The query that the client is sent."""
    assert response.status_code == 303, response.text
    found = parse_qs(urlsplit(response.headers["location"]).query, strict_parsing=True)
    assert all(len(values) == 1 for values in found.values())
    return {name: values[0] for name, values in found.items()}


async def sign_in(browser: httpx.AsyncClient, location: str, **fields: str) -> httpx.Response:
    """Fill in the login page at `location`."""
    shown = await browser.get(location)
    assert shown.status_code == 200, shown.text
    form = {"password": PASSWORD, **hidden(shown.text), **fields}
    return await browser.post("/oauth/login", data=form)


async def consent(
    browser: httpx.AsyncClient, shown: httpx.Response, decision: str = "allow"
) -> httpx.Response:
    assert shown.status_code == 200, shown.text
    return await browser.post("/oauth/authorize", data={**hidden(shown.text), "decision": decision})


async def with_password(app: Litestar, db: AsyncEngine, tenant: Tenant) -> Tenant:
    """Let the tenant's user sign in."""
    hashed = await desk_of(app).passwords.hash(PASSWORD)
    async with db.begin() as conn:
        owner = sa.update(users).where(users.c.id == tenant.user_id)
        await conn.execute(owner.values(password_hash=hashed))
    return tenant


async def at_the_account(browser: httpx.AsyncClient, tenant: Tenant) -> httpx.AsyncClient:
    """Sign in."""
    done = await sign_in(browser, "/oauth/login", org=tenant.org_name, email=tenant.email)
    assert done.headers["location"] == "/console"
    return browser
