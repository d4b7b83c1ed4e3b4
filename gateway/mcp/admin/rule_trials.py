"""Tries a call by an organization's rules, without making it, and says how each rule takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.mcp.tables import pins
from mcp_bridge.trust.call_records import Rules
from mcp_bridge.trust.conditions import ConditionArguments
from mcp_bridge.trust.policy import (
    CallState,
    Decision,
    ToolCall,
    ToolRule,
    concerns,
    decide,
    matching,
    names,
)

Word = Literal["elsewhere", "other_tools", "no", "unknown", "matches"]
"""`elsewhere`: of another project or key. `other_tools`: its tools or annotations are others. `no`:
its condition does not hold. `unknown`: its condition cannot be evaluated, which counts as the
stricter answer."""


class RuleWord(msgspec.Struct, frozen=True):
    id: str
    effect: str
    word: Word


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a trial. Limits are not counted: `decision` is that of a first call."""

    decision: Decision
    words: list[RuleWord]
    is_approved: bool
    """Whether the tool is approved; else no call reaches it, whatever the rules say."""


async def approved_annotations(
    conn: AsyncConnection, org_id: str, server: str, tool: str
) -> Mapping[str, object] | None:
    """Return the hints of a tool as they were approved; None: it is not approved."""
    asked = sa.select(pins.c.body).where(
        pins.c.org_id == org_id,
        pins.c.server == server,
        pins.c.kind == "tool",
        pins.c.name == tool,
    )
    body = await conn.scalar(asked)
    if body is None:
        return None
    value = msgspec.json.decode(bytes(body))
    found = value.get("annotations") if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def try_call(
    rules: Rules, call: ToolCall, *, is_approved: bool, tainted_by: tuple[str, ...] = ()
) -> Trial:
    looked = ConditionArguments(call.arguments)
    return Trial(
        decision=decide(call, rules.rules, CallState(tainted_by=tainted_by)),
        words=[RuleWord(rule.id, rule.effect, word_of(rule, call, looked)) for rule in rules.rules],
        is_approved=is_approved,
    )


def word_of(rule: ToolRule, call: ToolCall, looked: ConditionArguments) -> Word:
    if not concerns(rule, call):
        return "elsewhere"
    if not names(rule, call):
        return "other_tools"
    holds = matching(rule, call, looked)
    return "unknown" if holds is None else "matches" if holds else "no"
