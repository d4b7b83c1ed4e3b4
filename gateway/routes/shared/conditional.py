"""Implements ETag and If-Match (RFC 9110, 8.8.3 and 13.1.1): who changes a thing says which state
they have seen.

A tag is a digest of what clients see and of what they may change without seeing it, so most things
need no version column.

To show a thing (a GET with If-None-Match of its tag gets a 304):

    return answer(request, to_wire(row))

To change it, so that of two who have seen the same state one gets a 412, also when they come at
once, the check runs on the row as it stands under its lock, in the transaction that changes it:

    precondition = if_match(request)                           # at the door: 400 if malformed
    async with tenant(db, org_id) as conn:
        row = ... sa.select(things).where(...).with_for_update()
        precondition.check(to_wire(row))                       # PreconditionFailed: a 412
        ... sa.update(things) ...

A verb of `tenancy` that does the locking takes `check: Callable[[Row], None]` for this. Without the
header everything passes. What can be changed and is not shown, such as a secret, goes into the tag
behind the thing, at both ends: `answer(request, to_wire(row), unseen=(row.version,))` and
`precondition.check(to_wire(row), row.version)`.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from litestar import Request, Response

from gateway.request_errors import BadField, PreconditionFailed
from gateway.routes.shared.media_types import JSON

IF_MATCH = "If-Match"
ENTITY_TAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"')
MAX_HEADER_LENGTH = 4096
ENCODINGS = "accept-encoding"
GZIP = "gzip"
NO_WEIGHT = re.compile(r"q=0(?:\.0*)?")
TAG_LENGTH = 32
"""Hex digits: 128 bits."""


def etag_of(representation: bytes) -> str:
    """Return a strong tag."""
    return f'"{hashlib.sha256(representation).hexdigest()[:TAG_LENGTH]}"'


def tag_of(thing: msgspec.Struct, *unseen: Any) -> str:
    """Return the tag of a thing.

    `unseen`: what changes with the thing, and clients are not shown.
    """
    return etag_of(msgspec.json.encode((thing, unseen) if unseen else thing))


class Precondition(msgspec.Struct, frozen=True):
    """`tags` None: the client set none, or `*`."""

    tags: frozenset[str] | None = None

    def check(self, current: msgspec.Struct, *unseen: Any) -> None:
        """Compare with `current`, the thing as clients see it; `unseen`: as in its `tag_of`. Weak
        tags never match (RFC 9110, 13.1.1).

        Raises: PreconditionFailed.
        """
        self.check_tag(tag_of(current, *unseen))

    def check_tag(self, tag: str) -> None:
        """Raises: PreconditionFailed."""
        if self.tags is not None and tag not in self.tags:
            raise PreconditionFailed


def if_match(request: Request[Any, Any, Any]) -> Precondition:
    """Read If-Match. Raises: BadField."""
    header = ", ".join(request.headers.getall(IF_MATCH, [])).strip()
    if header in ("", "*"):
        return Precondition()
    return Precondition(tags=parse_tags(header, IF_MATCH))


def parse_tags(header: str, name: str) -> frozenset[str]:
    """Parse a list of entity tags. Raises: BadField."""
    tags = ENTITY_TAG.findall(header) if len(header) <= MAX_HEADER_LENGTH else []
    left = ENTITY_TAG.sub("", header)
    if not tags or left.strip(", \t"):
        message = f"Invalid value for '{name}': expected '*' or quoted tags."
        raise BadField(message, param=name, detail="Expected '*' or quoted tags.")
    return frozenset(tags)


def answer(
    request: Request[Any, Any, Any],
    thing: msgspec.Struct,
    *,
    unseen: tuple[Any, ...] = (),
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response[bytes]:
    """Answer with `thing` as JSON and its ETag; 304 without it, to a GET that knows it already."""
    tag = tag_of(thing, *unseen)
    if is_known(request, tag):
        return Response(b"", status_code=304, headers={"etag": tag})
    return tagged(thing, tag, status=status, headers=headers)


def is_known(request: Request[Any, Any, Any], *tags: str) -> bool:
    """Whether a GET names one of these tags in If-None-Match, weak or not (RFC 9110, 13.1.2)."""
    known = request.headers.get("if-none-match", "") if request.method == "GET" else ""
    named = ENTITY_TAG.findall(known.replace("W/", "")[:MAX_HEADER_LENGTH])
    return known == "*" or not set(tags).isdisjoint(named)


def tagged(
    thing: msgspec.Struct, tag: str, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response[bytes]:
    """Answer with `thing` as JSON under a tag that leaves out some of it: when it was used, or a
    secret that stands in this answer alone."""
    return Response(
        msgspec.json.encode(thing),
        status_code=status,
        media_type=JSON,
        headers={"etag": tag, **(headers or {})},
    )


class WrittenContent(msgspec.Struct, frozen=True, gc=False):
    """Holds content as it is sent, with and without compression."""

    plain: bytes
    compressed: bytes
    plain_tag: str
    compressed_tag: str


class KeptContent:
    """Answers with content that stays as it is while a worker lives: written once, compressed once,
    and not sent again to a client that has it. `write`: makes it, in a thread, once it is asked
    for. `cache_control`: what clients and proxies may do with it."""

    def __init__(
        self, write: Callable[[], bytes], media_type: str, *, cache_control: str = "no-cache"
    ) -> None:
        self._write, self._media_type, self._cache_control = write, media_type, cache_control
        self._written: WrittenContent | None = None
        self._writing = asyncio.Lock()

    async def answer(self, request: Request[Any, Any, Any]) -> Response[bytes]:
        """Answer a GET: 304 where the client has it, compressed where it takes that."""
        async with self._writing:
            if self._written is None:
                self._written = await asyncio.to_thread(self._make)
        kept = self._written
        headers = {"vary": ENCODINGS, "cache-control": self._cache_control}
        zips = accepts_gzip(request.headers.get(ENCODINGS, ""))
        headers["etag"] = kept.compressed_tag if zips else kept.plain_tag
        if is_known(request, kept.plain_tag, kept.compressed_tag):
            return Response(b"", status_code=304, headers=headers)
        headers |= {"content-encoding": GZIP} if zips else {}
        headers["x-content-type-options"] = "nosniff"
        content = kept.compressed if zips else kept.plain
        return Response(content, media_type=self._media_type, headers=headers)

    def _make(self) -> WrittenContent:
        plain = self._write()
        compressed = gzip.compress(plain, mtime=0)
        return WrittenContent(plain, compressed, etag_of(plain), etag_of(compressed))


def accepts_gzip(accepted: str) -> bool:
    """Read an `Accept-Encoding` (RFC 9110, 12.5.3); a weight counts only where it is 0."""
    for each in accepted.lower().split(","):
        name, _, weight = each.partition(";")
        if name.strip() in (GZIP, "*"):
            return NO_WEIGHT.fullmatch(weight.replace(" ", "")) is None
    return False
