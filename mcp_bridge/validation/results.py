"""Checks a tool's result: its size, its shape in its era, and its `outputSchema`.

MCP 2025-11-25, server/tools, "Structured Content" and "Output Schema": a tool with an output schema
answers with conforming `structuredContent`, unless the result is a tool error. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from mcp_bridge.canonical_json import short_json, walk
from mcp_bridge.errors import NotCanonical
from mcp_bridge.validation.arguments import (
    CompiledSchema,
    KillableEngine,
    Problem,
    beside,
    problems,
)
from mcp_bridge.validation.message_shapes import result_problem

MAX_RESULT_BYTES = 8 << 20
MAX_CONTENT_PARTS = 256


class ResultBounds(msgspec.Struct, frozen=True):
    """The bounds of one result: bytes of its JSON and parts of its `content`."""

    size_bytes: int = MAX_RESULT_BYTES
    content_parts: int = MAX_CONTENT_PARTS


def oversized(result: Mapping[str, object], bounds: ResultBounds) -> Problem | None:
    """Return the first bound that `result` breaks."""
    content = result.get("content", [])
    if not isinstance(content, list):
        return Problem("/content", "type", "is no list")
    if len(content) > bounds.content_parts:
        return Problem("/content", "maxItems", f"has more than {bounds.content_parts} parts")
    encoded = short_json(result)
    if encoded is not None and len(encoded) <= bounds.size_bytes:
        return None
    try:
        size = sum(weight(one) for _, one in walk(result))
    except NotCanonical as error:
        return Problem(error.param, "schema", error.message)
    if size > bounds.size_bytes:
        return Problem("", "size", f"has more than {bounds.size_bytes} bytes")
    return None


def weight(one: object) -> int:
    """Return the least bytes that a value takes in JSON, without what is inside it."""
    if isinstance(one, str):
        return len(one) + 2
    if isinstance(one, Mapping):
        return sum(len(key) + 4 for key in one) + 2
    return 2


async def result_problems(
    result: Mapping[str, object],
    output: CompiledSchema | None,
    killable: KillableEngine,
    bounds: ResultBounds | None = None,
    *,
    modern: bool = True,
) -> tuple[Problem, ...]:
    """Return the problems of a CallToolResult of either era; paths begin at the result. Raises:
    ValidationTimedOut."""
    wrong = await beside(result, misshapen, result, bounds or ResultBounds(), modern)
    if wrong is not None:
        return (wrong,)
    if output is None or result.get("isError") is True:
        return ()
    if "structuredContent" not in result:
        missing = "is missing, and the tool has an outputSchema"
        return (Problem("/structuredContent", "required", missing),)
    found = await problems(output, result["structuredContent"], killable)
    return tuple(msgspec.structs.replace(p, path=f"/structuredContent{p.path}") for p in found)


def misshapen(result: Mapping[str, object], bounds: ResultBounds, modern: bool) -> Problem | None:
    """Return the first bound, or rule of the protocol, that a CallToolResult breaks."""
    return oversized(result, bounds) or result_problem("tools/call", result, modern=modern)


def failed_result(message: str, wrong: Iterable[Problem]) -> dict[str, Any]:
    """Return a tool error, which the model can read and correct."""
    lines = [message, *(f"{one.path or '(root)'}: {one.message}" for one in wrong)]
    return {"content": [{"type": "text", "text": "\n".join(lines)}], "isError": True}


def annotations_of(tool: Mapping[str, Any]) -> Mapping[str, object]:
    found = tool.get("annotations")
    return found if isinstance(found, dict) else {}
