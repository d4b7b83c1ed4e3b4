"""/v1/chat/completions with tools of MCP servers, by the official SDK, on a worker as it runs."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.gateway.fleet.upstream.scripted_upstream import (
    Exchange,
    Script,
    chunk,
    completion,
    usage_chunk,
)
from tests.gateway.routes.openapi.running import TIMEOUT_S, Running
from tests.gateway.tools.conftest import bounded
from tests.gateway.tools.scripted import REQUESTS, Servers, mcp, script

LOOK = ("maps__look", {"place": "a"})
FUNCTION = {"type": "function", "function": {"name": "mine", "parameters": {"type": "object"}}}


def asked(text: str, *tools: Any, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "near", "messages": messages, "tools": list(tools) or [mcp()], **more}


def test_one_answer_of_all_rounds(client: OpenAI, servers: Servers) -> None:
    made: Any = client.chat.completions.create(
        **asked(script([LOOK, ("maps__write", {"place": "b"})], [("maps__fail", {})]))
    )
    [choice] = made.choices
    assert (choice.message.content, choice.finish_reason) == ("Done after 2 rounds.", "stop")
    assert choice.message.tool_calls is None
    steps = made.model_extra["mcp_steps"]
    assert [step["type"] for step in steps] == ["mcp_list_tools"] + ["mcp_call"] * 3
    assert [step["output"] for step in steps[1:]] == ["a is fine", "b is fine", None]


def test_a_servers_tool_is_called_where_it_is_chosen(client: OpenAI, servers: Servers) -> None:
    choice: Any = {"type": "mcp", "server_label": "maps", "name": "look"}
    begun = len(REQUESTS)
    text = script([LOOK, LOOK])
    made: Any = client.chat.completions.create(**asked(text, mcp(), FUNCTION, tool_choice=choice))
    assert made.choices[0].message.content == "Done after 1 rounds."
    first, second = REQUESTS[begun:]
    assert "maps__look" in str(first.sampling.grammar)
    assert "maps__peek" not in str(first.sampling.grammar) and second.sampling.grammar is None


def test_a_stream_has_the_same_and_the_steps_as_they_come(client: OpenAI, servers: Servers) -> None:
    text = script([LOOK], [LOOK])
    whole: Any = client.chat.completions.create(**asked(text))
    chunks = list(
        client.chat.completions.create(
            **asked(text), stream=True, stream_options={"include_usage": True}
        )
    )
    content = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert content == whole.choices[0].message.content
    reasons = [each.choices[0].finish_reason for each in chunks if each.choices]
    assert [each for each in reasons if each] == ["stop"]
    said = [(each.model_extra or {}).get("mcp_step") for each in chunks]
    steps: list[Any] = [each for each in said if each]
    assert [step["type"] for step in steps] == ["mcp_list_tools", "mcp_call", "mcp_call"]
    usage = chunks[-1].usage
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens


def test_the_clients_own_functions_end_it(client: OpenAI, servers: Servers) -> None:
    text = script([LOOK], [LOOK, ("mine", {"x": 1})])
    made: Any = client.chat.completions.create(**asked(text, mcp(), FUNCTION))
    [choice] = made.choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("mine", {"x": 1})
    chunks = list(client.chat.completions.create(**asked(text, mcp(), FUNCTION), stream=True))
    calls = [
        call for each in chunks if each.choices for call in each.choices[0].delta.tool_calls or ()
    ]
    assert {call.index for call in calls} == {0}
    assert calls[0].function is not None and calls[0].function.name == "mine"


def calling(*names: str) -> Script:
    """A model elsewhere that calls these, one a round, and then answers."""

    async def answer(exchange: Exchange) -> None:
        done = sum(each["role"] == "tool" for each in exchange.body["messages"])
        said: dict[str, Any] = {"content": "Done."}
        if done < len(names):
            function = {"name": names[done], "arguments": "{}"}
            call = {"index": 0, "id": f"call_{done}", "type": "function", "function": function}
            said = {"content": None, "tool_calls": [call]}
        reason = "tool_calls" if done < len(names) else "stop"
        if not exchange.body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", **said}, "finish_reason": reason}
            await exchange.answer(completion(choices=[choice]))
            return
        made = chunk(finish=reason)
        made["choices"][0]["delta"] = said
        await exchange.begin_stream()
        await exchange.send(made, usage_chunk(), "[DONE]")
        await exchange.end_stream()

    return answer


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_model_makes_up_is_an_error_that_it_is_told(
    worker: Running, client: OpenAI, servers: Servers, stream: bool
) -> None:
    """A name of nothing, a tool that does not exist, one that was not allowed: only the functions
    that were declared are handed to the client."""
    usual, worker.far.script = worker.far.script, calling("so", "maps__so", "maps__write")
    try:
        chat: Any = asked("hi", mcp(allowed_tools=["look"]), FUNCTION, model="far", stream=stream)
        made: Any = client.chat.completions.create(**chat)
        if stream:
            parts = [each for each in made if each.choices]
            assert [each for part in parts for each in part.choices[0].delta.tool_calls or ()] == []
            content = "".join(part.choices[0].delta.content or "" for part in parts)
            assert (content, parts[-1].choices[0].finish_reason) == ("Done.", "stop")
        else:
            [choice] = made.choices
            assert (choice.message.content, choice.finish_reason) == ("Done.", "stop")
            steps = [step for step in made.model_extra["mcp_steps"] if step["type"] == "mcp_call"]
            assert [step["error"]["message"] for step in steps] == ["There is no such tool."] * 3
        response: Any = client.responses.create(
            model="far", input="hi", tools=[mcp(allowed_tools=["look"])], stream=stream
        )
        whole = list(response)[-1].response if stream else response
        calls = [each for each in whole.output if each.type != "mcp_list_tools"]
        assert [each.type for each in calls] == ["mcp_call"] * 3 + ["message"]
        assert [(each.server_label, each.name) for each in calls[:3]] == [
            ("", "so"),
            ("maps", "so"),
            ("maps", "write"),
        ]
        worker.far.script = calling("so", "mine")
        ended: Any = client.chat.completions.create(**{**chat, "stream": False})
        [mine] = ended.choices[0].message.tool_calls
        assert mine.function.name == "mine" and ended.choices[0].finish_reason == "tool_calls"
    finally:
        worker.far.script = usual
    assert servers.toolbox.called == []


def test_a_bound_says_so(worker: Running, servers: Servers) -> None:
    bounded(worker, servers, max_rounds=2)
    made = worker.post("/v1/chat/completions", **asked(script(*[[LOOK]] * 5)))
    assert made["choices"][0]["finish_reason"] == "length"
    assert made["mcp_steps"][-1] == {"type": "incomplete", "reason": "max_tool_rounds"}


@pytest.mark.parametrize(
    ("tools", "more", "param"),
    [
        ([mcp("nobody")], {}, "tools[0].server_label"),
        ([mcp(approval="always")], {}, "tools[0].require_approval"),
        ([mcp(approval=None)], {}, "tools[0].require_approval"),
        ([FUNCTION, mcp(server_url="https://x.example")], {}, "tools[1].server_url"),
        ([mcp(), {"type": "function"}], {}, "tools[1].function"),
        ([mcp(), mcp()], {}, "tools[1].server_label"),
        ([mcp()], {"n": 2}, "n"),
        ([mcp(), 5], {}, "tools[1]"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(
    worker: Running, servers: Servers, tools: list[Any], more: dict[str, Any], param: str
) -> None:
    answer = worker.session.post(
        f"{worker.url}/v1/chat/completions",
        json=asked("hi", *tools, **more),
        headers={"authorization": f"Bearer {worker.everything}"},
        timeout=TIMEOUT_S,
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_who_may_not_call_tools_may_not_by_a_model(worker: Running, servers: Servers) -> None:
    key = worker.run(worker.new_key(["inference"]))
    with OpenAI(api_key=key, base_url=f"{worker.url}/v1", max_retries=0) as client:
        with pytest.raises(openai.PermissionDeniedError):
            client.chat.completions.create(**asked("hi"))
