"""Lets people sign in at the bridge's servers: starts and finishes the OAuth flow of a server.

The endpoints are those of the settings; without them they are discovered from the server's URL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import Actor
from gateway.db import tenant
from gateway.mcp.clients import client_fields, is_signed_in_at
from gateway.mcp.credentials import Challenges
from gateway.settings.file import WrittenMcpServer
from gateway.settings.load import Settings
from gateway.settings.mcp_servers import to_audience
from gateway.tenancy.errors import NotFound
from gateway.vault.challenge import Challenge
from gateway.vault.credentials import open_credential
from gateway.vault.discovery import Discovery
from gateway.vault.envelope import Vault
from gateway.vault.issuer_egress import IssuerEgress
from gateway.vault.oauth import Consent, Consents
from gateway.vault.registration import KnownClient, OwnMetadata, Registration
from gateway.vault.sign_in import SignIn
from gateway.vault.token_endpoint import UpstreamClient
from mcp_bridge.upstream.audience import EVERYBODY, Audience
from mcp_bridge.upstream.credentials import CredentialOf, UpstreamOwner

ROOT = "/oauth/upstream"
CALLBACK = ROOT + "/callback"
DOCUMENT = ROOT + "/client"
"""Our metadata document: to issuers that read one, its URL is what we are called."""
MAX_DISCOVERING = 16
"""People for whom a server and its issuer are asked at once, by one worker; others wait."""
TENANTS = "tenant"
"""Marks, in the query of a start, a sign-in for all of the tenant."""


class SignedInAt(msgspec.Struct, frozen=True, kw_only=True):
    """A server that people sign in at. `client`: as the operator wrote it down; else `known` is
    what they registered there, if they did, and the rest is discovered."""

    name: str
    url: str
    credential: CredentialOf
    client: UpstreamClient | None = None
    known: KnownClient | None = None
    audience: Audience = EVERYBODY


class SignIns:
    """The sign-ins of one process. `servers`: those that people sign in at."""

    def __init__(
        self,
        *,
        db: AsyncEngine,
        vault: Vault,
        consents: Consents,
        sign_in: SignIn,
        challenges: Challenges,
        issuer: str,
        servers: Sequence[SignedInAt],
    ) -> None:
        self._db, self._vault, self._consents = db, vault, consents
        self._sign_in, self._challenges, self._issuer = sign_in, challenges, issuer
        self._servers = {each.name: each for each in servers}
        self._turns = asyncio.Semaphore(MAX_DISCOVERING)

    def replace(self, servers: Sequence[SignedInAt]) -> None:
        """Have people sign in at these servers from now on."""
        self._servers = {each.name: each for each in servers}

    def url(self, owner: UpstreamOwner, server: str) -> str | None:
        """Return the URL of the page where a sign-in begins; None: nobody signs in there."""
        at = self._servers.get(server)
        return None if at is None else start_url(self._issuer, server, at.credential, owner)

    def is_for_tenant(self, org_id: str, server: str, wanted: str | None) -> bool:
        """Return whether what begins with `for=wanted` is for all of the tenant. Raises:
        NotFound."""
        return self._at(org_id, server).credential == TENANTS or wanted == TENANTS

    async def start(
        self, server: str, *, org_id: str, user_id: str, for_tenant: bool, browser: str
    ) -> str:
        """Return where to send the browser in which `user_id` is signed in. Raises: NotFound,
        SignInRefused, IssuerUnavailable, CannotOpen."""
        at = self._at(org_id, server)
        owner = UpstreamOwner(org_id, None if for_tenant else user_id)
        begun: dict[str, Any] = {
            "org_id": org_id,
            "user_id": owner.user_id,
            "began": user_id,
            "browser": browser,
        }
        if at.client is not None:
            return self._consents.start(at.client, upstream=server, **begun)
        before, is_refused = await self._before(server, owner)
        challenge = await self._challenge(server, owner, user_id)
        async with self._turns:
            return await self._sign_in.start(
                upstream=server,
                url=at.url,
                challenge=challenge,
                known=at.known,
                before=before,
                is_refused=is_refused,
                **begun,
            )

    def read(self, said: Mapping[str, str], **began: str) -> Consent:
        """Read the parameters of the callback, and return the consent. Raises: SignInRefused."""
        return self._consents.read(said.get("state", ""), **began)

    async def finish(self, consent: Consent, said: Mapping[str, str], actor: Actor) -> None:
        """Raises: NotFound, SignInRefused, IssuerUnavailable, InvalidField."""
        at = self._at(consent.org_id, consent.upstream)
        client = None if consent.client is not None else at.client
        await self._consents.finish(consent, client, said, actor)

    def _at(self, org_id: str, server: str) -> SignedInAt:
        found = self._servers.get(server)
        if found is None or not found.audience.has(org_id, None):
            raise NotFound("server", "nobody signs in at a server of that name")
        return found

    async def _before(
        self, server: str, owner: UpstreamOwner
    ) -> tuple[UpstreamClient | None, bool]:
        """Return our client there when this very credential was given."""
        async with tenant(self._db, owner.org_id) as conn:
            found = await open_credential(
                conn, self._vault, org_id=owner.org_id, upstream=server, user_id=owner.user_id
            )
        if found is None or found.credential.kind != "oauth":
            return None, False
        if found.credential.user_id != owner.user_id:
            return None, False
        is_refused = found.credential.refused_at is not None
        return UpstreamClient.from_values(found.values), is_refused

    async def _challenge(self, server: str, owner: UpstreamOwner, user_id: str) -> Challenge:
        """Return what the server said to them; for who begins for all, what it said to
        themselves."""
        found = await self._challenges.get(owner, server)
        if found == Challenge() and owner.user_id is None:
            return await self._challenges.get(UpstreamOwner(owner.org_id, user_id), server)
        return found


def start_url(issuer: str, server: str, credential: CredentialOf, owner: UpstreamOwner) -> str:
    is_plain = credential == TENANTS or owner.user_id is not None
    return f"{issuer}{ROOT}/{server}/start" + ("" if is_plain else f"?for={TENANTS}")


def open_sign_ins(
    settings: Settings,
    egress: IssuerEgress,
    *,
    db: AsyncEngine,
    vault: Vault,
    consents: Consents,
    challenges: Challenges,
) -> SignIns:
    """Open the sign-ins. Raises: SettingsError, for a secret that the environment does not have."""
    ours = ourselves(settings.issuer)
    discovery = Discovery(egress)
    return SignIns(
        db=db,
        vault=vault,
        consents=consents,
        sign_in=SignIn(discovery, Registration(egress, ours), consents),
        challenges=challenges,
        issuer=settings.issuer,
        servers=signed_in_at(settings),
    )


def signed_in_at(settings: Settings) -> list[SignedInAt]:
    """Return the servers that people sign in at. Raises: SettingsError, for a secret that the
    environment does not have."""
    found = [to_signed_in_at(each) for each in settings.mcp.servers]
    return [each for each in found if each is not None]


def ourselves(issuer: str) -> OwnMetadata:
    """Return our client identity; an issuer that reads documents takes them over https alone."""
    url = issuer + DOCUMENT if issuer.startswith("https:") else None
    return OwnMetadata(redirect_uri=issuer + CALLBACK, document_url=url)


def own_document(issuer: str) -> dict[str, Any] | None:
    """Return our client metadata, at its `client_id`; None: we cannot be known by a URL."""
    ours = ourselves(issuer)
    if ours.document_url is None:
        return None
    return {"client_id": ours.document_url, "client_uri": issuer, **ours.metadata("none")}


def to_signed_in_at(server: WrittenMcpServer) -> SignedInAt | None:
    """Read a server's sign-in settings; None: nobody signs in there. Raises: SettingsError."""
    if server.url is None or not is_signed_in_at(server):
        return None
    at = SignedInAt(
        name=server.name,
        url=server.url,
        credential=server.credential,
        audience=to_audience(server),
    )
    if server.oauth is None:
        return at
    fields = client_fields(server.oauth)
    if server.oauth.token_endpoint is None:
        return msgspec.structs.replace(at, known=KnownClient(**fields))
    return msgspec.structs.replace(at, client=UpstreamClient(**fields))
