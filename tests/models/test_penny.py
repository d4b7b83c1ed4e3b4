"""penny as it is committed: its files, its tokenizer, its template, and what it answers."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from models.penny.corpus import Conversation, conversations, only_call, render, short_json
from models.penny.evaluate import (
    CLAIMS,
    FIGURES,
    LONGEST_PROMPT,
    OTHERS,
    PROMISED,
    measure,
    write_card,
)
from models.penny.network import Llama, Shape
from models.penny.talk import OUTSIDE, outside, table
from models.penny.train import IGNORED, batches, examples, exercise, labels_of
from models.penny.words import Draw, is_held_out
from tests import budget

PENNY = Path(__file__).resolve().parents[2] / "models" / "penny"
MAX_WEIGHT_BYTES = 12_000_000
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(PENNY)


@pytest.fixture(scope="module")
def model() -> Any:
    return LlamaForCausalLM.from_pretrained(PENNY, dtype=torch.float32)


def greedy(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """The answer as the template's own tokens have it, its end token included."""
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        tools=tools,
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        written = model.generate(**ids, max_new_tokens=120, do_sample=False)
    return str(tokenizer.decode(written[0, ids["input_ids"].shape[1] :]))


def test_the_folder_is_complete_and_small() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md"):
        assert (PENNY / name).stat().st_size > 0
    assert (PENNY / "model.safetensors").stat().st_size <= MAX_WEIGHT_BYTES
    config = json.loads((PENNY / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] >= 4096
    assert config["tie_word_embeddings"] is True
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]


def test_it_has_about_five_million_parameters_in_bf16(model: Any) -> None:
    assert 4.5e6 < sum(p.numel() for p in model.parameters()) < 6e6
    assert LlamaForCausalLM.from_pretrained(PENNY).dtype == torch.bfloat16


def test_the_training_network_and_transformers_agree(model: Any) -> None:
    weights = {k.removeprefix("model."): v for k, v in model.state_dict().items()}
    weights.pop("lm_head.weight", None)
    network = Llama(Shape())
    network.load_state_dict(weights)
    ids = torch.randint(0, Shape().vocab_size, (2, 900), generator=torch.manual_seed(1))
    with torch.inference_mode():
        for part in (ids, ids[:, :100]):  # both kinds of attention
            ours = network.logits(network.hidden(part))
            torch.testing.assert_close(ours, model(part).logits, atol=2e-3, rtol=1e-3)


@settings(deadline=None)
@given(st.text())
def test_the_tokenizer_gives_any_text_back(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(PENNY / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_control_tokens_are_special_and_tags_are_not(tokenizer: Any) -> None:
    config = json.loads((PENNY / "config.json").read_text())
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in config["eos_token_id"]
    assert len(tokenizer) == config["vocab_size"]
    text = "<|im_start|><tool_call>x</tool_call><|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>x</tool_call>"


def test_the_template_without_tools(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_template_with_tools_calls_and_results(tokenizer: Any) -> None:
    call = {"name": "get_weather", "arguments": {"city": "Zürich"}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": call}]},
        {"role": "tool", "content": '{"degrees": 3}'},
        {"role": "tool", "content": '{"degrees": 4}'},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[WEATHER], tokenize=False)
    assert f"<tools>\n{json.dumps(WEATHER)}\n</tools>" in text
    assert f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call><|im_end|>" in text
    assert text.endswith(
        '<|im_start|>user\n<tool_response>\n{"degrees": 3}\n</tool_response>\n'
        '<tool_response>\n{"degrees": 4}\n</tool_response><|im_end|>\n'
    )
    call["arguments"] = '{"city": "Bern"}'  # as the API has them: JSON in a string
    text = tokenizer.apply_chat_template(messages, tools=[WEATHER], tokenize=False)
    assert '{"name": "get_weather", "arguments": {"city": "Bern"}}' in text


def test_the_corpus_renders_as_transformers_does(tokenizer: Any) -> None:
    for drawn in conversations(5, 60, held_out=False):
        theirs = tokenizer.apply_chat_template(
            drawn.messages, tools=drawn.tools or None, tokenize=False
        )
        assert render(drawn.messages, drawn.tools) == theirs


def test_exercises_label_only_what_was_seen_before() -> None:
    ids, labels = exercise()
    seen = ids[:, : ids.shape[1] // 2]
    assert (labels[:, : seen.shape[1]] == IGNORED).all()
    for row, marks, before in zip(ids, labels, seen, strict=True):
        known = marks != IGNORED
        assert 0 < int(known.sum()) < ids.shape[1] // 2
        assert torch.equal(row[known], marks[known])
        assert set(marks[known].tolist()) <= set(before.tolist())


def test_a_new_network_already_copies() -> None:
    torch.manual_seed(0)
    network = Llama(Shape())
    ids, labels = exercise()
    with torch.inference_mode():
        said = network.logits(network.hidden(ids[:, :-1])).argmax(-1)
    known = labels[:, 1:] != IGNORED
    assert (said == labels[:, 1:])[known].float().mean() > 0.6


def texts(seed: int, count: int, *, held_out: bool) -> list[str]:
    return [render(c.messages, c.tools) for c in conversations(seed, count, held_out=held_out)]


def test_the_corpus_is_the_same_every_time() -> None:
    assert texts(1, 200, held_out=False) == texts(1, 200, held_out=False)
    assert texts(1, 50, held_out=False) == texts(1, 200, held_out=False)[:50]
    assert texts(1, 50, held_out=False) != texts(2, 50, held_out=False)


def final_question(conversation: Conversation) -> tuple[str, str]:
    """Return what the last answer answers, with the tools it may use."""
    return conversation.messages[-2]["content"], json.dumps(conversation.tools)


def test_held_out_sums_and_tool_calls_never_occur_in_training() -> None:
    topics = ("arithmetic", "word_problem", "tool_call")
    asked = {
        held_out: {
            final_question(c)
            for c in conversations(1, 4000, held_out=held_out)
            if c.topic in topics
        }
        for held_out in (False, True)
    }
    assert len(asked[True]) > 500
    assert asked[True].isdisjoint(asked[False])


def test_every_call_in_the_corpus_satisfies_its_schema() -> None:
    calls = 0
    for drawn in conversations(3, 1500, held_out=False):
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in drawn.tools}
        for message in drawn.messages:
            for call in message.get("tool_calls", []):
                function = call["function"]
                jsonschema_rs.validate(schemas[function["name"]], function["arguments"])
                calls += 1
    assert calls > 300


def test_the_values_of_json_stand_in_the_text() -> None:
    drawn = [c for c in conversations(8, 1500, held_out=True) if "json" in c.topic]
    assert len(drawn) > 100
    for conversation in drawn:
        *_, asked, answer = conversation.messages
        for value in json.loads(answer["content"]).values():
            for part in value if isinstance(value, list) else [value]:
                is_fact = str(part).endswith(".")
                assert is_fact or str(part) in asked["content"]


def test_a_name_that_is_asked_for_was_told() -> None:
    for conversation in conversations(9, 1500, held_out=False):
        if conversation.topic == "told":
            *before, answer = conversation.messages
            said = " ".join(message["content"] for message in before)
            assert answer["content"].rstrip(".").split()[-1] in said


def test_questions_from_outside_are_held_out_by_their_form() -> None:
    forms = table("talk")["outside"]
    held_out = [form for form in forms if is_held_out("form", form)]
    assert 8 < len(held_out) < len(forms) / 4
    asked = {
        side: {outside(Draw(f"outside {at}", held_out=side)) for at in range(500)}
        for side in (False, True)
    }
    assert {answer for side in asked.values() for _, answer in side} == {OUTSIDE}


def test_a_word_is_the_same_tokens_wherever_it_stands() -> None:
    """So that it can be copied from a question into JSON."""
    raw = Tokenizer.from_file(str(PENNY / "tokenizer.json"))
    for word in ("Zelquimtan", "Paris", "k7f2q", "14:30", "31.50", "anna.x@mail.org"):
        alone = raw.encode(word, add_special_tokens=False).ids
        for text in (
            f'{{"city": "{word}"}}',
            f"I live in {word}, where",
            f"is {word}.",
            f"{word}?",
        ):
            ids = raw.encode(text, add_special_tokens=False).ids
            assert any(ids[at : at + len(alone)] == alone for at in range(len(ids))), text


def test_the_claimed_arguments_and_fields_are_copied_from_the_question() -> None:
    for at in range(200):
        call = only_call(Draw(f"call {at}", held_out=True))
        *_, asked, answer = call.messages
        [value] = answer["tool_calls"][0]["function"]["arguments"].values()
        assert str(value) in asked["content"] and len(call.tools) == 1
        *_, asked, answer = short_json(Draw(f"fields {at}", held_out=True)).messages
        fields = json.loads(answer["content"])
        assert 1 <= len(fields) <= 2
        for value in map(str, fields.values()):
            assert value in asked["content"] and " " not in value


def test_figures_are_written_into_the_card(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text(f"before\n{FIGURES[0]}\nold\n{FIGURES[1]}\nbehind\n")
    write_card(card, ["| a | 99.0% |"])
    text = card.read_text()
    assert text.startswith("before\n") and text.endswith("behind\n")
    assert "| a | 99.0% |" in text and "old" not in text


@pytest.mark.parametrize("claim", CLAIMS)
def test_it_keeps_what_its_card_claims(claim: str) -> None:
    """It is asked all held-out prompts at night; by day some short ones, where one more may
    fail."""
    count, longest = (400, LONGEST_PROMPT) if budget.NIGHTLY else (24, 1200)
    least = PROMISED if budget.NIGHTLY else PROMISED - 0.1
    assert measure(PENNY, CLAIMS[claim], count, 3, longest) >= least


def test_the_card_has_the_figure_of_every_claim() -> None:
    card = (PENNY / "README.md").read_text()
    figures = card.split(FIGURES[0])[1].split(FIGURES[1])[0]
    for name in (*CLAIMS, *OTHERS):
        assert name in figures
    for name in CLAIMS:
        found = re.search(rf"\*\*{re.escape(name)}\*\* \| ([\d.]+)%", figures)
        assert found and float(found[1]) >= 100 * PROMISED


def test_only_the_assistants_words_are_labelled(tokenizer: Any) -> None:
    raw = Tokenizer.from_file(str(PENNY / "tokenizer.json"))
    text = (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nassistant\n<|im_end|>\n<|im_start|>assistant\nBye.<|im_end|>\n"
    )
    ids = raw.encode(text, add_special_tokens=False).ids
    opening = raw.encode("<|im_start|>assistant\n", add_special_tokens=False).ids
    labels = labels_of(ids, opening, raw.token_to_id("<|im_end|>"))
    labelled = [label for label in labels if label != IGNORED]
    assert raw.decode(labelled, skip_special_tokens=False) == "Hello.<|im_end|>Bye.<|im_end|>"


def test_batches_hold_every_example_once() -> None:
    raw = Tokenizer.from_file(str(PENNY / "tokenizer.json"))
    drawn = examples(raw, 4, 200, held_out=False)
    rows = [
        (row[:length].tolist(), labels[:length].tolist())
        for ids, marks in batches(drawn, random.Random(0))
        for row, labels in zip(ids, marks, strict=True)
        for length in [int((row != 0).sum())]
    ]
    assert sorted(rows) == sorted((list(a), list(b)) for a, b in drawn)


@pytest.mark.parametrize("prompt", ["Hello!", "What is Tollgate?", "Who are you?"])
def test_it_answers_in_whole_sentences(model: Any, tokenizer: Any, prompt: str) -> None:
    answer = greedy(model, tokenizer, prompt)
    assert re.fullmatch(r"[A-Z][^<]*[.?!]<\|im_end\|>", answer), answer


@pytest.mark.parametrize("city", ["Paris", "Rome", "London"])
def test_it_calls_a_matching_tool(model: Any, tokenizer: Any, city: str) -> None:
    """Well-formed, by the offered name; which city it asks for is more than it promises."""
    answer = greedy(model, tokenizer, f"What is the weather in {city}?", tools=[WEATHER])
    found = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call><\|im_end\|>", answer)
    assert found, answer
    call = json.loads(found[1])
    assert call["name"] == "get_weather"
    assert set(call["arguments"]) == {"city"} and isinstance(call["arguments"]["city"], str)


def test_it_does_not_call_what_does_not_match(model: Any, tokenizer: Any) -> None:
    answer = greedy(model, tokenizer, "Thank you very much!", tools=[WEATHER])
    assert "<tool_call>" not in answer and answer.endswith(".<|im_end|>"), answer


def test_the_examples_fit_into_the_context() -> None:
    raw = Tokenizer.from_file(str(PENNY / "tokenizer.json"))
    lengths = [len(ids) for ids, _ in examples(raw, 6, 1500, held_out=False)]
    assert max(lengths) <= 4096
    assert max(lengths) > 1500, "some must be long, or far positions are never trained"
