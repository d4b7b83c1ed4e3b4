"""One client's connection: uvicorn's HTTP/1.1, with bounds on what a stranger may hold of a worker.

Knows bytes, times and how many connections there are, no route and no key: everything here happens
before a request has a name. httptools puts no bound on a request's head (the request line and the
headers) and collects a value in time quadratic in its length, so the bytes are counted here, and
those of a body's trailers and chunk headers. What is refused is answered in the shape of all errors
and closed; what has no head yet reaches no route, so no metric counts it.

What a request is gets decided by its head alone. Trailers (RFC 9110, 6.5) are read, bounded and
dropped: httptools reports them as it reports headers, and uvicorn would put them among those. A
wish to change to another protocol is ignored (RFC 9110, 7.8), and so the body is still a body.

Whoever is answered before the body has come may go on sending it: a bounded part is read and
dropped, also where the connection is to be closed, for clients that send all before they read. The
kernel would reset a connection that is closed over bytes nobody read, and the answer were lost.

A worker that leaves takes what is on its way to it, or its client could not tell whether it was
served.

A client that closes its sending side has hung up, and what it asked for is aborted: no message
tells half a close from a whole one. GET and HEAD are answered all the same, they cost no tokens.
"""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, ClassVar
from urllib.parse import unquote

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle as Cycle

from gateway.app.answer_cycle import AnswerCycle
from gateway.http_errors.table import INVALID, HttpError, http_error, unavailable
from gateway.ids import uuid7
from gateway.routes.asgi.response_headers import named
from gateway.routes.shared.reply import ON_LEAVE, RECEIVED_AT, WRITE

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
"""Bounds the request line with all headers, and separately all trailers. The size is checked after
each read of the socket, so one read more may come in."""
HEAD_TIMEOUT_S = 30.0
"""Bounds the time from the first byte of a head, or from the connection's opening, to the head's
last byte."""
BODY_TIMEOUT_S = 30.0
"""Bounds the time from a head's last byte to the last byte of its body; each MIN_BODY_BYTES_PER_S
that came adds a second."""
MIN_BODY_BYTES_PER_S = 16 * 1024
MAX_CONNECTIONS = 16_384
"""One worker keeps at most this many connections. A request on one more is answered with 503."""
SPARE_CONNECTIONS = 1024
"""How many more are kept to be told so; the next ones are closed without a word."""
OTHER_FILES = 512
"""Descriptors that are no client's: stores, spool, engines, upstreams' connections."""
LINGER_S = 1.0
"""How long a refused client may be silent until it is closed; what it still sends is dropped."""
MAX_LINGER_S = 30.0
MAX_LINGER_BYTES = 1024 * 1024
"""A head may go on for this many bytes behind its refusal. A client that sends more does not read.
"""
MAX_DRAINED_BYTES = 128 * 1024 * 1024
"""A body may go on for this many bytes behind the answer to its request."""
LAST_REQUEST_S = 0.5
"""How long a connection without a request may still bring one to a worker that leaves: a new one,
whose client was let in and is about to write, or one that was kept, whose client did not hear yet.
"""
MAX_JOINED_BYTES = 64 * 1024
"""A longer beginning of a body is not copied behind its head."""
SEPARATORS_BYTES = 4
"""Each header line has a colon, a space and a line end (two bytes)."""
FRAMING = (b"content-length", b"transfer-encoding")
"""Headers that say where a body ends."""
HOST = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+;=%-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")
"""A host and its port (RFC 9112, 3.2), without the comma that joins two."""
AUTHORITY = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")
"""How a request line in absolute form begins (RFC 9112, 3.2.2)."""

TOO_LARGE = http_error(
    431,
    f"The request line and headers are too large: more than {MAX_HEAD_BYTES} bytes.",
    INVALID,
    code="request_header_fields_too_large",
    param="headers",
)
TRAILERS_TOO_LARGE = http_error(
    431,
    "What stands around the body's chunks is too large: chunk extensions and trailers may have "
    f"{MAX_HEAD_BYTES} bytes.",
    INVALID,
    code="request_header_fields_too_large",
    param="trailers",
)
TOO_SLOW = http_error(408, "The request's headers took too long.", INVALID, code="request_timeout")
TOO_SLOW_BODY = http_error(
    408, "The request's body took too long.", INVALID, code="request_timeout"
)
NO_HOST = http_error(
    400,
    "The request has no Host header, which HTTP/1.1 requires.",
    INVALID,
    code="invalid_host",
    param="Host",
)
TWO_HOSTS = http_error(
    400,
    "The request has more than one Host header: exactly one is allowed.",
    INVALID,
    code="invalid_host",
    param="Host",
)
BAD_HOST = http_error(
    400,
    "The Host header is not a host name or address with an optional port.",
    INVALID,
    code="invalid_host",
    param="Host",
)
OTHER_HOST = http_error(
    400,
    "The request line names another host than the Host header.",
    INVALID,
    code="invalid_host",
    param="Host",
)
MALFORMED = http_error(400, "The request is not valid HTTP/1.1.", INVALID, code="invalid_http")
TOO_MANY = unavailable("This gateway has too many open connections.", code="overloaded")


class _RequestRefused(Exception):
    """Ends the parsing of a request that is whole and not wanted."""


def unnoted(request_id: str, status: int) -> None:
    """Note no refusal."""


class AnswerTransport:
    """Stands for a connection's transport where uvicorn writes an answer. `close`: what it calls
    after the answer.

    An answer's head goes out with what is written next, the beginning of its body, if that comes
    before the loop's next turn: one system call and one packet instead of two.
    """

    __slots__ = ("_begins", "_close", "_head", "_loop", "_write", "is_closing")

    def __init__(
        self,
        transport: asyncio.Transport,
        close: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._write, self.is_closing, self._close = transport.write, transport.is_closing, close
        self._loop = loop
        self._begins = False
        """The next that is written is a head."""
        self._head = b""
        """It waits."""

    def begin(self) -> None:
        """Note that an answer begins."""
        self._begins = True

    def write(self, data: bytes) -> None:
        if self._begins:
            self._begins = False
            self._head += data
            self._loop.call_soon(self._write_head)
        elif self._head and len(data) <= MAX_JOINED_BYTES:
            head, self._head = self._head, b""
            self._write(head + data)
        else:
            self._write_head()
            self._write(data)

    def close(self) -> None:
        self._write_head()
        self._close()

    def _write_head(self) -> None:
        head, self._head = self._head, b""
        if head and not self.is_closing():
            self._write(head)


class ClientConnection(HttpToolsProtocol):
    """The protocol that uvicorn makes for each client.

    `refusal`: the error that the client was told; whatever it sends from then on is dropped.
    """

    unread_s: ClassVar[float] = 60.0
    """How long what is written may wait for its reader. Closing waits for that as well, so whoever
    took a byte now and then would hold a connection that was given up for days."""
    on_refused: ClassVar[Callable[[str, int], None]] = unnoted
    """Hears of each refusal: the id that the client was told, and the status."""
    leaving: ClassVar[bool] = False
    """The worker leaves: what is answered from now on is a connection's last answer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.refusal: HttpError | None = None
        self._max_connections = max_connections()
        self._running: Cycle | None = None
        """The request that is being answered, or was answered last."""
        self._on_leave: Callable[[], None] | None = None
        """Called if the client leaves before the running request is answered."""
        self._is_last = False
        """True if the next request is the connection's last one, because the worker leaves."""
        self._in_head = True
        """Nothing but a head, or its beginning, may come next."""
        self._begun = False
        self._head_bytes = 0
        self._num_heads = 0
        self._bodiless_bytes = 0
        """Bytes that came after a head, in reads without a byte of its body: chunk headers and
        trailers alone."""
        self._trailer_bytes = 0
        self._body_bytes = 0
        self._body_since = 0.0
        self._drained_bytes = 0
        """Bytes of a body that came behind the answer to their own request."""
        self._closes_after_body = False
        self._refused_at = 0.0
        self._dropped_bytes = 0
        """Bytes that came behind a refusal; the connection ends at `_max_dropped_bytes`."""
        self._max_dropped_bytes = MAX_LINGER_BYTES
        self._timer: asyncio.TimerHandle | None = None
        self._idle_since: float | None = None
        """When its last answer was complete, by the loop's clock; None: no request is awaited
        behind one."""
        self._unread: asyncio.TimerHandle | None = None

    @classmethod
    def reading_within(cls, unread_s: float) -> type[ClientConnection]:
        return type(cls.__name__, (cls,), {"unread_s": unread_s})

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._answers: Any = AnswerTransport(transport, self._close_answered, self.loop)
        if len(self.connections) > self._max_connections + SPARE_CONNECTIONS:
            transport.abort()
            return
        self._expect_head()
        if self.leaving:  # the kernel had let it in before the socket was let go
            self.shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_read()

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._is_read()
        self._unset_keepalive_if_required()
        if self._running is not None:
            # uvicorn tells the request that came last, which may wait for this one's answer
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        if self._on_leave is not None:
            self._on_leave()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True to keep the connection open for writing."""
        return (
            self.refusal is None
            and self._answering()
            and not self.cycle.more_body
            and self.cycle.scope["method"] in ("GET", "HEAD")
        )

    def data_received(self, data: bytes) -> None:
        if self.refusal is not None:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > self._max_dropped_bytes:
                self.transport.abort()
            return
        was_in_head, num_heads = self._in_head, self._num_heads
        self._bodiless_bytes += len(data)
        self._idle_since = None
        self._parse(data)
        if self.refusal is not None or self.transport.is_closing():
            return
        if was_in_head and num_heads == self._num_heads:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(TOO_LARGE)
            else:
                self._expect_head()
        elif self._begun:
            self._expect_head()
        elif not self._in_head:
            if num_heads != self._num_heads:
                self._bodiless_bytes = 0
            self._expect_body(len(data))

    def _parse(self, data: bytes) -> None:
        """Feed the parser, also past requests that ask for another protocol."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                (offset,) = upgrade.args
                data = data[offset:]
                self._parse_body_without_upgrade()
            except httptools.HttpParserError:
                if self.refusal is None and not self.transport.is_closing():
                    self._refuse(MALFORMED)
                return

    def _parse_body_without_upgrade(self) -> None:
        """Go on with a parser that never saw the wish for another protocol: httptools takes what
        follows such a head for that protocol, so the body would be read as the next request."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        framing = [
            b"".join((name, b": ", value, b"\r\n"))
            for name, value in self.headers
            if name in FRAMING
        ]
        self.parser.feed_data(b"".join((b"POST / HTTP/1.1\r\n", *framing, b"\r\n")))

    # uvicorn

    def shutdown(self) -> None:
        """Close this connection after the request that it has, or may yet bring: the worker
        leaves."""
        self._is_last = True
        if self._answering():
            super().shutdown()
        elif self.refusal is None:
            self.loop.call_later(LAST_REQUEST_S, self._close_idle)

    def on_response_complete(self) -> None:
        """Wait for the next request as uvicorn does, with one timer for as long as the connection
        lives: to start one for each request and to stop it costs as much as reading its head."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._look_when_idle(self.timeout_keep_alive)

    def _look_when_idle(self, after_s: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(after_s, self._close_if_long_idle)

    def _close_if_long_idle(self) -> None:
        self.timeout_keep_alive_task = None
        if self._idle_since is None or self.transport.is_closing():
            return
        left_s = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._look_when_idle(left_s)
        else:
            self.transport.close()

    def _close_idle(self) -> None:
        """Close if nothing is under way: a head that has begun to come, and a request that is being
        answered, have time limits of their own."""
        if not self._begun and self._in_head and not self._answering():
            self.transport.close()

    def on_leave(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` when the client leaves; None: the response in progress is complete."""
        self._on_leave = callback
        if callback is not None and self._running is not None and self._running.disconnected:
            callback()

    def write_part(self, part: bytes) -> bool:
        """Send a part of the running answer's body, as `AnswerCycle.send` does. False:
        what was sent before waits for its reader, or nobody reads."""
        cycle = self._running
        if self.flow.write_paused or cycle is None or cycle.disconnected:
            return False
        if cycle.response_complete or not cycle.chunked_encoding:
            return False
        if part:
            self._answers.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    def _start_asgi_task(self, cycle: Cycle, app: ASGI3Application) -> None:
        self._running = cycle
        self._answers.begin()
        extensions: Any = cycle.scope["extensions"]
        extensions[ON_LEAVE], extensions[WRITE] = self.on_leave, self.write_part
        if self._is_last:
            cycle.keep_alive = False
        super()._start_asgi_task(cycle, app)

    # httptools

    def on_message_begin(self) -> None:
        if not self._in_head:
            return  # `_parse_body_without_upgrade`: the request under way
        self._begun = True
        self._trailer_bytes = 0
        super().on_message_begin()
        extensions: Any = {RECEIVED_AT: time.perf_counter()}
        self.scope["extensions"] = extensions

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; a trailer is counted and dropped."""
        if self._in_head:
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            self.headers.append((name, value))
            return
        self._trailer_bytes += len(name) + len(value) + SEPARATORS_BYTES
        if self._trailer_bytes > MAX_HEAD_BYTES:
            self._refuse(TRAILERS_TOO_LARGE)
            raise _RequestRefused

    def on_headers_complete(self) -> None:
        if not self._in_head:
            return
        self._cancel_timer()
        self._begun = False
        self._head_bytes = 0
        self._num_heads += 1
        size_bytes = len(self.url) + SEPARATORS_BYTES * len(self.headers)
        size_bytes += sum(map(len, chain.from_iterable(self.headers)))
        if size_bytes > MAX_HEAD_BYTES:
            self._refuse(TOO_LARGE)
            raise _RequestRefused
        if len(self.connections) > self._max_connections:
            self._refuse(TOO_MANY)
            raise _RequestRefused
        hosts = [value for name, value in self.headers if name == b"host"]
        version = self.parser.get_http_version()
        fault = host_fault(hosts, self.url, version)
        if fault is not None:
            self._refuse(fault)
            raise _RequestRefused
        self._begin_request(version)
        self._in_head = False

    def _begin_request(self, version: str) -> None:
        """Complete the scope and answer the request, or let it wait for the answer before it."""
        scope, url = self.scope, httptools.parse_url(self.url)
        raw_path = url.path
        path = raw_path.decode("ascii")
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["http_version"] = version
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"], scope["query_string"] = raw_path, url.query or b""
        before, is_kept = self.cycle, version != "1.0" and self.parser.should_keep_alive()
        self.cycle = AnswerCycle(
            *(scope, self._answers, self.flow, self.logger, self.access_logger, self.access_log),
            *(self.server_state.default_headers, asyncio.Event(), self.expect_100_continue),
            *(is_kept, self.on_response_complete),
        )
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _should_upgrade(self) -> bool:
        return False

    def on_body(self, body: bytes) -> None:
        self._bodiless_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # `_parse_body_without_upgrade`: its body is to come
        self._cancel_timer()
        self._in_head = True
        self._head_bytes = self._body_bytes = self._drained_bytes = 0
        super().on_message_complete()
        if self._closes_after_body:
            self.transport.close()
            raise _RequestRefused  # whatever comes next

    # what is answered or refused before it has come

    def _close_answered(self) -> None:
        """Close a connection whose last answer is written, once the body of its request has come:
        the answer says that it is the last, and ends here."""
        answered = self._running is self.cycle and self.cycle.response_complete
        if answered and not self._in_head:
            self._closes_after_body = True
            self.transport.write_eof()
        else:
            self.transport.close()

    def _refuse(self, why: HttpError) -> None:
        """Send the refusal, as long as no answer is on its way, and close."""
        self.refusal = why
        self._refused_at = self.loop.time()
        self._max_dropped_bytes = MAX_LINGER_BYTES if self._begun else MAX_DRAINED_BYTES
        self._cancel_timer()
        if self._answering() and not self._give_up_body():
            self.transport.close()
            return
        body, request_id = why.encode(), f"req_{uuid7().hex}"
        headers = [
            *self.server_state.default_headers,
            *((name.encode(), value.encode()) for name, value in why.headers.items()),
            *named(request_id, elapsed_ms=0),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        lines = [b"".join((name, b": ", value, b"\r\n")) for name, value in headers]
        self.transport.write(b"".join([STATUS_LINE[why.status], *lines, b"\r\n", body]))
        self.transport.write_eof()
        type(self).on_refused(request_id, why.status)
        self._linger()

    def _linger(self, dropped_bytes: int = -1) -> None:
        """Close as soon as the client has been silent, or went on for too long. `dropped_bytes`:
        how many there were when this was asked before."""
        is_late = self.loop.time() - self._refused_at > MAX_LINGER_S
        if self._dropped_bytes == dropped_bytes or is_late:
            self.transport.close()
            return
        self._timer = self.loop.call_later(LINGER_S, self._linger, self._dropped_bytes)

    def _give_up_body(self) -> bool:
        """Tell whoever waits for the rest of the body that the client has left.

        False: nobody waits, or the answer has begun.
        """
        if self._in_head or self.cycle.response_started or self.pipeline:
            return False
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        return True

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # the time that a head and a body may take

    def _expect_head(self) -> None:
        """Start the time limit of a head, if it is not running already."""
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_is_late(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._answering():  # the head of the next request, which may wait
            self._expect_head()
        elif self._begun:
            self._refuse(TOO_SLOW)
        else:
            self.transport.close()

    def _expect_body(self, num_bytes: int) -> None:
        """Count a part of a body that is not whole."""
        if self._bodiless_bytes > MAX_HEAD_BYTES:
            self._refuse(TRAILERS_TOO_LARGE)
            return
        self._body_bytes += num_bytes
        if self.cycle.response_complete:
            self._drained_bytes += num_bytes
            if self._drained_bytes > MAX_DRAINED_BYTES:
                self.transport.abort()
                return
        if self._timer is None:
            self._body_since = self.loop.time()
            self._timer = self.loop.call_later(BODY_TIMEOUT_S, self._body_is_late)

    def _body_is_late(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused or self.pipeline:  # it is we who do not read it
            self._body_since = self.loop.time()
        allowed_s = BODY_TIMEOUT_S + self._body_bytes / MIN_BODY_BYTES_PER_S
        left_s = self._body_since + allowed_s - self.loop.time()
        if left_s > 0:
            self._timer = self.loop.call_later(left_s, self._body_is_late)
        elif self.cycle.response_complete:
            self.transport.close()
        else:
            self._refuse(TOO_SLOW_BODY)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def host_fault(hosts: Sequence[bytes], url: bytes, version: str) -> HttpError | None:
    """Return why a request names no one host (RFC 9112, 3.2), or None. Only HTTP/1.0, which health
    checks of load balancers speak, may go without."""
    if not hosts:
        return None if version == "1.0" else NO_HOST
    if len(hosts) > 1:
        return TWO_HOSTS
    if HOST.fullmatch(hosts[0]) is None:
        return BAD_HOST
    if not url.startswith(b"/") and (found := AUTHORITY.match(url)) is not None:
        return None if found[1].lower() == hosts[0].lower() else OTHER_HOST
    return None


def max_connections() -> int:
    """Return as many as there are descriptors for, and `MAX_CONNECTIONS` at most."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, min(MAX_CONNECTIONS, files - OTHER_FILES - SPARE_CONNECTIONS))
