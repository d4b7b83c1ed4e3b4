"""Does once what is asked for again under the same `Idempotency-Key`; without the header nothing of
this is there.

Administration: each POST below `/v1/organization` and `/v1/admin` honours the header, and authors
of routes have nothing to do, provided that its change and its audit entry stand in one transaction
(`audit.log.record` with `actor_of(request)`, which carries the request's id and its claim).

| the key was                                            | answer                               |
|--------------------------------------------------------|--------------------------------------|
| new                                                    | carried out, and kept for 24 hours   |
| this request's, which has ended                        | the same, with `idempotent-replayed` |
| this request's, which has not                          | 409 `idempotency_in_flight`          |
| another request's (method, path, query or body differ) | 422 `idempotency_key_reused`         |
| this request's, changed something, its worker died     | 409 `idempotency_answer_lost`        |

Keys belong to a credential and whom it acts for. A request that failed and changed nothing lets go
of its key. The answer is kept before it is sent.

A generation (`reply_once`) is answered as before, billed once.

| the key was                                            | answer                               |
|--------------------------------------------------------|--------------------------------------|
| new                                                    | generated, and kept for 24 hours     |
| this request's, which has ended                        | the same, with `idempotent-replayed` |
| this request's, which has not                          | 409 `idempotency_in_flight`          |
| another request's (path, query or body differ)         | 400 `idempotency_key_reused`         |
| this request's, and its gateway died                   | generated anew; what the first was   |
|                                                        | billed is taken back (`superseded`)  |
| this request's, billed, and too long to be kept, or    | 409 `idempotency_answer_lost`        |
| of a project that keeps nothing                        |                                      |

It is claimed once the request is understood, before anything is reserved. Who leaves does not end
it: that is whom the answer is kept for. What is one body is kept before it is sent, a stream before
its end is. An answer that failed and was billed nothing lets go of its key.

One thing that stays (`create_once`: a file, a batch, a conversation) is answered by the second
table, too. What is made and what is answered stand in one transaction, so there is no answer to
lose; a claim whose worker died made nothing, and is taken over.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from copy import copy
from typing import Any, cast

import msgspec
from litestar import Request, Response
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from foundation.periodic import Periodic
from gateway.db import DATABASE_ERRORS, tenant
from gateway.http_errors.table import unavailable
from gateway.inference.calls import RequestContext
from gateway.principal import Principal
from gateway.request_errors import (
    AnswerLost,
    AnswerNotKept,
    BadField,
    KeyUnknown,
    OtherBody,
    OtherRequest,
)
from gateway.responses.creation import NOTHING_KEPT
from gateway.routes.shared.access import AuthenticatedRequest, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.conditional import etag_of
from gateway.routes.shared.media_types import JSON
from gateway.routes.shared.problem import encode_error
from gateway.routes.shared.reply import ON_LEAVE, WRITE, Reply
from gateway.routes.shared.request_state import REQUEST_ID
from gateway.routes.shared.services import Services
from gateway.tenancy.changes import EVERYTHING, announce
from gateway.tenancy.idempotency_keys import (
    ALIVE_S,
    CLAIM,
    HANDLER_TIMEOUT_S,
    Answer,
    Claim,
    IdempotencyKeys,
)
from gateway.wire.shared.refusals import unsupported

log = logging.getLogger(__name__)

HEADER = "Idempotency-Key"
HEADER_NAME = HEADER.lower().encode()
REPLAYED = (b"idempotent-replayed", b"true")
KEY_FORM = re.compile(r"[\x21-\x7e]{1,255}", re.ASCII)
PREFIXES = ("/v1/organization/", "/v1/admin/")
UNANNOUNCED = 503
"""The status kept for a change that was committed but not announced to all workers. A repeated
request announces the change and does not make it again."""
CHANGED_PER_REQUEST = (b"content-length", b"date")
MAX_KEPT_BYTES = 4 * 1024 * 1024
"""An answer larger than this is not kept."""
RENEW_S = ALIVE_S / 4
OVER_TIMEOUT_S = 10.0
"""A failed answer may take this long to be aborted and billed. If it takes longer, its key stays
claimed; once the claim ends, the answer is generated anew and the bill of the first is taken back.
"""
Make = Callable[[AsyncConnection], Awaitable[msgspec.Struct]]
"""Creates in a transaction of the tenant, and returns what the client is shown."""


def concerns(scope: Scope) -> bool:
    """Return whether the request can have a claim."""
    return (
        scope["type"] == ScopeType.HTTP
        and scope["method"] == "POST"
        and scope["path"].startswith(PREFIXES)
        and any(name.lower() == HEADER_NAME for name, _ in scope["headers"])
    )


async def claim_key(request: Request[Any, Any, Any]) -> Response[bytes] | None:
    """Return the answer that is known already, before the handler; None: let it run.

    Raises: BadField, EncodedBody, RequestInFlight, OtherRequest, AnswerLost, ChangeNotAnnounced.
    """
    principal = request.scope.get("user")
    if not concerns(request.scope) or not isinstance(principal, Principal):
        return None
    key = read_key(request.scope["headers"])
    assert key is not None
    claim = to_claim(request, key, await plain_body(request))
    known = await services(request).idempotency_keys.claim(claim)
    if known is None:
        request.scope["state"][CLAIM] = claim
        return None
    if known.status == UNANNOUNCED:
        await announce(services(request).redis, EVERYTHING)
        raise AnswerLost
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in known.headers}
    media_type = headers.pop("content-type", None)
    headers[REPLAYED[0].decode()] = REPLAYED[1].decode()
    return Response(known.body, status_code=known.status, headers=headers, media_type=media_type)


def read_key(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Read the key from ASGI's headers. Raises: BadField."""
    given = [value for name, value in headers if name == HEADER_NAME]
    if not given:
        return None
    key = given[0].decode("latin-1")
    if len(given) > 1 or KEY_FORM.fullmatch(key) is None:
        expected = "expected 1 to 255 visible ASCII characters."
        message = f"Invalid value for '{HEADER}': {expected}"
        raise BadField(message, param=HEADER, detail=f"E{expected[1:]}")
    return key


def to_claim(
    request: Request[Principal, Any, Any], key: str, body: bytes, *, generates: bool = False
) -> Claim:
    """Make the claim of a request. `body`: or a digest of what it says. Method and path hold no
    line feed, and the query is percent-encoded."""
    scope, principal = request.scope, request.user
    acts_for = principal.user_id or principal.service_account_id or ""
    line = f"{request.method}\n{scope['path']}\n".encode() + scope["query_string"] + b"\n"
    return Claim(
        org_id=principal.org_id,
        principal=f"{principal.key_id} {acts_for}".strip(),
        key_digest=hashlib.sha256(key.encode()).digest(),
        request_digest=hashlib.sha256(line + hashlib.sha256(body).digest()).digest(),
        request_id=scope["state"][REQUEST_ID],
        generates=generates,
    )


class IdempotencyLayer:
    """The ASGI layer that keeps what a claimed request was answered, before it is sent."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not concerns(scope):
            await self.app(scope, receive, send)
            return
        held: list[Message] = []

        async def hold(message: Message) -> None:
            held.append(message)

        state = scope.setdefault("state", {})
        try:
            async with asyncio.timeout(HANDLER_TIMEOUT_S):
                await self.app(scope, receive, hold)
        except TimeoutError:
            log.error("a request with an idempotency key took more than %.0f s", HANDLER_TIMEOUT_S)
            held = given_up(scope)
        if CLAIM in state:
            await self.settle(scope, state[CLAIM], held)
        for message in held:
            await send(message)

    async def settle(self, scope: Scope, claim: Claim, held: list[Message]) -> None:
        """Keep the answer.

        A failure costs the replay, not the answer: the audit log knows that it was done.
        """
        answer = to_answer(held)
        keys = cast(Services, scope["litestar_app"].state.services).idempotency_keys
        try:
            await keys.settle(claim, answer)
        except (SQLAlchemyError, OSError) as error:
            log.error("an answer could not be kept for its key (%s)", type(error).__name__)


def to_answer(messages: list[Message]) -> Answer:
    start: Any = messages[0]
    bodies: list[Any] = [*messages[1:]]
    return Answer(
        status=start["status"],
        headers=[
            (name, value)
            for name, value in start["headers"]
            if name.lower() not in CHANGED_PER_REQUEST
        ],
        body=b"".join(each.get("body", b"") for each in bodies),
    )


def given_up(scope: Scope) -> list[Message]:
    http_error = unavailable("The request took too long.")
    body, media_type = encode_error(http_error, scope["path"], scope["state"].get(REQUEST_ID))
    headers = [(b"content-type", media_type.encode())]
    headers += [(name.encode(), value.encode()) for name, value in http_error.headers.items()]
    return [
        {"type": "http.response.start", "status": http_error.status, "headers": headers},
        {"type": "http.response.body", "body": body, "more_body": False},
    ]


# ---- generations


async def reply_once(
    request: AuthenticatedRequest, context: RequestContext, begin: Callable[[], Reply]
) -> ASGIApp:
    """Return the answer that was given before under the request's key, or the one that is given
    now.

    Raises: RequestInFlight, OtherBody, AnswerLost, KeyUnknown.
    """
    if context.idempotency_key is None:
        return begin()
    claim, known = await claim_once(request, context.idempotency_key, context.body)
    if known is not None:
        return ReplayedReply(known)
    keys, keeps_nothing = services(request).idempotency_keys, request.user.zero_retention
    return IdempotentReply(begin(), claim, keys, MAX_KEPT_BYTES if not keeps_nothing else 0)


async def claim_once(
    request: AuthenticatedRequest, key: str, body: bytes, *, generates: bool = True
) -> tuple[Claim, Answer | None]:
    """Return the claim, and the answer that was given before, if there was one. `body`: or a digest
    of what it says.

    Raises: RequestInFlight, OtherBody, AnswerLost, KeyUnknown.
    """
    claim = to_claim(request, key, body, generates=generates)
    try:
        known = await services(request).idempotency_keys.claim(claim)
    except DATABASE_ERRORS as error:
        log.warning("an idempotency key cannot be claimed (%s)", type(error).__name__)
        raise KeyUnknown from None
    except OtherRequest:
        raise OtherBody from None
    except AnswerLost:
        raise (AnswerNotKept if request.user.zero_retention else AnswerLost) from None
    return claim, known


class ReplayedReply:
    """An ASGI application for an answer that was given before: a stream is one again."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [*self.answer.headers, REPLAYED]
        await send(
            {"type": "http.response.start", "status": self.answer.status, "headers": headers}
        )
        await send({"type": "http.response.body", "body": self.answer.body, "more_body": False})


class IdempotentReply:
    """An ASGI application for one response that is kept if it is no longer than `most_bytes`; of a
    longer one it is kept that it was billed."""

    def __init__(self, reply: Reply, claim: Claim, keys: IdempotencyKeys, most_bytes: int) -> None:
        self.reply, self.claim, self.keys = reply, claim, keys
        self.most_bytes = most_bytes
        self.held: list[Message] = []
        self.num_bytes = 0
        self.is_kept = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        alone: Any = {**scope, "extensions": _without(scope.get("extensions"))}
        renewal = Periodic(
            "renew an idempotency key",
            RENEW_S,
            lambda: self.keys.renew(self.claim),
            log=log,
            failure="the claim of an idempotency key is not renewed",
            expected=DATABASE_ERRORS,
            at_once=False,
        )
        renewal.start()

        async def keep(message: Message) -> None:
            self.note(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                await self.settle(is_whole=True)
            await send(message)

        try:
            await self.reply(alone, stays, keep)
        finally:
            await renewal.close()
            if not self.is_kept:
                await self.settle(is_whole=False)

    def note(self, message: Message) -> None:
        """Hold a message as long as the answer can be kept."""
        if message["type"] == "http.response.body":
            self.num_bytes += len(message["body"])
        if self.num_bytes > self.most_bytes:
            self.held.clear()
        else:
            self.held.append(copy(message))  # the layers above change their own

    async def settle(self, *, is_whole: bool) -> None:
        """Keep the answer.

        A failure costs the replay, not the answer: until its claim is over it is in flight, and
        then generated anew.
        """
        self.is_kept = True
        try:
            if is_whole and await self.has_cost_nothing():
                await self.keys.let_go(self.claim)
            elif is_whole and self.num_bytes <= self.most_bytes:
                await self.keys.keep(self.claim, to_answer(self.held))
            else:
                await self.keys.keep(self.claim, None)
        except TimeoutError:
            log.error("what a failed answer was billed is not known: its key is left claimed")
        except (SQLAlchemyError, OSError) as error:
            log.error("an answer could not be kept for its key (%s)", type(error).__name__)

    async def has_cost_nothing(self) -> bool:
        """Return whether it failed, and is on no bill, nor comes to one: what ran out of time or
        was cut off is billed once it is aborted, after its reader has heard of it. Raises:
        TimeoutError."""
        delivery = self.reply.delivery
        if delivery.failure is None:
            return False
        async with asyncio.timeout(OVER_TIMEOUT_S):
            await delivery.over()
        return not delivery.is_billed


async def stays() -> Any:
    """Wait forever, in the place of `receive`: whoever left may come back for the answer."""
    await asyncio.Event().wait()


def _without(extensions: Any) -> dict[str, Any]:
    """Leave out what tells of the client's leaving, and what would send past the copy."""
    return {
        name: value for name, value in (extensions or {}).items() if name not in (ON_LEAVE, WRITE)
    }


# ---- things that stay


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
