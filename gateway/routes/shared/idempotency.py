"""Carries out a repeated POST of administration once (`Idempotency-Key`).

Authors of routes have nothing to do: each POST below `/v1/organization` and `/v1/admin` honours the
header, provided that its change and its audit entry stand in one transaction (`audit.log.record`
with `actor_of(request)`, which carries the request's id and its claim).

| the key was                                            | answer                               |
|--------------------------------------------------------|--------------------------------------|
| new                                                    | carried out, and kept for 24 hours   |
| this request's, which has ended                        | the same, with `idempotent-replayed` |
| this request's, which has not                          | 409 `idempotency_in_flight`          |
| another request's (method, path, query or body differ) | 422 `idempotency_key_reused`         |
| this request's, changed something, its worker died     | 409 `idempotency_answer_lost`        |

Keys belong to a credential and whom it acts for. A request that failed and changed nothing lets go
of its key. The answer is kept before it is sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Iterable
from typing import Any, cast

from litestar import Request, Response
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send
from sqlalchemy.exc import SQLAlchemyError

from gateway.http_errors.table import unavailable
from gateway.principal import Principal
from gateway.request_errors import AnswerLost, BadField
from gateway.routes.shared.access import services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.problem import encode_error
from gateway.routes.shared.request_state import REQUEST_ID
from gateway.routes.shared.services import Services
from gateway.tenancy.changes import EVERYTHING, announce
from gateway.tenancy.idempotency_keys import CLAIM, HANDLER_TIMEOUT_S, Answer, Claim

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
