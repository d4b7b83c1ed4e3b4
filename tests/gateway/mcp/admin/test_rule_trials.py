"""A call that is tried gets the answer that it would get, and each rule says how it takes it."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.mcp.admin.rule_trials import try_call
from mcp_bridge.caller import Caller
from mcp_bridge.trust.call_records import Rules
from mcp_bridge.trust.policy import CallState, ToolRule, decide
from mcp_bridge.trust.read_permit import to_call

RULES = Rules.of(
    [
        ToolRule(id="all", effect="allow"),
        ToolRule(id="etc", effect="deny", tools=("files__*",), when='args.path == "/etc"'),
        ToolRule(id="mail", effect="ask", tools=("mail__*",)),
        ToolRule(id="shop", effect="allow", level="project", of="proj_2"),
    ]
)


def call(tool: str, server: str = "files", **arguments: Any) -> Any:
    caller = Caller(org_id="org_1", project_id="proj_1", subject="u", client="key_1")
    return to_call(caller, server, "tool", tool, arguments=arguments, annotations={})


@pytest.mark.parametrize(
    ("tried", "effect", "words"),
    [
        (call("read", path="/srv"), "allow", ["matches", "no", "other_tools", "elsewhere"]),
        (call("read", path="/etc"), "deny", ["matches", "matches", "other_tools", "elsewhere"]),
        (call("read"), "deny", ["matches", "unknown", "other_tools", "elsewhere"]),
        (call("send", "mail"), "ask", ["matches", "other_tools", "matches", "elsewhere"]),
    ],
)
def test_each_rule_says_how_it_takes_the_call(tried: Any, effect: str, words: list[str]) -> None:
    trial = try_call(RULES, tried, is_approved=True)
    assert trial.decision.effect == effect
    assert trial.decision == decide(tried, RULES.rules, CallState())
    assert [each.word for each in trial.words] == words
    assert [each.id for each in trial.words] == ["all", "etc", "mail", "shop"]


def test_after_a_taint_a_call_asks() -> None:
    trial = try_call(RULES, call("write", path="/srv"), is_approved=False, tainted_by=("web",))
    assert (trial.decision.effect, trial.decision.reason) == ("ask", "tainted")
    assert not trial.is_approved
