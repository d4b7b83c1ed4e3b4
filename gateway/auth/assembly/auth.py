"""Opens the services of authentication for one process.

Each service that needs closing is pushed on the caller's stack, in the order of dependence.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

import msgspec
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.auth.bearer.access_tokens import AccessTokens
from gateway.auth.bearer.api_keys import Authenticator
from gateway.auth.bearer.last_used import LastUsed
from gateway.auth.cors_origins import CorsOrigins
from gateway.auth.federation.external_issuers import ExternalIssuers
from gateway.auth.federation.external_login import STATE_PURPOSE, ExternalLogin
from gateway.auth.federation.issuer_directory import IssuerDirectory
from gateway.auth.federation.issuer_keys import IssuerKeys
from gateway.auth.federation.issuers import CIPHER_PURPOSE
from gateway.auth.oauth.authority import Authority
from gateway.auth.oauth.authorization import Authorization, open_authorization
from gateway.auth.oauth.client_authentication import ClientAuthentication
from gateway.auth.oauth.clients.keys import ClientKeys
from gateway.auth.oauth.clients.metadata_documents import ClientDocuments
from gateway.auth.oauth.rfc8414_metadata import INTROSPECTION_PATH, REVOCATION_PATH, TOKEN_PATH
from gateway.auth.oauth.tokens.refresh_tokens import RefreshTokens
from gateway.auth.oauth.tokens.signing_keys import PURPOSE, KeyRing
from gateway.net.egress import MAX_PER_HOST, Egress
from gateway.secret import Cipher, Secret
from gateway.tenancy.keys.keys import PEPPER_PURPOSE


class Federation(msgspec.Struct, frozen=True, kw_only=True):
    """The services for parties that others run: clients with metadata documents, and issuers."""

    client_keys: ClientKeys
    documents: ClientDocuments
    external: ExternalIssuers
    login: ExternalLogin
    secrets: Cipher
    """Encrypts the client secrets that issuers gave us."""
    allow_loopback: bool


class Auth(msgspec.Struct, frozen=True, kw_only=True):
    authenticator: Authenticator
    authority: Authority
    authorization: Authorization
    federation: Federation
    cors_origins: CorsOrigins


async def open_auth(
    stack: AsyncExitStack,
    *,
    issuer: str,
    db: AsyncEngine,
    system_db: AsyncEngine,
    redis: Redis,
    secret: Secret,
    allow_loopback: bool,
) -> Auth:
    """Open all of it. `db` acts for one tenant at a time, `system_db` sees all organizations.

    `allow_loopback`: for development, allow issuers and clients that run on this machine.
    """
    federation = await open_federation(
        public_url=issuer,
        secret=secret,
        db=db,
        system_db=system_db,
        redis=redis,
        stack=stack,
        allow_loopback=allow_loopback,
    )
    authorization = open_authorization(
        stack,
        issuer=issuer,
        db=db,
        system_db=system_db,
        redis=redis,
        secret=secret,
        documents=federation.documents,
        external=federation.login,
    )
    cors_origins = CorsOrigins(system_db)
    stack.push_async_callback(cors_origins.close)
    keys = KeyRing(system_db, Cipher(secret, PURPOSE))
    await keys.start()
    stack.push_async_callback(keys.close)
    tokens = AccessTokens(db=system_db, redis=redis, keys=keys, issuer=issuer)
    await tokens.start()
    stack.push_async_callback(tokens.close)
    authority = Authority(
        issuer=issuer,
        db=system_db,
        redis=redis,
        keys=keys,
        clients=ClientAuthentication(
            authorization.clients,
            db=system_db,
            throttle=authorization.throttle,
            audiences=audiences(issuer),
            fetch=federation.client_keys.fetch,
        ),
        codes=authorization.codes,
        refresh_tokens=RefreshTokens(secret),
        access_tokens=tokens,
        clock=time.time,
    )
    return Auth(
        authenticator=await open_authenticator(
            stack, system_db, redis, secret, tokens, federation.external
        ),
        authority=authority,
        authorization=authorization,
        federation=federation,
        cors_origins=cors_origins,
    )


async def open_federation(
    *,
    public_url: str,
    secret: Secret,
    db: AsyncEngine,
    system_db: AsyncEngine,
    redis: Redis,
    stack: AsyncExitStack,
    allow_loopback: bool,
) -> Federation:
    def open_egress(per_host: int = MAX_PER_HOST) -> Egress:
        egress = Egress(allow_loopback=allow_loopback, per_host=per_host)
        stack.callback(egress.close)
        return egress

    # One client for each kind of host: slow document hosts keep no tenant from its issuer.
    documents = ClientDocuments(open_egress(per_host=1), allow_loopback=allow_loopback)
    stack.push_async_callback(documents.close)
    client_keys = ClientKeys(open_egress(per_host=1))
    stack.push_async_callback(client_keys.close)
    egress = open_egress()
    keys = IssuerKeys(egress)
    stack.push_async_callback(keys.close)
    directory = IssuerDirectory(db=system_db, redis=redis)
    await directory.start()
    stack.push_async_callback(directory.close)

    secrets = Cipher(secret, CIPHER_PURPOSE)
    return Federation(
        client_keys=client_keys,
        documents=documents,
        external=ExternalIssuers(directory=directory, keys=keys, public_url=public_url),
        login=ExternalLogin(
            db=db,
            directory=directory,
            keys=keys,
            egress=egress,
            secrets=secrets,
            states=Cipher(secret, STATE_PURPOSE),
            public_url=public_url,
        ),
        secrets=secrets,
        allow_loopback=allow_loopback,
    )


async def open_authenticator(
    stack: AsyncExitStack,
    db: AsyncEngine,
    redis: Redis,
    secret: Secret,
    tokens: AccessTokens,
    external: ExternalIssuers,
) -> Authenticator:
    last_used = LastUsed(db)
    last_used.start()
    stack.push_async_callback(last_used.close)
    key = secret.current
    authenticator = Authenticator(
        db=db,
        redis=redis,
        pepper=key.derive(PEPPER_PURPOSE),
        pepper_id=key.id,
        older=[(old.id, old.derive(PEPPER_PURPOSE)) for old in secret.keys[1:]],
        tokens=tokens,
        external=external,
        on_use=last_used.note,
    )
    await authenticator.start()
    stack.push_async_callback(authenticator.close)
    return authenticator


def audiences(issuer: str) -> frozenset[str]:
    """Return the valid values of `aud` in a client assertion (RFC 7523, section 3): the issuer, or
    the endpoint that the assertion is sent to."""
    paths = (TOKEN_PATH, REVOCATION_PATH, INTROSPECTION_PATH)
    return frozenset({issuer, *(issuer + path for path in paths)})
