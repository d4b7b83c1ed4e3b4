"""An authorization server over a real Postgres and Redis, with an org, a user and clients, and a
clock that a test moves; and a client that does what clients do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE, Actor
from gateway.auth.assembly.auth import audiences
from gateway.auth.bearer.access_tokens import AccessTokens
from gateway.auth.login.throttle import Throttle
from gateway.auth.oauth import rfc6749_token
from gateway.auth.oauth.authority import Authority
from gateway.auth.oauth.client_authentication import ClientAuthentication
from gateway.auth.oauth.clients.metadata import ClientMetadata
from gateway.auth.oauth.clients.store import SECRET_PEPPER_PURPOSE, Client, Clients, create_client
from gateway.auth.oauth.form import Form
from gateway.auth.oauth.rfc6749_errors import OAuthError
from gateway.auth.oauth.rfc6749_token import TokenRequest
from gateway.auth.oauth.tokens.grants import CODE_PEPPER_PURPOSE, Grant, create_grant, issue_code
from gateway.auth.oauth.tokens.refresh_tokens import RefreshTokens
from gateway.auth.oauth.tokens.rfc9068_access_token import AccessClaims
from gateway.auth.oauth.tokens.signing_keys import PURPOSE, KeyRing
from gateway.ids import uuid7
from gateway.principal import Principal
from gateway.secret import Cipher, Peppers
from gateway.tenancy.member_tables import service_accounts, users
from gateway.tenancy.orgs import create_org
from gateway.tenancy.projects import create_project
from tests.gateway.a_secret import a_secret
from tests.gateway.auth.parts import ISSUER, Clock

REDIRECT = "https://app.example.com/callback"
VERIFIER = "v" * 43
CODES = ("authorization_code", "refresh_token")
EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"
SCOPES = ("inference", "mcp:call", "openid", "email", "profile", "usage:read")
ACTOR = Actor(kind="system", id="test")
SECRET = a_secret("one")


class World:
    def __init__(
        self, db: AsyncEngine, redis: Redis, clock: Clock, keys: KeyRing, tokens: AccessTokens
    ) -> None:
        self.db, self.redis, self.clock, self.keys, self.tokens = db, redis, clock, keys, tokens
        self.peppers = Peppers(SECRET, SECRET_PEPPER_PURPOSE)
        self.clients = Clients(db=db, peppers=self.peppers)
        self.authority = Authority(
            issuer=ISSUER,
            db=db,
            redis=redis,
            keys=keys,
            clients=ClientAuthentication(
                self.clients,
                db=db,
                throttle=Throttle(redis),
                audiences=audiences(ISSUER),
                clock=clock,
                monotonic=clock,
            ),
            codes=Peppers(SECRET, CODE_PEPPER_PURPOSE),
            refresh_tokens=RefreshTokens(SECRET),
            access_tokens=tokens,
            clock=clock,
        )

    async def settle(self, name: str = "acme") -> None:
        """An org with a project, a user and a service account."""
        async with self.db.begin() as conn:
            org = await create_org(conn, name=name, actor=COMMAND_LINE)
            project = await create_project(conn, org_id=org.id, name="web", actor=COMMAND_LINE)
            self.org_id, self.project_id = org.id, project.id
            self.user_id = await self.add_user(conn, "developer", f"ann@{name}.example")
            self.account_id = f"svc_acct_{uuid7().hex}"
            await conn.execute(
                sa.insert(service_accounts).values(
                    id=self.account_id,
                    org_id=org.id,
                    project_id=project.id,
                    name="robot",
                    role="developer",
                    project_role="member",
                )
            )

    async def add_user(self, conn: Any, role: str, email: str) -> str:
        user_id = f"user_{uuid7().hex}"
        await conn.execute(
            sa.insert(users).values(
                id=user_id, org_id=self.org_id, email=email, name="Ann", role=role
            )
        )
        return user_id

    async def client(
        self,
        *,
        method: str = "client_secret_basic",
        grants: Sequence[str] = CODES,
        scopes: Sequence[str] = SCOPES,
        **more: Any,
    ) -> tuple[Client, str | None]:
        """A client of the org and its secret."""
        described = {
            name: more.pop(name) for name in ("jwks", "dpop_bound_access_tokens") if name in more
        }
        metadata = ClientMetadata(
            client_name="app",
            redirect_uris=[REDIRECT],
            token_endpoint_auth_method=method,  # type: ignore[arg-type]
            grant_types=list(grants),
            **described,
        )
        more.setdefault("org_id", self.org_id)
        more.setdefault("project_id", self.project_id)
        async with self.db.begin() as conn:
            made = await create_client(
                conn, self.peppers, metadata=metadata, scopes=scopes, actor=ACTOR, **more
            )
        return made.client, made.client_secret

    async def code(
        self,
        client: Client,
        *,
        scopes: Sequence[str] = ("inference",),
        resources: Sequence[str] = (),
        nonce: str | None = None,
        dpop_jkt: str | None = None,
    ) -> tuple[str, Grant]:
        """Return the code that the authorization endpoint gives, and its grant."""
        now = datetime.fromtimestamp(self.clock(), UTC)
        async with self.db.begin() as conn:
            grant = await create_grant(
                conn,
                org_id=self.org_id,
                user_id=self.user_id,
                client_id=client.id,
                project_id=self.project_id,
                resources=resources,
                scopes=scopes,
                actor=ACTOR,
            )
            code = await issue_code(
                conn,
                self.authority.codes,
                grant=grant,
                redirect_uri=REDIRECT,
                code_challenge=create_s256_code_challenge(VERIFIER),
                nonce=nonce,
                auth_time=now,
                amr=["pwd"],
                dpop_jkt=dpop_jkt,
                now=now,
            )
        return code, grant

    async def ask(self, client: Client, *, jkt: str | None = None, **sent: Any) -> bytes:
        """The token endpoint's body, behind client authentication. Raises: OAuthError."""
        repeated = {
            name: [value] if isinstance(value, str) else list(value)
            for name in ("resource", "audience")
            if (value := sent.pop(name, None)) is not None
        }
        actor = Actor(kind="client", id=client.id)
        request = TokenRequest(form=Form(sent, repeated), client=client, jkt=jkt, actor=actor)
        return await rfc6749_token.respond(self.authority, request)

    async def tokens_of(self, client: Client, **sent: Any) -> dict[str, Any]:
        answer: dict[str, Any] = msgspec.json.decode(await self.ask(client, **sent))
        return answer

    async def redeem(self, client: Client, code: str, **more: Any) -> dict[str, Any]:
        sent = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": REDIRECT,
            "code_verifier": VERIFIER,
            **more,
        }
        return await self.tokens_of(client, **sent)

    async def refresh(self, client: Client, token: str, **more: Any) -> dict[str, Any]:
        return await self.tokens_of(client, grant_type="refresh_token", refresh_token=token, **more)

    async def login(self, client: Client, **more: Any) -> dict[str, Any]:
        code, _ = await self.code(client, **more)
        return await self.redeem(client, code)

    async def claims(self, token: str) -> AccessClaims:
        """Return the claims of a token that is good now. Raises: InvalidToken."""
        return await self.tokens.verify(token)

    async def principal(self, token: str, **more: Any) -> Principal:
        return await self.tokens.authenticate(token, feed_as_of=self.tokens._clock(), **more)


async def error_of(work: Any) -> str:
    """The RFC's code that `work` is refused with."""
    try:
        await work
    except OAuthError as error:
        return error.error
    raise AssertionError("it was not refused")


@asynccontextmanager
async def open_world(db: AsyncEngine, redis: Redis) -> AsyncIterator[World]:
    clock = Clock()
    keys = KeyRing(db, Cipher(SECRET, PURPOSE), clock=clock)
    tokens = AccessTokens(db=db, redis=redis, keys=keys, issuer=ISSUER, wall_clock=clock)
    await asyncio.gather(keys.start(), tokens.start())
    world = World(db, redis, clock, keys, tokens)
    await world.settle()
    yield world
    await tokens.close()
    await keys.close()
