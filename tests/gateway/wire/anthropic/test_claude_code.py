"""Tests that what Claude Code sends, as it was recorded, is taken, and the fields of its betas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.fleet.upstream.body import to_chat_body
from gateway.generate_request import ChatPrompt, GenerateRequest, ModelKind, PromptPlace
from gateway.request_errors import BadField, UnsupportedField
from gateway.wire.anthropic.from_anthropic import from_anthropic, from_count_tokens
from tests.gateway.wire.recorded_clients import recorded_body

SENT = recorded_body("claude_code", "/v1/messages")
KEPT = {"type": "ephemeral"}
NOT_COUNTED = ("max_tokens", "metadata", "stream")


def read(body: dict[str, Any], kind: ModelKind = "engine") -> GenerateRequest:
    return from_anthropic(json.dumps(body).encode(), kind)


def prompt(*messages: dict[str, Any], **fields: Any) -> ChatPrompt:
    said = messages or ({"role": "user", "content": "hi"},)
    found = read({"model": "m", "max_tokens": 5000, "messages": said, **fields}).prompt
    assert found is not None
    return found


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": {"type": "object"}, **fields}


def names(found: ChatPrompt) -> list[str]:
    return [] if found.tools is None else [each.name for each in found.tools.tools]


@pytest.mark.parametrize("kind", ["engine", "upstream"])
def test_what_it_sends_is_taken(kind: ModelKind) -> None:
    request = read(SENT, kind)
    found = request.prompt
    assert found is not None and request.stream
    assert "CronList" in names(found)  # its search had found it
    assert "DeferredToolPlaceholder" not in names(found)
    roles = [message["role"] for message in found.messages]
    assert roles == ["system", "user", "system", *["assistant", "tool"] * 4]
    assert found.messages[4]["content"] == "Loaded the tool CronList."
    assert (found.reasoning_effort, found.effort_is_hint) == ("high", True)


def test_an_upstream_is_told_of_an_effort_only_if_it_takes_one() -> None:
    request = read(SENT, "upstream")
    assert "reasoning_effort" not in to_chat_body(request, "max_tokens")
    hinted = to_chat_body(request, "max_tokens", hints_effort=True)
    assert hinted["reasoning_effort"] == "high"
    asked = {**SENT, "thinking": {"type": "enabled", "budget_tokens": 2000}, "output_config": {}}
    told = to_chat_body(read(asked, "upstream"), "max_tokens")
    assert told["reasoning_effort"] == "low"


def test_what_it_sends_can_be_counted() -> None:
    body = {name: value for name, value in SENT.items() if name not in NOT_COUNTED}
    counted, asked = from_count_tokens(json.dumps(body).encode()).prompt, read(SENT).prompt
    assert counted is not None and asked is not None
    assert counted.messages == asked.messages and counted.tools == asked.tools


# ---- tools that come and go


LATE = [tool("now"), tool("later", defer_loading=True, cache_control=KEPT), tool("last")]
CALL = {"type": "tool_use", "id": "a", "name": "now", "input": {}}


def searched(name: str) -> list[dict[str, Any]]:
    """A conversation in which a search has found a tool."""
    found = [{"type": "tool_reference", "tool_name": name}, {"type": "text", "text": "Enjoy."}]
    result = {"type": "tool_result", "tool_use_id": "a", "content": found}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [result]},
    ]


def change(kind: str, **of_tool: Any) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": kind, "tool": of_tool}]}


def test_a_deferred_tool_is_shown_once_it_was_found() -> None:
    assert names(prompt(tools=LATE)) == ["now", "last"]
    found = prompt(*searched("later"), tools=LATE)
    assert names(found) == ["now", "later", "last"]
    assert found.messages[-1]["content"] == "Loaded the tool later.\nEnjoy."
    assert names(prompt(*searched("unknown"), tools=LATE)) == ["now", "last"]
    forced = prompt(tools=LATE, tool_choice={"type": "tool", "name": "later"})
    assert forced.tools is not None and forced.tools.forced == ("later",)
    with pytest.raises(BadField) as caught:
        prompt(tools=LATE[1:2], tool_choice={"type": "any"})
    assert caught.value.param == "tool_choice"
    assert prompt(tools=LATE[1:2]).tools is None


def test_a_breakpoint_lies_behind_the_tools_that_are_shown() -> None:
    marked = [*LATE[:2], tool("last", cache_control=KEPT)]
    assert [each.end for each in prompt(tools=marked).breakpoints] == [PromptPlace(num_tools=2)]
    shown = prompt(*searched("later"), tools=marked)
    places = [PromptPlace(num_tools=2), PromptPlace(num_tools=3)]
    assert [each.end for each in shown.breakpoints] == places


def test_a_turn_of_the_system_adds_and_removes_tools() -> None:
    named = {"type": "tool_reference", "name": "later"}
    added = prompt(*searched("x"), change("tool_addition", **named), tools=LATE)
    assert names(added) == ["now", "later", "last"]
    assert added.messages == prompt(*searched("x"), tools=LATE).messages
    gone = [*searched("later"), change("tool_removal", **named)]
    assert names(prompt(*gone, tools=LATE)) == ["now", "last"]
    defined = {"type": "tool_definition", "definition": tool("new", description="New.")}
    found = prompt(*searched("x"), change("tool_addition", **defined))
    assert names(found) == ["new"] and found.tools is not None
    assert found.tools.tools[0].param == "messages[3].content[0].tool.definition.input_schema"
    wrong = {"type": "tool_definition", "definition": tool("a b")}
    with pytest.raises(BadField) as caught:
        prompt(*searched("x"), change("tool_addition", **wrong))
    assert caught.value.param == "messages[3].content[0].tool.definition.name"


# ---- wishes


@pytest.mark.parametrize(
    "edit",
    [
        {"type": "clear_tool_uses_20250919"},
        {
            "type": "clear_tool_uses_20250919",
            "trigger": {"type": "tool_uses", "value": 20},
            "keep": {"type": "tool_uses", "value": 3},
            "clear_at_least": {"type": "input_tokens", "value": 5000},
            "exclude_tools": ["Read"],
            "clear_tool_inputs": ["Bash"],
        },
        {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 1}},
        {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}},
        {"type": "clear_thinking_20251015"},
    ],
)
def test_wishes_to_shorten_the_conversation_change_nothing(edit: dict[str, Any]) -> None:
    assert prompt(context_management={"edits": [edit]}) == prompt()


def test_whom_a_kept_prompt_is_shared_with_changes_nothing() -> None:
    def of(**control: Any) -> ChatPrompt:
        text = {"type": "text", "text": "x", "cache_control": {**KEPT, **control}}
        return prompt(system=[text])

    assert of(scope="global") == of()
    with pytest.raises(BadField) as caught:
        of(scope="x" * 65)
    assert caught.value.param == "system[0].cache_control.scope"


@pytest.mark.parametrize("kind", ["image", "document"])
def test_what_no_model_reads_is_named_in_results_too(kind: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": kind}]}
    with pytest.raises(UnsupportedField) as caught:
        prompt(*searched("x")[:2], {"role": "user", "content": [result]})
    assert caught.value.param == "messages[2].content[0].content[0].type"
    assert f"'{kind}'" in str(caught.value)
