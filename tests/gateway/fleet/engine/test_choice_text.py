"""GenerationText: whatever answers, stops and cuts, text is right and each token counts once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.cache_contracts import CONTRACTS, ContractName
from engine.protocol import EngineOutput, FinishReason, Usage
from engine.text.output_parser.output_format import OutputFormat
from engine.text.tokenizer import Tokenizer
from gateway.fleet.engine.choice_text import ChoiceParser, Choices, GenerationText
from gateway.fleet.engine.completion_text import CompletionText
from gateway.generate_request import ChatPrompt, CompletionPrompt
from gateway.generation_events import MeteredUsage, TextDelta
from tests.engine.conftest import byte_fallback

ANSWER = st.text(st.sampled_from("abS!ü😀"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("abS!ü"), min_size=1, max_size=3), max_size=3)


def cut(ids: list[int], data: st.DataObject) -> list[list[int]]:
    pieces = []
    while ids:
        size = data.draw(st.integers(1, len(ids)))
        pieces.append(ids[:size])
        ids = ids[size:]
    return pieces


def expected(answer: str, stops: list[str]) -> tuple[str, int | None]:
    """The text that is shown and the number of tokens through the stop, by the plain definition."""
    for end in range(1, len(answer) + 1):
        done = [stop for stop in stops if answer[:end].endswith(stop)]
        if done:
            shown = answer[: end - max(map(len, done))]
            return shown, len(answer[:end].encode())
    return answer, None


def test_what_the_engine_reused_is_told_by_the_contract_of_the_model(tokenizer: Tokenizer) -> None:
    usage = Usage(prompt_tokens=2000, cached_tokens=1200, generated_tokens=1, prefilled=True)
    output = EngineOutput(request_id="a", usage=usage, token_ids=[1])

    def read(contract: ContractName) -> int:
        told = GenerationText(ChatPrompt(messages=[]), 1, tokenizer, contract).read(output).usage
        assert told is not None and told.prompt_tokens == 2000
        return told.cache_read

    found = [read(contract) for contract in CONTRACTS]
    assert found == [1200, 1152, 0, 1200]


@given(st.lists(ANSWER, min_size=1, max_size=3), STOPS, st.integers(0, 3), st.data())
def test_each_token_counts_once(
    tokenizer: Tokenizer, answers: list[str], stops: list[str], in_flight: int, data: st.DataObject
) -> None:
    prompt = ChatPrompt(messages=[], stop=tuple(stops))
    generation = GenerationText(prompt, len(answers), tokenizer)
    eos = 0
    queues = {
        index: cut([*tokenizer.encode(answer), eos], data) for index, answer in enumerate(answers)
    }
    texts = [""] * len(answers)
    generated = 0
    usages: list[MeteredUsage] = []
    while queues and not generation.over:
        index = data.draw(st.sampled_from(sorted(queues)))
        ids = queues[index].pop(0)
        reason: FinishReason | None = None
        if not queues[index]:
            del queues[index]
            reason = "stop"
        generated += len(ids)
        usage = Usage(prompt_tokens=1, generated_tokens=generated, prefilled=True)
        output = EngineOutput(
            request_id="a", usage=usage, index=index, token_ids=ids, finish_reason=reason
        )
        event = generation.read(output)
        assert event.usage is not None
        usages.append(event.usage)
        for item in event.items:
            assert isinstance(item, TextDelta)
            texts[item.index] += item.text
    assert generation.over
    # Tokens of a step that ran while the abort was on its way are never sent.
    usage = Usage(prompt_tokens=1, generated_tokens=generated + in_flight, prefilled=True)
    last = generation.read(
        EngineOutput(request_id="a", usage=usage, finish_reason="abort", finished=True)
    ).usage
    assert last is not None
    usages.append(last)
    wanted = [expected(answer, stops) for answer in answers]
    assert texts == [shown for shown, _ in wanted]
    tokens = [
        len(answer.encode()) + 1 if stopped is None else stopped
        for answer, (_, stopped) in zip(answers, wanted, strict=True)
    ]
    assert last.output == sum(tokens)
    assert last.output + last.wasted_output == generated + in_flight
    outputs = [usage.output for usage in usages]
    assert outputs == sorted(outputs)


@given(ANSWER.filter(bool), st.booleans(), st.data())
def test_a_grammar_that_comes_to_its_end_needs_no_eos(
    tokenizer: Tokenizer, answer: str, with_eos: bool, data: st.DataObject
) -> None:
    """The last token of such an answer is part of it."""
    generation = GenerationText(ChatPrompt(messages=[]), 1, tokenizer, ends={0})
    pieces = cut([*tokenizer.encode(answer), *([0] if with_eos else [])], data)
    text, generated = "", 0
    for position, ids in enumerate(pieces, start=1):
        generated += len(ids)
        output = EngineOutput(
            request_id="a",
            usage=Usage(prompt_tokens=1, generated_tokens=generated, prefilled=True),
            token_ids=ids,
            finish_reason="stop" if position == len(pieces) else None,
            finished=position == len(pieces),
        )
        for item in generation.read(output).items:
            assert isinstance(item, TextDelta)
            text += item.text
    assert text == answer and generation.over
    assert generation.usage is not None and generation.usage.output == generated


@pytest.mark.parametrize("continues", [True, False])
def test_what_goes_on_with_a_text_keeps_the_space_between_them(
    tmp_path: Path, continues: bool
) -> None:
    """As with Llama 2 and Mistral 7B, whose decoder drops the space that a text begins with."""
    byte_fallback().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    begun = "the quick brown"
    before, rest = tokenizer.encode(begun), tokenizer.encode("fox")
    assert tokenizer.decode([*before, *rest]) == f"{begun} fox"
    usage = Usage(prompt_tokens=len(before), generated_tokens=1, prefilled=True)
    output = EngineOutput(
        request_id="a",
        usage=usage,
        token_ids=rest,
        finish_reason="length",
        finished=True,
    )
    completion = CompletionText(
        CompletionPrompt(prompts=[begun]), [before], 1, tokenizer, CONTRACTS[0]
    )
    assert said_by(completion, output) == " fox"
    form = OutputFormat(tokenizer, "</think>")
    for parsing in (None, ChoiceParser(lambda: form.parser(tools=["f"]))):
        prompt = ChatPrompt(messages=[], continues=continues)
        chat = GenerationText(prompt, 1, tokenizer, prompt_token_ids=before, parsing=parsing)
        assert said_by(chat, output) == (" fox" if continues else "fox")


def said_by(generation: Choices, output: EngineOutput) -> str:
    return "".join(
        each.text for each in generation.read(output).items if isinstance(each, TextDelta)
    )
