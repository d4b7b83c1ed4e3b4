"""Measure what it costs to keep an output to a JSON schema, by llguidance and by xgrammar, in one
run.

`python -m bench.engine.grammar`: for penny's vocabulary of 4,096 and one grown to 131,072

- a cold schema of 5 and of 50 fields, from its text to the first mask; and for the engine's own way
  there, which tries it in a process of its own first, `prepare` as a request waits for it;
- a mask behind each token of texts that fit, alone and for 32 sequences;
- how much of such a text the schema alone decides (jump-forward);

and what the engine says a second at batch 32, free, and kept to a schema by each library: penny,
and a model of the shape of SmolLM2-135M with random weights. The libraries take turns, and each
figure is the median of its turns. Claims: at batch 32 at most 10 % of the throughput, and at most
50 ms before the first token for a cold schema of 50 fields.

xgrammar is in the extra `bench`; where it is not installed, llguidance is measured alone.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.engine.grammar_libraries import (
    EOS,
    PENNY,
    Grammars,
    Library,
    grown_vocabulary,
    libraries,
)
from bench.tools.record import record
from bench.tools.workload import SMOLLM2_135M, build_checkpoint
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.protocol import EngineRequest, Grammar, SamplingParams
from engine.runner.grammar.compiler import GrammarCompiler
from engine.runner.grammar.constraint import Vocabulary
from engine.text.tokenizer import Tokenizer

BATCH = 32
LARGE_VOCABULARY = 131_072
NUM_SCHEMAS = 3
"""Cold ones of each size."""
NUM_TOKENS = 96
"""The length of each answer whose rate is measured."""
MOST_COST = 0.10
MOST_FIRST_TOKEN_MS = 50.0

ENDLESS = json.dumps(
    {
        "type": "array",
        "minItems": 10_000,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},
                "count": {"type": "integer", "minimum": 0},
                "kind": {"enum": ["small", "medium", "large"]},
            },
            "required": ["name", "count", "kind"],
            "additionalProperties": False,
        },
    }
)
"""No output of NUM_TOKENS completes it, so that all are of the same length."""


def schema_and_text(num_fields: int, seed: int) -> tuple[str, str]:
    """A schema that no other seed has, and a text that fits."""
    draw = random.Random(seed)
    kinds: list[tuple[dict[str, Any], Callable[[], Any]]] = [
        ({"type": "string", "maxLength": 64}, lambda: "some words of an answer, and a number 17"),
        ({"type": "integer", "minimum": 0, "maximum": 10_000}, lambda: draw.randint(0, 10_000)),
        ({"enum": ["red", "green", "blue"]}, lambda: draw.choice(["red", "green", "blue"])),
        ({"type": "boolean"}, lambda: draw.random() < 0.5),
        (
            {"type": "array", "items": {"type": "string"}, "maxItems": 4},
            lambda: ["one", "two", "three"][: draw.randint(0, 3)],
        ),
    ]
    properties, value = {}, {}
    for number in range(num_fields):
        name = f"{draw.choice(['user', 'order', 'item', 'price', 'place'])}_{number}_{seed}"
        properties[name], make = kinds[number % len(kinds)]
        value[name] = make()
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return json.dumps(schema), json.dumps(value)


def first_mask_ms(library: Library, vocab: int, num_fields: int) -> dict[str, float]:
    """From a cold schema's text to the mask of its first token."""
    took = []
    for seed in range(NUM_SCHEMAS):
        schema, _ = schema_and_text(num_fields, seed)
        started = time.perf_counter()
        library.compile(schema).allow([], [], new_mask(vocab))
        took.append(1000 * (time.perf_counter() - started))
    return spread(took)


def mask_us(library: Library, tokenizer: Tokenizer) -> dict[str, float]:
    """To see a token and to make the mask behind it, along texts that fit."""
    took: list[float] = []
    for seed in range(NUM_SCHEMAS):
        schema, text = schema_and_text(50, seed)
        constraint, said = library.compile(schema), list[int]()
        mask = new_mask(tokenizer.vocab_size)
        for token_id in tokenizer.encode(text):
            started = time.perf_counter()
            constraint.allow(said, [], mask)
            took.append(1e6 * (time.perf_counter() - started))
            said.append(token_id)
    return spread(took) | {"batch_of_32_ms": round(BATCH * statistics.mean(took) / 1000, 3)}


def forced_share(library: Library) -> float:
    schema, text = schema_and_text(50, 0)
    return round(library.num_forced(schema, text) / len(text), 3)


def prepare_ms(path: Path, vocab: int) -> dict[str, Any]:
    """The engine's own way: tried in a process of its own, then compiled. `at_start`: what an
    engine does once, in a thread, before anybody asks; without it the first schema would."""

    def took_ms(run: Callable[[], object]) -> float:
        started = time.perf_counter()
        run()
        return round(1000 * (time.perf_counter() - started), 2)

    def prepare(number: int) -> None:
        grammar = Grammar(kind="json_schema", text=schema_and_text(50, number)[0])
        compiler.prepare(str(number), grammar)

    compiler = GrammarCompiler(Vocabulary(str(path), vocab, EOS))
    without_start = took_ms(lambda: prepare(0))
    compiler = GrammarCompiler(Vocabulary(str(path), vocab, EOS))
    at_start = took_ms(compiler.begin)
    first = took_ms(lambda: prepare(0))
    took = [took_ms(partial(prepare, number)) for number in range(1, NUM_SCHEMAS + 1)]
    return {
        "first_without_start": without_start,
        "at_start": at_start,
        "first": first,
        **spread([first, *took]),
    }


def new_mask(vocab: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.full(-(-vocab // 32), -1, np.int32)


def spread(took: list[float]) -> dict[str, float]:
    ordered = sorted(took)
    return {
        "median": round(statistics.median(ordered), 3),
        "p99": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3),
        "max": round(ordered[-1], 3),
    }


def compare(path: Path) -> dict[str, Any]:
    tokenizer = Tokenizer.load(path.parent)
    vocab = tokenizer.vocab_size
    found: dict[str, Any] = {"vocabulary": vocab}
    for library in libraries(path):
        library.compile(ENDLESS)  # what a library makes once is not a schema's
        found[library.name] = {
            "first_mask_ms": {
                f"{fields}_fields": first_mask_ms(library, vocab, fields) for fields in (5, 50)
            },
            "mask_us": mask_us(library, tokenizer),
            "forced_share_of_characters": forced_share(library),
        }
    found["prepare_ms_50_fields"] = prepare_ms(path, vocab)
    return found


# ---- the engine


def rate(core: EngineCore, grammar: Grammar | None, turn: str) -> float:
    """Tokens per second of BATCH answers of NUM_TOKENS. Grammars are compiled before."""
    requests = [
        EngineRequest(
            request_id=f"{turn}.{index}",
            prompt_token_ids=[5, 6, 7, 8],
            sampling=SamplingParams(
                max_tokens=NUM_TOKENS, ignore_eos=grammar is None, seed=index, grammar=grammar
            ),
        )
        for index in range(BATCH)
    ]
    for request in requests:
        core.prepare(request)
    for request in requests:
        core.add(request)
    num_tokens = 0
    started = time.perf_counter()
    while core.has_work():
        num_tokens += sum(len(output.token_ids) for output in core.step())
    took_s = time.perf_counter() - started
    assert num_tokens == BATCH * NUM_TOKENS, num_tokens
    return num_tokens / took_s


def throughput(folder: Path, turns: int) -> dict[str, Any]:
    """By each library. Compilations are in no figure."""
    core = EngineCore(
        EngineConfig(
            model=folder, device="cpu", dtype="float32", num_blocks=2000, max_model_len=512
        )
    )
    grammar = Grammar(kind="json_schema", text=ENDLESS)
    makers = {each.name: Grammars(each) for each in libraries(folder / "tokenizer.json")}
    rates: dict[str, list[float]] = {"free": [], **{name: [] for name in makers}}
    rate(core, None, "warm")
    for turn in range(turns):
        rates["free"].append(rate(core, None, f"free{turn}"))
        for name, maker in makers.items():
            vars(core)["_grammars"] = maker
            rates[name].append(rate(core, grammar, f"{name}{turn}"))
    medians = {name: statistics.median(each) for name, each in rates.items()}
    cost = {name: round(1 - medians[name] / medians["free"], 4) for name in makers}
    return {
        "tokens_per_s": {name: round(each, 1) for name, each in medians.items()},
        "turns": {name: [round(each, 1) for each in found] for name, found in rates.items()},
        "cost": cost,
    }


def build_small(folder: Path) -> Path:
    """A model of SmolLM2-135M's shape, with a vocabulary of its size."""
    build_checkpoint(folder, SMOLLM2_135M | {"eos_token_id": EOS[0]}, "float32")
    grown_vocabulary(folder, SMOLLM2_135M["vocab_size"])
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dry", action="store_true", help="record nothing")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as made:
        large, small = Path(made) / "large", Path(made) / "small"
        large.mkdir()
        shutil.copy(PENNY / "tokenizer_config.json", large)
        vocabularies = [PENNY / "tokenizer.json", grown_vocabulary(large, LARGE_VOCABULARY)]
        result: dict[str, Any] = {
            "libraries": [compare(path) for path in vocabularies],
            "batch_32": {
                "penny": throughput(PENNY, arguments.turns),
                "smollm2_135m_shape": throughput(build_small(small), arguments.turns),
            },
        }
    result["claims"] = claims(result)
    print(json.dumps(result, indent=2))
    if not arguments.dry:
        print(record("grammar", result))


def claims(result: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that are claimed of the library that the engine uses."""
    costs = {
        model: next(cost for name, cost in found["cost"].items() if name.startswith("llguidance"))
        for model, found in result["batch_32"].items()
    }
    first = {
        found["vocabulary"]: found["prepare_ms_50_fields"]["max"] for found in result["libraries"]
    }
    return {
        "cost_at_batch_32": costs,
        "cost_holds": {model: cost <= MOST_COST for model, cost in costs.items()},
        "cold_50_fields_ms": first,
        "first_token_holds": {vocab: ms <= MOST_FIRST_TOKEN_MS for vocab, ms in first.items()},
    }


if __name__ == "__main__":
    main()
