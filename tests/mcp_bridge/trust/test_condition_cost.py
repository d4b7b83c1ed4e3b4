"""No condition, and not all of a call together, may cost more than a bound, whoever wrote it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_bridge.trust.condition_cost import MAX_PATTERN_STEPS, pattern_steps, shape_of, sizes_of
from mcp_bridge.trust.conditions import (
    MAX_CALL_COST_NS,
    MAX_COST_NS,
    ConditionArguments,
    holds,
    problem_of,
)
from mcp_bridge.trust.policy import CallState, ToolCall, ToolRule, checked_rules, decide

LONG: dict[str, Any] = {"s": "a" * 16_000, "x": list(range(99))}
MANY: dict[str, Any] = {"x": list(range(8_000)), "y": [[0]] * 400}


def asked(condition: str, args: dict[str, Any]) -> bool | None:
    assert problem_of(condition) is None
    return holds(condition, looked=ConditionArguments(args), tool="t", server="s", annotations={})


@pytest.mark.parametrize(
    ("condition", "args"),
    [
        ("args.x.all(a, args.x.all(b, args.s.matches('((a{0,30}){0,30})b$') || true))", LONG),
        ("args.x.all(a, args.x.all(b, args.s.matches('(.*a){20}b') || true))", LONG),
        ("args.x.all(a, args.x.all(b, args.s.contains('aaaab') || true))", LONG),
        ("args.x.all(a, args.x.all(b, args.x.all(c, true)))", MANY),
        ("args.x.all(a, args.x == args.x && args.x in [args.x, args.x])", MANY),
        ("args.x.exists(a, a in args.x && false)", MANY),
        ("args.x.exists(a, !(args.x in args.y))", MANY),
        ("args.s.matches('(a|aa)*(b|bb)*(c|cc)*(d|dd)*d')", {"s": "a" * 60_000}),
    ],
)
def test_what_would_take_seconds_is_not_asked(condition: str, args: dict[str, Any]) -> None:
    assert asked(condition, args) is None


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("args.s.matches('((((a{0,10}){0,10}){0,10}))b')", "repetitions written out"),
        ("args.s.matches(args.p)", "no literal"),
        ("matches(args.s, args.p)", "no literal"),
        ("args.s.matches('a' + args.p)", "no literal"),
    ],
)
def test_patterns_that_are_too_much_or_unknown_are_refused(condition: str, said: str) -> None:
    problem = problem_of(condition)
    assert problem is not None and said in problem


USUAL = {
    "path": "/srv/a",
    "tags": ["x" * 20] * 200,
    "paths": ["/srv/" + "a" * 60] * 100,
    "amount": 3,
    "body": "b" * 4_000,
    "to": "a@acme.example",
    "day": "2026-01-01",
    "host": "a.example",
}


@pytest.mark.parametrize(
    "condition",
    [
        "args.path != '/etc'",
        "args.path.startsWith('/srv/')",
        "args.tags.all(tag, !(tag in ['a', 'b']))",
        "args.paths.all(path, path.startsWith('/srv/'))",
        "has(args.amount) && args.amount < 100",
        "size(args.body) < 5000 && args.to.endsWith('@acme.example')",
        r"args.day.matches('^\\d{4}-\\d{2}-\\d{2}$')",
        "args.path.matches('^/srv/[a-z0-9/._-]{1,100}$')",
        r"args.host.matches('^[a-z0-9-]{1,63}(\\.[a-z0-9-]{1,63}){1,2}$')",
    ],
)
def test_what_people_write_is_asked(condition: str) -> None:
    assert asked(condition, USUAL) is True


def test_all_rules_of_a_call_share_a_bound() -> None:
    """The rest is as if it could not be said: a deny denies."""
    costly = "args.s.matches('(a|b)*c')"
    cost_ns = shape_of(costly).cost_ns(sizes_of(LONG, 1 << 20) or pytest.fail("too large"))
    assert 1e6 < cost_ns < MAX_COST_NS
    looked = ConditionArguments(LONG)
    found = [
        holds(costly, looked=looked, tool="t", server="s", annotations={}) for _ in range(1_000)
    ]
    num_asked = int(MAX_CALL_COST_NS // cost_ns)
    assert found == [False] * num_asked + [None] * (1_000 - num_asked)

    call = ToolCall(
        org_id="o", project_id="p", key_id="k", server="s", tool="t", alias="s__t", arguments=LONG
    )
    allow = ToolRule(id="0", effect="allow")
    denies = [ToolRule(id=f"{n + 1:04}", effect="deny", when=costly) for n in range(num_asked)]
    assert decide(call, checked_rules([allow, *denies]), CallState()).effect == "allow"
    more = ToolRule(id="9999", effect="deny", when=costly)
    assert decide(call, checked_rules([allow, *denies, more]), CallState()).rules == ("9999",)


@pytest.mark.parametrize(
    ("pattern", "steps"),
    [
        ("'abc'", 5),
        ("'a{3}'", 5),
        ("'(a{0,10}){0,10}'", 112),
        (r"'[a-z\]]{2,5}'", 7),
        ("'a{2,}'", 4),
        (r"'\pL'", 53),
    ],
)
def test_counted_repetitions_are_written_out(pattern: str, steps: int) -> None:
    assert pattern_steps(pattern) == steps


@given(st.recursive(st.sampled_from("ab."), lambda inner: st.tuples(inner, st.integers(1, 9))))
def test_no_nesting_of_repetitions_hides_what_it_counts(made: Any) -> None:
    def written(it: Any) -> tuple[str, int]:
        if isinstance(it, str):
            return it, 1
        text, count = written(it[0])
        return f"({text}){{0,{it[1]}}}", count * it[1]

    text, count = written(made)
    assert pattern_steps(text) >= count
    if count > MAX_PATTERN_STEPS:
        assert problem_of(f"args.s.matches('{text}')") is not None
