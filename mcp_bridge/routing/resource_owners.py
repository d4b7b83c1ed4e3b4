"""Finds the owner of a resource among several servers behind one URL: URIs stay as they are, so
nothing in one says it.

A server claims what it lists, and what a template of it matches. What one alone claims is its; what
several do is nobody's, and refused with their names: else a server could list what another has, and
be read in its place. But where the operator vouches for one of them alone (`trust = "all"`), it is
that one's. What nobody lists is read at whose it is that answers, if one alone does: a result of a
tool may name what is on no list. For all else it is nobody's: an address may be a secret, and is
not told around.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from mcp_bridge.protocol.eras import LISTS
from mcp_bridge.protocol.rpc import INVALID_PARAMS, RpcError
from mcp_bridge.routing.exchanges import pages_of
from mcp_bridge.routing.sessions import MAX_URI_LEN
from mcp_bridge.upstream.resource_claims import Claims, KnownClaims
from mcp_bridge.upstream.upstream import SETUP_TIMEOUT_S, Unreachable, Upstream

log = logging.getLogger(__name__)

FRESH_S = 5.0
"""How long what a server listed is what it lists; less where it says that it changed."""

Ask = Callable[[Upstream, str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""The result of a request at a server. Raises: RpcError."""


MayRead = Callable[[Upstream], Awaitable[bool]]


async def owner_of(
    uri: object, upstreams: Sequence[Upstream], ask: Ask, may_read: MayRead | None = None
) -> Upstream:
    """Return the server that has a resource.

    `upstreams`: those that have resources. `may_read`: where one may be read that nobody lists;
    None: nowhere. Raises: RpcError.
    """
    if not isinstance(uri, str) or not upstreams:
        raise RpcError(INVALID_PARAMS, "Resource not found", {"uri": uri})
    if len(uri) > MAX_URI_LEN:
        raise RpcError(INVALID_PARAMS, f"uri: more than {MAX_URI_LEN} characters")
    if len(upstreams) == 1:
        return upstreams[0]
    claims = await asyncio.gather(*(claims_of(each, ask) for each in upstreams))
    found = [each for each, known in zip(upstreams, claims, strict=True) if known.has(uri)]
    if not found and may_read is not None:
        asked = [each for each in upstreams if await may_read(each)]
        said = await asyncio.gather(*(has(each, uri, ask) for each in asked))
        found = [each for each, it_has in zip(asked, said, strict=True) if it_has]
    if not found:
        raise RpcError(INVALID_PARAMS, "Resource not found", {"uri": uri})
    vouched_for = [each for each in found if each.config.trust == "all"]
    for alone in (found, vouched_for):
        if len(alone) == 1:
            return alone[0]
    names = [each.name for each in found]
    text = f"Several servers have this resource: {', '.join(names)}"
    raise RpcError(INVALID_PARAMS, text, {"reason": "ambiguous_resource", "servers": names})


async def claims_of(upstream: Upstream, ask: Ask) -> Claims:
    """Return what a server claims, as it listed it last where it does not say now: who has fallen
    silent is not replaced."""
    async with upstream.claims_lock:
        now = asyncio.get_running_loop().time()
        known = upstream.known_claims
        is_fresh = known is not None and known.at + FRESH_S > now
        if known is None or not is_fresh or known.generation != upstream.generation:
            claims = Claims() if known is None else known.claims
            try:
                async with asyncio.timeout(SETUP_TIMEOUT_S):
                    claims = await listed(upstream, ask)
            except (RpcError, TimeoutError) as error:
                log.info("mcp: %s: it does not list its resources: %s", upstream.name, error)
            known = upstream.known_claims = KnownClaims(claims, upstream.generation, now)
        return known.claims


async def listed(upstream: Upstream, ask: Ask) -> Claims:
    """Raises: RpcError."""
    claims = Claims()
    async for item in items_of(upstream, "resources/list", ask):
        claims.add(item.get("uri"))
    try:
        async for item in items_of(upstream, "resources/templates/list", ask):
            claims.add_template(item.get("uriTemplate"))
    except Unreachable:
        raise
    except RpcError as error:
        log.info("mcp: %s: it has no templates: %s", upstream.name, error)
    return claims


async def items_of(upstream: Upstream, method: str, ask: Ask) -> AsyncIterator[dict[str, Any]]:
    """Yield the items of a list. Raises: RpcError."""
    async for page in pages_of(partial(ask, upstream, method)):
        items = page.get(LISTS[method])
        for item in items if isinstance(items, list) else ():
            if isinstance(item, dict):
                yield item


async def has(upstream: Upstream, uri: str, ask: Ask) -> bool:
    """True if the server can read the resource."""
    try:
        async with asyncio.timeout(SETUP_TIMEOUT_S):
            await ask(upstream, "resources/read", {"uri": uri})
    except (RpcError, TimeoutError):
        return False
    return True
