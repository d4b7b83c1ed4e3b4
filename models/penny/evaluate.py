"""Measure penny on held-out prompts: the figures of its model card.

    OMP_NUM_THREADS=2 python -m models.penny.evaluate --check --card

Answers are greedy, in fp32, by transformers, and only the very answer counts. Names, words, number
pairs and the composed tools of the prompts occur nowhere in training, and neither do the questions
from outside of the card (`words.py`). `--check` fails if a claim of the card is not met.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM, LogitsProcessor

from engine.protocol import Grammar
from engine.runner.grammar.constraint import (
    GrammarConstraint,
    MatcherTokenizer,
    Vocabulary,
    compile_grammar,
)
from engine.text import tokenizer as engine_tokenizer
from engine.text.output_parser.grammars.forced_calls import Tool
from engine.text.output_parser.output_format import OutputFormat
from gateway.fleet.engine.bounded_schema import guiding_schema
from models.penny import corpus, talk
from models.penny.corpus import Conversation, render
from models.penny.network import Llama, Shape
from models.penny.train import DEVICE, HERE, TURN_END, examples, held_out_loss
from models.penny.words import MAX_TRIES, Draw

SEED = 7
PROMISED = 0.95
PART = 4
"""Kinds that are no claims are measured with this part of the prompts."""
MAX_NEW_TOKENS = 256
LONGEST_PROMPT = 6_000
"""In characters; longer prompts are left out, for they take long on a CPU."""
BATCH = 16 if DEVICE.type == "cpu" else 128
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
FIGURES = ("<!-- figures -->", "<!-- end of figures -->")
"""The lines of the model card between which the figures stand."""

Maker = Callable[[Draw], Conversation]


def exchange(make: Callable[[Draw], talk.Exchange], topic: str) -> Maker:
    """Make conversations of one question, some with a system prompt."""

    def made(draw: Draw) -> Conversation:
        question, answer = make(draw)
        messages = [*corpus.system_messages(draw), corpus.user(question), corpus.assistant(answer)]
        return Conversation(topic, messages, [])

    return made


class Kind(NamedTuple):
    """A kind of held-out prompts."""

    topic: str
    """The topic of such conversations."""
    make: Maker
    kept: bool = False
    """The answer is kept to a grammar as the gateway keeps it: JSON to the schema of the expected
    one, which a client would send, and calls to the names of the offered tools and parameters."""


CLAIMS = {
    "sums and differences of numbers up to 99": Kind(
        "arithmetic", exchange(talk.arithmetic, "arithmetic")
    ),
    "a name or something else that it was told before": Kind("told", corpus.told_conversation),
    "a call of the one offered tool, kept, its one argument copied from the question": Kind(
        "tool_call", corpus.only_call, kept=True
    ),
    "JSON, kept: one or two fields of a short text, each one word or number": Kind(
        "json", corpus.short_json, kept=True
    ),
    "JSON, kept: a name or another word of a short text, and a number": Kind(
        "json", corpus.word_and_number, kept=True
    ),
    "says what it is when asked anything else": Kind("outside", exchange(talk.outside, "outside")),
}
"""Kinds that the card promises."""
OTHERS = {
    "a call of one of up to three tools, kept, up to two arguments": Kind(
        "tool_call", corpus.one_call, kept=True
    ),
    "the same, not kept": Kind("tool_call", corpus.one_call),
    "calls of up to six tools, kept, up to four arguments, in a conversation": Kind(
        "tool_call", corpus.tool_conversation, kept=True
    ),
    "JSON, kept: up to five fields, keys of any name": Kind(
        "json", corpus.json_conversation, kept=True
    ),
    "the same, without a schema": Kind("json", corpus.json_conversation),
    "facts about Tollgate: one of the right answers": Kind("fact", exchange(talk.fact, "fact")),
    "a tool's result: the very answer": Kind("tool_answer", corpus.tool_conversation),
    "no offered tool matches: none is called": Kind("no_tool", corpus.no_tool_conversation),
    "repeating words or codes": Kind("echo", exchange(talk.echo, "echo")),
    "a small word problem": Kind("word_problem", exchange(talk.word_problem, "word_problem")),
    "capitals, days, the times table": Kind(
        "little_knowledge", exchange(talk.little_knowledge, "little_knowledge")
    ),
}


def drawn_for(kind: Kind, count: int, longest: int = LONGEST_PROMPT) -> list[Conversation]:
    """`count` held-out conversations whose last answer is of the topic."""
    found: list[Conversation] = []
    for index in range(count * MAX_TRIES):
        conversation = kind.make(Draw(f"{SEED}/{kind.topic}/{index}", held_out=True))
        length = len(render(conversation.messages, conversation.tools))
        if conversation.topic == kind.topic and length <= longest:
            found.append(conversation)
        if len(found) == count:
            return found
    raise AssertionError(f"not enough conversations of the topic {kind.topic}")


def calls_in(answer: str) -> list[dict[str, Any]] | None:
    """The calls of an answer; None if one of them is not a JSON object or a tag is open."""
    bodies = CALL.findall(answer)
    if answer.count("<tool_call>") != len(bodies):
        return None
    try:
        calls = [json.loads(body) for body in bodies]
    except json.JSONDecodeError:
        return None
    return calls if all(isinstance(call, dict) for call in calls) else None


def is_right(conversation: Conversation, answer: str, ended: bool) -> bool:
    """Whether it is the expected answer, JSON by its value, and came to its end."""
    expected = conversation.messages[-1]
    match conversation.topic:
        case "tool_call":
            wanted = [call["function"] for call in expected["tool_calls"]]
            return ended and calls_in(answer) == wanted
        case "json":
            try:
                return ended and bool(json.loads(answer) == json.loads(expected["content"]))
            except json.JSONDecodeError:
                return False
        case "fact":
            entries = talk.table("facts")["fact"]
            right = next(e["answer"] for e in entries if expected["content"] in e["answer"])
            return ended and answer in right
        case "no_tool":
            return "<tool_call>" not in answer
    return ended and answer == expected["content"]


JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def grammar_of(conversation: Conversation, output: OutputFormat) -> Grammar:
    """Return what the answer is kept to."""
    if conversation.tools:
        offered = [tool["function"] for tool in conversation.tools]
        return output.offered(
            [Tool(each["name"], guiding_schema(each["parameters"])) for each in offered]
        )
    properties = {
        key: {"type": "array", "items": {"type": "string"}}
        if isinstance(value, list)
        else {"type": JSON_TYPES[type(value)]}
        for key, value in json.loads(conversation.messages[-1]["content"]).items()
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return Grammar(kind="json_schema", text=json.dumps(schema))


class KeptToGrammars(LogitsProcessor):
    """Keeps each answer of a batch to its grammar, by what the engine does it with."""

    def __init__(self, folder: Path, grammars: list[Grammar], end: int, start: int) -> None:
        """`start`: the number of tokens of a prompt, padding included."""
        vocabulary = Vocabulary(str(folder / "tokenizer.json"), Shape().vocab_size, (end,))
        tokenizer = MatcherTokenizer(vocabulary)
        self._kept = [
            GrammarConstraint(
                compile_grammar(grammar, tokenizer),
                after_token_id=grammar.after_token_id,
                stop_token_ids=(end,),
                unused_id=None,
            )
            for grammar in grammars
        ]
        self._end, self._start = end, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        masks = np.full((len(scores), scores.shape[1] // 32), -1, np.int32)
        for row, ids in enumerate(input_ids[:, self._start :].tolist()):
            if self._end not in ids:
                self._kept[row].allow(ids, [], masks[row])
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        return scores.masked_fill(torch.from_numpy(bits == 0).to(scores.device), -torch.inf)


def answers(
    folder: Path, drawn: list[Conversation], *, kept: bool = False
) -> list[tuple[str, bool]]:
    """The greedy answer to each conversation's last prompt, and whether it came to its end."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.to(DEVICE)
    end = tokenizer.convert_tokens_to_ids(TURN_END)
    prompts = [render(c.messages[:-1], c.tools, add_generation_prompt=True) for c in drawn]
    template = (folder / "chat_template.jinja").read_text()
    output = OutputFormat(engine_tokenizer.Tokenizer.load(folder), template)
    order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
    found: dict[int, tuple[str, bool]] = {}
    for first in range(0, len(order), BATCH):
        chosen = order[first : first + BATCH]
        batch = tokenizer([prompts[at] for at in chosen], return_tensors="pt", padding=True)
        start = batch["input_ids"].shape[1]
        processors = []
        if kept:
            grammars = [grammar_of(drawn[at], output) for at in chosen]
            processors = [KeptToGrammars(folder, grammars, end, start)]
        with torch.inference_mode():
            written = model.generate(
                **batch.to(DEVICE),
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=False,
                logits_processor=processors,
            )
        for at, row in zip(chosen, written[:, start:].tolist(), strict=True):
            ended = end in row
            text = tokenizer.decode(row[: row.index(end)] if ended else row)
            found[at] = (str(text), ended)
    return [found[at] for at in range(len(drawn))]


def measure_loss(folder: Path, count: int) -> float:
    """Held-out loss in nats per assistant token, over `count` conversations."""
    network = Llama(Shape())
    weights = load_file(folder / "model.safetensors")
    network.load_state_dict({k.removeprefix("model."): v for k, v in weights.items()})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return held_out_loss(network.to(DEVICE), examples(tokenizer, SEED, count, held_out=True))


def measure(
    folder: Path, kind: Kind, count: int, show: int, longest: int = LONGEST_PROMPT
) -> float:
    """The share of right answers; prints `show` of the others."""
    drawn = drawn_for(kind, count, longest)
    said = answers(folder, drawn, kept=kind.kept)
    right = 0
    for conversation, (answer, ended) in zip(drawn, said, strict=True):
        if is_right(conversation, answer, ended):
            right += 1
        elif show > 0:
            show -= 1
            question, expected = conversation.messages[-2:]
            print(
                f"--- {kind.topic}\n{question['content']}\n>>> {answer}\nnot {expected}", flush=True
            )
    return right / count


def write_card(card: Path, lines: Iterable[str]) -> None:
    """Replace the figures of the model card."""
    before, rest = card.read_text().split(FIGURES[0])
    after = rest.split(FIGURES[1])[1]
    table = "\n".join(["| held-out prompts | right |", "|---|---|", *lines])
    card.write_text(f"{before}{FIGURES[0]}\n{table}\n{FIGURES[1]}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure penny on held-out prompts.")
    parser.add_argument("--folder", type=Path, default=HERE)
    parser.add_argument("--count", type=int, default=400, help="number of prompts of a claim")
    parser.add_argument("--show", type=int, default=0, help="print so many failures of each kind")
    parser.add_argument("--only", default="", help="measure kinds with this text in their name")
    parser.add_argument("--check", action="store_true", help="fail if the card claims too much")
    parser.add_argument("--card", action="store_true", help="write the figures to the card")
    asked = parser.parse_args()
    lines, broken = list[str](), list[str]()
    for name, kind in {**CLAIMS, **OTHERS}.items():
        if asked.only not in name:
            continue
        count = asked.count if name in CLAIMS else asked.count // PART
        share = measure(asked.folder, kind, count, asked.show)
        if name in CLAIMS and share < PROMISED:
            broken.append(name)
        shown = f"**{name}**" if name in CLAIMS else name
        lines.append(f"| {shown} | {share:.1%} of {count} |")
        print(lines[-1], flush=True)
    loss = measure_loss(asked.folder, asked.count)
    lines.append(f"| held-out loss, nats per assistant token | {loss:.3f} |")
    print(lines[-1], flush=True)
    if asked.card:
        write_card(asked.folder / "README.md", lines)
    if asked.check and broken:
        sys.exit(f"not met ({PROMISED:.0%}): {'; '.join(broken)}")


if __name__ == "__main__":
    main()
