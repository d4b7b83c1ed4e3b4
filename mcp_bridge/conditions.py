"""Conditions of policy rules in CEL, the Common Expression Language (cel.dev), by its own runtime.

A condition sees `args` (map), `tool`, `server` (strings) and `annotations` (map of booleans), and
is a boolean. CEL ends always; how long it takes is bounded besides: by the length of the text,
its depth (32) and its steps of comprehensions (10,000, both the runtime's), by the size of the
arguments, and by leaving out what makes large values: `map`, `filter`, and `+` inside what
repeats. Regular expressions are RE2's, which are linear. Pure. Above: `policy`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from cel_expr_python import cel

from mcp_bridge.canonical import walk
from mcp_bridge.errors import NotCanonical

MAX_CONDITION_CHARS = 1_000
MAX_ARGUMENT_CHARS = 64 << 10
MAX_REPEATED_CHARS = 16 << 10
"""Of arguments that a comprehension may look at once a step."""
MAX_COMPILED = 4_096

LITERAL = re.compile(
    r"""[rR][bB]?'[^'\n]*'|[rR][bB]?"[^"\n]*"|'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*\""""
)
REPEATS = re.compile(r"\.\s*(?:all|exists|exists_one)\s*\(")
BUILDS = re.compile(r"\.\s*(?:map|filter|transformList|transformMap|transformMapEntry)\s*\(")

ENVIRONMENT = cel.NewEnv(
    variables={
        "args": cel.Type.Map(cel.Type.STRING, cel.Type.DYN),
        "annotations": cel.Type.Map(cel.Type.STRING, cel.Type.BOOL),
        "tool": cel.Type.STRING,
        "server": cel.Type.STRING,
    }
)


def problem_of(condition: str) -> str | None:
    """Why a text is no condition; None for one that is."""
    if len(condition) > MAX_CONDITION_CHARS:
        return f"has more than {MAX_CONDITION_CHARS} characters"
    if "'''" in condition or '"""' in condition:
        return "has a string of several lines"
    bare = LITERAL.sub("''", condition)
    if BUILDS.search(bare):
        return "makes lists: only all, exists and exists_one look at several values"
    if REPEATS.search(bare) and "+" in bare:
        return "adds (+) beside all, exists or exists_one"
    try:
        returned = compiled(condition).return_type()
    except RuntimeError as error:
        return str(error).splitlines()[0][:200]
    return None if returned.name() in ("BOOL", "DYN") else "is no boolean"


@lru_cache(MAX_COMPILED)
def compiled(condition: str) -> Any:
    return ENVIRONMENT.compile(condition)


def holds(
    condition: str,
    *,
    args: Mapping[str, object],
    tool: str,
    server: str,
    annotations: Mapping[str, bool],
) -> bool | None:
    """Whether it holds; None where that cannot be said: an argument that is not there or of
    another type, a number beyond 64 bits, arguments too large to look at."""
    bound = MAX_REPEATED_CHARS if REPEATS.search(condition) else MAX_ARGUMENT_CHARS
    if too_large(args, bound):
        return None
    data = {"args": args, "tool": tool, "server": server, "annotations": annotations}
    try:
        value = compiled(condition).eval(data=data).value()
    except (RuntimeError, ValueError, TypeError, OverflowError):
        return None
    return value if isinstance(value, bool) else None


def too_large(args: Mapping[str, object], bound: int) -> bool:
    size = 0
    try:
        for _, value in walk(args):
            size += len(value) if isinstance(value, str) else 1
            size += sum(map(len, value)) if isinstance(value, dict) else 0
            if size > bound:
                return True
    except (NotCanonical, TypeError):
        return True
    return False
