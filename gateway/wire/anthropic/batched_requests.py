"""The body of `POST /v1/messages/batches`, request by request as its bytes come: no body is in
memory, however many requests it has.

Pure. Between requests the bytes are read token by token; a request is only looked through for where
it ends, and then decoded. Whatever is in the way is refused by its place: `requests[3].custom_id`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.request_errors import BadField
from gateway.wire.shared.refusals import BROKEN_JSON, to_bad_value

FIELD = "requests"
CUSTOM_ID = r"^[a-zA-Z0-9_-]{1,64}\Z"
MAX_REQUESTS = 100_000
MAX_BODY_BYTES = 256 * 1024 * 1024
MAX_KEY_BYTES = 256
"""The bound on a field name of the body, with its quotes."""
_SPACE = re.compile(rb"[ \t\r\n]*")
_KEY = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_MARK = re.compile(rb'["{}\[\]]')
_TEXT = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_OPENING, _QUOTE, _OBJECT = b"{[", ord('"'), b"{"
_NEXT: dict[str, dict[bytes, str]] = {
    "start": {b"{": "first key"},
    "colon": {b":": "array"},
    "array": {b"[": "first request"},
    "first request": {b"]": "after"},
    "behind request": {b",": "request", b"]": "after"},
    "after": {b",": "key", b"}": "end"},
    "first key": {b"}": "end"},
}
"""For each expectation, the bytes that may follow, and the expectation after each."""


class BatchedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    custom_id: Annotated[str, Meta(pattern=CUSTOM_ID)]
    params: msgspec.Raw


decoder = msgspec.json.Decoder(BatchedRequest)


class BodyReader:
    """A reader of one body. Raises BadField, and is of no use after that."""

    def __init__(self, *, max_requests: int, max_request_bytes: int) -> None:
        self._max_requests, self._max_request_bytes = max_requests, max_request_bytes
        self._bytes = bytearray()
        """The bytes that are not parsed yet."""
        self._at = 0
        """How far they were looked at."""
        self._expected = "start"
        self._depth = 0
        """The nesting depth within the current request; 0: between requests."""
        self._in_text = False
        self._first_of: dict[str, int] = {}

    @property
    def num_requests(self) -> int:
        return len(self._first_of)

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The requests that are whole now, each as one line without its line feed."""
        if not self._depth:
            self._drop()
        self._bytes += piece
        while True:
            if self._depth:
                if not self._to_its_end():
                    return
                yield self._request()
            elif not self._step():
                return

    def end(self) -> None:
        """Say that nothing more comes."""
        if self._depth or self._expected != "end":
            raise _broken("it ends too early", self._place)
        if not self._first_of:
            message = f"Missing required parameter: '{FIELD}'."
            raise BadField(message, param=FIELD, detail="This required parameter is missing.")

    @property
    def _place(self) -> str | None:
        is_within = self._depth or self._expected in ("request", "first request")
        return f"{FIELD}[{self.num_requests}]" if is_within else None

    def _drop(self) -> None:
        del self._bytes[: self._at]
        self._at = 0

    # ---- between requests

    def _step(self) -> bool:
        """Read one token. Return False if it is not all there."""
        found = _SPACE.match(self._bytes, self._at)
        assert found is not None  # the pattern takes nothing, too
        self._at = found.end()
        if self._at == len(self._bytes):
            return False
        token = bytes(self._bytes[self._at : self._at + 1])
        following = _NEXT.get(self._expected, {}).get(token)
        if following is not None:
            self._at += 1
            self._expected = following
            if following == "after" and not self._first_of:
                raise _wrong(FIELD, "it has no request")
            return True
        if self._expected in ("request", "first request"):
            self._begin(token)
            return True
        if self._expected in ("key", "first key") and token == b'"':
            return self._key()
        if self._expected == "array":
            raise _wrong(FIELD, "expected an array", kind="type")
        raise _broken("it is not what can stand there", self._place)

    def _key(self) -> bool:
        found = _KEY.match(self._bytes, self._at)
        if found is None and len(self._bytes) - self._at <= MAX_KEY_BYTES:
            return False
        text = b"" if found is None else found[0]
        try:
            name = msgspec.json.decode(text, type=str)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise _broken("a field has no name", None) from None
        if name != FIELD:
            shown = name[:MAX_KEY_BYTES]
            raise BadField(
                f"Unrecognized request argument supplied: {shown}",
                param=shown,
                detail="This request argument is not recognized.",
            )
        if self._first_of:
            raise _wrong(FIELD, "it stands there twice")
        self._at += len(text)
        self._expected = "colon"
        return True

    def _begin(self, token: bytes) -> None:
        param = f"{FIELD}[{self.num_requests}]"
        if self.num_requests >= self._max_requests:
            raise _wrong(FIELD, f"a batch has at most {self._max_requests} requests")
        if token != _OBJECT:
            raise _wrong(param, "expected an object", kind="type")
        self._drop()
        self._depth, self._at = 1, 1

    # ---- within one, which begins with the first byte

    def _to_its_end(self) -> bool:
        """Return False if its end has not come."""
        size = len(self._bytes)
        while self._depth and self._at < size:
            if self._in_text:
                text = _TEXT.match(self._bytes, self._at)
                assert text is not None  # the pattern takes nothing, too
                self._at = text.end()
                if self._at == size or self._bytes[self._at] != _QUOTE:
                    break  # half an escape is looked at again with what comes
                self._in_text = False
                self._at += 1
                continue
            mark = _MARK.search(self._bytes, self._at)
            if mark is None:
                self._at = size
                break
            self._at = mark.end()
            byte = self._bytes[self._at - 1]
            if byte == _QUOTE:
                self._in_text = True
            else:
                self._depth += 1 if byte in _OPENING else -1
        if self._at > self._max_request_bytes:
            param = f"{FIELD}[{self.num_requests}]"
            raise _wrong(param, f"it is longer than {self._max_request_bytes} bytes")
        return self._depth == 0

    def _request(self) -> bytes:
        number, text = self.num_requests, bytes(self._bytes[: self._at])
        found = read_request(text, f"{FIELD}[{number}]")
        known = self._first_of.setdefault(found.custom_id, number)
        if known != number:
            raise _wrong(f"{FIELD}[{number}].custom_id", f"it is that of {FIELD}[{known}]")
        self._expected = "behind request"
        return text.replace(b"\n", b" ")  # between tokens alone: in a text it would be escaped


def read_request(text: bytes, param: str) -> BatchedRequest:
    """Raises BadField."""
    try:
        found = decoder.decode(text)
    except msgspec.ValidationError as error:
        reason, _, inside = str(error).partition(" - at `$")
        raise to_bad_value(f"{reason} - at `$.{param}{inside or '`'}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _broken("it is not parseable", param) from error
    except RecursionError as error:
        raise _broken("it is nested too deep", param) from error
    if not bytes(found.params).startswith(_OBJECT):
        raise _wrong(f"{param}.params", "expected an object", kind="type")
    return found


def _wrong(param: str, reason: str, *, kind: str = "value") -> BadField:
    return BadField(f"Invalid {kind} for '{param}': {reason}.", param=param)


def _broken(reason: str, param: str | None) -> BadField:
    where = f", in or after '{param}'" if param else ""
    return BadField(f"{BROKEN_JSON} ({reason}{where})", param=param, detail=BROKEN_JSON)
