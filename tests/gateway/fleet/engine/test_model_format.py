"""A model's own folder decides parts of a request: the settings that its chat template knows, the
form that an answer can have, how it calls and what it thinks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from engine.fake.engine import FakeCore, FakeEngine
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from gateway.fleet.drain_marks import DrainMarks
from gateway.fleet.engine.kept_prefixes import unheard
from gateway.fleet.engine.replica import EngineReplica
from gateway.fleet.engine.routes import engine_routes
from gateway.fleet.kv_index import KvIndex
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.generate_request import GenerateRequest, ToTokenize
from gateway.generation_events import ReplicaEvent, TextDelta
from gateway.lanes import Priority
from gateway.request_errors import BadField, ContextTooLong, UnsupportedField
from gateway.settings.models import ModelConfig
from gateway.wire.openai.from_chat import from_openai
from gateway.wire.openai_responses.from_responses import own_items, read_response, to_generate

Make = Callable[..., EngineReplica]


def chat(**fields: Any) -> GenerateRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}
    return from_openai(json.dumps(body).encode(), "engine")


@pytest.fixture
def make(tokenizer: Tokenizer, threads: PrepareThreads) -> Make:
    """A replica by the source of its template, before an engine that says these texts."""

    def make_replica(source: str, *texts: str) -> EngineReplica:
        core = FakeCore(
            vocab_size=tokenizer.vocab_size,
            respond=lambda _, index: iter(tokenizer.encode(texts[index])),
        )
        return EngineReplica(
            name="m@0",
            client=FakeEngine(core),
            tokenizer=tokenizer,
            template=ChatTemplate({"default": source}, {}),
            threads=threads,
        )

    return make_replica


async def events(replica: EngineReplica, request: GenerateRequest) -> AsyncIterator[ReplicaEvent]:
    prepared = await replica.prepare(request)
    async with aclosing(replica.stream(prepared, attempt_id="a", cache_salt="org")) as stream:
        async for event in stream:
            yield event


F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
G = {"type": "function", "function": {"name": "g", "strict": True}}
SHOWS_TOOLS = "{{ tools | tojson }}{% for m in messages %}{{ m.tool_calls }}{% endfor %}<tool_call>"


async def test_the_model_is_shown_its_tools_and_its_calls_are_read(
    make: Make, tokenizer: Tokenizer
) -> None:
    text = 'Yes.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    replica = make(SHOWS_TOOLS, text)
    request = chat(tools=[F])
    prepared = await replica.prepare(request)
    assert prepared.payload.request.sampling.grammar is None
    shown = tokenizer.decode(prepared.payload.rendered.token_ids)
    assert shown == json.dumps([F]) + "<tool_call>"
    found = [event async for event in events(replica, request)]
    items = [item for event in found for item in event.items if isinstance(item, TextDelta)]
    assert "".join(item.text for item in items) == "Yes."
    assert "".join(call.arguments for item in items for call in item.calls) == '{"a": 1}'
    assert items[-1].finish_reason == "tool_calls"


async def test_the_settings_may_name_the_form_of_a_models_output(
    model_folder: Path, tmp_path: Path, threads: PrepareThreads
) -> None:
    """As they do of a template that does not show it."""
    template = tmp_path / "named.jinja"
    template.write_text("{{ tools }}")
    engine = FakeEngine(FakeCore())
    config = ModelConfig(
        name="m",
        path=model_folder,
        engines=("unix:/engine-0.sock",),
        chat_template=template,
        tool_call_parser="llama3_json",
        reasoning_parser="think",
    )
    marks, index = DrainMarks(tmp_path / "drain_marks"), KvIndex(tmp_path / "kv_index")
    [route] = engine_routes(config, [engine], threads, unheard, marks, index)
    replica = route.replicas[0]
    prepared = await replica.prepare(chat(tools=[F], tool_choice="required"))
    grammar = prepared.payload.request.sampling.grammar
    assert "parameters" in grammar.text and "thought" in grammar.text


async def test_without_tools_what_looks_like_a_call_is_text(make: Make) -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    found = [event async for event in events(make(SHOWS_TOOLS, text), chat())]
    items = [item for event in found for item in event.items if isinstance(item, TextDelta)]
    assert "".join(item.text for item in items) == text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [F], "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"tools": [F, G], "tool_choice": "required"}, "tools"),
        ({"tools": [F, G]}, "tools"),
        ({"tools": [F], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [F], "structured_outputs": {"json": "x"}}, "structured_outputs.json"),
    ],
)
async def test_what_calls_are_kept_to_is_refused_by_its_field(
    make: Make, fields: dict[str, Any], param: str
) -> None:
    """There is no grammar without a model, so all of them are."""
    with pytest.raises(BadField) as caught:
        [event async for event in events(make(SHOWS_TOOLS, "x"), chat(**fields))]
    assert caught.value.param == param


async def test_a_call_that_cannot_be_told_from_an_answer_is_not_offered_beside_one(
    make: Make,
) -> None:
    with pytest.raises(UnsupportedField) as caught:
        form = {"type": "json_object"}
        await make("{{ tools }}").prepare(chat(tools=[F], response_format=form))
    assert caught.value.param == "response_format"


async def test_schemas_that_are_too_much_together_are_refused(make: Make) -> None:
    properties = {f"{'p' * 1000}{n}": {} for n in range(20)}
    parameters = {"type": "object", "properties": properties}
    large = [
        {"type": "function", "function": {"name": name, "strict": True, "parameters": parameters}}
        for name in "abcdefghij"
    ]
    with pytest.raises(BadField, match="more than") as caught:
        await make("{% if tools %}tools{% endif %}").prepare(chat(tools=large))
    assert caught.value.param == "tools"


async def test_megabytes_of_tools_that_no_context_holds_are_not_tokenized(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(Tokenizer, "_encoding", refuse)
    tool = {"type": "function", "function": {"name": "f", "description": "words " * 200_000}}
    replica, asked = make(SHOWS_TOOLS), chat(tools=[tool])
    assert asked.prompt is not None
    tokenizing = ToTokenize(chat=asked.prompt, add_special_tokens=False)
    waiting = [
        partial(replica.prepare, asked),
        partial(replica.count, asked),
        partial(replica.tokenize, tokenizing, Priority(tenant="o")),
    ]
    for each in waiting:
        with pytest.raises(ContextTooLong, match="your messages have at least"):
            await each()


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
ANSWER = {"role": "tool", "tool_call_id": "call_1", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [F]}, "tools"),
        ({"messages": [CALLING, ANSWER]}, "messages[0].tool_calls"),
    ],
)
async def test_a_template_that_knows_no_tools_is_given_none(
    make: Make, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(UnsupportedField) as caught:
        await make("{{ messages }}").prepare(chat(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_a_grammar_of_free_text_that_cannot_be_kept_to_is_named(
    make: Make, choice: str
) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"\n%ignore " "'}
    tool = {"type": "custom", "name": "write", "format": form}
    body = {"model": "m", "input": "x", "tools": [tool], "tool_choice": choice}
    request = read_response(json.dumps(body).encode())
    generate = to_generate(request, own_items(request, {}))
    with pytest.raises(BadField) as caught:
        await make("{{ tools }}").prepare(generate)
    assert caught.value.param == "tools[0].format.definition"
    assert "line 2: '%ignore" in str(caught.value)


STRICT = """\
{%- for message in messages %}
{%- if message['role'] == 'system' and not loop.first %}
{{- raise_exception('the system comes first') }}
{%- endif %}
{%- if not loop.first and message['role'] == loop.previtem['role'] %}
{{- raise_exception('they take turns') }}
{%- endif %}
{{- '<' + message['role'] + '>' + message['content'] }}
{%- endfor %}"""


def said(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


async def test_a_strict_template_is_given_messages_in_turns(
    make: Make, tokenizer: Tokenizer
) -> None:
    """As agents send them: several of the system, one of them later on, several of the user."""
    messages = said(
        *(("system", "a"), ("developer", "b"), ("user", "c"), ("user", "d"), ("system", "e")),
        *(("assistant", "f"), ("system", "g"), ("user", "h")),
    )
    prepared = await make(STRICT).prepare(chat(messages=messages))
    text = "<system>a\nb<user>c\nd\ne<assistant>f<user>g\nh"
    assert prepared.payload.rendered.token_ids == tokenizer.encode(text)
    plain = await make(STRICT).prepare(chat(messages=messages[2:3]))
    assert plain.payload.rendered.token_ids == tokenizer.encode("<user>c")


async def test_messages_that_no_form_helps_are_refused(make: Make) -> None:
    twice = said(("user", "a"), ("assistant", "b"), ("assistant", "c"), ("user", "d"))
    for messages in (twice, [*twice, *twice]):
        with pytest.raises(BadField) as caught:
            await make(STRICT).prepare(chat(messages=messages))
        assert caught.value.param == "messages"


async def test_what_is_thought_is_no_answer_and_counted_apart(make: Make) -> None:
    replica = make("{# </think> #}{{ enable_thinking }}<think>", "so</think>\n\nYes.")
    found = [event async for event in events(replica, chat())]
    items = [item for event in found for item in event.items if isinstance(item, TextDelta)]
    assert "".join(item.reasoning for item in items) == "so"
    assert "".join(item.text for item in items) == "Yes."
    usage = found[-1].usage
    assert usage is not None
    assert usage.reasoning_output == len("so</think>")
    assert usage.output == len("so</think>\n\nYes.") + 1


async def test_a_grammar_is_refused_by_the_field_that_asked_for_it(make: Make) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    with pytest.raises(BadField) as caught:  # there is no grammar without a model
        [event async for event in events(make("x", "x"), chat(response_format=schema))]
    assert caught.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("setting", "effort", "shown"),
    [
        ("reasoning_effort", "none", "none"),
        ("reasoning_effort", "high", "high"),
        ("enable_thinking", "none", "False"),
        ("thinking", "minimal", "True"),
        ("neither", "none", ""),
    ],
)
async def test_how_much_to_think_is_told_to_the_template(
    make: Make, tokenizer: Tokenizer, setting: str, effort: str, shown: str
) -> None:
    replica = make("{{ " + setting + " }}!")
    prepared = await replica.prepare(chat(reasoning_effort=effort))
    assert prepared.payload.rendered.token_ids == tokenizer.encode(f"{shown}!")


async def test_a_model_that_always_thinks_takes_any_effort_but_none(
    make: Make, tokenizer: Tokenizer
) -> None:
    replica = make("x</think>")
    said = await replica.prepare(chat(reasoning_effort="low"))
    plain = await replica.prepare(chat())
    assert said.payload.rendered.token_ids == plain.payload.rendered.token_ids


@pytest.mark.parametrize(("source", "effort"), [("x", "low"), ("</think>", "none")])
async def test_an_effort_is_a_hint_to_a_model_that_knows_no_setting_for_it(
    make: Make, source: str, effort: str
) -> None:
    """It does not think at all, or always."""
    replica = make(source)
    told = await replica.prepare(chat(reasoning_effort=effort))
    plain = await replica.prepare(chat())
    assert told.payload.rendered.token_ids == plain.payload.rendered.token_ids


@pytest.mark.parametrize(("source", "effort"), [("x", "low"), ("</think>", "none")])
async def test_an_effort_that_is_no_hint_is_refused_where_it_cannot_be(
    make: Make, source: str, effort: str
) -> None:
    request = chat(reasoning_effort=effort)
    assert request.prompt is not None
    prompt = structs.replace(request.prompt, effort_is_hint=False)
    with pytest.raises(UnsupportedField) as caught:
        await make(source).prepare(structs.replace(request, prompt=prompt))
    assert caught.value.param == "reasoning_effort"


async def test_variables_of_the_template_are_the_clients_to_say(
    make: Make, tokenizer: Tokenizer
) -> None:
    replica = make("{{ enable_thinking }} {{ style.name }}!")
    kwargs = {"enable_thinking": False, "style": {"name": "plain"}, "unread": 1}
    told = await replica.prepare(chat(reasoning_effort="high", chat_template_kwargs=kwargs))
    assert told.payload.rendered.token_ids == tokenizer.encode("False plain!")


async def test_the_last_message_is_gone_on_with_or_nothing_is_begun(
    make: Make, tokenizer: Tokenizer
) -> None:
    replica = make(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    asked = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "Sure,"}]
    for fields, text in (
        ({}, "<user>Go.</><assistant>Sure,</><assistant>"),
        ({"add_generation_prompt": False}, "<user>Go.</><assistant>Sure,</>"),
        ({"continue_final_message": True}, "<user>Go.</><assistant>Sure,"),
    ):
        prepared = await replica.prepare(chat(messages=asked, **fields))
        assert prepared.payload.rendered.token_ids == tokenizer.encode(text), fields
