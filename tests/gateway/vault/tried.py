"""Lists what `test_tenant_methods` tries of the vault: its methods, with the ids of Alice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE
from gateway.auth.oauth.tokens.signing_keys import KeyRing
from gateway.mcp.admin.credentials_admin import UpstreamVault
from gateway.mcp.credentials import Challenges, VaultCredentials
from gateway.mcp.exchanges import Exchanges
from gateway.mcp.sign_ins import SignedInAt, SignIns
from gateway.net.egress import Egress
from gateway.secret import Cipher
from gateway.vault.discovery import Discovery
from gateway.vault.envelope import Vault
from gateway.vault.errors import CannotOpen, ConsentNeeded, IssuerUnavailable, NoCredential
from gateway.vault.issuer_egress import IssuerEgress
from gateway.vault.oauth import STATE_PURPOSE, Consents, UpstreamTokens
from gateway.vault.registration import OwnMetadata, Registration
from gateway.vault.sign_in import SignIn
from gateway.vault.token_endpoint import TokenEndpoint, UpstreamClient
from mcp_bridge.upstream.audience import EVERYBODY
from mcp_bridge.upstream.credentials import NO_CREDENTIAL, UpstreamOwner
from mcp_bridge.upstream.transport import NotSent
from tests.gateway.a_secret import a_secret
from tests.gateway.walls.two_tenants import id_of


class Stage(Protocol):
    pool: AsyncEngine
    redis: Redis
    org: str


async def find_token(stage: Stage) -> Any:
    """Find Alice's token: whoever finds it finds that it is sealed under no secret of ours."""
    egress = Egress()
    tokens = UpstreamTokens(
        db=stage.pool, vault=Vault(a_secret("one")), endpoint=TokenEndpoint(IssuerEgress(egress))
    )
    try:
        return await tokens.access_token(
            org_id=stage.org,
            upstream=id_of("upstream_credentials", "upstream"),
            user_id=id_of("users"),
        )
    except CannotOpen:
        return "found"
    except NoCredential:
        return None
    finally:
        egress.close()


async def find_shown(stage: Stage) -> Any:
    """As `find_token`, of what a server is shown."""
    egress, vault = Egress(), Vault(a_secret("one"))
    credentials = VaultCredentials(
        db=stage.pool,
        vault=vault,
        tokens=UpstreamTokens(
            db=stage.pool, vault=vault, endpoint=TokenEndpoint(IssuerEgress(egress))
        ),
        challenges=Challenges(Redis()),  # asked for nothing here
    )
    whose = UpstreamOwner(stage.org, id_of("users"))
    try:
        found = await credentials.of(whose, id_of("upstream_credentials", "upstream"))
    except NotSent as error:
        return error.reason if error.reason == CannotOpen.code else None
    finally:
        egress.close()
    return None if found is NO_CREDENTIAL else found


def sign_ins(stage: Stage, egress: Egress, servers: Sequence[SignedInAt]) -> SignIns:
    vault, ours = (
        Vault(a_secret("one")),
        OwnMetadata(redirect_uri="https://gateway.example/callback"),
    )
    consents = Consents(
        db=stage.pool,
        vault=vault,
        endpoint=TokenEndpoint(IssuerEgress(egress)),
        states=Cipher(a_secret("one"), STATE_PURPOSE),
        redirect_uri=ours.redirect_uri,
    )
    return SignIns(
        db=stage.pool,
        vault=vault,
        consents=consents,
        sign_in=SignIn(
            Discovery(IssuerEgress(egress)), Registration(IssuerEgress(egress), ours), consents
        ),
        challenges=Challenges(stage.redis),
        issuer="https://gateway.example",
        servers=servers,
    )


async def find_before(stage: Stage) -> Any:
    """As `find_token`, of what we were when somebody signed in before."""
    egress, upstream = Egress(), id_of("upstream_credentials", "upstream")
    at = SignedInAt(name=upstream, url="https://127.0.0.1:1/mcp", credential="user")
    try:
        return await sign_ins(stage, egress, [at]).start(
            upstream, org_id=stage.org, user_id=id_of("users"), for_tenant=False, browser="cookie"
        )
    except CannotOpen:
        return "found"
    except IssuerUnavailable:
        return None
    finally:
        egress.close()


def exchanges(stage: Stage, egress: Egress) -> Exchanges:
    return Exchanges(
        db=stage.pool,
        tokens=UpstreamTokens(
            db=stage.pool,
            vault=Vault(a_secret("one")),
            endpoint=TokenEndpoint(IssuerEgress(egress)),
        ),
        keys=KeyRing(stage.pool, Cipher(a_secret("one"), "test")),
        issuer="https://gateway.example",
        clients={"up": UpstreamClient(token_endpoint="https://127.0.0.1:1/t", client_id="us")},
    )


async def vouch(stage: Stage) -> Any:
    """Nothing can be signed here: whoever gets so far has found Alice's user."""
    egress = Egress()
    try:
        return await exchanges(stage, egress).token(stage.org, id_of("users"), "up", None)
    except IssuerUnavailable as error:
        return "can be signed" in error.message
    except ConsentNeeded:
        return None
    finally:
        egress.close()


@asynccontextmanager
async def upstream_vault(stage: Stage) -> AsyncIterator[UpstreamVault]:
    egress, vault, redis = Egress(), Vault(a_secret("one")), stage.redis
    upstream, endpoint = (
        id_of("upstream_credentials", "upstream"),
        TokenEndpoint(IssuerEgress(egress)),
    )
    tokens = UpstreamTokens(db=stage.pool, vault=vault, endpoint=endpoint)
    try:
        yield UpstreamVault(
            db=stage.pool,
            redis=redis,
            vault=vault,
            shown=VaultCredentials(
                db=stage.pool, vault=vault, tokens=tokens, challenges=Challenges(redis)
            ),
            sign_ins=sign_ins(stage, egress, []),
            exchanges=exchanges(stage, egress),
            egress=IssuerEgress(egress),
            servers={upstream: EVERYBODY},
        )
    finally:
        egress.close()


async def find_kept(stage: Stage) -> Any:
    async with upstream_vault(stage) as found:
        upstream = id_of("upstream_credentials", "upstream")
        return await found.find(stage.org, upstream, None)


async def delete_kept(stage: Stage) -> Any:
    async with upstream_vault(stage) as found:
        upstream = id_of("upstream_credentials", "upstream")
        return await found.delete(stage.org, upstream, None, COMMAND_LINE)


async def put_kept(stage: Stage) -> bool:
    """Whether it stands in the place of another one."""
    async with upstream_vault(stage) as found:
        upstream = id_of("upstream_credentials", "upstream")
        kept = await found.put(stage.org, upstream, None, {"A": "b"}, COMMAND_LINE)
        return kept.version > 1
