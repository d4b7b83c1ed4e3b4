"""One request and its answer on a client's connection: uvicorn's, with the answer's head checked as
a whole. uvicorn searches each name and each value for itself, which for the twenty headers of ours
takes as long as all else that it does for a request."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import (
    HEADER_RE,
    STATUS_LINE,
    RequestResponseCycle,
)

START, BODY = "http.response.start", "http.response.body"
CONTROLS = bytes(each for each in range(32) if each != 9) + b"\x7f"
"""No value of a header may have one of these: it would end there."""
MAX_NAMES = 1024
"""So many names of headers are remembered; each is one that our code writes."""
NO_BODY = (204, 304)

_prefixes: dict[bytes, bytes] = {}
"""By the name of a header, what comes before its value; of those that say nothing of the body."""


class AnswerCycle(RequestResponseCycle):
    """A request that is being answered."""

    _says_close = False
    """A header of the answer says that the connection ends with it."""

    async def send(self, message: Any) -> None:
        """Take a message of ASGI. Raises: RuntimeError for one that may not come now, or says what
        no answer can."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        expected = BODY if self.response_started else START
        if self.response_complete or message["type"] != expected:
            raise RuntimeError(f"an ASGI message {message['type']!r}, which may not come now")
        if self.response_started:
            self._send_body(message.get("body", b""), more=message.get("more_body", False))
        else:
            self.response_started, self.waiting_for_100_continue = True, False
            self._send_head(message["status"], message.get("headers", ()))

    def _send_head(self, status: int, headers: Any) -> None:
        parts, values = [STATUS_LINE[status][:-2]], []
        for each in (self.default_headers, headers):
            for name, value in each:
                parts.append(_prefixes.get(name) or self._prefix(name, value))
                parts.append(value)
                values.append(value)
        written = b"".join(values)
        if len(written.translate(None, CONTROLS)) < len(written):
            raise RuntimeError("a value of a header has a control character")
        if not (self.keep_alive or self._says_close):
            parts.append(b"\r\nconnection: close")
        has_body = status not in NO_BODY and self.scope["method"] != "HEAD"
        if self.chunked_encoding is None and has_body:
            self.chunked_encoding = True
            parts.append(b"\r\ntransfer-encoding: chunked")
        parts.append(b"\r\n\r\n")
        self.transport.write(b"".join(parts))

    def _prefix(self, name: bytes, value: bytes) -> bytes:
        """Return what comes before a header's value, and heed what it says of the body."""
        if HEADER_RE.search(name):
            raise RuntimeError("a name of a header has a character that none may have")
        name = name.lower()
        prefix = b"\r\n%b: " % name
        if name == b"content-length":
            if self.chunked_encoding is None:
                self.expected_content_length, self.chunked_encoding = int(value), False
        elif name == b"transfer-encoding":
            if value.lower() == b"chunked":
                self.expected_content_length, self.chunked_encoding = 0, True
        elif name == b"connection":
            if b"close" in [token.strip() for token in value.lower().split(b",")]:
                self.keep_alive, self._says_close = False, True
        elif len(_prefixes) < MAX_NAMES:
            _prefixes[name] = prefix
        return prefix

    def _send_body(self, body: bytes, *, more: bool) -> None:
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
        elif self.chunked_encoding:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self.transport.write(chunk if more else chunk + b"0\r\n\r\n")
        else:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0:
                raise RuntimeError("a body that is longer than its Content-Length")
            self.transport.write(body)
        if more:
            return
        if self.expected_content_length:
            raise RuntimeError("a body that is shorter than its Content-Length")
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
