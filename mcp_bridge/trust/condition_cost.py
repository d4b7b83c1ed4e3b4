"""Bounds what a condition in CEL may cost, before it is asked: by its text and by the sizes of the
arguments. Pure.

The runtime bounds the steps of comprehensions, not what a step does: a regular expression over a
long text, or two lists that are compared, as often as there are steps, take seconds, and nothing
else runs meanwhile. The model is of the worst that was measured with cel-expr-python 0.1 (RE2 that
falls back to its NFA, a comparison that looks at everything); most conditions take a hundredth.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import msgspec

from mcp_bridge.canonical_json import walk

MAX_STEPS = 10_000
"""Steps of comprehensions, the runtime's own bound."""
MAX_PATTERN_STEPS = 1_000
"""Steps of a regular expression with its counted repetitions written out."""
MANY_STEPS = 50
"""Steps of a class of Unicode characters, which matches byte by byte."""
STEP_NS, TEXT_NS, COMPARE_NS, PATTERN_NS = 500.0, 5.0, 50.0, 30.0
"""For an operation; for a character of a text that is searched; for a value or character that is
compared with what is no literal; for a character and step of a pattern."""

LITERAL = re.compile(
    r"""[rR][bB]?'[^'\n]*'|[rR][bB]?"[^"\n]*"|'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*\""""
)
REPEATS = re.compile(r"\.\s*(?:all|exists|exists_one)\s*\(")
CALLS = re.compile(r"\w\s*\(")
MATCHES = re.compile(r"\bmatches\s*\(")
COMPARES = re.compile(r"==|!=|<=?|>=?|\bin\b")
ONE = r"(?:''|-?[\d.]+u?|true|false|null)"
WITH_LITERAL = re.compile(
    rf"(?:==|!=|<=?|>=?|\bin\b)\s*(?:{ONE}|\[\s*(?:{ONE}\s*,?\s*)*\])(?![\w.\[(])"
    rf"|(?<![\w.\])]){ONE}\s*(?:==|!=|<=?|>=?)"
)
PATTERN_ARGUMENT = re.compile(rf"\bmatches\s*\(\s*(?:[^()]*,\s*)?({LITERAL.pattern})\s*\)")


class Sizes(NamedTuple):
    """The sizes of arguments: values and characters altogether, the longest text, the most values
    in one list or map."""

    total: int
    text: int
    values: int


class Shape(msgspec.Struct, frozen=True):
    """The steps of a condition, each at most once."""

    repeats: int
    operations: int
    searches: int
    """Operations that may look at a whole text."""
    compares: int
    """Comparisons with something else than a literal."""
    adds: int
    pattern_steps: int | None
    """The steps of all its patterns; None: a pattern is not known before the condition runs."""
    literals: int
    """The most values in a list of the condition itself."""

    def cost_ns(self, sizes: Sizes) -> float:
        """Return the most that the condition costs, for arguments of these sizes."""
        if self.pattern_steps is None:
            return float("inf")
        more = 1 + self.adds
        a_step = STEP_NS * (1 + self.operations) + sizes.text * more * TEXT_NS * self.searches
        a_step += sizes.total * more * COMPARE_NS * self.compares
        a_step += sizes.text * more * PATTERN_NS * self.pattern_steps
        values = max(sizes.values * more, self.literals)
        return float(a_step * max(1, min(MAX_STEPS, values**self.repeats)))


@lru_cache(4_096)
def shape_of(condition: str) -> Shape:
    bare = LITERAL.sub("''", condition)
    steps = [pattern_steps(it) for it in PATTERN_ARGUMENT.findall(condition)]
    repeats, calls = len(REPEATS.findall(bare)), len(CALLS.findall(bare))
    compares = len(COMPARES.findall(bare))
    return Shape(
        repeats=repeats,
        operations=compares + calls + len(re.findall(r"[-+*/%?]", bare)),
        searches=calls - repeats - len(re.findall(r"\bhas\s*\(", bare)) + bare.count("+"),
        compares=max(0, compares - len(WITH_LITERAL.findall(bare))),
        adds=bare.count("+"),
        pattern_steps=sum(steps) if len(steps) == len(MATCHES.findall(bare)) else None,
        literals=bare.count(",") + 1,
    )


def sizes_of(args: Mapping[str, object], bound: int) -> Sizes | None:
    """Return the sizes of arguments; None: beyond `bound` altogether.

    Raises: NotCanonical, TypeError.
    """
    total = text = values = 0
    for _, value in walk(args):
        total += len(value) if isinstance(value, str) else 1
        if isinstance(value, str):
            text = max(text, len(value))
        elif isinstance(value, dict):
            total += sum(map(len, value))
            text = max(text, *map(len, value), 0)
            values = max(values, len(value))
        elif isinstance(value, list | tuple):
            values = max(values, len(value))
        if total > bound:
            return None
    return Sizes(total, text, values)


def pattern_steps(pattern: str) -> int:
    """Return the steps of a regular expression as it is written, literal and all: about as many as
    its characters, a counted repetition as many times as it counts at most."""
    groups, last = [0], 0
    for piece in re.finditer(r"\\.|\{(\d+)(?:(,)(\d*))?\}|\[(?:\\.|[^\]\\])+\]|[()]|.", pattern):
        token = piece[0]
        if piece[1] is not None:
            groups[-1] += last * (max(int(piece[1]), int(piece[3] or 0), 1) - 1)
            last = 0
        elif token == "(":
            groups.append(1)
        elif token == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        else:
            last = MANY_STEPS if token[:2] in (r"\p", r"\P") or r"\p" in token.lower() else 1
            groups[-1] += last
    return sum(groups)
