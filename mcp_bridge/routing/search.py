"""Finding tools in a catalogue that is too large to show: `tools.search` and `tools.call`.

A catalogue costs its tokens with every request. Up to a bound it is listed; beyond it clients see
two tools instead, one that searches and one that calls what was found, under the same validation
and policy. Texts are ranked by BM25 (`bm25s`) and, where an embedding is at hand, by meaning; the
two rankings are fused by reciprocal rank (Cormack et al., SIGIR 2009).

An index holds only what its callers may see; the embedding is handed in.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from mcp_bridge.canonical_json import walk
from mcp_bridge.names import MAX_ALIAS_CHARS

Embed = Callable[[Sequence[str]], Awaitable[Sequence[Sequence[float]]]]

SEARCH = "tools.search"
CALL = "tools.call"
MAX_TOOLS = 20_000
MAX_QUERY_CHARS = 1_000
MAX_TEXT_CHARS = 4_096
MAX_EMBEDDED_CHARS = 400
"""Bounds tools and queries: small sentence models read no more than 256 tokens."""
MAX_RESULTS = 50
DEFAULT_RESULTS = 10
FUSION_OFFSET = 60  # of reciprocal rank fusion, as its authors have it

INSIDE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|(?<=[A-Za-z])(?=\d)")
"""Matches where a word begins inside `camelCase` and `HTTPServer2`."""
WORD = re.compile(r"[^\W_]+")

DESCRIPTORS: tuple[Mapping[str, Any], ...] = (
    {
        "name": SEARCH,
        "title": "Search tools",
        "description": "Finds tools by what they do; answers names and input schemas.",
        "inputSchema": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "minLength": 1, "maxLength": MAX_QUERY_CHARS},
                "limit": {"type": "integer", "minimum": 1, "maximum": MAX_RESULTS},
            },
            "required": ["query"],
            "additionalProperties": False,
        },
        "annotations": {"readOnlyHint": True, "openWorldHint": False},
    },
    {
        "name": CALL,
        "title": "Call a tool",
        "description": f"Calls a tool that {SEARCH} has found, with arguments by its input schema.",
        "inputSchema": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": MAX_ALIAS_CHARS},
                "arguments": {"type": "object"},
            },
            "required": ["name"],
            "additionalProperties": False,
        },
    },
)


class NotEmbedded(Exception):
    """The meaning of a text cannot be had now; the reason is of whoever embeds."""


class ListedTool(msgspec.Struct, frozen=True):
    """A tool under its alias. `body`: the whole of it, as JSON."""

    alias: str
    body: bytes


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, also those inside `snake_case` and `camelCase`."""
    return WORD.findall(INSIDE.sub(" ", text).lower())


def text_of(tool: ListedTool) -> str:
    """Return the text that is searched: the names, then every string of the tool, bounded."""
    texts: list[str] = [tool.alias.replace("__", " ")]
    size = 0
    for parts, value in walk(msgspec.json.decode(tool.body)):
        said = [str(parts[-1])] if parts and isinstance(parts[-1], str) else []
        said += [value] if isinstance(value, str) else []
        texts += said
        size += sum(map(len, said))
        if size > MAX_TEXT_CHARS:
            break
    return " ".join(texts)[:MAX_TEXT_CHARS]


class ToolIndex:
    """The search over one catalogue; built once for each that is pinned."""

    def __init__(self, tools: Sequence[ListedTool], texts: Sequence[str], ranker: Any) -> None:
        self.tools, self._texts, self.ranker = tools, texts, ranker
        self._vectors: Any = None
        self._learning = asyncio.Lock()

    @classmethod
    async def built(cls, tools: Sequence[ListedTool]) -> ToolIndex:
        """Return the index of at most MAX_TOOLS."""
        assert len(tools) <= MAX_TOOLS
        return cls(tools, *await asyncio.to_thread(read, tools))

    async def learn(self, embed: Embed) -> None:
        """Embed what the tools mean, once. Raises: NotEmbedded."""
        async with self._learning:
            if self._vectors is None and self.tools:
                texts = [text[:MAX_EMBEDDED_CHARS] for text in self._texts]
                self._vectors = normalized(await embed(texts))

    async def search(
        self, query: str, *, limit: int = DEFAULT_RESULTS, embed: Embed | None = None
    ) -> list[ListedTool]:
        """Return the best tools, best first. `query` up to MAX_QUERY_CHARS and `limit` up to
        MAX_RESULTS count. `embed`: that of `learn`. Raises: NotEmbedded."""
        query = query[:MAX_QUERY_CHARS]
        if not self.tools:
            return []
        known = [word for word in words(query) if word in self.ranker.vocab_dict]
        rankings: list[list[int]] = []
        if known:
            scores = self.ranker.get_scores(known)
            rankings.append(ranked(scores))
        if embed is not None and self._vectors is not None:
            wanted = normalized(await embed([query[:MAX_EMBEDDED_CHARS]]))[0]
            rankings.append(ranked(self._vectors @ wanted))
        fused: dict[int, float] = {}
        for ranking in rankings:
            for place, at in enumerate(ranking):
                fused[at] = fused.get(at, 0.0) + 1 / (FUSION_OFFSET + place + 1)
        best = sorted(fused, key=lambda at: (-fused[at], self.tools[at].alias))
        return [self.tools[at] for at in best[: max(1, min(limit, MAX_RESULTS))]]


def ranked(scores: Any) -> list[int]:
    """Return the places with a positive score, best first."""
    found = (at for at, score in enumerate(scores) if score > 0)
    return sorted(found, key=lambda at: (-scores[at], at))


def read(tools: Sequence[ListedTool]) -> tuple[list[str], Any]:
    """Return the text that is searched of each tool, and the ranking by words; None if there are no
    tools."""
    texts = [text_of(tool) for tool in tools]
    corpus = [words(text) or ["-"] for text in texts]
    return texts, ranker_of(corpus) if corpus else None


def ranker_of(corpus: list[list[str]]) -> Any:
    import bm25s  # with numba beside it half a second: for those who have large catalogues

    ranker = bm25s.BM25()
    ranker.index(corpus, show_progress=False)
    return ranker


def normalized(vectors: Sequence[Sequence[float]]) -> Any:
    import numpy as np

    found = np.asarray(vectors, dtype=np.float32)
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
