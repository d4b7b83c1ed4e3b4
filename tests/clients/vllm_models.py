"""Trains the two models that vLLM's tests are run with: they answer the prompts of those tests, and
know nothing else.

The tests want answers: JSON that fits its schema, a thought before a call, a name remembered. So
each model learns the lessons of `vllm_lessons.py` by heart, in a few minutes on one core, and is
written as a Hugging Face folder that the engine loads as it loads any. What the tests measure then
is the protocol, not a model.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.autograd import backward

from engine.text.chat_template import ChatTemplate
from models.penny.network import Llama, Shape
from models.penny.train import IGNORED, Example, batches, loss_of, optimizers
from tests.clients.vllm_lessons import (
    Chat,
    Lesson,
    base_lessons,
    long_lessons,
    thinking_lessons,
)
from tests.stack import ROOT

PENNY = ROOT / "models" / "penny"
CACHE = ROOT / ".clients" / "vllm_models"
SEED = 5
BASE_CONTEXT, THINKING_CONTEXT = 10112, 8192
"""The tests ask their servers for so many tokens."""
BASE_EPOCHS, THINKING_EPOCHS = 100, 40
LONG_EVERY = 4
"""Epochs from one time that the long lessons are learnt to the next."""
WARMUP_STEPS, LEAST_RATE = 20, 0.02
OPENING = 5
"""Tokens of a chat up to the name of its first role: a prompt's log-probabilities are likely."""
LEARNT = 0.05
"""The most that an answer may cost, in nats: its probability is above 0.95."""
BASE_SHAPE = Shape(vocab_size=32_000, num_hidden_layers=4)
BASE_TEMPLATE = r"""{#- Zephyr's own, for any role, with tools as in Hermes. -#}
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools %}
{{- "<|tools|>\n" }}
{%- for tool in tools %}{{ tool | tojson }}{{ "\n" }}{% endfor %}
{{- "Call one in <tool_call></tool_call>." ~ eos_token ~ "\n" }}
{%- endif %}
{%- for message in messages %}
{{- "<|" ~ message.role ~ "|>\n" ~ text(message.content) ~ eos_token ~ "\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|assistant|>\n" }}{% endif %}
"""
THINKING_SWITCH = """
{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}
{{- "<think>\\n\\n</think>\\n\\n" }}
{%- endif %}
"""
"""Qwen 3 has this in its template, and penny has not."""
CONVERT = """
import importlib.util, pathlib, shutil, sys
from transformers import LlamaTokenizer
spec = importlib.util.find_spec("mistral_common")
found = pathlib.Path(spec.submodule_search_locations[0]) / "data" / "tokenizer.model.v1"
shutil.copy(found, pathlib.Path(sys.argv[1]) / "tokenizer.model")
LlamaTokenizer.from_pretrained(sys.argv[1], legacy=True, add_bos_token=True).save_pretrained(
    sys.argv[1]
)
"""


def write_models(source: Path) -> dict[str, Path]:
    """Write both models, or find them written. Return their folders.

    Raises AssertionError where one has not learnt its lessons.
    """
    folder, found = CACHE / digest(), {}
    for name, write in (("base", write_base), ("thinking", write_thinking)):
        found[name], begun = folder / name, folder / f"{name}.begun"
        if not found[name].exists():
            shutil.rmtree(begun, ignore_errors=True)
            begun.mkdir(parents=True)
            write(begun, source)
            begun.rename(found[name])
    return found


def digest() -> str:
    """Tell by what the models are made of whether they are to be made anew."""
    here = Path(__file__)
    made_of = [here, here.with_name("vllm_lessons.py"), *sorted(PENNY.glob("*.py"))]
    texts = b"".join(path.read_bytes() for path in made_of)
    return hashlib.sha256(texts).hexdigest()[:16]


def write_base(folder: Path, source: Path) -> None:
    """Write the one that stands for zephyr: with Mistral's tokenizer, which the tests count by."""
    subprocess.run([os.environ["CLIENTS_PYTHON"], "-c", CONVERT, folder], check=True)
    (folder / "chat_template.jinja").write_text(BASE_TEMPLATE)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_configs(folder, BASE_SHAPE, BASE_CONTEXT, special, bos=1, eos=[2])
    torch.manual_seed(SEED)
    network = Llama(BASE_SHAPE)
    chat = Chat(ChatTemplate.load(folder))
    always = long_lessons(chat)

    def drawn(rng: random.Random, epoch: int) -> list[Lesson]:
        return base_lessons(chat, source, rng) + (always if epoch % LONG_EVERY == 0 else [])

    fit(folder, network, drawn, BASE_EPOCHS)


def write_thinking(folder: Path, source: Path) -> None:
    """Write the one that stands for Qwen 3: penny, which has learnt these lessons, too."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PENNY / name, folder)
    template = (PENNY / "chat_template.jinja").read_text() + THINKING_SWITCH
    (folder / "chat_template.jinja").write_text(template)
    special = json.loads((PENNY / "tokenizer_config.json").read_text())
    penny = json.loads((PENNY / "config.json").read_text())
    bos, eos = penny["bos_token_id"], penny["eos_token_id"]
    write_configs(folder, Shape(), THINKING_CONTEXT, special, bos=bos, eos=eos)
    network = Llama(Shape())
    weights = load_file(PENNY / "model.safetensors")
    network.load_state_dict({k.removeprefix("model."): v for k, v in weights.items()})
    chat = Chat(ChatTemplate.load(folder))
    fit(folder, network, lambda rng, _: thinking_lessons(chat, source, rng), THINKING_EPOCHS)


def write_configs(
    folder: Path,
    shape: Shape,
    context: int,
    special: dict[str, Any],
    *,
    bos: int,
    eos: list[int],
) -> None:
    """Write penny's configurations with other sizes. `special`: the special tokens, by name."""
    ids = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": bos}
    config = {
        **json.loads((PENNY / "config.json").read_text()),
        **asdict(shape),
        **ids,
        "max_position_embeddings": context,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generation = {**ids, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    words = {**special, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))


def fit(
    folder: Path,
    network: Llama,
    drawn: Callable[[random.Random, int], list[Lesson]],
    epochs: int,
) -> None:
    """Train on what is drawn for each epoch, then write the weights."""
    torch.set_num_threads(1)  # two wait for each other on a busy machine
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = json.loads((folder / "config.json").read_text())["eos_token_id"][0]
    rng = random.Random(SEED)
    steps = optimizers(network)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in steps]
    done = 0
    for epoch in range(epochs):
        lessons = [to_example(tokenizer, end, each) for each in drawn(rng, epoch)]
        for ids, labels in batches(lessons, rng):
            backward(loss_of(network, ids, labels))
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            now = min(1.0, (done + 1) / WARMUP_STEPS) * rate(epoch / epochs)
            for optimizer, peak in zip(steps, peaks, strict=True):
                optimizer.param_groups[0]["lr"] = peak * now
                optimizer.step()
                optimizer.zero_grad()
            done += 1
    check(network, tokenizer, end, drawn(random.Random(SEED), 0))
    weights = {f"model.{name}": each.contiguous() for name, each in network.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def rate(progress: float) -> float:
    """The learning rate, as a share of its peak: a cosine down to `LEAST_RATE`."""
    return LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * progress))


def to_example(tokenizer: Tokenizer, end: int, lesson: Lesson) -> Example:
    """Token ids and labels: of the answer, and of the tokens that every chat begins with."""
    is_chat = isinstance(lesson.prompt, str) and lesson.prompt.startswith("<|")
    if isinstance(lesson.prompt, str):
        before, ids = (  # the template of a chat writes what begins a text
            tokenizer.encode(text, add_special_tokens=not is_chat).ids
            for text in (
                lesson.prompt + lesson.given,
                lesson.prompt + lesson.given + lesson.answer,
            )
        )
    else:
        before = lesson.prompt
        ids = [*before, *tokenizer.encode(lesson.answer, add_special_tokens=False).ids]
    assert ids[: len(before)] == before, f"tokens across the end of a prompt: {lesson.answer}"
    ids += [end] * lesson.ends
    labels = [IGNORED] * len(before) + ids[len(before) :]
    if is_chat:
        labels[1:OPENING] = ids[1:OPENING]
    return ids, labels


@torch.no_grad()
def check(network: Llama, tokenizer: Tokenizer, end: int, lessons: list[Lesson]) -> None:
    """Raise AssertionError unless each lesson is known by heart, but for what chance draws."""
    for lesson in lessons:
        ids, labels = to_example(tokenizer, end, lesson)
        hidden = network.hidden(torch.tensor([ids[:-1]]))[0]
        costs = -network.logits(hidden).log_softmax(-1)
        cost = sum(
            float(costs[at, label])
            for at, label in enumerate(labels[1:])
            if label != IGNORED and at >= OPENING
        )
        assert cost < LEARNT or "LLM" in lesson.prompt, f"{cost:.2f} nats: {lesson.answer}"
