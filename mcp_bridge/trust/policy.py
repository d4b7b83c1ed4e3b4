"""Decides whether a tool may be called: by rules of an org, its projects and its keys.

Order says nothing. Of all rules that match a call **a deny wins, then an ask, then an allow**; a
call that no rule of the org grants (allow or ask) is denied. A project or a key that has grants
of its own must grant, too: what is narrower only narrows, never widens. A rule can bound calls
and money in a window; beyond it the call is denied for a while. After a result of an untrusted
server in the same conversation (taint), what has side effects asks. Who asks is answered by an
administrator, or by the caller itself where all rules that ask leave it to the caller.

A condition that cannot be evaluated is taken as the stricter answer: it matches in a deny or an
ask, and grants nothing. Annotations are hints (MCP 2025-11-25, ToolAnnotations): those that were
approved with the tool hold, and where it has none the specification's defaults: the worst case.

Pure: counts, sums and taint are handed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from mcp_bridge.canonical_json import digest
from mcp_bridge.errors import PolicyRefused
from mcp_bridge.trust.approvals import Decider
from mcp_bridge.trust.conditions import ConditionArguments, holds, problem_of

Effect = Literal["allow", "ask", "deny"]
Level = Literal["org", "project", "key"]
Reason = Literal["granted", "asked", "denied", "not_granted", "rate", "budget", "tainted"]

STRICTNESS: Mapping[Effect, int] = {"allow": 0, "ask": 1, "deny": 2}
HINTS: Mapping[str, bool] = {
    "readOnlyHint": False,
    "destructiveHint": True,
    "idempotentHint": False,
    "openWorldHint": True,
}
"""The specification's defaults: what a tool may do that does not say otherwise."""

MAX_RULES = 1_000
MAX_GLOBS = 100
MAX_GLOB_CHARS = 128
MAX_ID_CHARS = 64
MAX_WINDOW_S = 31 * 24 * 3600


class CallLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A limit of at most `calls` in any `window_s` seconds."""

    calls: int
    window_s: int


class SpendLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A limit of at most `amount_pico` (pico-USD) in any `window_s` seconds."""

    amount_pico: int
    window_s: int


class ToolRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule for the calls that match all of: level and `of` (the id of the project or key; empty
    for the org), one of the globs over `server__tool`, every annotation, the condition. `decider`:
    who answers, where it asks."""

    id: str
    effect: Effect
    level: Level = "org"
    of: str = ""
    tools: tuple[str, ...] = ("*",)
    annotations: dict[str, bool] = {}
    when: str = ""
    decider: Decider = "administrator"
    rate: CallLimit | None = None
    budget: SpendLimit | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call as policy sees it. `annotations`: as they were approved, or as a server says them that
    the operator trusts."""

    org_id: str
    project_id: str
    key_id: str
    server: str
    tool: str
    alias: str
    arguments: Mapping[str, object]
    annotations: Mapping[str, object] = {}
    cost_pico: int = 0

    def hints(self) -> dict[str, bool]:
        return {
            hint: value if isinstance(value := self.annotations.get(hint), bool) else default
            for hint, default in HINTS.items()
        }


class CallState(msgspec.Struct, frozen=True):
    """The state that rules look at: calls and pico-USD by the id of the rule whose window they are
    in, and the untrusted servers whose results are in the conversation."""

    calls: Mapping[str, int] = {}
    spent_pico: Mapping[str, int] = {}
    tainted_by: tuple[str, ...] = ()


class Decision(msgspec.Struct, frozen=True):
    """The answer, why, by which rules (sorted by id), when asking again makes sense, and who says
    yes where it is to ask."""

    effect: Effect
    reason: Reason
    rules: tuple[str, ...] = ()
    retry_after_s: int | None = None
    decider: Decider = "administrator"


def checked_rules(rules: Iterable[ToolRule]) -> tuple[ToolRule, ...]:
    """Return `rules` sorted by id; PolicyRefused names the rule and the field of the first bad
    one."""
    found = tuple(sorted(rules, key=lambda rule: rule.id))
    if len(found) > MAX_RULES:
        raise PolicyRefused("", "rules", f"more than {MAX_RULES}")
    for before, rule in zip(("", *(one.id for one in found)), found, strict=False):
        for field, problem in problems_of(rule, before):
            raise PolicyRefused(rule.id[:MAX_ID_CHARS], field, problem)
    return found


def problems_of(rule: ToolRule, before: str) -> Iterable[tuple[str, str]]:
    if not 0 < len(rule.id) <= MAX_ID_CHARS:
        yield "id", f"has 1 to {MAX_ID_CHARS} characters"
    if rule.id == before:
        yield "id", "is used twice"
    if (rule.level == "org") != (rule.of == ""):
        yield "of", "names the project or key, and nothing for the org"
    if not 0 < len(rule.tools) <= MAX_GLOBS:
        yield "tools", f"has 1 to {MAX_GLOBS} globs"
    if not all(0 < len(glob) <= MAX_GLOB_CHARS for glob in rule.tools):
        yield "tools", f"a glob has 1 to {MAX_GLOB_CHARS} characters"
    if unknown := set(rule.annotations) - set(HINTS):
        yield "annotations", f"{min(unknown)[:MAX_ID_CHARS]!r} is none of {', '.join(HINTS)}"
    if rule.when and (problem := problem_of(rule.when)):
        yield "when", problem
    if rule.decider != "administrator" and rule.effect != "ask":
        yield "decider", "is for what asks alone"
    yield from problems_of_limits(rule)


def problems_of_limits(rule: ToolRule) -> Iterable[tuple[str, str]]:
    for field in ("rate", "budget"):
        limit: CallLimit | SpendLimit | None = getattr(rule, field)
        if limit is None:
            continue
        amount = limit.calls if isinstance(limit, CallLimit) else limit.amount_pico
        if amount < 0 or not 0 < limit.window_s <= MAX_WINDOW_S:
            yield field, f"is nothing or more, in 1 to {MAX_WINDOW_S} seconds"
        if rule.effect == "deny":
            yield field, "a deny has no limits"


def policy_version(rules: Iterable[ToolRule]) -> str:
    """Return the digest of a set of rules, whatever their order; approvals are bound to it."""
    return digest([msgspec.to_builtins(rule) for rule in sorted(rules, key=lambda one: one.id)])


def decide(call: ToolCall, rules: Sequence[ToolRule], state: CallState) -> Decision:
    """Return the answer to one call by `checked_rules`."""
    mine = [rule for rule in rules if concerns(rule, call)]
    looked = ConditionArguments(call.arguments)
    matches = {rule.id: matching(rule, call, looked) for rule in mine}
    denied = [rule.id for rule in mine if rule.effect == "deny" and matches[rule.id] is not False]
    if denied:
        return Decision("deny", "denied", tuple(sorted(denied)))
    grants = [rule for rule in mine if rule.effect != "deny"]
    for level in ("org", "project", "key"):
        here = [rule for rule in grants if rule.level == level]
        if (here or level == "org") and not any(matches[rule.id] for rule in here):
            return Decision("deny", "not_granted")
    granted = [rule for rule in grants if matches[rule.id]]
    exhausted = over(granted, state, call.cost_pico)
    if exhausted is not None:
        return exhausted
    asked = [rule for rule in grants if rule.effect == "ask" and matches[rule.id] is not False]
    is_tainted = bool(state.tainted_by) and not call.hints()["readOnlyHint"]
    if asked:
        by = tuple(sorted(rule.id for rule in asked))
        own = not is_tainted and all(rule.decider == "caller" for rule in asked)
        return Decision("ask", "asked", by, decider="caller" if own else "administrator")
    by = tuple(sorted(rule.id for rule in granted))
    if is_tainted:
        return Decision("ask", "tainted", by)
    return Decision("allow", "granted", by)


def taint_matters(call: ToolCall, decision: Decision) -> bool:
    """True if `decide`, which said this of somebody clean, could say otherwise of them tainted."""
    could = decision.effect == "allow" or decision.decider == "caller"
    return could and not call.hints()["readOnlyHint"]


def concerns(rule: ToolRule, call: ToolCall) -> bool:
    """True if the rule is of this call's org, project or key. All rules are of one org."""
    return rule.of == {"org": "", "project": call.project_id, "key": call.key_id}[rule.level]


def matching(rule: ToolRule, call: ToolCall, looked: ConditionArguments) -> bool | None:
    """Return whether the rule matches; None where its condition cannot be evaluated."""
    if not names(rule, call):
        return False
    if not rule.when:
        return True
    hints = call.hints()
    return holds(rule.when, looked=looked, tool=call.tool, server=call.server, annotations=hints)


def names(rule: ToolRule, call: ToolCall) -> bool:
    """True if the rule matches but for its condition."""
    if not any(fnmatchcase(call.alias, glob) for glob in rule.tools):
        return False
    hints = call.hints() if rule.annotations else {}
    return all(hints[hint] == wanted for hint, wanted in rule.annotations.items())


def may_ever(call: ToolCall, rules: Sequence[ToolRule], *, asks: bool = True) -> bool:
    """True if `decide` can say anything but a deny, with whatever arguments.

    `asks`: whether somebody can be asked.
    """
    mine = [rule for rule in rules if concerns(rule, call)]
    found = [rule for rule in mine if names(rule, call)]
    refusing = ("deny",) if asks else ("deny", "ask")
    if any(rule.effect in refusing and not rule.when for rule in found):
        return False
    for level in ("org", "project", "key"):
        is_bound = level == "org" or any(r.level == level and r.effect != "deny" for r in mine)
        if is_bound and not any(r.level == level and r.effect != "deny" for r in found):
            return False
    return True


def over(rules: Iterable[ToolRule], state: CallState, cost_pico: int) -> Decision | None:
    """Return the denial by the rules whose limit is reached, or would be exceeded by the cost of
    the call; it ends with the longest window."""
    rated = [r for r in rules if r.rate and state.calls.get(r.id, 0) >= r.rate.calls]
    sums = state.spent_pico
    spent = [r for r in rules if r.budget and is_spent(r.budget, sums.get(r.id, 0), cost_pico)]
    windows = [r.rate.window_s for r in rated if r.rate]
    windows += [r.budget.window_s for r in spent if r.budget]
    if not windows:
        return None
    reason: Reason = "budget" if spent else "rate"
    by = tuple(sorted({rule.id for rule in (*rated, *spent)}))
    return Decision("deny", reason, by, max(windows))


def is_spent(budget: SpendLimit, spent_pico: int, cost_pico: int) -> bool:
    """True if a call of that cost is too much; where nothing is left a free one is."""
    return spent_pico >= budget.amount_pico or spent_pico + cost_pico > budget.amount_pico
