"""engine.text.chat_template renders what transformers renders, and refuses what it must."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

import engine.text.chat_template
from engine.errors import ConfigError, InvalidRequest
from engine.text.chat_template import ChatTemplate

# In the structure of the templates that were published with these models.

LLAMA_3 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- The system message, if there is one -#}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string[-4:] + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You have access to the following functions.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN_2_5 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are a helpful assistant.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\nFunction signatures within <tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
           or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.tool_calls is defined) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is defined and tools is not none and (message == loop_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}
                        {{- ", " }}
                    {%- endif %}
                {%- endfor %}
                {{- "}}" }}
            {%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {{- tool_call.function|tojson }}
        {%- endfor %}
        {{- "]" + eos_token }}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("Only user, assistant and tool roles are supported") }}
    {%- endif %}
{%- endfor %}
"""

WITH_LOOP_CONTROLS = """{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
{{ message.role }}: {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}

{% endfor %}
{{ unk_token }}{{ {'b': "<&'>é", 'a': 1} | tojson(sort_keys=True) }}
"""

TEMPLATES = {
    "llama_3": LLAMA_3,
    "qwen_2_5": QWEN_2_5,
    "mistral": MISTRAL,
    "loop_controls": WITH_LOOP_CONTROLS,
}

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a <city> & its 'region' – now",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich <'&'>"}},
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "  Hello, 世界 😀 <b>&amp;</b>  "}],
    "system": [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Why?\n"},
        {"role": "assistant", "content": " Because. "},
        {"role": "user", "content": "{{ bos_token }} {% raw %}"},
    ],
    "tool": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "21", "tool_call_id": "call00001"},
    ],
}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def folder_with(path: Path, chat_template: object = None, jinja: str | None = None) -> Path:
    config = {**SPECIAL_TOKENS}
    if chat_template is not None:
        config["chat_template"] = chat_template  # type: ignore[assignment]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (path / "chat_template.jinja").write_text(jinja)
    return path


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
@pytest.mark.parametrize("chat", sorted(CHATS))
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_renders_as_transformers_does(
    name: str, chat: str, tools: list[Any] | None, generate: bool
) -> None:
    reference = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizers.Tokenizer(models.BPE()),
        chat_template=TEMPLATES[name],
        **SPECIAL_TOKENS,
    )
    expected = reference.apply_chat_template(
        CHATS[chat], tools=tools, add_generation_prompt=generate, tokenize=False
    )
    template = ChatTemplate({"default": TEMPLATES[name]}, SPECIAL_TOKENS)
    rendered = template.render(CHATS[chat], tools=tools, add_generation_prompt=generate)
    assert rendered == expected
    assert len(rendered) > 20


def test_the_clock_is_the_callers() -> None:
    template = ChatTemplate({"default": LLAMA_3}, {}, now=lambda: datetime(1999, 12, 31))
    assert "Today Date: 1999" in template.render(CHATS["one"])


def test_the_jinja_file_comes_before_the_config(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, chat_template="config", jinja="file {{ bos_token }}")
    assert ChatTemplate.load(folder).render([]) == "file <s>"


def test_a_template_of_ones_own_comes_before_the_folders(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, jinja="folder's")
    own = tmp_path / "own.jinja"
    with pytest.raises(ConfigError, match=r"own\.jinja cannot be read"):
        ChatTemplate.load(folder, file=own)
    own.write_text("own {{ bos_token }}{{ tools | length }}")
    template = ChatTemplate.load(folder, file=own)
    assert template.render([], tools=[TOOL]) == "own <s>1"
    assert template.takes_tools
    assert template.source == own.read_text()


def test_a_template_that_is_not_text_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{{ x }}")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja cannot be read: .*utf-8") as error:
        ChatTemplate.load(folder_with(tmp_path))
    assert "\n" not in error.value.message


def test_a_named_template_for_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    template = ChatTemplate.load(folder_with(tmp_path, chat_template=named))
    assert template.render([]) == "plain"
    assert template.render([], tools=[TOOL]) == "1 tools"


def test_a_folder_without_template_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatTemplate.load(folder_with(tmp_path))


@pytest.mark.parametrize(
    ("chat_template", "message"),
    [
        ("{% if %}", "line 1"),
        ([{"name": "default"}], "a name and a template"),
        ([{"name": "rag", "template": ""}], "has no chat template"),
    ],
)
def test_a_broken_template_is_one_clear_line(
    tmp_path: Path, chat_template: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatTemplate.load(folder_with(tmp_path, chat_template=chat_template))


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("mistral", [{"role": "assistant", "content": "first"}]),  # raise_exception
        ("llama_3", []),  # undefined: there is no messages[0]
        ("qwen_2_5", [{"role": "user", "content": 5}]),  # str + int
        ("qwen_2_5", [{"role": "user", "content": None}]),
        ("qwen_2_5", [{"role": "user"}]),  # str + undefined
    ],
)
def test_messages_a_template_refuses(name: str, messages: list[dict[str, Any]]) -> None:
    template = ChatTemplate({"default": TEMPLATES[name]}, SPECIAL_TOKENS)
    with pytest.raises(InvalidRequest) as refused:
        template.render(messages)
    assert refused.value.param == "messages"
    assert refused.value.message.startswith("chat template: ")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__ }}{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ 1 // 0 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ ('x' * 1000) | tojson(separators=5) }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequest):
        ChatTemplate({"default": source}, {}).render(messages)
    assert messages == [{"role": "user", "content": "hi"}]


def test_the_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.text.chat_template, "MAX_RENDERED_CHARS", 1000)
    template = ChatTemplate({"default": "{% for i in range(n) %}x{% endfor %}"}, {"n": 1000})  # type: ignore[dict-item]
    assert len(template.render([])) == 1000
    template = ChatTemplate({"default": "{% for i in range(n) %}x{% endfor %}"}, {"n": 1001})  # type: ignore[dict-item]
    with pytest.raises(InvalidRequest, match="more than 1000 characters"):
        template.render([])


def test_what_a_template_looks_at_is_known_and_told() -> None:
    named = ChatTemplate(
        {"default": "{{ effort }}{% if enable_thinking %}!{% endif %}", "tool_use": "{{ tools }}"},
        {},
    )
    assert named.variables >= {"effort", "enable_thinking", "tools"}
    assert named.render([], options={"effort": "low", "enable_thinking": True}) == "low!"
    assert "tools" in ChatTemplate({"default": LLAMA_3}, SPECIAL_TOKENS).variables
    assert "tools" not in ChatTemplate({"default": "{% set tools = 1 %}{{ tools }}"}, {}).variables
