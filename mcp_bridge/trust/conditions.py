"""Conditions of policy rules in CEL, the Common Expression Language (cel.dev), by its own runtime.

A condition sees `args` (map), `tool`, `server` (strings) and `annotations` (map of booleans), and
is a boolean. CEL ends always; how long it takes is bounded besides: by the length of the text, its
depth (32) and its steps of comprehensions (10,000, both the runtime's), by the size of the
arguments, by leaving out what makes large values (`map`, `filter`, and `+` inside what repeats),
and by what it may cost with arguments of such sizes (`condition_cost`): one that may cost more than
MAX_COST_NS is not asked. Regular expressions are RE2's. The runtime, 7 MB of memory, is loaded with
the first condition. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, cached_property, lru_cache
from typing import Any

from mcp_bridge.errors import NotCanonical
from mcp_bridge.trust.condition_cost import (
    LITERAL,
    MAX_PATTERN_STEPS,
    REPEATS,
    Sizes,
    shape_of,
    sizes_of,
)

MAX_CONDITION_CHARS = 1_000
MAX_ARGUMENT_CHARS = 64 << 10
MAX_REPEATED_CHARS = 16 << 10
"""Characters of arguments that a comprehension may read in each step."""
MAX_COST_NS = 25e6
"""The most that one condition may cost in the worst case."""
MAX_CALL_COST_NS = 250e6
"""The most that all conditions about one call may cost."""
MAX_COMPILED = 4_096

BUILDS = re.compile(r"\.\s*(?:map|filter|transformList|transformMap|transformMapEntry)\s*\(")


@cache
def environment() -> Any:
    """Return what a condition may name."""
    from cel_expr_python import cel

    return cel.NewEnv(
        variables={
            "args": cel.Type.Map(cel.Type.STRING, cel.Type.DYN),
            "annotations": cel.Type.Map(cel.Type.STRING, cel.Type.BOOL),
            "tool": cel.Type.STRING,
            "server": cel.Type.STRING,
        }
    )


def problem_of(condition: str) -> str | None:
    """Return why a text is no condition; None: it is one."""
    if len(condition) > MAX_CONDITION_CHARS:
        return f"has more than {MAX_CONDITION_CHARS} characters"
    if "'''" in condition or '"""' in condition:
        return "has a string of several lines"
    bare = LITERAL.sub("''", condition)
    if BUILDS.search(bare):
        return "makes lists: only all, exists and exists_one look at several values"
    if REPEATS.search(bare) and "+" in bare:
        return "adds (+) beside all, exists or exists_one"
    steps = shape_of(condition).pattern_steps
    if steps is None:
        return "matches a pattern that is no literal"
    if steps > MAX_PATTERN_STEPS:
        return f"has patterns of more than {MAX_PATTERN_STEPS} steps, repetitions written out"
    try:
        returned = compiled(condition).return_type()
    except RuntimeError as error:
        return str(error).splitlines()[0][:200]
    return None if returned.name() in ("BOOL", "DYN") else "is no boolean"


@lru_cache(MAX_COMPILED)
def compiled(condition: str) -> Any:
    return environment().compile(condition)


class ConditionArguments:
    """The arguments of one call, looked at once for however many conditions."""

    def __init__(self, args: Mapping[str, object]) -> None:
        self.args = args
        self._left_ns = MAX_CALL_COST_NS

    @cached_property
    def _sizes(self) -> Sizes | None:
        """Return the sizes; None: they are too large, or no JSON."""
        try:
            return sizes_of(self.args, MAX_ARGUMENT_CHARS)
        except (NotCanonical, TypeError):
            return None

    def may_cost(self, condition: str) -> bool:
        """True if the condition may be asked; what it may cost is spent then."""
        shape, sizes = shape_of(condition), self._sizes
        if sizes is None or (shape.repeats and sizes.total > MAX_REPEATED_CHARS):
            return False
        cost_ns = shape.cost_ns(sizes)
        if cost_ns > min(MAX_COST_NS, self._left_ns):
            return False
        self._left_ns -= cost_ns
        return True


def holds(
    condition: str,
    *,
    looked: ConditionArguments,
    tool: str,
    server: str,
    annotations: Mapping[str, bool],
) -> bool | None:
    """Return whether the condition holds; None: it cannot be evaluated, for an argument that is
    missing or of another type, a number beyond 64 bits, or too large arguments."""
    if not looked.may_cost(condition):
        return None
    data = {"args": looked.args, "tool": tool, "server": server, "annotations": annotations}
    try:
        value = compiled(condition).eval(data=data).value()
    except (RuntimeError, ValueError, TypeError, OverflowError):
        return None
    return value if isinstance(value, bool) else None
