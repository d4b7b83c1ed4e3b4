"""Opens the services of authentication for one process.

Each service that needs closing is pushed on the stack of the resources, in the order of dependence.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial

import msgspec

from gateway.auth.bearer.access_tokens import AccessTokens
from gateway.auth.bearer.api_keys import Authenticator
from gateway.auth.bearer.last_used import LastUsed
from gateway.auth.cors_origins import CorsOrigins
from gateway.auth.federation.external_issuers import ExternalIssuers
from gateway.auth.federation.external_login import STATE_PURPOSE, ExternalLogin
from gateway.auth.federation.issuer_directory import IssuerDirectory
from gateway.auth.federation.issuer_keys import IssuerKeys
from gateway.auth.federation.issuers import CIPHER_PURPOSE
from gateway.auth.login.login import Login
from gateway.auth.login.passkeys import Passkeys
from gateway.auth.login.passwords import Passwords
from gateway.auth.login.sessions import SESSION_PEPPER_PURPOSE, Seals
from gateway.auth.login.throttle import Throttle
from gateway.auth.oauth.authority import Authority
from gateway.auth.oauth.authorization import Authorization
from gateway.auth.oauth.client_authentication import ClientAuthentication
from gateway.auth.oauth.clients.metadata_documents import ClientDocuments
from gateway.auth.oauth.clients.store import SECRET_PEPPER_PURPOSE, Clients
from gateway.auth.oauth.rfc7523_assertion import ClientKeys
from gateway.auth.oauth.rfc8414_metadata import INTROSPECTION_PATH, REVOCATION_PATH, TOKEN_PATH
from gateway.auth.oauth.tokens.grants import CODE_PEPPER_PURPOSE
from gateway.auth.oauth.tokens.refresh_tokens import RefreshTokens
from gateway.auth.oauth.tokens.signing_keys import PURPOSE, KeyRing
from gateway.net.egress import MAX_PER_HOST, Egress
from gateway.secret import Cipher, Peppers
from gateway.tenancy.keys.keys import PEPPER_PURPOSE
from gateway.worker.resources import Resources


class Federation(msgspec.Struct, frozen=True, kw_only=True):
    """The services for parties that others run: clients with metadata documents, and issuers."""

    client_keys: ClientKeys
    documents: ClientDocuments
    external: ExternalIssuers
    login: ExternalLogin
    secrets: Cipher
    """Encrypts the client secrets that issuers gave us."""
    named_urls: Egress
    """Checks the URLs that are registered; it holds up nobody's fetches."""
    allow_loopback: bool


class Auth(msgspec.Struct, frozen=True, kw_only=True):
    authenticator: Authenticator
    authority: Authority
    authorization: Authorization
    federation: Federation
    cors_origins: CorsOrigins


async def open_auth(resources: Resources, *, issuer: str, allow_loopback: bool) -> Auth:
    """Open all of it. `allow_loopback`: for development, allow issuers and clients that run on this
    machine."""
    stack, system_db, redis = resources.stack, resources.system_db, resources.redis
    federation = await open_federation(resources, issuer, allow_loopback=allow_loopback)
    authorization = open_authorization(resources, issuer, federation)
    cors_origins = CorsOrigins(system_db)
    stack.push_async_callback(cors_origins.close)
    listener = resources.listener
    keys = KeyRing(system_db, Cipher(resources.secret, PURPOSE), listener=listener)
    await keys.start()
    stack.push_async_callback(keys.close)
    tokens = AccessTokens(db=system_db, redis=redis, keys=keys, issuer=issuer, listener=listener)
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
        refresh_tokens=RefreshTokens(resources.secret),
        access_tokens=tokens,
        clock=time.time,
    )
    return Auth(
        authenticator=await open_authenticator(resources, tokens, federation.external),
        authority=authority,
        authorization=authorization,
        federation=federation,
        cors_origins=cors_origins,
    )


async def open_federation(
    resources: Resources, public_url: str, *, allow_loopback: bool
) -> Federation:
    stack, secret = resources.stack, resources.secret

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
    directory = IssuerDirectory(db=resources.system_db, redis=resources.redis)
    await directory.start()
    stack.push_async_callback(directory.close)

    secrets = Cipher(secret, CIPHER_PURPOSE)
    return Federation(
        client_keys=client_keys,
        documents=documents,
        external=ExternalIssuers(directory=directory, keys=keys, public_url=public_url),
        login=ExternalLogin(
            db=resources.db,
            directory=directory,
            keys=keys,
            egress=egress,
            secrets=secrets,
            states=Cipher(secret, STATE_PURPOSE),
            public_url=public_url,
        ),
        secrets=secrets,
        named_urls=open_egress(),
        allow_loopback=allow_loopback,
    )


def open_authorization(resources: Resources, issuer: str, federation: Federation) -> Authorization:
    secret, clock = resources.secret, partial(datetime.now, UTC)
    passwords, seals, throttle = Passwords(), Seals(secret), Throttle(resources.redis)
    resources.stack.callback(passwords.close)
    sessions = Peppers(secret, SESSION_PEPPER_PURPOSE)
    pools = {"db": resources.db, "system_db": resources.system_db}
    login = Login(
        **pools,
        passwords=passwords,
        throttle=throttle,
        sessions=sessions,
        seals=seals,
        clock=clock,
    )
    return Authorization(
        **pools,
        issuer=issuer,
        redis=resources.redis,
        secret=secret,
        clients=Clients(
            db=resources.system_db,
            peppers=Peppers(secret, SECRET_PEPPER_PURPOSE),
            fetch=federation.documents.find_client,
        ),
        codes=Peppers(secret, CODE_PEPPER_PURPOSE),
        sessions=sessions,
        seals=seals,
        passwords=passwords,
        throttle=throttle,
        login=login,
        external=federation.login,
        passkeys=Passkeys(
            **pools,
            redis=resources.redis,
            seals=seals,
            login=login,
            public_url=issuer,
            clock=clock,
        ),
        clock=clock,
    )


async def open_authenticator(
    resources: Resources, tokens: AccessTokens, external: ExternalIssuers
) -> Authenticator:
    last_used = LastUsed(resources.system_db)
    last_used.start()
    resources.stack.push_async_callback(last_used.close)
    current, *older = resources.secret.keys
    authenticator = Authenticator(
        db=resources.system_db,
        redis=resources.redis,
        pepper=current.derive(PEPPER_PURPOSE),
        pepper_id=current.id,
        older=[(key.id, key.derive(PEPPER_PURPOSE)) for key in older],
        tokens=tokens,
        external=external,
        on_use=last_used.note,
    )
    await authenticator.start()
    resources.stack.push_async_callback(authenticator.close)
    return authenticator


def audiences(issuer: str) -> frozenset[str]:
    """Return the valid values of `aud` in a client assertion (RFC 7523, section 3): the issuer, or
    the endpoint that the assertion is sent to."""
    paths = (TOKEN_PATH, REVOCATION_PATH, INTROSPECTION_PATH)
    return frozenset({issuer, *(issuer + path for path in paths)})
