"""Opens what one process needs for parties that others run: clients that publish a metadata
document, and external issuers.

What is opened is pushed on the caller's stack, in the order of dependence.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import msgspec
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.auth.encrypted_at_rest import Cipher
from gateway.auth.federation.external_issuers import ExternalIssuers
from gateway.auth.federation.external_login import STATE_PURPOSE, ExternalLogin
from gateway.auth.federation.issuer_directory import IssuerDirectory
from gateway.auth.federation.issuer_keys import IssuerKeys
from gateway.auth.federation.issuers import CIPHER_PURPOSE
from gateway.auth.oauth.clients.keys import ClientKeys
from gateway.auth.oauth.clients.metadata_documents import ClientDocuments
from gateway.net.egress import MAX_PER_HOST, Egress
from gateway.secret import Secret


class Federation(msgspec.Struct, frozen=True, kw_only=True):
    """One per process."""

    client_keys: ClientKeys
    documents: ClientDocuments
    external: ExternalIssuers
    login: ExternalLogin
    secrets: Cipher
    """Of client secrets at issuers."""
    allow_loopback: bool


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
    """`db`: the tenants' pool; `system_db` sees all orgs. allow_loopback: for development."""

    def open_egress(per_host: int = MAX_PER_HOST) -> Egress:
        egress = Egress(allow_loopback=allow_loopback, per_host=per_host)
        stack.callback(egress.close)
        return egress

    # Of each its own: whoever names slow hosts as documents keeps no tenant from its issuer.
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
