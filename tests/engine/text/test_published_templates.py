"""Chats as ids: the templates that models were published with, and penny's, give the ids that
transformers gives; and what they show of earlier calls is what their family's parser reads.

Of trl only the files of templates are read. Mistral's and Hermes' are not among them: those of
`test_chat_template` are in their structure.
"""

from __future__ import annotations

import importlib.metadata
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from engine.errors import InvalidRequest
from engine.text.chat_template import ChatTemplate
from engine.text.output_parser.output_format import OutputFormat
from engine.text.output_parser.registry import FAMILIES
from engine.text.tokenizer import Tokenizer
from engine.text.tool_call_history import FORMS, CallForm, find_form, in_form
from tests.engine.text.output_parser.readings import Reading, read
from tests.engine.text.test_chat_template import MISTRAL, TOOL

PENNY = Path(__file__).resolve().parents[3] / "models" / "penny"
HERMES = """{{- bos_token }}
{%- if tools is iterable and tools | length > 0 %}
    {{- "<|im_start|>system\\nYou are a function calling AI model. Here are the tools: <tools> " }}
    {%- for tool in tools %}
        {{- '{"type": "function", "function": {"name": "' + tool.function.name + '", ' }}
        {%- for name, fields in tool.function.parameters.properties|items %}
            {{- name + ": " + fields.type + (", " if not loop.last else "") }}
        {%- endfor %}
        {{- '"parameters": ' + tool.function.parameters|tojson + "}}" }}
    {%- endfor %}
    {{- " </tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls is defined %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"arguments": ' + tool_call.function.arguments|tojson }}
            {{- ', "name": "' + tool_call.function.name + '"}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>tool\\n<tool_response>\\n{"content": ' + message.content|tojson + '}' }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
STRICT_IDS = MISTRAL.replace(
    "{{- tool_call.function|tojson }}",
    "{%- if tool_call.id|length != 9 %}{{- raise_exception('ids have 9 letters') }}{%- endif %}"
    "{{- tool_call.function|tojson }}",
)
NAMES = {
    "qwen2_5": ("hermes", "none"),
    "qwen3": ("hermes", "think"),
    "qwen3_instruct_2507": ("hermes", "none"),
    "llama3_1": ("llama3_json", "none"),
    "llama3_2": ("llama3_json", "none"),
    "deepseekv3": ("deepseek_v3", "think"),
    "deepseek_r1_distill": ("deepseek_v3", "think"),
    "hermes": ("hermes", "none"),
    "mistral": ("mistral", "none"),
    "penny": ("hermes", "none"),
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@cache
def source(name: str) -> str:
    own = {"hermes": HERMES, "mistral": MISTRAL}
    if name in own:
        return own[name]
    if name == "penny":
        return (PENNY / "chat_template.jinja").read_text()
    file = f"trl/chat_templates/{name}.jinja"
    return Path(str(importlib.metadata.distribution("trl").locate_file(file))).read_text()


@cache
def backend() -> tokenizers.Tokenizer:
    """penny's, and the tokens that these templates write."""
    tokenizer = tokenizers.Tokenizer.from_file(str(PENNY / "tokenizer.json"))
    markers = [marker for family in FAMILIES.values() for marker in family.markers]
    headers = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]"]
    tokenizer.add_special_tokens([*SPECIAL.values(), *headers, *markers, "<｜User｜>"])
    return tokenizer


def template(name: str) -> ChatTemplate:
    return ChatTemplate({"default": source(name)}, SPECIAL)


def call(arguments: object) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": "call00001", "type": "function", "function": function}


def said(arguments: object, content: str | None, num_calls: int) -> list[dict[str, Any]]:
    """A turn that calls, what came of it and how it went on."""
    answer = {"role": "tool", "name": "get_weather", "content": "21", "tool_call_id": "call00001"}
    return [
        {"role": "user", "content": "Weather in 東京 & <b>Zürich</b>?"},
        {"role": "assistant", "content": content, "tool_calls": [call(arguments)] * num_calls},
        *[answer] * num_calls,
        {"role": "assistant", "content": "It is 21.", "reasoning_content": "So it is.\n"},
        {"role": "user", "content": "Thanks"},
    ]


ARGUMENTS = {"city": "Zürich <'&'>", "days": [1, {"a": None}]}
TALK = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Why? 世界 😀"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nBecause. "},
    {"role": "user", "content": "{{ bos_token }}\n"},
]


def reference(name: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend(), chat_template=source(name), **SPECIAL
    )


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_transformers(name: str, tools: list[Any] | None, generate: bool) -> None:
    options = {"enable_thinking": False} if tools and generate else {}
    ours = template(name)
    num_calls = 1 if name.startswith("llama") else 2
    form = ours.call_form()
    arguments = json.dumps(ARGUMENTS, ensure_ascii=False)
    theirs = arguments if form.arguments == "text" else ARGUMENTS
    chats = [(TALK, TALK)]
    if form.empty_content is not None:  # transformers takes such a content out
        same = said(theirs, form.empty_content, num_calls)
        chats += [(said(given, "", num_calls), same) for given in (arguments, ARGUMENTS)]
    for messages, same in chats:
        expected = reference(name).apply_chat_template(
            same, tools=tools, add_generation_prompt=generate, return_dict=False, **options
        )
        text = ours.render(messages, tools=tools, add_generation_prompt=generate, options=options)
        assert Tokenizer(backend(), SPECIAL).encode(text) == expected
        assert len(expected) > 20


@pytest.mark.parametrize("name", NAMES)
def test_what_a_template_shows_of_calls_its_parser_reads(name: str) -> None:
    """So a model of it writes its calls as its family is said to."""
    ours = template(name)
    form = OutputFormat(Tokenizer(backend(), SPECIAL), ours.source)
    expected = NAMES[name]
    assert (form.family, form.reasoning) == expected
    asked, called, *_ = said(json.dumps(ARGUMENTS), "", 1)
    before = ours.render([asked], add_generation_prompt=False)
    turn = ours.render([asked, called], add_generation_prompt=False).removeprefix(before)
    begins = turn.index("{" if form.family == "llama3_json" else FAMILIES[form.family].markers[0])
    reading = read(form.parser(tools=["get_weather"]), turn[begins:])
    [(function, arguments)] = reading.calls
    assert (function, json.loads(arguments)) == ("get_weather", ARGUMENTS)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("penny", CallForm("text", "", False)),
        ("qwen2_5", CallForm("object", "", False)),
        ("qwen3", CallForm("text", "", False)),
        ("llama3_1", CallForm("object", "", False)),
        ("deepseekv3", CallForm("text", "", False)),
        ("deepseek_r1_distill", CallForm("text", None, False)),
        ("qwen3_5_think", CallForm("object", "", False)),
    ],
)
def test_a_template_gets_calls_as_it_takes_them(name: str, form: CallForm) -> None:
    assert template(name).call_form() == form


def test_ids_are_as_long_as_a_template_wants_them() -> None:
    ours = ChatTemplate({"default": STRICT_IDS}, SPECIAL)
    assert ours.call_form() == CallForm("object", "", True)
    messages = said("{}", "", 1)
    messages[1]["tool_calls"][0]["id"] = messages[2]["tool_call_id"] = "call_made_by_a_client"
    assert "get_weather" in ours.render(messages[:3])
    changed = in_form(messages, ours.call_form())
    [short] = [changed[2]["tool_call_id"]]
    assert changed[1]["tool_calls"][0]["id"] == short
    assert short.isalnum() and len(short) == 9
    kept = in_form(said("{}", "", 1), ours.call_form())
    assert kept[2]["tool_call_id"] == "call00001"


def test_of_a_template_that_shows_no_calls_nothing_is_known() -> None:
    assert find_form(lambda messages: "nothing") == FORMS[0]

    def refuse(messages: object) -> str:
        raise InvalidRequest("no")

    assert find_form(refuse) == FORMS[0]


def test_arguments_that_are_no_json_are_shown_as_they_are() -> None:
    for name in ("qwen2_5", "qwen3"):
        for arguments in ('{"city": ', "[1]", "[" * 100_000):
            assert arguments[:20] in template(name).render(said(arguments, "", 1)).replace("\\", "")


def test_a_models_own_spacing_stays_where_a_template_lets_it() -> None:
    arguments = '{"city":"Bern" }'
    assert arguments in template("qwen3").render(said(arguments, "", 1))
    assert arguments in template("penny").render(said(arguments, "", 1))


def test_a_prompt_says_whether_the_model_is_to_think() -> None:
    form = OutputFormat(Tokenizer(backend(), SPECIAL), source("qwen3"))
    state = form.reasoning_state(
        template("qwen3").render(TALK[:2], options={"enable_thinking": False})
    )
    assert state == "closed"
    assert read(form.parser(reasoning_state=state), "Hello") == Reading(content="Hello")
    prompt = template("deepseekv3").render(TALK)
    assert (
        OutputFormat(Tokenizer(backend(), SPECIAL), source("deepseekv3")).reasoning_state(prompt)
        == "open"
    )
