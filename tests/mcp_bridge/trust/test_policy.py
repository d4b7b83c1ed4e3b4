"""A deny wins, what is narrower never widens, and what cannot be said is said strictly."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_bridge.errors import PolicyRefused
from mcp_bridge.trust.conditions import ConditionArguments, holds, problem_of
from mcp_bridge.trust.policy import (
    STRICTNESS,
    CallLimit,
    CallState,
    Decision,
    SpendLimit,
    ToolCall,
    ToolRule,
    checked_rules,
    decide,
    may_ever,
    policy_version,
    taint_matters,
)


def call(**changed: Any) -> ToolCall:
    return ToolCall(
        **{
            "org_id": "o",
            "project_id": "p",
            "key_id": "k",
            "server": "files",
            "tool": "read",
            "alias": "files__read",
            "arguments": {"path": "/tmp/x", "n": 3},
            **changed,
        }
    )


conditions = st.sampled_from(
    ["", "true", "false", "args.n < 5", "args.missing == 1", "args.path.startsWith('/tmp/')"]
)
places = st.sampled_from([("org", ""), ("project", "p"), ("project", "other"), ("key", "k")])
globs = st.sampled_from([("*",), ("files__*",), ("mail__*",), ("*__read", "mail__*")])
deciders = st.sampled_from(["administrator", "caller"])
hints = st.dictionaries(st.sampled_from(["readOnlyHint", "destructiveHint"]), st.booleans())


@st.composite
def rule_sets(draw: st.DrawFn) -> tuple[ToolRule, ...]:
    made = []
    for number in range(draw(st.integers(0, 6))):
        level, of = draw(places)
        effect = draw(st.sampled_from(["allow", "ask", "deny"]))
        rate = draw(st.none() | st.builds(CallLimit, st.integers(0, 3), st.just(60)))
        made.append(
            ToolRule(
                id=f"r{number}",
                effect=effect,
                level=level,
                of=of,
                tools=draw(globs),
                annotations=draw(hints),
                when=draw(conditions),
                rate=None if effect == "deny" else rate,
                decider=draw(deciders) if effect == "ask" else "administrator",
            )
        )
    return checked_rules(made)


states = st.builds(
    CallState,
    calls=st.dictionaries(st.sampled_from(["r0", "r1", "r2"]), st.integers(0, 4)),
    tainted_by=st.sampled_from([(), ("web",)]),
)
calls = st.builds(
    lambda alias, n, read_only: call(
        alias=alias, arguments={"n": n}, annotations={"readOnlyHint": read_only}
    ),
    st.sampled_from(["files__read", "mail__send"]),
    st.one_of(st.integers(), st.text(), st.none()),
    st.sampled_from([True, False, "yes"]),
)


@given(calls, rule_sets(), states, st.randoms())
def test_order_says_nothing(one: ToolCall, rules: Any, state: CallState, random: Any) -> None:
    shuffled = list(rules)
    random.shuffle(shuffled)
    assert decide(one, shuffled, state) == decide(one, rules, state)
    assert policy_version(shuffled) == policy_version(rules)


@given(calls, rule_sets(), states, rule_sets())
def test_a_deny_more_never_loosens(one: ToolCall, rules: Any, state: CallState, more: Any) -> None:
    before = decide(one, rules, state).effect
    for rule in more:
        if rule.effect == "deny":
            after = decide(one, (*rules, msgspec.structs.replace(rule, id="new")), state).effect
            assert STRICTNESS[after] >= STRICTNESS[before]


@given(calls, rule_sets(), states, rule_sets())
def test_what_is_narrower_never_widens(
    one: ToolCall, rules: Any, state: CallState, more: Any
) -> None:
    wide = [rule for rule in rules if rule.level == "org"]
    narrow = [msgspec.structs.replace(r, id=f"n{r.id}") for r in more if r.level != "org"]
    by_org = decide(one, wide, state).effect
    assert STRICTNESS[decide(one, [*wide, *narrow], state).effect] >= STRICTNESS[by_org]


@given(calls, rule_sets(), states)
def test_a_matching_deny_wins(one: ToolCall, rules: Any, state: CallState) -> None:
    deny = ToolRule(id="deny", effect="deny")
    assert decide(one, (*rules, deny), state).effect == "deny"
    unsayable = ToolRule(id="deny", effect="deny", when="args.nobody.knows == 1")
    assert decide(one, (*rules, unsayable), state).effect == "deny"


@given(calls, rule_sets())
def test_what_may_never_be_called_is_denied_and_what_has_no_condition_is_known(
    one: ToolCall, rules: Any
) -> None:
    effect = decide(one, [without_limits(rule) for rule in rules], CallState()).effect
    if not may_ever(one, rules):
        assert effect == "deny"
    elif not any(rule.when for rule in rules):
        assert effect != "deny"
    if not may_ever(one, rules, asks=False) and not any(rule.when for rule in rules):
        assert effect != "allow"


def without_limits(rule: ToolRule) -> ToolRule:
    return msgspec.structs.replace(rule, rate=None)


@given(calls, rule_sets(), states)
def test_taint_and_spending_only_tighten(one: ToolCall, rules: Any, state: CallState) -> None:
    clean = decide(one, rules, CallState()).effect
    assert STRICTNESS[decide(one, rules, state).effect] >= STRICTNESS[clean]


@given(calls, rule_sets(), states)
def test_taint_is_looked_up_wherever_it_changes_anything(
    one: ToolCall, rules: Any, state: CallState
) -> None:
    clean = decide(one, rules, msgspec.structs.replace(state, tainted_by=()))
    tainted = decide(one, rules, msgspec.structs.replace(state, tainted_by=("web",)))
    assert taint_matters(one, clean) == (tainted != clean)


def test_what_a_tool_does_not_say_of_itself_is_the_worst() -> None:
    worst = {"readOnlyHint": False, "destructiveHint": True, "openWorldHint": True}
    rules = [ToolRule(id="a", effect="allow", annotations=worst)]
    for said in ({}, {"readOnlyHint": "yes", "destructiveHint": None, "openWorldHint": 0}):
        assert decide(call(annotations=said), rules, CallState()).effect == "allow"
    assert decide(call(annotations={"readOnlyHint": True}), rules, CallState()).effect == "deny"


def test_nothing_is_allowed_that_no_rule_grants() -> None:
    assert decide(call(), (), CallState()) == Decision("deny", "not_granted")
    key_alone = ToolRule(id="k", effect="allow", level="key", of="k")
    assert decide(call(), (key_alone,), CallState()).reason == "not_granted"
    org = ToolRule(id="o", effect="allow")
    assert decide(call(), (org, key_alone), CallState()).effect == "allow"
    other = ToolRule(id="k", effect="allow", level="key", of="k", tools=("mail__*",))
    assert decide(call(), (org, other), CallState()).reason == "not_granted"
    assert decide(call(key_id="k2"), (org, other), CallState()).effect == "allow"


def test_an_ask_whose_condition_cannot_be_evaluated_asks_and_grants_nothing() -> None:
    allow = ToolRule(id="a", effect="allow")
    ask = ToolRule(id="b", effect="ask", when="args.amount > 100")
    assert decide(call(), (allow, ask), CallState()) == Decision("ask", "asked", ("b",))
    assert decide(call(), (ask,), CallState()).reason == "not_granted"
    assert decide(call(arguments={"amount": 5}), (allow, ask), CallState()).effect == "allow"


def test_one_rule_that_wants_an_administrator_is_enough() -> None:
    own = ToolRule(id="a", effect="ask", decider="caller")
    other = ToolRule(id="b", effect="ask", tools=("files__*",))
    assert decide(call(), [own], CallState()) == Decision("ask", "asked", ("a",), decider="caller")
    assert decide(call(), [own, other], CallState()).decider == "administrator"
    tainted = CallState(tainted_by=("web",))
    assert decide(call(), [own], tainted).decider == "administrator"
    reads = call(annotations={"readOnlyHint": True})
    assert decide(reads, [own], tainted).decider == "caller"
    with pytest.raises(PolicyRefused, match="decider"):
        checked_rules([ToolRule(id="a", effect="allow", decider="caller")])


def test_taint_asks_for_side_effects() -> None:
    rules = (ToolRule(id="a", effect="allow"),)
    tainted = CallState(tainted_by=("web",))
    reads = call(annotations={"readOnlyHint": True})
    assert decide(call(), rules, tainted) == Decision("ask", "tainted", ("a",))
    assert decide(reads, rules, tainted).effect == "allow"
    unsaid = call(annotations={"readOnlyHint": "yes", "title": "Reads"})
    assert decide(unsaid, rules, tainted).effect == "ask"
    assert decide(call(), rules, CallState()).effect == "allow"


def test_rates_and_budgets_deny_for_a_while() -> None:
    rules = (
        ToolRule(id="a", effect="allow", rate=CallLimit(2, 60)),
        ToolRule(id="b", effect="allow", budget=SpendLimit(10, 3_600)),
    )
    assert decide(call(), rules, CallState({"a": 1}, {"b": 9})).effect == "allow"
    assert decide(call(), rules, CallState({"a": 2})) == Decision("deny", "rate", ("a",), 60)
    both = Decision("deny", "budget", ("a", "b"), 3_600)
    assert decide(call(), rules, CallState({"a": 2}, {"b": 10})) == both


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"id": ""}, "id"),
        ({"level": "key"}, "of"),
        ({"of": "p"}, "of"),
        ({"tools": ()}, "tools"),
        ({"tools": ("x" * 200,)}, "tools"),
        ({"annotations": {"title": True}}, "annotations"),
        ({"when": "args.n +"}, "when"),
        ({"when": "'text'"}, "when"),
        ({"rate": CallLimit(-1, 60)}, "rate"),
        ({"rate": CallLimit(1, 0)}, "rate"),
        ({"effect": "deny", "budget": SpendLimit(1, 60)}, "budget"),
    ],
)
def test_a_bad_rule_is_refused_by_rule_and_field(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(PolicyRefused) as caught:
        checked_rules([ToolRule(**{"id": "r", "effect": "allow", **changed})])
    assert caught.value.field == field


def test_rules_are_bounded_and_their_ids_single() -> None:
    with pytest.raises(PolicyRefused, match="used twice"):
        checked_rules([ToolRule(id="a", effect="allow"), ToolRule(id="a", effect="deny")])
    with pytest.raises(PolicyRefused, match="more than 1000"):
        checked_rules(ToolRule(id=str(n), effect="allow") for n in range(1_001))


def evaluated(condition: str, **args: object) -> bool | None:
    assert problem_of(condition) is None
    hints, looked = {"readOnlyHint": True}, ConditionArguments(args)
    return holds(condition, looked=looked, tool="read", server="files", annotations=hints)


@pytest.mark.parametrize(
    ("condition", "args", "answer"),
    [
        ("args.path.startsWith('/srv/') && !args.path.contains('..')", {"path": "/srv/a"}, True),
        ("args.amount <= 100.0", {"amount": 99.5}, True),
        ("args.to.all(x, x.endsWith('@example.com'))", {"to": ["a@example.com", "b@evil"]}, False),
        ("has(args.force) && args.force", {}, False),
        ("args.name.matches('^[a-z]+$')", {"name": "abc"}, True),
        ("tool == 'read' && server == 'files' && annotations.readOnlyHint", {}, True),
        ("args.q == 'a + b'", {"q": "a + b"}, True),
        ("args.missing", {}, None),
        ("args.n > 1", {"n": "text"}, None),
        ("args.n > 1", {"n": 2**70}, None),
        ("args.n", {"n": 1}, None),
        ("args.big == ''", {"big": "x" * 70_000}, None),
        ("args.l.exists(x, x == 'y')", {"l": ["x" * 20_000]}, None),
        ("args.l.all(x, args.l.all(y, args.l.all(z, true)))", {"l": list(range(300))}, None),
        ("args.s.matches('^(a+)+$')", {"s": "a" * 60_000 + "!"}, False),
    ],
)
def test_conditions_look_at_arguments(
    condition: str, args: dict[str, object], answer: object
) -> None:
    assert evaluated(condition, **args) is answer


@pytest.mark.parametrize(
    "condition",
    [
        "args.l.map(x, x) == []",
        "args.l . filter(x, true) == []",
        "args.l.all(x, args.s + args.s == x)",
        r"args.l.all(x, r'\' + args.s + 'y' == x)",  # no escape in a raw string
        "'''a''' == 'a'",
        "(" * 60 + "true" + ")" * 60,
        "true || " * 200 + "true",
        "nobody == 1",
        "1 + 'a' == 2",
        "args.n + 1",
        "",
    ],
)
def test_what_could_take_long_or_is_no_boolean_is_no_condition(condition: str) -> None:
    assert problem_of(condition)
