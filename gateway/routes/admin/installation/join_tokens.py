"""/v1/admin/join_tokens: what lets engines of other machines join this home. For operators: who may
say that a machine serves a model sees what all tenants ask of it.

Tokens are of the home whose gateway answers, as its replicas are.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Literal

import msgspec
from litestar import Response
from msgspec import Meta

from gateway.audit.log import record
from gateway.fleet.joining.joined_engines import JoinRecord, records_in
from gateway.fleet.joining.tokens import NotJoinable, StoredToken, TooManyTokens
from gateway.routes.shared.access import needs
from gateway.routes.shared.pages import page_of
from gateway.routes.shared.resource import NO_STORE, AdminRequest, AdminResource
from gateway.tenancy.errors import InvalidField, NotFound
from gateway.wire.shared.page_query import PageQuery
from gateway.wire.shared.resource import view_of

TokenState = Literal["open", "used", "expired", "revoked"]


class JoinedEngineView(msgspec.Struct, frozen=True, kw_only=True):
    """`replica`: what it is, or was last; null: it has not served yet. Times are Unix seconds."""

    host: str
    replica: str | None
    joined_at: int
    seen_at: int | None
    """When it became that replica."""


class JoinTokenView(msgspec.Struct, frozen=True, kw_only=True):
    """`state`: whether it lets another engine in. Who joined stays where it expired or is used up,
    not where it was revoked."""

    object: Literal["join_token"] = "join_token"
    id: str
    model: str
    """Empty: those that its cell lends engines of."""
    cell: str
    """The other cell whose engines it lets in; empty: engines of this home."""
    state: TokenState
    uses: int
    created_at: int
    expires_at: int
    revoked_at: int | None
    engines: list[JoinedEngineView]


class JoinTokenWithSecret(JoinTokenView, frozen=True, kw_only=True):
    token: str
    """The content of the file that an engine is given by `--token`."""


class NewJoinToken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`uses`: so many engines may join by it, until it expires. It has one of `model` and `cell`:
    engines of this home, or all those that another cell lends."""

    model: str | None = None
    cell: str | None = None
    uses: Annotated[int, Meta(ge=1, le=1000)] = 1
    expires_in_s: Annotated[int, Meta(ge=60, le=30 * 86_400)] = 3600


class KnownToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token, and who joined by it."""

    token: StoredToken
    engines: list[JoinRecord]


def to_view(known: KnownToken) -> JoinTokenView:
    return view_of(
        JoinTokenView,
        known.token,
        state=state_of(known.token, len(known.engines), time.time()),
        engines=[
            JoinedEngineView(
                host=each.host,
                replica=each.replica or None,
                joined_at=each.joined_at,
                seen_at=each.seen_at or None,
            )
            for each in known.engines
        ],
    )


def state_of(token: StoredToken, num_used: int, now: float) -> TokenState:
    if token.revoked_at is not None:
        return "revoked"
    if now >= token.expires_at:
        return "expired"
    return "used" if num_used >= token.uses else "open"


tokens = AdminResource[KnownToken](
    path="/v1/admin/join_tokens",
    id_name="token_id",
    tag="Fleet",
    read=needs("operator:models"),
    change=needs("operator:models"),
    view=JoinTokenView,
    show=to_view,
    unsteady=("state", "engines"),
    headers=NO_STORE,
)


async def known_tokens(request: AdminRequest) -> dict[str, KnownToken]:
    def read() -> dict[str, KnownToken]:
        kept = request.services.join_tokens
        records = records_in(kept.folder)
        return {
            each.id: KnownToken(
                token=each, engines=[one for one in records if one.token_id == each.id]
            )
            for each in kept.all()
        }

    return await asyncio.to_thread(read)


async def known_token(request: AdminRequest) -> KnownToken:
    """Raises: NotFound."""
    found = (await known_tokens(request)).get(request.id)
    if found is None:
        raise NotFound("token_id", "no such token")
    return found


@tokens.page("The tokens with which engines join, by their ids", PageQuery)
async def list_join_tokens(
    request: AdminRequest, query: PageQuery
) -> tuple[list[KnownToken], bool]:
    found = await known_tokens(request)
    ids, more = page_of(found, query)
    return [found[each] for each in ids], more


@tokens.get("One token")
async def retrieve_join_token(request: AdminRequest) -> KnownToken:
    return await known_token(request)


@tokens.create(
    "Let engines join a model; only this answer shows the token",
    NewJoinToken,
    answer=JoinTokenWithSecret,
)
async def create_join_token(request: AdminRequest, wanted: NewJoinToken) -> Response[bytes]:
    kept = request.services.join_tokens
    bounds = {"uses": wanted.uses, "expires_in_s": wanted.expires_in_s}
    try:
        if wanted.model is not None and wanted.cell is None:
            made, text = kept.draw(wanted.model, **bounds)
        elif wanted.cell is not None and wanted.model is None:
            made, text = kept.draw_for_cell(wanted.cell, **bounds)
        else:
            raise NotJoinable("a token is either for a model or for a cell")
    except NotJoinable as error:
        raise InvalidField(error.field, str(error)) from None
    known = KnownToken(token=made, engines=[])
    shown = to_view(known)
    async with request.transaction() as conn:
        await record(
            conn,
            org_id=request.org_id,
            actor=request.actor,
            action="join_token.created",
            target=made.id,
            after=msgspec.to_builtins(shown),
        )
        try:
            await asyncio.to_thread(kept.keep, made)
        except TooManyTokens as error:
            raise InvalidField("model", str(error)) from None
    values = {name: getattr(shown, name) for name in JoinTokenView.__struct_fields__}
    once = JoinTokenWithSecret(**values, token=text)
    return tokens.respond_once(once, known, status=201)


@tokens.act("/revoke", "A token lets nobody in any more, and who joined by it is turned out")
async def revoke_join_token(request: AdminRequest) -> KnownToken:
    found = await known_token(request)
    request.check(found)
    if found.token.revoked_at is not None:
        return found
    async with request.transaction() as conn:
        await record(
            conn,
            org_id=request.org_id,
            actor=request.actor,
            action="join_token.revoked",
            target=found.token.id,
            before={"revoked": False},
            after={"revoked": True},
        )
    revoked = await asyncio.to_thread(request.services.join_tokens.revoke, found.token)
    return msgspec.structs.replace(found, token=revoked)


routes = [list_join_tokens, retrieve_join_token, create_join_token, revoke_join_token]
