"""Answers a repeated generation as before, billed once (`Idempotency-Key`).

Without the header nothing of this is there.

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
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from copy import copy
from typing import Any

from litestar.types import ASGIApp, Message, Receive, Scope, Send
from sqlalchemy.exc import SQLAlchemyError

from foundation.periodic import Periodic
from gateway.db import DATABASE_ERRORS
from gateway.inference.calls import RequestContext
from gateway.request_errors import (
    AnswerLost,
    AnswerNotKept,
    KeyUnknown,
    OtherBody,
    OtherRequest,
)
from gateway.routes.shared.access import AuthenticatedRequest, services
from gateway.routes.shared.idempotency import REPLAYED, to_answer, to_claim
from gateway.routes.shared.reply import ON_LEAVE, Reply
from gateway.tenancy.idempotency_keys import ALIVE_S, Answer, Claim, IdempotencyKeys

log = logging.getLogger(__name__)

MAX_KEPT_BYTES = 4 * 1024 * 1024
"""An answer larger than this is not kept."""
RENEW_S = ALIVE_S / 4
OVER_TIMEOUT_S = 10.0
"""A failed answer may take this long to be aborted and billed. If it takes longer, its key stays
claimed; once the claim ends, the answer is generated anew and the bill of the first is taken back.
"""


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
    """Leave out the extension that tells of the client's leaving."""
    return {name: value for name, value in (extensions or {}).items() if name != ON_LEAVE}
