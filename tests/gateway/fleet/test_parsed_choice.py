"""Choices that are read for calls and reasoning: however the tokens come, the same is shown, each
counts once, and those that were thought are counted as such."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import EngineOutput, FinishReason, TokenLogprob, TokenLogprobs, Usage
from engine.text.output_parser.output_format import OutputFormat
from engine.text.tokenizer import Tokenizer
from gateway.fleet.engine.choice_text import ChoiceParser, GenerationText
from gateway.generate_request import ChatPrompt
from gateway.generation_events import MeteredUsage, TextDelta

EOS = 0
TWO = (
    "<think>hm, ü?</think>\n\nI see.\n"
    '<tool_call>\n{"name": "f", "arguments": {"a": "ü\\n"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)
THOUGHT = len("<think>hm, ü?</think>".encode())


class CollectedText(msgspec.Struct):
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = []
    reasons: list[str] = []
    num_logprobs: int = 0

    def add(self, delta: Any) -> None:
        assert isinstance(delta, TextDelta)
        self.text += delta.text
        self.reasoning += delta.reasoning
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(self.calls)
                self.calls.append((call.name, ""))
            name, arguments = self.calls[call.index]
            self.calls[call.index] = (name, arguments + call.arguments)
        self.num_logprobs += len(delta.logprobs or ())
        self.reasons += [] if delta.finish_reason is None else [delta.finish_reason]
        shown = delta.text or delta.reasoning or delta.calls or delta.finish_reason
        assert shown, "logprobs alone would open a stream with text"


def hear(
    tokenizer: Tokenizer,
    pieces: list[list[int]],
    reason: FinishReason = "stop",
    *,
    one_call: bool = False,
    stop: tuple[str, ...] = (),
) -> tuple[CollectedText, MeteredUsage]:
    form = OutputFormat(tokenizer, "<tool_call></think>")
    parsing = ChoiceParser(lambda: form.parser(tools=["f", "g"]), form.shown_ids, one_call)
    generation = GenerationText(ChatPrompt(messages=[], stop=stop), 1, tokenizer, parsing=parsing)
    heard, generated = CollectedText(), 0
    for position, ids in enumerate(pieces, start=1):
        generated += len(ids)
        is_last = position == len(pieces)
        output = EngineOutput(
            request_id="a",
            usage=Usage(prompt_tokens=1, generated_tokens=generated, prefilled=True),
            token_ids=ids,
            logprobs=[TokenLogprobs(TokenLogprob(i, -1.0), []) for i in ids],
            finish_reason=reason if is_last else None,
            finished=is_last,
        )
        for item in generation.read(output).items:
            heard.add(item)
    assert generation.usage is not None and generation.over
    return heard, generation.usage


@given(st.data())
def test_however_the_tokens_come(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = [*tokenizer.encode(TWO), EOS]
    pieces = []
    rest = ids
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        pieces.append(rest[:size])
        rest = rest[size:]
    heard, usage = hear(tokenizer, pieces)
    assert heard == CollectedText(
        text="I see.",
        reasoning="hm, ü?",
        calls=[("f", '{"a": "ü\\n"}'), ("g", "{}")],
        reasons=["tool_calls"],
        num_logprobs=len(ids) - 1,
    )
    assert usage == MeteredUsage(uncached_input=1, output=len(ids), reasoning_output=THOUGHT)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_of_one_call_is_over_with_it(tokenizer: Tokenizer, size: int) -> None:
    ids = [*tokenizer.encode(TWO), EOS]
    pieces = [ids[at : at + size] for at in range(0, len(ids), size)]
    heard, usage = hear(tokenizer, pieces, one_call=True)
    assert heard.calls == [("f", '{"a": "ü\\n"}')] and heard.reasons == ["tool_calls"]
    used = len(TWO[: TWO.index("}}") + 1].encode())
    assert (usage.output, usage.wasted_output) == (used, len(ids) - used)


@pytest.mark.parametrize(
    ("text", "reason", "content", "calls", "said"),
    [
        ("Hello.", "stop", "Hello.", [], "stop"),
        ('<tool_call>\n{"name": "f", "arg', "length", None, [], "length"),
        ('<tool_call>{"name": "f", "arguments": {"a', "length", "", [("f", '{"a')], "length"),
        ('<tool_call>{"name": "h", "arguments": {}}', "stop", None, [], "stop"),
        ("<tool_call>nonsense</tool_call>", "stop", None, [], "stop"),
    ],
)
def test_what_is_no_call_is_text_and_ends_as_it_ended(
    tokenizer: Tokenizer,
    text: str,
    reason: FinishReason,
    content: str | None,
    calls: list[tuple[str, str]],
    said: str,
) -> None:
    """`content` None: all of it."""
    ids = tokenizer.encode(text) + ([EOS] if reason == "stop" else [])
    heard, _ = hear(tokenizer, [[i] for i in ids], reason)
    assert (heard.text, heard.calls) == (text if content is None else content, calls)
    assert heard.reasons == [said]


def test_a_stop_string_stops_it_too(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("one STOP two"), EOS]
    heard, usage = hear(tokenizer, [[i] for i in ids], stop=("STOP",))
    assert (heard.text, heard.reasons) == ("one ", ["stop"])
    assert (usage.output, usage.wasted_output) == (8, 5)
