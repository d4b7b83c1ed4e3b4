"""A conversation's breakpoints are found in its tokens, and an engine keeps what they ask of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.cache_contracts import Breakpoint, ContractName
from engine.fake.engine import FakeCore, FakeEngine
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from gateway.fleet.engine.kept_prefixes import (
    KeepRequest,
    common_chars,
    to_prefixes,
    under,
)
from gateway.fleet.engine.model_format import ModelFormat
from gateway.fleet.engine.replica import EngineJob, EngineReplica
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.generate_request import ChatPrompt, GenerateRequest
from gateway.generation_events import MeteredUsage
from gateway.lanes import Priority
from gateway.wire.openai.from_chat import from_openai

BLOCK = 16
KEPT = {"type": "ephemeral"}
LONG = "lorem ipsum dolor " * 80
"""1,440 tokens, a letter each."""


def asked(*messages: dict[str, Any], **fields: Any) -> GenerateRequest:
    body = {"model": "m", "messages": messages, "max_tokens": 1, **fields}
    return from_openai(json.dumps(body).encode(), "engine")


def says(role: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **fields}


def prompt_of(*messages: dict[str, Any], **fields: Any) -> ChatPrompt:
    prompt = asked(*messages, **fields).prompt
    assert prompt is not None
    return prompt


@given(st.text("ab"), st.text("ab"))
def test_how_much_two_texts_have_in_common(one: str, other: str) -> None:
    found = common_chars(one, other)
    assert one[:found] == other[:found]
    assert one[found : found + 1] != other[found : found + 1] or found == len(one) == len(other)


def found_in(template: ChatTemplate, tokenizer: Tokenizer, prompt: ChatPrompt) -> list[Breakpoint]:
    rendered = ModelFormat(tokenizer, template).render(prompt, 4096, BLOCK)
    assert ModelFormat(tokenizer, template).render(prompt, 4096).token_ids == rendered.token_ids
    return [*rendered.kept.breakpoints]


def test_each_token_ends_somewhere(tokenizer: Tokenizer) -> None:
    token_ids, ends = tokenizer.encode_with_ends("aü</s>b")
    assert token_ids == tokenizer.encode("aü</s>b")
    assert ends == [1, 2, 2, 6, 7]


def test_places_are_whole_blocks_of_what_does_not_depend_on_the_rest(
    template: ChatTemplate, tokenizer: Tokenizer
) -> None:
    marked = [
        says("system", LONG, cache_control={**KEPT, "ttl": "1h"}),
        {"role": "user", "content": [
            {"type": "text", "text": "ü" * 100, "cache_control": KEPT},
            {"type": "text", "text": "who?"},
        ]},
        says("assistant", "I", cache_control=KEPT),
        says("user", "again"),
    ]  # fmt: skip
    system = 1 + len(LONG) + 1
    part = system + 1 + 200  # "ü" is two bytes, and so two tokens
    reply = part + len("\nwho?") + 1 + 1 + 1 + 1
    wanted = [at // BLOCK * BLOCK for at in (system, part, reply)]
    found = found_in(template, tokenizer, prompt_of(*marked))
    assert [each.position for each in found] == sorted({*wanted})
    assert [each.ttl for each in found][:2] == ["1h", "5m"]


def test_what_is_too_short_or_at_the_same_place_is_left_out(
    template: ChatTemplate, tokenizer: Tokenizer
) -> None:
    short = says("system", "x" * 1000, cache_control=KEPT)
    both = {"role": "user", "cache_control": KEPT, "content": [
        {"type": "text", "text": "y" * 500, "cache_control": KEPT}
    ]}  # fmt: skip
    [only] = found_in(template, tokenizer, prompt_of(short, both))
    assert only.position == 1504


def test_a_breakpoint_reaches_back_to_the_end_of_a_block(
    template: ChatTemplate, tokenizer: Tokenizer
) -> None:
    turns = [says("user", "z" * 98) for _ in range(30)]
    turns[-1]["cache_control"] = KEPT
    [found] = found_in(template, tokenizer, prompt_of(*turns))
    assert found == Breakpoint(3000 // BLOCK * BLOCK, "5m", since=1000 // BLOCK * BLOCK)


ALTERNATING = """
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif -%}
<{{ m.role }}>{{ m.content | trim }}
{%- endfor %}
{%- if messages[-1].role != 'user' %}{{ raise_exception('a user speaks last') }}{% endif -%}
"""


def test_a_template_that_wants_the_user_to_speak_last(tokenizer: Tokenizer) -> None:
    template = ChatTemplate({"default": ALTERNATING}, {})
    kept = says("assistant", LONG + " \n", cache_control=KEPT)
    prompt = prompt_of(says("user", "hello"), kept, says("user", "so"))
    [found] = found_in(template, tokenizer, prompt)
    assert found.position == (1 + 5 + 1 + len(LONG.strip()) + 1) // BLOCK * BLOCK
    strange = ChatTemplate({"default": "{{ messages | length }}{{ messages[2].content }}"}, {})
    assert found_in(strange, tokenizer, prompt) == []


TOOLS_FIRST = """
{%- for tool in tools or [] %}[{{ tool.function.name }}]{% endfor -%}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor -%}
"""
TOOLS_LAST = "<system>{{ messages[0].content }}{{ tools | length }}{{ messages[1].content }}"


def test_tools_end_where_the_template_puts_them(tokenizer: Tokenizer) -> None:
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": letter * 98}} for letter in "abcdefghijklmnop"
    ]
    tools[11]["cache_control"] = KEPT
    prompt = prompt_of(says("system", LONG), says("user", "hello"), tools=tools)
    [found] = found_in(ChatTemplate({"default": TOOLS_FIRST}, {}), tokenizer, prompt)
    assert found.position == 12 * 100 // BLOCK * BLOCK
    [found] = found_in(ChatTemplate({"default": TOOLS_LAST}, {}), tokenizer, prompt)
    assert found.position == (1 + len(LONG) + 1) // BLOCK * BLOCK, "its system's message"
    unasked = prompt_of(says("user", LONG), tools=tools, tool_choice="none")
    assert found_in(ChatTemplate({"default": TOOLS_FIRST}, {}), tokenizer, unasked) == []


def test_a_prefix_is_told_by_what_nobody_else_can_compute() -> None:
    places = (Breakpoint(32), Breakpoint(64))
    one, other = (to_prefixes([*range(64), last], places) for last in (1, 2))
    assert one == other != to_prefixes([*range(1, 65)], places)
    assert under("salt", one.digests) != under("other salt", one.digests)
    assert len({*under("salt", one.digests), *one.digests}) == 4


async def answered(
    contract: ContractName,
    model: tuple[Tokenizer, ChatTemplate, PrepareThreads],
    requests: list[GenerateRequest],
    heard: dict[str, KeepRequest],
) -> list[MeteredUsage]:
    tokenizer, template, threads = model
    core = FakeCore(vocab_size=tokenizer.vocab_size, respond=lambda *_: iter([5]))
    replica = EngineReplica(
        name="m",
        client=FakeEngine(core),
        tokenizer=tokenizer,
        template=template,
        threads=threads,
        cache_contract=contract,
        on_asked=heard.__setitem__,
    )
    usages = []
    for number, request in enumerate(requests):
        priority = Priority(tenant="org_a")
        prepared = await replica.prepare(request, priority)
        bounded = replica.bounded(prepared, 1)
        assert isinstance(bounded.payload, EngineJob) and bounded.payload == prepared.payload
        events = replica.stream(
            prepared, attempt_id=f"a{number}", cache_salt="s", priority=priority
        )
        usage = [event.usage async for event in events][-1]
        assert usage is not None
        usages.append(usage)
    return usages


@pytest.mark.parametrize("contract", ["explicit", "native"])
async def test_a_conversation_is_written_and_read_by_an_explicit_contract_alone(
    contract: ContractName, tokenizer: Tokenizer, template: ChatTemplate, threads: PrepareThreads
) -> None:
    heard: dict[str, KeepRequest] = {}
    system = says("system", LONG, cache_control={**KEPT, "ttl": "1h"})
    first = asked(system, says("user", "u" * 200, cache_control=KEPT))
    spoken = (says("user", "u" * 200), says("assistant", "a" * 100, cache_control=KEPT))
    second = asked(system, *spoken, says("user", "more"))
    model = (tokenizer, template, threads)
    wrote, read = await answered(contract, model, [first, second], heard)
    if contract == "native":
        assert (wrote.cache_write, wrote.cache_write_1h, heard) == (0, 0, {})
        assert read.cache_read == (1442 + 202) // BLOCK * BLOCK
        return
    assert (wrote.cache_read, wrote.cache_write_1h, wrote.cache_write) == (0, 1440, 192)
    assert (read.cache_read, read.cache_write_1h, read.cache_write) == (1632, 0, 112)
    assert wrote.prompt_tokens == 1442 + 202 + 1 and read.prompt_tokens == 1442 + 202 + 102 + 7
    one, two = heard["a0"], heard["a1"]
    assert (one.org_id, one.model, one.prefixes[0]) == ("org_a", "m", two.prefixes[0])
    assert [each.position for each in one.breakpoints] == [1440, 1632]
