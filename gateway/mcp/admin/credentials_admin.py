"""Keeps credentials for MCP servers: a user's own, or the tenant's. Every worker is told of a
change."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import Actor
from gateway.auth.oauth.tokens.signing_keys import KeyRing
from gateway.db import tenant
from gateway.mcp.clients import is_signed_in_at
from gateway.mcp.credentials import Challenges, VaultCredentials
from gateway.mcp.exchanges import Exchanges, exchange_clients, open_exchanges
from gateway.mcp.known import ChangeFeed, announce
from gateway.mcp.sign_ins import CALLBACK, SignIns, open_sign_ins, signed_in_at, start_url
from gateway.net.egress import Egress
from gateway.secret import Cipher, Secret
from gateway.settings.load import Settings
from gateway.settings.mcp_servers import issuer_hosts_of, to_audience
from gateway.tenancy.errors import NotFound
from gateway.vault.credentials import (
    UpstreamCredential,
    delete_credential,
    find_credential,
    put_credential,
)
from gateway.vault.envelope import Vault
from gateway.vault.issuer_egress import IssuerEgress
from gateway.vault.oauth import STATE_PURPOSE, Consents, UpstreamTokens
from gateway.vault.token_endpoint import TokenEndpoint
from mcp_bridge.upstream.audience import Audience
from mcp_bridge.upstream.credentials import UpstreamOwner


class UpstreamVault:
    """The operations of whoever keeps credentials. `shown`: what the bridge asks. `sign_ins`: how
    people let us in. `servers`: those that are shown a credential, and whom they are there for."""

    def __init__(
        self,
        *,
        db: AsyncEngine,
        redis: Redis,
        vault: Vault,
        shown: VaultCredentials,
        sign_ins: SignIns,
        exchanges: Exchanges,
        egress: IssuerEgress,
        servers: Mapping[str, Audience],
    ) -> None:
        self.shown, self.sign_ins, self._servers = shown, sign_ins, servers
        self._exchanges, self._egress = exchanges, egress
        self._hosts: Mapping[str, object] = {}
        """The hosts that issuers may be at, by server; as they were replaced last."""
        self._db, self._redis, self._vault = db, redis, vault

    def prepare(self, settings: Settings) -> Callable[[], None]:
        """Return what takes up the servers of other settings, at once. Raises: SettingsError, for a
        secret that the environment does not have."""
        signed_in, clients = signed_in_at(settings), exchange_clients(settings)
        servers = shown_servers(settings)
        found = {each.name: issuer_hosts_of(each) for each in settings.mcp.servers}
        hosts = {name: near for name, near in found.items() if near}

        def swap() -> None:
            self._servers = servers
            self.sign_ins.replace(signed_in)
            self._exchanges.replace(clients)
            if hosts != self._hosts:
                self._hosts = hosts
                self._egress.replace(issuer_clients(settings))

        return swap

    def _check(self, name: str, org_id: str, project_id: str | None) -> None:
        """Raises: NotFound."""
        audience = self._servers.get(name)
        if audience is None or not audience.has(org_id, project_id):
            raise NotFound("server", "no server of that name is shown a credential")

    async def find(
        self, org_id: str, server: str, user_id: str | None, *, project_id: str | None = None
    ) -> UpstreamCredential:
        """Return the credential of exactly that owner. `project_id`: of who asks; None: they see
        all of the organization. Raises: NotFound."""
        self._check(server, org_id, project_id)
        async with tenant(self._db, org_id) as conn:
            found = await find_credential(conn, org_id=org_id, upstream=server, user_id=user_id)
        if found is None or found.user_id != user_id:
            raise NotFound("server", "no credential is kept for it")
        return found

    async def put(
        self,
        org_id: str,
        server: str,
        user_id: str | None,
        values: Mapping[str, str],
        actor: Actor,
        *,
        project_id: str | None = None,
    ) -> UpstreamCredential:
        """Raises: NotFound, InvalidField, NameTaken, ChangeNotAnnounced."""
        self._check(server, org_id, project_id)
        async with tenant(self._db, org_id) as conn:
            kept = await put_credential(
                conn,
                self._vault,
                org_id=org_id,
                upstream=server,
                user_id=user_id,
                values=values,
                actor=actor,
            )
        await announce(self._redis, org_id)
        return kept

    async def delete(
        self,
        org_id: str,
        server: str,
        user_id: str | None,
        actor: Actor,
        *,
        project_id: str | None = None,
    ) -> UpstreamCredential:
        """Raises: NotFound, ChangeNotAnnounced."""
        found = await self.find(org_id, server, user_id, project_id=project_id)
        async with tenant(self._db, org_id) as conn:
            gone = await delete_credential(conn, org_id=org_id, credential_id=found.id, actor=actor)
        await announce(self._redis, org_id)
        return gone

    async def told(self, org_id: str) -> None:
        """Forget what is known of an organization after a consent. Raises: ChangeNotAnnounced."""
        await announce(self._redis, org_id)


def open_egress(settings: Settings) -> IssuerEgress:
    """Open the client that asks issuers; the caller closes it."""
    everybodys = Egress(allow_loopback=settings.egress_to_loopback)
    return IssuerEgress(everybodys, issuer_clients(settings))


def issuer_clients(settings: Settings) -> dict[str, Egress]:
    """Return the clients for issuers that lie where the operator says, by server."""
    loopback = settings.egress_to_loopback
    found = {each.name: issuer_hosts_of(each) for each in settings.mcp.servers}
    return {
        name: Egress(allow_loopback=loopback, near=near) for name, near in found.items() if near
    }


def shown_servers(settings: Settings) -> dict[str, Audience]:
    """Return whom the servers are there for that are shown a credential, by server."""
    servers = settings.mcp.servers
    return {each.name: to_audience(each) for each in servers if each.credential != "none"}


@asynccontextmanager
async def vault_credentials(
    settings: Settings, secret: Secret, db: AsyncEngine, redis: Redis
) -> AsyncIterator[VaultCredentials]:
    """Give a command what a worker shows servers, for as long as the command takes."""
    servers = {each.name: each for each in settings.mcp.servers}

    def sign_in_url(owner: UpstreamOwner, server: str) -> str | None:
        at = servers[server]
        if not is_signed_in_at(at):
            return None
        return start_url(settings.issuer, server, at.credential, owner)

    egress = open_egress(settings)
    vault = Vault(secret)
    tokens = UpstreamTokens(db=db, vault=vault, endpoint=TokenEndpoint(egress))
    try:
        yield VaultCredentials(
            db=db,
            vault=vault,
            tokens=tokens,
            challenges=Challenges(redis),
            sign_in_url=sign_in_url,
        )
    finally:
        await tokens.close()
        egress.close()


async def open_vault(
    settings: Settings,
    stack: AsyncExitStack,
    secret: Secret,
    db: AsyncEngine,
    redis: Redis,
    keys: KeyRing,
) -> UpstreamVault:
    """Open the vault; it is closed with `stack`, after the bridge. `keys`: sign statements about
    who calls."""
    feed = ChangeFeed(redis)
    await feed.start()
    stack.push_async_callback(feed.close)
    egress = open_egress(settings)
    stack.callback(egress.close)
    vault, endpoint = Vault(secret), TokenEndpoint(egress)
    tokens = UpstreamTokens(db=db, vault=vault, endpoint=endpoint)
    stack.push_async_callback(tokens.close)
    challenges = Challenges(redis)
    sign_ins = open_sign_ins(
        settings,
        egress,
        db=db,
        vault=vault,
        challenges=challenges,
        consents=Consents(
            db=db,
            vault=vault,
            endpoint=endpoint,
            states=Cipher(secret, STATE_PURPOSE),
            redirect_uri=settings.issuer + CALLBACK,
        ),
    )
    exchanges = open_exchanges(settings, db=db, tokens=tokens, keys=keys)
    shown = VaultCredentials(
        db=db,
        vault=vault,
        tokens=tokens,
        challenges=challenges,
        sign_in_url=sign_ins.url,
        exchanges=exchanges,
    )
    feed.forgetting.append(shown.forget)
    return UpstreamVault(
        db=db,
        redis=redis,
        vault=vault,
        shown=shown,
        sign_ins=sign_ins,
        exchanges=exchanges,
        egress=egress,
        servers=shown_servers(settings),
    )
