"""Turns a `Delivery` into an HTTP response: plain ASGI, so that a client's leaving is seen and
never cancels a settle.

Headers go out with the first bytes, so that whatever fails before them has its proper status; what
fails after them is an error event of the stream, in the shape that its path speaks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from litestar.types import HTTPResponseStartEvent, Message, Receive, Scope, Send

from gateway.http_errors.table import HttpError, to_http_error
from gateway.inference.delivery import Delivery
from gateway.limits.headers import to_headers
from gateway.routes.shared.media_types import EVENT_STREAM, JSON
from gateway.routes.shared.problem import (
    code_of,
    encode_error,
    encode_error_event,
    with_vendor_status,
)
from gateway.routes.shared.request_state import CLIENT_LEFT, ERROR_CODE, OUTCOME, REQUEST_ID
from gateway.wire.shared.unknown_fields import to_ignored_header
from gateway.wire.usage import cost as cost_header

log = logging.getLogger(__name__)

UTF8_EVENT_STREAM = f"{EVENT_STREAM}; charset=utf-8"
VERSION_HEADER = "x-tollgate-model-version"
ON_LEAVE = "tollgate.on_leave"
"""The extension of ASGI by which our own server tells of a client's leaving: a `Teller`. A task
that waits for it, as others need, is a tenth of what an answer costs."""
RECEIVED_AT = "tollgate.received_at"
"""The extension of ASGI by which our own server tells when it read a request's first byte: seconds
of `time.perf_counter`."""
WRITE = "tollgate.write"
"""The extension of ASGI by which our own server sends a part of a body at once: a `Write`."""
ToHttpError = Callable[[Exception], HttpError]
Teller = Callable[[Callable[[], None] | None], None]
"""Takes what is to be called should the client leave before the answer is complete; None: nothing
any more."""
Write = Callable[[bytes], bool]
"""Sends a part of the body, whose head was sent. False: it has to wait for its reader."""


class Patience:
    """`async with`: raises TimeoutError once a wait between `begin` and `end` has lasted
    `timeout_s`, and at most half as long again; or when it is `cut` short."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._deadline = asyncio.timeout(None)
        self._since: float | None = None

    def begin(self) -> None:
        self._since = self._loop.time()

    def end(self) -> None:
        self._since = None

    def cut(self) -> None:
        """End it now, whatever it waits for."""
        if not self._deadline.expired():
            self._deadline.reschedule(self._loop.time())

    async def __aenter__(self) -> Patience:
        await self._deadline.__aenter__()
        self._look_again()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._timer.cancel()
        await self._deadline.__aexit__(*error)  # type: ignore[arg-type]

    def _look_again(self) -> None:
        self._timer = self._loop.call_later(self._timeout_s / 2, self._look)

    def _look(self) -> None:
        if self._since is not None and self._loop.time() - self._since >= self._timeout_s:
            self.cut()
        else:
            self._look_again()


def response_start(status: int, media_type: str, extra: dict[str, str]) -> HTTPResponseStartEvent:
    headers = [(b"content-type", media_type.encode())]
    headers += [(name.encode(), value.encode()) for name, value in extra.items()]
    return {"type": "http.response.start", "status": status, "headers": headers}


def teller_of(scope: Scope) -> Teller | None:
    extensions: Any = scope.get("extensions")
    return None if extensions is None else extensions.get(ON_LEAVE)


def write_of(scope: Scope) -> Write | None:
    extensions: Any = scope.get("extensions")
    return None if extensions is None else extensions.get(WRITE)


def received_at_of(scope: Scope) -> float | None:
    extensions: Any = scope.get("extensions")
    return None if extensions is None else extensions.get(RECEIVED_AT)


def request_id_of(scope: Scope) -> str | None:
    found: str | None = scope.get("state", {}).get(REQUEST_ID)
    return found


def within(patience: Patience, send: Send) -> Send:
    """Bound how long `send` waits while the connection's buffer is full."""

    async def bounded(message: Message) -> None:
        patience.begin()
        await send(message)
        patience.end()

    return bounded


class Reply:
    """An ASGI application for one response."""

    def __init__(
        self,
        delivery: Delivery,
        *,
        stream: bool,
        to_http_error: ToHttpError = to_http_error,
        fail: Callable[[HttpError], bytes] | None = None,
    ) -> None:
        """Answer with a delivery.

        `fail`: how its stream ends where it fails; None: with an event as its path speaks.
        """
        self.delivery = delivery
        self.stream = stream
        self.to_http_error = to_http_error
        self.fail = fail
        self.was_left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tell = teller_of(scope)
        watcher = None if tell else asyncio.create_task(self.watch(receive))
        if tell is not None:
            tell(self.leave)
        try:
            if tell is not None and not self.stream:  # one write, which our own server bounds
                status = await self.respond(scope, send)
            else:
                async with Patience(self.delivery.stalled_reader_s) as patience:
                    status = await self.respond(scope, within(patience, send))
        except TimeoutError:
            # Returning with the response unfinished makes the server close the connection.
            log.info("a reader took nothing for %.0f s: given up", self.delivery.stalled_reader_s)
            status = CLIENT_LEFT
        finally:
            if tell is not None:
                tell(None)
            if watcher is not None:
                watcher.cancel()
            self.delivery.abandon()
        scope.setdefault("state", {})[OUTCOME] = CLIENT_LEFT if self.was_left else status

    def leave(self) -> None:
        self.was_left = True
        self.delivery.abandon()

    async def watch(self, receive: Receive) -> None:
        """Watch for the client's leaving, where the server does not tell of it.

        The body is read already: the next thing to be received is the client's leaving.
        """
        while (await receive())["type"] != "http.disconnect":
            continue
        self.leave()

    async def respond(self, scope: Scope, send: Send) -> str:
        try:
            chunk = await self.delivery.next()
        except Exception as error:
            return await self.refuse(scope, send, self.failed_by(error, scope))
        if chunk is None:
            return CLIENT_LEFT
        if self.stream:
            return await self.send_stream(scope, send, chunk)
        headers = {"content-length": str(len(chunk)), **self.notes(), **self.cost()}
        start = response_start(200, JSON, headers)
        await send(start)
        await send({"type": "http.response.body", "body": chunk, "more_body": False})
        return "200"

    async def send_stream(self, scope: Scope, send: Send, first: bytes) -> str:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **self.notes()}
        await send(response_start(200, UTF8_EVENT_STREAM, headers))
        write = write_of(scope)
        if write is not None:
            self.delivery.write_with(write)
        status = "200"
        chunk: bytes | None = first
        while chunk is not None:
            is_last = self.delivery.is_taken
            await send({"type": "http.response.body", "body": chunk, "more_body": not is_last})
            if is_last:
                self.delivery.sent()
                return status
            try:
                chunk = await self.delivery.next()
            except Exception as error:
                failed = self.failed_by(error, scope)
                status, chunk = str(failed.status), None
                event = self.failure(failed, scope)
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return CLIENT_LEFT if self.delivery.abandoned and status == "200" else status

    def failed_by(self, error: Exception, scope: Scope) -> HttpError:
        """Return what an error means to the client, and note its code."""
        failed = with_vendor_status(self.to_http_error(error), scope["path"])
        scope.setdefault("state", {})[ERROR_CODE] = code_of(failed, scope["path"])
        return failed

    def failure(self, failed: HttpError, scope: Scope) -> bytes:
        if self.fail is not None:
            return self.fail(failed)
        return encode_error_event(failed, scope["path"], request_id_of(scope))

    async def refuse(self, scope: Scope, send: Send, failed: HttpError) -> str:
        body, media_type = encode_error(failed, scope["path"], request_id_of(scope))
        headers = {**self.notes(), **failed.headers, "content-length": str(len(body))}
        await send(response_start(failed.status, media_type, headers))
        await send({"type": "http.response.body", "body": body, "more_body": False})
        return str(failed.status)

    def cost(self) -> dict[str, str]:
        cost = self.delivery.cost
        return {} if cost is None else {cost_header.HEADER: cost_header.to_header(cost.amount_pico)}

    def notes(self) -> dict[str, str]:
        """Return the headers on limits, on the model's version, and on what was left out of the
        request."""
        state, ignored = self.delivery.rate_state, self.delivery.ignored
        found = {} if state is None else to_headers(state)
        if self.delivery.version is not None:
            found = {**found, VERSION_HEADER: str(self.delivery.version)}
        return {**found, **to_ignored_header(ignored)} if ignored else found
