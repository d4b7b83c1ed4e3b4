"""Bodies to requests: what is honoured, and that whatever is not names its field."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generate_request import ChatPrompt, GenerateRequest, ModelKind
from gateway.request_errors import BadField, UnsupportedField
from gateway.wire.openai.chat import ChatCompletionRequest
from gateway.wire.openai.forward import BILLED_OTHERWISE
from gateway.wire.openai.from_chat import Peek, from_openai, peek

HELLO = [{"role": "user", "content": "hello"}]


def encode(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": HELLO, **fields}).encode()


def engine(**fields: Any) -> GenerateRequest:
    return from_openai(encode(**fields), "engine")


def prompt(**fields: Any) -> ChatPrompt:
    found = engine(**fields).prompt
    assert found is not None
    return found


def refused(body: bytes, kind: ModelKind = "engine") -> BadField:
    with pytest.raises(BadField) as caught:
        from_openai(body, kind)
    assert caught.value.message
    return caught.value


# ---- peek


def test_peek() -> None:
    body = b'{"messages": [[{"deep": 1e5}]], "stream": true, "model": "m"}'
    assert peek(body) == Peek("m", stream=True)
    assert peek(b'{"model": "m", "stream": null}') == Peek("m", stream=False)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{}", "model"),
        (b'{"model": null}', "model"),
        (b'{"model": ""}', "model"),
        (b'{"model": 7}', "model"),
        (b'{"model": "%b"}' % (b"m" * 257), "model"),
        (b'{"model": "m", "stream": 1}', "stream"),
    ],
)
def test_peek_names_the_field(body: bytes, param: str) -> None:
    with pytest.raises(BadField) as caught:
        peek(body)
    assert caught.value.param == param


BROKEN = {
    "empty": b"",
    "cut": b'{"model": "m"',
    "not JSON": b"model=m",
    "trailing": b'{"model": "m"} x',
    "not UTF-8": b'{"model": "\xff"}',
    "half a surrogate pair": b'{"model": "\\ud800"}',
    "NaN": b'{"model": NaN}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "deep": b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b', "model": "m"}',
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_no_json_object(body: bytes) -> None:
    with pytest.raises(BadField, match="could not parse the JSON body"):
        peek(body)
    for kind in ("engine", "upstream"):
        refused(body, kind)


@pytest.mark.parametrize(("body", "is_a"), [(b"[]", "an array"), (b"7", "an integer")])
def test_what_is_json_and_no_object_is_told_so(body: bytes, is_a: str) -> None:
    with pytest.raises(BadField, match=f"must be an object, and is {is_a}"):
        peek(body)
    for kind in ("engine", "upstream"):
        refused(body, kind)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_or_a_refusal(body: bytes) -> None:
    for kind in ("engine", "upstream"):
        with pytest.raises(BadField):
            from_openai(body, kind)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "role", "content", "ttl"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
FIELDS = st.sampled_from([*ChatCompletionRequest.__struct_fields__, *BILLED_OTHERWISE, "x"])


@given(
    st.dictionaries(FIELDS, JSON, min_size=1, max_size=4), st.sampled_from(["engine", "upstream"])
)
def test_any_fields_are_honoured_or_named(fields: dict[str, Any], kind: ModelKind) -> None:
    try:
        from_openai(encode(**fields), kind)
    except BadField as error:
        assert error.param is not None
        named = error.param.split("[")[0].split(".")[0]
        # One that is refused beside another may name either of the two.
        assert named in {*fields, "stream_options", "top_logprobs", "max_tokens", "min_tokens"}


# ---- our engine


def test_everything_that_is_honoured() -> None:
    fields = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "frequency_penalty": -1,
        "presence_penalty": 2,
        "logit_bias": {"5": -100, "6": 1.5},
        "stop_token_ids": [7],
        "ignore_eos": True,
        "seed": -3,
        "logprobs": True,
        "top_logprobs": 4,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprob_token_ids": [8, 9],
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "priority": -5,
        "reasoning_effort": "low",
        "add_generation_prompt": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    request = engine(**fields, n=2, stream=True, stream_options={"include_usage": True})
    assert (request.model, request.n, request.stream, request.include_usage) == ("m", 2, True, True)
    assert request.forward is None
    assert request.prompt == ChatPrompt(
        messages=HELLO,
        max_tokens=9,
        min_tokens=2,
        temperature=0.0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        frequency_penalty=-1.0,
        presence_penalty=2.0,
        logit_bias={5: -100.0, 6: 1.5},
        stop_token_ids=(7,),
        ignore_eos=True,
        seed=-3,
        logprobs=4,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        prompt_logprobs=None,
        logprob_token_ids=(8, 9),
        return_token_ids=True,
        return_tokens_as_token_ids=True,
        priority=-5,
        reasoning_effort="low",
        effort_is_hint=True,
        add_generation_prompt=False,
        template_kwargs={"enable_thinking": False},
        num_other_chars=25,
    )


def test_absent_and_null_are_the_same() -> None:
    names = [n for n in ChatCompletionRequest.__struct_fields__ if n not in ("model", "messages")]
    plain = engine()
    assert engine(**dict.fromkeys(names)) == plain
    assert plain == GenerateRequest(
        model="m",
        stream=False,
        include_usage=False,
        n=1,
        prompt=ChatPrompt(messages=HELLO, effort_is_hint=True),
    )


def test_what_means_nothing_here_is_accepted() -> None:
    plain = engine()
    assert plain == engine(
        user="u",
        safety_identifier="s",
        metadata={"a": "b"},
        store=True,
        parallel_tool_calls=False,
        response_format={"type": "text"},
        modalities=["text"],
    )


def test_messages_of_every_role() -> None:
    messages = [
        {"role": "developer", "content": "be kind"},
        {
            "role": "system",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "user", "content": "hi", "name": "ann"},
        {
            "role": "assistant",
            "content": "yes",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "tool_calls": None,
            "function_call": None,
            "provider_specific_fields": {"refusal": None},
        },
    ]
    assert prompt(messages=messages).messages == [
        {"role": "system", "content": "be kind"},
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": "yes"},
    ]


def test_small_conversions() -> None:
    assert prompt(stop="END").stop == ("END",)
    assert prompt(stop=["A", "B"]).stop == ("A", "B")
    assert prompt(stop=[]).stop == ()
    assert prompt(max_completion_tokens=5).max_tokens == 5
    assert prompt(max_completion_tokens=5, max_tokens=5).max_tokens == 5
    assert prompt(logprobs=True).logprobs == 0
    assert prompt(logprobs=False).logprobs is None
    assert prompt(top_k=-1).top_k == 0
    assert (prompt(top_p=0).top_p, prompt(top_p=0).top_k) == (1.0, 1)


MESSAGE = {"role": "user", "content": "x"}
CALLED = {
    "role": "assistant",
    "content": "x",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "a b", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "x"}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
CALLING = {"name": "f", "arguments": '{"a": 1}'}
FUNCTION_RESULT = {"role": "function", "name": "f", "content": "2"}
REFUSED = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [MESSAGE, {"content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{**MESSAGE, "extra": 1}]}, "messages[0].extra"),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": []}]},
        "messages[0].tool_calls",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}
            ]
        },
        "messages[0].content[1].type",
    ),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 256.0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-46}, "repetition_penalty"),
    ({"repetition_penalty": 101}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"logit_bias": {"word": 1}}, "logit_bias.word"),
    ({"logit_bias": {"4": 1, "5": 101, "6": 1}}, "logit_bias.5"),
    ({"logit_bias": {"4": 1, "-5": 1}}, "logit_bias.-5"),
    ({"logit_bias": {"4": 1, "5": "a, b"}}, "logit_bias.5"),
    ({"logit_bias": {'a"b': 1}}, 'logit_bias.a\\"b'),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"min_tokens": 1, "stop": "x"}, "min_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
    ({"stream": "yes"}, "stream"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"logprob_token_ids": [1] * 129, "logprobs": True}, "logprob_token_ids"),
    ({"priority": 2**31}, "priority"),
    ({"continue_final_message": True}, "continue_final_message"),
    (
        {
            "messages": [{"role": "assistant", "content": "x"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        "continue_final_message",
    ),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"a": "x" * 65536}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {str(n): n for n in range(65)}}, "chat_template_kwargs"),
    ({"service_tier": "scale"}, "service_tier"),
    ({"modalities": ["text", "audio"]}, "modalities[1]"),
    ({"functions": [{"name": "a.b"}]}, "functions[0].name"),
    ({"functions": [FUNCTION, FUNCTION]}, "functions[1].name"),
    ({"functions": [FUNCTION], "function_call": {"name": "g"}}, "function_call.name"),
    ({"functions": [FUNCTION], "function_call": "required"}, "function_call"),
    ({"functions": [FUNCTION], "tools": [TOOL]}, "tools"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"messages": [MESSAGE, FUNCTION_RESULT]}, "messages[1].name"),
    ({"messages": [{**CALLED, "function_call": CALLING}, RESULT]}, "messages[0].function_call"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ({"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
    ({"reasoning": "low"}, "reasoning"),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning.effort"),
    ({"verbosity": "low"}, "verbosity"),
    ({"messages": [MESSAGE, RESULT]}, "messages[1].role"),
    ({"messages": [{**CALLED, "tool_calls": None}, RESULT]}, "messages[1].role"),
    ({"messages": [CALLED, RESULT, MESSAGE, RESULT]}, "messages[3].role"),
    ({"messages": [CALLED, {**RESULT, "tool_call_id": "d"}]}, "messages[1].tool_call_id"),
    ({"messages": [MESSAGE, CALLED]}, "messages[1].tool_calls"),
    ({"messages": [MESSAGE, CALLED, MESSAGE, CALLED, RESULT]}, "messages[1].tool_calls"),
    ({"tools": [{"type": "function", "function": {"name": "a.b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a\n"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "é"}}]}, "tools[0].function.name"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"foo": 1}, "foo"),
    ({"a`b": 1}, "a`b"),
    ({"x" * 500: 1}, "x" * 200),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str) -> None:
    assert refused(encode(**fields)).param == param


def test_results_of_calls_come_behind_them() -> None:
    assert prompt(messages=[MESSAGE, CALLED, RESULT, RESULT, MESSAGE])
    assert "'tool_calls'" in refused(encode(messages=[RESULT])).message


def test_the_older_form_of_tools_is_read_as_tools_of_which_one_is_called() -> None:
    found = engine(functions=[FUNCTION])
    tools = engine(tools=[TOOL], parallel_tool_calls=False)
    assert found.has_tools and found.calls_function and not tools.calls_function
    assert found.prompt is not None and tools.prompt is not None
    assert found.prompt.tools is not None and tools.prompt.tools is not None
    assert found.prompt.tools.tools[0].shown == tools.prompt.tools.tools[0].shown
    assert (found.prompt.tools.forced, found.prompt.tools.parallel) == ((), False)
    named = prompt(functions=[FUNCTION], function_call={"name": "f"})
    assert named.tools is not None and named.tools.forced == ("f",)
    assert prompt(functions=[FUNCTION], function_call="none").tools is None
    assert prompt(functions=[], function_call="auto") == prompt()


def test_calls_and_results_in_the_older_form_are_shown_as_those_of_tools() -> None:
    called = {"role": "assistant", "content": None, "function_call": CALLING}
    *_, call, result = prompt(messages=[MESSAGE, called, FUNCTION_RESULT]).messages
    [shown] = call["tool_calls"]
    assert shown["function"] == CALLING
    assert result == {
        "role": "tool",
        "content": "2",
        "name": "f",
        "tool_call_id": shown["id"],
    }


def test_an_effort_by_either_name() -> None:
    for fields in (
        {"reasoning": {"effort": "high"}},
        {"reasoning": {"effort": "high"}, "reasoning_effort": "high"},
    ):
        found = prompt(**fields)
        assert (found.reasoning_effort, found.effort_param) == ("high", "reasoning.effort")
    assert prompt(reasoning={}) == prompt(reasoning=None) == prompt(reasoning={"effort": None})


def test_words() -> None:
    assert refused(encode(foo=1)).message == "Unrecognized request argument supplied: foo"
    assert refused(encode(n=0)).message == "Invalid value for 'n': Expected `int` >= 1."
    assert refused(b'{"model": "m"}').message == "Missing required parameter: 'messages'."
    whole = "Invalid type for 'n': expected an integer or null, but got a decimal number instead."
    for number in (b"1.0", b"1e3", b"2.5"):
        assert refused(encode(n=0).replace(b'"n": 0', b'"n": ' + number)).message == whole
    robot = {"messages": [{"role": "robot", "content": "x"}]}
    assert refused(encode(**robot)).message == "Invalid value for 'messages[0].role': 'robot'."
    assert type(refused(encode(**robot))) is BadField


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}, fields]}


def part(**fields: Any) -> dict[str, Any]:
    return message(role="user", content=[fields])


NOT_YET = [
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
    (message(role="assistant", content=None, audio={"id": "a"}), "messages[1].audio"),
    (part(type="image_url", image_url={"url": "x"}), "messages[1].content[0].type"),
    (part(image_url={"url": "x"}, type="image_url"), "messages[1].content[0].image_url"),
    (part(type="input_audio", input_audio={}), "messages[1].content[0].type"),
    (part(type="file", file={}), "messages[1].content[0].type"),
    ({"modalities": ["text", "audio"]}, "modalities[1]"),
    ({"service_tier": "scale"}, "service_tier"),
]


@pytest.mark.parametrize(("fields", "param"), NOT_YET)
def test_what_others_honour_is_said_to_be_unsupported(fields: dict[str, Any], param: str) -> None:
    error = refused(encode(**fields))
    assert isinstance(error, UnsupportedField)
    assert error.param == param and f"'{param}'" in error.message
    assert re.search("not support(ed)?", error.message)


def test_an_assistant_says_something_or_calls_a_tool() -> None:
    for silent in (message(role="assistant"), message(role="assistant", content=None)):
        assert refused(encode(**silent)).param == "messages[1].content"


@pytest.mark.parametrize("tier", ["scale", "on_demand", ["flex"], 1])
def test_a_tier_that_is_none_is_refused_in_the_same_words(tier: Any) -> None:
    ours, theirs = (refused(encode(service_tier=tier), kind) for kind in ("engine", "upstream"))
    assert type(ours) is type(theirs)
    assert ours.param == "service_tier" and vars(ours) == vars(theirs)


OWN = {"role": "my-role", "content": [{"type": "text", "text": "x"}], "name": "ann"}


def test_a_role_of_any_name_is_the_templates_affair_in_vllms_dialect() -> None:
    body = encode(messages=[OWN, MESSAGE])
    found = from_openai(body, "vllm")
    assert found.prompt is not None and found.speaks_vllm
    assert found.prompt.messages == [{"role": "my-role", "content": "x", "name": "ann"}, MESSAGE]
    assert refused(body).param == "messages[0].role"
    assert from_openai(encode(messages=[MESSAGE]), "vllm").prompt == prompt(messages=[MESSAGE])


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({**OWN, "role": "a b"}, "role"),
        ({**OWN, "role": "\x7f"}, "role"),
        ({**OWN, "role": "x" * 65}, "role"),
        ({**OWN, "role": 5}, "role"),
        ({"content": "x"}, "role"),
        ({**OWN, "content": None}, "content"),
        ({**OWN, "tool_calls": []}, "tool_calls"),
    ],
)
def test_a_role_has_a_plain_name_in_vllms_dialect(message: dict[str, Any], param: str) -> None:
    with pytest.raises(BadField) as caught:
        from_openai(encode(messages=[MESSAGE, message]), "vllm")
    assert caught.value.param == f"messages[1].{param}"
