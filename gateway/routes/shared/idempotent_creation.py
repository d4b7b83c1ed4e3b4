"""Makes one thing that stays (a file, a batch, a conversation) once, also where the request is
repeated (`Idempotency-Key`).

The answers are those of `idempotent_replies`' table. What is made and what is answered stand in one
transaction, so there is no answer to lose; a claim whose worker died made nothing, and is taken
over.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
from litestar import Response
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.db import DATABASE_ERRORS, tenant
from gateway.principal import Principal
from gateway.responses.creation import NOTHING_KEPT
from gateway.routes.shared.access import AuthenticatedRequest, services
from gateway.routes.shared.conditional import etag_of
from gateway.routes.shared.idempotency import REPLAYED, read_key
from gateway.routes.shared.idempotent_replies import claim_once
from gateway.routes.shared.media_types import JSON
from gateway.tenancy.idempotency_keys import Answer, Claim, IdempotencyKeys
from gateway.wire.shared.refusals import unsupported

Make = Callable[[AsyncConnection], Awaitable[msgspec.Struct]]
"""Creates in a transaction of the tenant, and returns what the client is shown."""


class Creation(msgspec.Struct, frozen=True):
    response: Response[bytes]
    is_new: bool
    """Else it is what an earlier request was answered."""


def check_may_stay(principal: Principal, param: str) -> None:
    """Refuse in a project with `zero_retention`, where nothing that is asked stays.

    Raises: BadField.
    """
    if principal.zero_retention:
        raise unsupported(param, NOTHING_KEPT)


async def create_once(request: AuthenticatedRequest, asked: bytes, make: Make) -> Creation:
    """Make it, or return what an earlier request made. `asked`: a digest of all that a repetition
    has in common with the first.

    Raises: RequestInFlight, OtherBody, AnswerLost, KeyUnknown, BadField, and what `make` raises.
    """
    found, org_id = services(request), request.user.org_id
    key = read_key(request.scope["headers"])
    if key is None:
        async with tenant(found.db, org_id) as conn:
            return Creation(to_response(msgspec.json.encode(await make(conn))), is_new=True)
    claim, known = await claim_once(request, key, asked, generates=False)
    if known is not None:
        replayed = {name.decode(): value.decode() for name, value in [REPLAYED]}
        return Creation(to_response(known.body, replayed), is_new=False)
    async with released_on_failure(found.idempotency_keys, claim):
        async with tenant(found.db, org_id) as conn:
            body = msgspec.json.encode(await make(conn))
            kept = Answer(status=200, headers=[], body=body)
            await found.idempotency_keys.keep_within(conn, claim, kept)
    return Creation(to_response(body), is_new=True)


@asynccontextmanager
async def released_on_failure(keys: IdempotencyKeys, claim: Claim) -> AsyncIterator[None]:
    """Let go of a claim if what is done under it fails."""
    try:
        yield
    except BaseException:
        with suppress(*DATABASE_ERRORS):  # its claim ends by itself, where it cannot be let go of
            await keys.let_go(claim)
        raise


def to_response(body: bytes, headers: dict[str, str] | None = None) -> Response[bytes]:
    return Response(body, media_type=JSON, headers={"etag": etag_of(body), **(headers or {})})


def digest_of_parts(*parts: bytes) -> bytes:
    """Return a SHA-256 of all parts, each of which stays one."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()
