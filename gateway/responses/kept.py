"""Defines what is kept of a response: the items that it was given and the answer, as it was sent.
Knows no table."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.principal import Principal
from gateway.wire.openai_responses.answer import ResponseObject
from gateway.wire.openai_responses.items import Item

MAX_KEPT_BYTES = 8 * 1024 * 1024
"""A stored response has at most this size, together with its input."""
_encode = msgspec.json.Encoder().encode
_items_decoder = msgspec.json.Decoder(tuple[Item, ...])


class ResponseOwner(msgspec.Struct, frozen=True):
    """A project that owns what it keeps."""

    org_id: str
    project_id: str

    @classmethod
    def of(cls, principal: Principal) -> ResponseOwner:
        return cls(principal.org_id, principal.project_id)

    def context(self, *place: str) -> bytes:
        """Return what something sealed at that place is bound to."""
        return "\n".join((self.org_id, self.project_id, *place)).encode()


class _Output(msgspec.Struct):
    output: tuple[Item, ...]


_output_decoder = msgspec.json.Decoder(_Output)


class AskedRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The request that asked for a response in the background, as the log of requests names it:
    for whoever finds that its worker has gone."""

    request_id: str
    trace: str
    """32 hex digits."""
    key: str
    model: str
    """As the client wrote it."""
    lane: str
    tags: dict[str, str] = {}


class StoredResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """Items and answer as JSON: what is answered again is what was answered."""

    given: bytes
    """Its own items, without what it continues."""
    answer: bytes
    asked: AskedRequest | None = None
    """None: it does not run."""

    @classmethod
    def of(
        cls,
        given: tuple[Item, ...],
        response: ResponseObject,
        asked: AskedRequest | None = None,
    ) -> StoredResponse:
        return cls(_encode(given), _encode(response), asked)

    @property
    def given_items(self) -> tuple[Item, ...]:
        return _items_decoder.decode(self.given)

    @property
    def items(self) -> tuple[Item, ...]:
        """Return what the next response continues."""
        return self.given_items + _output_decoder.decode(self.answer).output


def encode(kept: StoredResponse) -> bytes:
    return msgspec.msgpack.encode(kept)


def decode(plain: bytes) -> StoredResponse:
    return msgspec.msgpack.decode(plain, type=StoredResponse)


def to_json(value: Any) -> bytes:
    return _encode(value)
