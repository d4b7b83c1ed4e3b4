"""Measure penny on held-out conversations: the figures of its model card.

    OMP_NUM_THREADS=2 python -m models.penny.evaluate

Answers are greedy, in fp32, by transformers. Tools, names, number pairs and wordings of the prompts
occur nowhere in training (`words.py`). Figures of "known tools" are of fresh conversations as well,
but with the words, the tools and the kinds of composed tools that training draws from.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import jsonschema_rs
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from models.penny.corpus import Conversation, conversations, render
from models.penny.network import Llama, Shape
from models.penny.talk import table
from models.penny.train import HERE, TURN_END, examples, held_out_loss

SEED = 7
FRESH_SEED = 9_001
"""Not among the seeds of training, which start at two million."""
MAX_NEW_TOKENS = 480
BATCH = 16
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


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


def well_formed(conversation: Conversation, calls: list[dict[str, Any]]) -> bool:
    """Each call has exactly a name and arguments, and the arguments satisfy the tool's schema."""
    schemas = {
        tool["function"]["name"]: tool["function"]["parameters"] for tool in conversation.tools
    }
    return all(
        call.keys() == {"name", "arguments"}
        and call["name"] in schemas
        and jsonschema_rs.is_valid(schemas[call["name"]], call["arguments"])
        for call in calls
    )


def judge(conversation: Conversation, answer: str, ended: bool) -> dict[str, bool]:
    """Name of each figure this answer counts for, and whether it does well there."""
    expected = conversation.messages[-1]
    if conversation.topic == "tool_call":
        calls = calls_in(answer) or []
        wanted = [call["function"] for call in expected["tool_calls"]]
        names = [call.get("name") for call in calls] == [call["name"] for call in wanted]
        return {
            "tool: well-formed call of the right tool": names and well_formed(conversation, calls),
            "tool: the very call, every argument right": calls == wanted,
        }
    whole = ended and answer.endswith((".", "!", "?")) and "<" not in answer
    figures = {"whole sentences": whole}
    if conversation.tools and conversation.topic == "no_tool":
        figures["tool: none called when none matches"] = "<tool_call>" not in answer
    if conversation.topic == "fact":
        entry = next(e for e in table("facts")["fact"] if expected["content"] in e["answer"])
        figures["fact: one of its right answers"] = answer in entry["answer"]
    elif conversation.topic in ("arithmetic", "word_problem", "echo", "long_text", "tool_answer"):
        figures[f"{conversation.topic}: the very answer"] = answer == expected["content"]
    return figures


def answers(folder: Path, drawn: list[Conversation]) -> list[tuple[str, bool]]:
    """The greedy answer to each conversation's last prompt, and whether it came to its end."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    end = tokenizer.convert_tokens_to_ids(TURN_END)
    prompts = [render(c.messages[:-1], c.tools, add_generation_prompt=True) for c in drawn]
    order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
    found: dict[int, tuple[str, bool]] = {}
    for first in range(0, len(order), BATCH):
        chosen = order[first : first + BATCH]
        batch = tokenizer([prompts[at] for at in chosen], return_tensors="pt", padding=True)
        with torch.inference_mode():
            written = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        for at, row in zip(chosen, written[:, batch["input_ids"].shape[1] :].tolist(), strict=True):
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
    return held_out_loss(network, examples(tokenizer, SEED, count, held_out=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure penny on held-out conversations.")
    parser.add_argument("--folder", type=Path, default=HERE)
    parser.add_argument("--count", type=int, default=1000, help="number of conversations")
    parser.add_argument("--show", type=int, default=0, help="print so many failures of each kind")
    asked = parser.parse_args()
    loss = measure_loss(asked.folder, asked.count)
    print(f"held-out loss {loss:.4f} nats per assistant token", flush=True)
    drawn = list(conversations(SEED, asked.count, held_out=True))
    known = conversations(FRESH_SEED, asked.count, held_out=False)
    report(asked.folder, drawn, asked.show, "")
    report(asked.folder, [c for c in known if c.topic == "tool_call"], asked.show, "known tools, ")


def report(folder: Path, drawn: list[Conversation], show: int, prefix: str) -> None:
    """Print the figures, and `show` failures of each."""
    drawn = [c for c in drawn if len(render(c.messages, c.tools)) < 3 * Shape().vocab_size]
    figures: dict[str, list[bool]] = defaultdict(list)
    for conversation, (answer, ended) in zip(drawn, answers(folder, drawn), strict=True):
        for figure, good in judge(conversation, answer, ended).items():
            figures[figure].append(good)
            if not good and figures[figure].count(False) <= show:
                question, expected = conversation.messages[-2:]
                print(f"--- {figure}\n{question['content']}\n>>> {answer}\nnot {expected}")
    for figure, goods in sorted(figures.items()):
        print(f"{prefix + figure:58} {sum(goods) / len(goods):6.1%} of {len(goods)}", flush=True)


if __name__ == "__main__":
    main()
