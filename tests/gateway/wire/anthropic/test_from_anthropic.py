"""Anthropic's messages as the template and the engine get them, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params

from gateway.generate_request import CacheBreakpoint, ChatPrompt, PromptPlace
from gateway.request_errors import BadField, UnsupportedField
from gateway.wire.anthropic.from_anthropic import from_anthropic, from_count_tokens
from gateway.wire.anthropic.messages import SERVER_BLOCKS, SERVER_TOOLS, THEIR_TOOLS

KEPT = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "look", "description": "Look.", "input_schema": SCHEMA}
OTHER = {"name": "wait", "input_schema": {"type": "object"}}


def prompt(*messages: Any, **fields: Any) -> ChatPrompt:
    said = messages or ({"role": "user", "content": "hi"},)
    body = {"model": "m", "max_tokens": 4000, "messages": said, **fields}
    found = from_anthropic(json.dumps(body).encode(), "engine").prompt
    assert found is not None
    return found


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": [block(each) for each in content]}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [block(each) for each in content]}


def block(content: Any) -> Any:
    return {"type": "text", "text": content} if isinstance(content, str) else content


def call(id_: str, name: str = "look", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": name, "input": {"city": "Köln"}, **fields}


def result(id_: str, content: Any = "sunny", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id_, "content": content, **fields}


def refused(*messages: Any, **fields: Any) -> BadField:
    with pytest.raises(BadField) as caught:
        prompt(*messages, **fields)
    return caught.value


def test_a_conversation_with_tools_as_templates_take_it() -> None:
    found = prompt(
        user("What", "now?"),
        assistant({"type": "thinking", "thinking": "Hm.", "signature": "s"}, "I ", "look."),
        assistant(call("a"), call("b", "wait", caller={"type": "direct"})),
        user(result("b", [block("in"), block("time")], is_error=True), result("a")),
        {"role": "user", "content": "And?"},
        {"role": "system", "content": "Be kind."},
        system=[block("You are"), block("penny.")],
    )
    function = {"name": "look", "arguments": '{"city": "Köln"}'}
    calls = [
        {"id": "a", "type": "function", "function": function},
        {"id": "b", "type": "function", "function": {**function, "name": "wait"}},
    ]
    assert found.messages == [
        {"role": "system", "content": "You are\npenny."},
        {"role": "user", "content": "What\nnow?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": calls,
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "a", "name": "look"},
        {"role": "tool", "content": "Error: in\ntime", "tool_call_id": "b", "name": "wait"},
        {"role": "user", "content": "And?"},
        {"role": "system", "content": "Be kind."},
    ]
    assert not found.continues
    assert found.message_paths[0] == "system"
    assert found.message_paths[3] == "messages[3].content[1]"


def test_an_answer_may_have_begun() -> None:
    found = prompt(user("x"), {"role": "assistant", "content": "It is"}, assistant(" (B"))
    assert found.continues and found.messages[-1]["content"] == "It is (B"
    ended = prompt(user("x"), {"role": "assistant", "content": ""})
    assert not ended.continues and ended.messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([user("x"), assistant(call("a"))], "messages[1].content[0]"),
        ([user("x"), assistant(call("a")), user("y")], "messages[1].content[0]"),
        ([user("x"), assistant(call("a")), user("y", result("a"))], "messages[2].content[1]"),
        ([user(result("a"))], "messages[0].content[0].tool_use_id"),
        (
            [user("x"), assistant(call("a")), user(result("a"), result("a"))],
            "messages[2].content[1].tool_use_id",
        ),
        ([user("x"), assistant(call("a"), call("a"))], "messages[1].content[1].id"),
        ([user("x"), assistant("Well, ")], "messages[1].content[0]"),
        ([user(call("a"))], "messages[0].content[0].type"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([], "messages"),
        ([user({"type": "text"})], "messages[0].content[0].text"),
        ([user({"type": "text", "text": "x", "more": 1})], "messages[0].content[0].more"),
    ],
)
def test_a_conversation_that_is_none_is_refused_where_it_breaks(messages: Any, param: str) -> None:
    body = {"model": "m", "max_tokens": 5, "messages": messages}
    with pytest.raises(BadField) as caught:
        from_anthropic(json.dumps(body).encode(), "engine")
    assert caught.value.param == param


@pytest.mark.parametrize("kind", ["image", "document", "search_result", *sorted(SERVER_BLOCKS)])
def test_blocks_that_no_model_here_reads_are_refused_as_such(kind: str) -> None:
    error = refused(user({"type": kind}))
    assert isinstance(error, UnsupportedField)
    assert error.param == "messages[0].content[0].type"


@pytest.mark.parametrize("kind", sorted(SERVER_TOOLS | THEIR_TOOLS))
def test_the_vendors_own_tools_are_refused_as_such(kind: str) -> None:
    error = refused(tools=[{"type": kind, "name": "x"}])
    assert isinstance(error, UnsupportedField)
    assert error.param == "tools[0].type"


# ---- tools, forms, thinking


def test_how_tools_are_chosen() -> None:
    def use(**choice: Any) -> Any:
        return prompt(tools=[TOOL, {**OTHER, "strict": True}], tool_choice=choice or None).tools

    offered = use()
    assert [each.name for each in offered.tools] == ["look", "wait"]
    assert [each.strict for each in offered.tools] == [False, True]
    assert offered.tools[0].param == "tools[0].input_schema"
    shown = {"name": "look", "description": "Look.", "parameters": SCHEMA}
    assert offered.tools[0].shown == {"type": "function", "function": shown}
    assert (offered.forced, offered.parallel) == ((), True)
    assert use(type="auto", disable_parallel_tool_use=True).parallel is False
    assert use(type="any").forced == ("look", "wait")
    assert use(type="tool", name="wait").forced == ("wait",)
    assert use(type="none") is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4000}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"temperature": 1.5}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"speed": "fast"}, "speed"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"n": 2}, "n"),
        ({"context_management": {"edits": [{"type": "x"}]}}, "context_management.edits[0].type"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_how_much_is_thought() -> None:
    def effort(**fields: Any) -> tuple[str | None, str]:
        found = prompt(**fields)
        return found.reasoning_effort, found.effort_param

    assert effort() == (None, "output_config.effort")
    assert effort(thinking={"type": "adaptive"})[0] is None
    assert effort(thinking={"type": "disabled"}) == ("none", "thinking")
    for budget, asked in ((1024, "low"), (4096, "medium"), (16384, "high")):
        thinking = {"type": "enabled", "budget_tokens": budget}
        assert effort(thinking=thinking, max_tokens=20_000) == (asked, "thinking")
    both = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}
    assert effort(**both) == ("max", "output_config.effort")


def test_an_answer_of_a_schema() -> None:
    form = prompt(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}).form
    assert form is not None
    assert form.param == "output_config.format.schema"
    assert json.loads(form.grammar.text) == SCHEMA


def test_what_is_asked_of_sampling_and_of_the_window() -> None:
    found = prompt(temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["END"])
    assert (found.temperature, found.top_p, found.top_k) == (0.5, 0.9, 3)
    assert (found.stop, found.max_tokens, found.fits_window) == (("END",), 4000, True)
    assert (prompt(top_p=0).top_p, prompt(top_p=0).top_k) == (1.0, 1)


# ---- breakpoints


def places(found: ChatPrompt) -> list[PromptPlace]:
    return [each.end for each in found.breakpoints]


def test_a_breakpoint_lies_behind_its_block() -> None:
    marked = {"type": "text", "text": "ab", "cache_control": HOUR}
    found = prompt(
        user("x", {**marked, "cache_control": KEPT}, "y"),
        system=[marked, block("c")],
        tools=[{**TOOL, "cache_control": HOUR}],
    )
    assert found.breakpoints == (
        CacheBreakpoint(PromptPlace(num_tools=1), "1h"),
        CacheBreakpoint(PromptPlace(1, 2), "1h"),
        CacheBreakpoint(PromptPlace(2, 4), "5m"),
    )


def test_a_breakpoint_lies_between_an_answers_calls_and_behind_a_result() -> None:
    text = {"type": "text", "text": "I ", "cache_control": KEPT}
    found = prompt(
        user("x"),
        assistant(text, "do", call("a", cache_control=KEPT), call("b")),
        user(
            result("a", [{**text, "text": "no"}, block("yes")], is_error=True),
            result("b", cache_control=KEPT),
        ),
    )
    assert places(found) == [
        PromptPlace(2, 2, num_calls=0),
        PromptPlace(2, num_calls=1),
        PromptPlace(3, len("Error: no")),
        PromptPlace(4),
    ]


def test_the_last_block_is_marked_by_the_request() -> None:
    found = prompt(user("x", "y"), cache_control=HOUR)
    assert found.breakpoints == (CacheBreakpoint(PromptPlace(1), "1h"),)
    own = {"type": "text", "text": "x", "cache_control": KEPT}
    assert prompt(user(own), cache_control=KEPT).breakpoints == prompt(user(own)).breakpoints


def test_breakpoints_have_a_bound_and_an_order() -> None:
    marked = {"type": "text", "text": "x", "cache_control": KEPT}
    assert refused(user(*[marked] * 5)).param == "messages[0].content[4].cache_control"
    late = {**marked, "cache_control": HOUR}
    assert refused(user(marked, late)).param == "messages[0].content[1].cache_control.ttl"
    assert refused(user({**marked, "text": ""})).param == "messages[0].content[0].cache_control"


# ---- the vendor's fields


def test_every_field_of_anthropics_is_known() -> None:
    headers = {"workspace_id", "betas"}
    theirs = message_create_params.MessageCreateParamsBase.__annotations__.keys() | {"stream"}
    known = from_anthropic.__globals__["MessagesRequest"].__struct_fields__
    assert theirs - headers <= set(known)
    counted = message_count_tokens_params.MessageCountTokensParams.__annotations__.keys()
    known = from_anthropic.__globals__["CountTokensRequest"].__struct_fields__
    assert counted - headers <= set(known)


def test_what_is_counted_has_the_prompt_of_what_is_asked() -> None:
    fields = {"messages": [user("x")], "system": "s", "tools": [TOOL]}
    counted = from_count_tokens(json.dumps({"model": "m", **fields}).encode())
    found = counted.prompt
    assert found is not None
    assert found.messages == prompt(user("x"), system="s").messages
    assert found.tools == prompt(tools=[TOOL]).tools
    with pytest.raises(BadField) as caught:
        from_count_tokens(json.dumps({"model": "m", "max_tokens": 5, **fields}).encode())
    assert caught.value.param == "max_tokens"
