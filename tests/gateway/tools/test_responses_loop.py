"""/v1/responses with tools of MCP servers, by the official SDK, on a worker as it runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.gateway.routes.openapi.running import Running
from tests.gateway.tools.conftest import bounded
from tests.gateway.tools.scripted import ASKED, REQUESTS, SEEN, TOKENIZER, Servers, mcp, script
from tests.journeys.sdk.sdk_shapes import extras


def asked(text: str, *tools: Any, **more: Any) -> dict[str, Any]:
    return {"model": "near", "input": text, "tools": list(tools) or [mcp()], **more}


def kinds(answer: Any) -> list[str]:
    return [item.type for item in answer.output]


LOOK = ("maps__look", {"place": "a"})


def test_rounds_go_on_until_an_answer(client: OpenAI, servers: Servers) -> None:
    text = script([LOOK, ("maps__peek", {"place": "b"})], [("maps__write", {"place": "c"})])
    made = client.responses.create(**asked(text))
    assert extras(made) == [] and made.status == "completed"
    assert kinds(made) == ["mcp_list_tools", "mcp_call", "mcp_call", "mcp_call", "message"]
    assert made.output_text == "Done after 2 rounds."
    listed: Any = made.output[0]
    assert [tool.name for tool in listed.tools][:2] == ["look", "peek"]
    calls: list[Any] = made.output[1:4]  # type: ignore[assignment]
    assert [(call.name, call.output, call.status) for call in calls] == [
        ("look", "a is fine", "completed"),
        ("peek", "b is fine", "completed"),
        ("write", "c is fine", "completed"),
    ]
    assert servers.toolbox.called[0] == LOOK
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()


def test_a_stream_adds_up_to_the_whole_answer(client: OpenAI, servers: Servers) -> None:
    text = script([LOOK, ("maps__fail", {})], [("maps__refuse", {})])
    with client.responses.stream(**asked(text)) as stream:
        seen = list(stream)
        streamed = stream.get_final_response()
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    whole = client.responses.create(**asked(text))
    left_out = {"id", "created_at", "completed_at", "usage"}
    both = [each.model_dump(exclude=left_out, warnings=False) for each in (streamed, whole)]
    for each in both:
        for item in each["output"]:
            item.pop("id")
            for part in item.get("content") or ():
                part.pop("parsed", None)
    assert both[0] == both[1]
    names = [event.type for event in seen]
    assert names[2:6] == [
        "response.output_item.added",
        "response.mcp_list_tools.in_progress",
        "response.mcp_list_tools.completed",
        "response.output_item.done",
    ]
    assert names.count("response.mcp_call.in_progress") == 3
    assert names.count("response.mcp_call.completed") == 1
    assert names.count("response.mcp_call.failed") == 2
    done = [event for event in seen if event.type == "response.mcp_call_arguments.done"]
    assert [each.arguments for each in done] == ['{"place": "a"}', "{}", "{}"]
    pieces = [event for event in seen if event.type == "response.mcp_call_arguments.delta"]
    written = "".join(each.delta for each in pieces if each.item_id == done[0].item_id)
    assert written == done[0].arguments


def test_what_goes_wrong_is_told_to_the_model_and_in_the_item(
    client: OpenAI, servers: Servers
) -> None:
    text = script([("maps__fail", {}), ("maps__refuse", {})])
    made = client.responses.create(**asked(text))
    calls = [item.to_dict() for item in made.output if item.type == "mcp_call"]
    assert [call["status"] for call in calls] == ["failed"] * 2
    assert [call["error"]["type"] for call in calls] == [  # type: ignore[index]
        "mcp_tool_execution_error",
        "mcp_protocol_error",
    ]
    assert made.output_text == "Done after 1 rounds."


def test_what_the_rules_ask_is_asked_once_in_the_order_of_calls(
    client: OpenAI, servers: Servers
) -> None:
    """Two calls that are the same wait for one answer; the others of the round are made."""
    text = script([("maps__ask", {}), LOOK, ("maps__ask", {})])
    with client.responses.stream(**asked(text)) as stream:
        seen = list(stream)
        made = stream.get_final_response()
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    calls: list[Any] = [item for item in made.output if item.type == "mcp_call"]
    assert [call.status for call in calls] == ["incomplete", "completed", "failed"]
    requests: list[Any] = [item for item in made.output if item.type == "mcp_approval_request"]
    [request] = requests
    assert (request.name, request.arguments) == ("ask", "{}")
    assert request.id.startswith(ASKED) and calls[0].approval_request_id == request.id
    done = [event.item.id for event in seen if event.type == "response.output_item.done"]
    assert sorted(done) == sorted(item.id for item in made.output)  # type: ignore[type-var]
    assert made.status == "completed" and kinds(made)[-1] != "message"

    servers.toolbox.approvals[ASKED] = "denied"
    said: Any = {
        "type": "mcp_approval_response",
        "approval_request_id": request.id,
        "approve": True,
    }
    SEEN.clear()
    then = client.responses.create(
        model="near", tools=[mcp()], previous_response_id=made.id, input=[said]
    )
    assert kinds(then) == ["mcp_call", "message"]
    prompt = TOKENIZER.decode(SEEN[0][0], skip_special_tokens=False)
    turn = prompt.rpartition(":DONE")[2]
    assert turn.count("maps__ask") == 2 and turn.count("It was not approved.") == 1
    first, second, third = (turn.index(each) for each in ("not approved", "a is fine", "A person"))
    assert first < second < third


def test_reading_runs_side_by_side_and_writing_in_order(client: OpenAI, servers: Servers) -> None:
    order = [("maps__look", "a"), ("maps__peek", "b"), ("maps__write", "c"), ("maps__write", "d")]
    text = script([(alias, {"place": place}) for alias, place in order])
    client.responses.create(**asked(text))
    assert servers.most_running == 2
    assert servers.order[2:] == ["write c", "write d"]
    servers.most_running = 0
    text = script([("maps__write", {"place": place}) for place in "abc"])
    client.responses.create(**asked(text))
    assert servers.most_running == 1


@pytest.mark.parametrize(
    ("bounds", "reason"),
    [
        ({"max_rounds": 2}, "max_tool_rounds"),
        ({"max_tokens": 10}, "max_tool_tokens"),
        ({"max_cost_usd": 1e-12}, "max_tool_cost"),
        ({"max_seconds": 1e-9}, "max_tool_seconds"),
    ],
)
def test_a_bound_ends_it_with_what_was_done(
    worker: Running, servers: Servers, bounds: dict[str, Any], reason: str
) -> None:
    bounded(worker, servers, **bounds)
    made = worker.post("/v1/responses", **asked(script(*[[LOOK]] * 5)))
    assert (made["status"], made["incomplete_details"]) == ("incomplete", {"reason": reason})
    assert [item["type"] for item in made["output"]].count("mcp_call") >= 1


def test_a_round_that_is_refused_ends_it_with_what_was_done(
    worker: Running, servers: Servers
) -> None:
    bounded(worker, servers, max_result_bytes=1_000_000)
    made = worker.post("/v1/responses", **asked(script([("maps__flood", {})])))
    assert made["incomplete_details"] == {"reason": "context_length_exceeded"}
    assert [item["type"] for item in made["output"]] == ["mcp_list_tools", "mcp_call"]
    assert made["usage"]["output_tokens"] > 0


def test_bounds_on_calls_and_results(worker: Running, servers: Servers) -> None:
    many = script([("maps__look", {"place": str(number)}) for number in range(6)])
    made = worker.post("/v1/responses", **asked(many))
    calls = [item for item in made["output"] if item["type"] == "mcp_call"]
    assert [call["status"] for call in calls] == ["completed"] * 4 + ["failed"] * 2
    made = worker.post("/v1/responses", **asked(many, max_tool_calls=1))
    calls = [item for item in made["output"] if item["type"] == "mcp_call"]
    assert [call["status"] for call in calls].count("completed") == 1
    made = worker.post("/v1/responses", **asked(script([("maps__flood", {})])))
    [flood] = [item for item in made["output"] if item["type"] == "mcp_call"]
    assert len(flood["output"]) < 2100 and "cut off" in flood["output"]


def test_a_model_that_may_call_no_more_answers(client: OpenAI, servers: Servers) -> None:
    """Once the calls are made there is one more round, and nothing is offered in it."""
    before = len(SEEN)
    text = script(*[[LOOK]] * 5)
    made = client.responses.create(**asked(text, max_tool_calls=2))
    assert made.status == "completed" and kinds(made)[1:] == ["mcp_call", "mcp_call", "message"]
    prompts = [
        TOKENIZER.decode(asked_of, skip_special_tokens=False) for asked_of, _ in SEEN[before:]
    ]
    assert ["maps__peek" in prompt for prompt in prompts] == [True, True, False]
    before = len(SEEN)
    client.responses.create(**asked(text, mcp(), FUNCTION, max_tool_calls=1))
    last = TOKENIZER.decode(SEEN[-1][0], skip_special_tokens=False)
    assert len(SEEN) == before + 2 and '"mine"' in last and "maps__peek" not in last


def test_output_is_bounded_over_all_rounds(client: OpenAI, servers: Servers) -> None:
    text = script(*[[LOOK]] * 5)
    whole = client.responses.create(**asked(text))
    assert whole.usage is not None
    most = whole.usage.output_tokens // 2
    cut = client.responses.create(**asked(text, max_output_tokens=most))
    assert cut.usage is not None and cut.usage.output_tokens == most
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


FUNCTION = {"type": "function", "name": "mine", "parameters": {"type": "object"}}


def test_the_clients_own_functions_end_it(client: OpenAI, servers: Servers) -> None:
    tools: Any = [FUNCTION, mcp()]
    made = client.responses.create(**asked(script([LOOK], [LOOK, ("mine", {"x": 1})]), *tools))
    assert kinds(made)[-2:] == ["mcp_call", "function_call"]
    mine: Any = made.output[-1]
    answer = {"type": "function_call_output", "call_id": mine.call_id, "output": "ok"}
    then = client.responses.create(
        model="near",
        tools=tools,
        previous_response_id=made.id,
        input=[answer],  # type: ignore[list-item]
    )
    assert kinds(then) == ["message"]
    assert then.output_text == "Done after 2 rounds."


def test_an_approval_round_trip(client: OpenAI, servers: Servers) -> None:
    tools: Any = [mcp(approval={"never": {"read_only": True}})]
    text = script([LOOK, ("maps__write", {"place": "w"})])
    first = client.responses.create(**asked(text, *tools))
    assert kinds(first) == ["mcp_list_tools", "mcp_call", "mcp_approval_request"]
    assert servers.order == ["look a"] and first.status == "completed"
    request: Any = first.output[-1]
    assert (request.name, request.arguments) == ("write", '{"place": "w"}')

    def answer(approve: bool, previous: str) -> Any:
        said = {
            "type": "mcp_approval_response",
            "approval_request_id": request.id,
            "approve": approve,
        }
        return client.responses.create(
            model="near",
            tools=tools,
            previous_response_id=previous,
            input=[said],  # type: ignore[list-item]
        )

    denied = answer(False, first.id)
    assert kinds(denied) == ["message"] and servers.order == ["look a"]
    done = answer(True, first.id)
    assert kinds(done) == ["mcp_call", "message"] and servers.order == ["look a", "write w"]
    call: Any = done.output[0]
    assert (call.approval_request_id, call.output) == (request.id, "w is fine")
    for previous in (denied, done):
        with pytest.raises(openai.BadRequestError, match="answered already"):
            answer(True, previous.id)


def test_an_approval_is_used_on_one_branch_alone(client: OpenAI, servers: Servers) -> None:
    """At once, and later."""
    tools: Any = [mcp(approval="always")]
    first = client.responses.create(**asked(script([LOOK]), *tools))
    asks: Any = first.output[-1]
    said: Any = {
        "type": "mcp_approval_response",
        "approval_request_id": asks.id,
        "approve": True,
    }

    def branch(_: int) -> Any:
        found = client.responses.create(
            model="near", tools=tools, previous_response_id=first.id, input=[said]
        )
        return found.output[0]

    with ThreadPoolExecutor(4) as threads:
        calls = [*threads.map(branch, range(4)), branch(4)]
    assert servers.toolbox.called == [LOOK]
    assert sorted(call.status for call in calls) == ["completed", *["failed"] * 4]
    assert all("used already" in str(call.error) for call in calls if call.error)


def test_an_approved_call_is_streamed(client: OpenAI, servers: Servers) -> None:
    tools: Any = [mcp(approval="always")]
    first = client.responses.create(**asked(script([LOOK]), *tools))
    request: Any = first.output[-1]
    said: Any = {
        "type": "mcp_approval_response",
        "approval_request_id": request.id,
        "approve": True,
    }
    with client.responses.stream(
        model="near", tools=tools, previous_response_id=first.id, input=[said]
    ) as stream:
        names = [event.type for event in stream]
        done = stream.get_final_response()
    assert kinds(done) == ["mcp_call", "message"]
    assert "response.mcp_call.completed" in names


CHOICE = {"type": "mcp", "server_label": "maps"}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({**CHOICE, "name": "look"}, {"look"}),
        (CHOICE, {"look", "peek"}),
    ],
)
def test_a_servers_tool_is_called_where_it_is_chosen(
    client: OpenAI, servers: Servers, choice: Any, names: set[str]
) -> None:
    """In the first round, by a grammar; then the model answers as it likes."""
    mine: Any = {"type": "function", "name": "mine", "parameters": {"type": "object"}}
    text = script([LOOK])
    given = asked(text, mcp(allowed_tools=["look", "peek"]), mine, tool_choice=choice)
    begun = len(REQUESTS)
    made = client.responses.create(**given)
    assert made.output_text == "Done after 1 rounds."
    assert made.to_dict()["tool_choice"] == {"name": None, **choice}
    first, second = REQUESTS[begun:]
    kept = str(first.sampling.grammar)
    assert {name for name in ("look", "peek", "mine") if name in kept} == names
    assert second.sampling.grammar is None


@pytest.mark.parametrize(
    ("tool", "choice", "param"),
    [
        (mcp(), {"type": "mcp", "server_label": "away"}, "tool_choice.server_label"),
        (mcp("away"), {"type": "mcp", "server_label": "away"}, "tool_choice.server_label"),
        (mcp(), {**CHOICE, "name": "fly"}, "tool_choice.name"),
        (mcp(allowed_tools=["peek"]), {**CHOICE, "name": "look"}, "tool_choice.name"),
        (mcp(), {**CHOICE, "name": ""}, "tool_choice.name"),
        (mcp(), {"type": "mcp"}, "tool_choice.server_label"),
        (mcp(), {**CHOICE, "unknown": 1}, "tool_choice.unknown"),
    ],
)
def test_what_cannot_be_chosen_is_refused_by_its_name(
    client: OpenAI, servers: Servers, tool: Any, choice: Any, param: str
) -> None:
    """Either surface refuses it before anything is generated."""
    begun = len(REQUESTS)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**asked("hi", tool, tool_choice=choice))
    messages: Any = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.BadRequestError) as of_chat:
        client.chat.completions.create(
            model="near", messages=messages, tools=[tool], tool_choice=choice
        )
    assert (caught.value.param, of_chat.value.param) == (param, param)
    assert len(REQUESTS) == begun


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (mcp("nobody"), "tools[0].server_label"),
        (mcp(server_url="https://x.example"), "tools[0].server_url"),
        (mcp(connector_id="connector_gmail"), "tools[0].connector_id"),
        (mcp(headers={"a": "b"}), "tools[0].headers"),
        (mcp(authorization="secret"), "tools[0].authorization"),
        (mcp(approval="sometimes"), "tools[0].require_approval"),
        (mcp(allowed_tools=[""]), "tools[0].allowed_tools[0]"),
        (mcp(unknown=1), "tools[0].unknown"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(
    client: OpenAI, servers: Servers, tool: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**asked("hi", tool))
    assert caught.value.param == param


def test_who_may_not_call_tools_may_not_by_a_model(worker: Running, servers: Servers) -> None:
    key = worker.run(worker.new_key(["inference"]))
    with OpenAI(api_key=key, base_url=f"{worker.url}/v1", max_retries=0) as client:
        with pytest.raises(openai.PermissionDeniedError):
            client.responses.create(**asked("hi"))


def test_only_allowed_tools_are_offered(client: OpenAI, servers: Servers) -> None:
    for allowed in (["look", "nothing"], {"tool_names": ["look", "write"], "read_only": True}):
        made = client.responses.create(**asked("hi", mcp(allowed_tools=allowed)))
        listed: Any = made.output[0]
        assert [tool.name for tool in listed.tools] == ["look"]
    made = client.responses.create(**asked(script([LOOK]), mcp(allowed_tools=["peek"])))
    assert servers.toolbox.called == [] and kinds(made)[-1] == "message"


def test_a_server_that_is_away_is_missing_alone(client: OpenAI, servers: Servers) -> None:
    made = client.responses.create(**asked(script([LOOK]), mcp("away"), mcp()))
    assert kinds(made) == ["mcp_list_tools", "mcp_list_tools", "mcp_call", "message"]
    away: Any = made.output[0]
    assert away.tools == [] and away.error


def test_in_the_background(worker: Running, client: OpenAI, servers: Servers) -> None:
    made = client.responses.create(**asked(script([LOOK]), background=True))
    with client.responses.retrieve(made.id, stream=True) as stream:
        names = [event.type for event in stream]
    assert names[-1] == "response.completed" and "response.mcp_call.completed" in names
