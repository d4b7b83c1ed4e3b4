"""Replaces a catalogue that costs too much by two meta-tools: one searches what the caller may see,
one calls what was found.

A call is permitted, checked, recorded and billed as that of the tool that it names. No alias has a
full stop (`names`), so no server's tool is taken for a meta-tool.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from mcp_bridge.caller import Caller
from mcp_bridge.protocol.rpc import INVALID_PARAMS, RpcError
from mcp_bridge.routing.search import (
    CALL,
    DEFAULT_RESULTS,
    DESCRIPTORS,
    MAX_TOOLS,
    SEARCH,
    ListedTool,
    NotEmbedded,
    ToolIndex,
)
from mcp_bridge.validation.arguments import CompiledSchema, Problem, check, compile_schema

log = logging.getLogger(__name__)

BYTES_PER_TOKEN = 4  # of JSON, about, whatever the tokenizer is
MAX_INDICES = 32
"""One worker keeps this many indices: one for each catalogue that somebody sees."""
COST_META = "tollgate/catalogue"
SCHEMAS: dict[str, CompiledSchema] = {
    str(one["name"]): compile_schema(one["inputSchema"]) for one in DESCRIPTORS
}


class NamedTool(msgspec.Struct):
    name: str


class Embedder(Protocol):
    async def embed(self, caller: Caller, texts: Sequence[str]) -> Sequence[Sequence[float]]:
        """Return the vectors of texts, on the caller's bill. Raises: NotEmbedded."""
        ...


class Pruner:
    """Replaces large catalogues by a search; there is one per bridge.

    `max_tokens`: what a catalogue may cost that is listed. `embedder`: None, or where it fails:
    tools are found by their words alone.
    """

    def __init__(self, max_tokens: int, embedder: Embedder | None = None) -> None:
        self._max_tokens, self._embedder = max_tokens, embedder
        self._indices: OrderedDict[bytes, ToolIndex] = OrderedDict()

    def pruned(self, page: dict[str, Any], items: Sequence[Any]) -> dict[str, Any]:
        """Return `page`, which has the first of `items`, or the meta-tools; with the cost of all
        `items`."""
        tokens = sum(map(tokens_of, items))
        said = page.get("_meta")
        cost = {"tools": len(items), "tokens": tokens}
        meta = {**(said if isinstance(said, dict) else {}), COST_META: cost}
        if tokens <= self._max_tokens:
            return {**page, "_meta": meta}
        return {"tools": [dict(one) for one in DESCRIPTORS], "_meta": meta}

    async def search(self, caller: Caller, items: Sequence[Any], arguments: Any) -> dict[str, Any]:
        """Return the result of SEARCH."""
        wrong = check(SCHEMAS[SEARCH], arguments)
        if wrong:
            return refused(wrong)
        index = await self._index(listed(items))
        query, limit = arguments["query"], arguments.get("limit", DEFAULT_RESULTS)
        try:
            embed = None if self._embedder is None else partial(self._embedder.embed, caller)
            if embed is not None:
                await index.learn(embed)
            found = await index.search(query, limit=limit, embed=embed)
        except NotEmbedded as error:
            log.warning("mcp: tools are searched by words alone: %s", error)
            found = await index.search(query, limit=limit)
        tools = [msgspec.Raw(one.body) for one in found]
        body = msgspec.json.encode({"tools": tools})
        return {
            "content": [{"type": "text", "text": body.decode()}],
            "structuredContent": msgspec.json.decode(body),
        }

    async def _index(self, tools: list[ListedTool]) -> ToolIndex:
        digest = hashlib.sha256()
        for tool in tools:
            digest.update(b"%d " % len(tool.body))
            digest.update(tool.body)
        key = digest.digest()
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = await ToolIndex.built(tools)
            while len(self._indices) > MAX_INDICES:
                self._indices.popitem(last=False)
        self._indices.move_to_end(key)
        return index


def called(params: dict[str, Any]) -> dict[str, Any]:
    """Return the `tools/call` that a call of CALL stands for; never one of a meta-tool. Raises:
    RpcError."""
    arguments: Any = params.get("arguments")
    for wrong in check(SCHEMAS[CALL], arguments):
        raise RpcError(INVALID_PARAMS, f"{CALL}: arguments{wrong.path} {wrong.message}")
    alias = arguments["name"]
    if alias in (SEARCH, CALL):
        raise RpcError(INVALID_PARAMS, f"{CALL}: arguments/name {alias} is called by its own name")
    return {**params, "name": alias, "arguments": arguments.get("arguments", {})}


def listed(items: Sequence[Any]) -> list[ListedTool]:
    """Return the tools of pages of `tools/list`, as JSON or read of it."""
    bodies = [
        bytes(item) if isinstance(item, msgspec.Raw) else msgspec.json.encode(item)
        for item in items[:MAX_TOOLS]
    ]
    return [ListedTool(msgspec.json.decode(body, type=NamedTool).name, body) for body in bodies]


def tokens_of(item: Any) -> int:
    body = item if isinstance(item, msgspec.Raw) else msgspec.json.encode(item)
    return -(-len(memoryview(body)) // BYTES_PER_TOKEN)


def refused(wrong: Sequence[Problem]) -> dict[str, Any]:
    """Return a tool error, which the model can read and correct."""
    lines = [f"arguments{one.path}: {one.message}" for one in wrong]
    return {"content": [{"type": "text", "text": "\n".join(lines)}], "isError": True}
