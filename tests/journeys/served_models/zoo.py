"""Writes small checkpoints of every kind, whose answers `transformers` can tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import models, pre_tokenizers

from tests.budget import NIGHTLY
from tests.engine import checkpoints, quantised
from tests.engine.weights.test_adapters import ATTENTION, EVERYWHERE, merged, write_adapter

PRICES = {"base": (2, 3), "base-terse": (5, 7)}
"""Pico-USD for a token of uncached input and of output."""


class Served(NamedTuple):
    """A model by its name."""

    reference: Any
    """`transformers`' model with the weights that are meant."""
    tolerance: float
    """How far below the best a logit may lie: arithmetic in another order."""


class Zoo(NamedTuple):
    """Checkpoints on disk, what to write into tollgate.toml for them, and what each stands for."""

    config: str
    book: Path
    """A price book."""
    served: dict[str, Served]


def write_text_side(folder: Path) -> None:
    """A vocabulary in which text and ids are the same: id 7 is the word w7."""
    vocabulary = {f"w{token_id}": token_id for token_id in range(checkpoints.VOCAB)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    (folder / "chat_template.jinja").write_text(template)


def make_zoo(root: Path) -> Zoo:
    """Write the checkpoints of six engines by night; by day those three that a test asks for by
    name."""
    served = {}
    families = {"base": "llama3", "mixtral": "mixtral", "qwen3-moe": "qwen3_moe"}
    for name, family in families.items() if NIGHTLY else (("base", "llama3"),):
        checkpoints.save(family, root / name)
        served[name] = Served(checkpoints.build(family), 1e-4)
    for name, form, family in (
        *([("fp8", "fp8 blocks", "qwen3_moe")] if NIGHTLY else []),
        ("awq", "awq", "qwen3"),
        ("gptq", "gptq asymmetric, act order", "qwen2"),
    ):
        served[name] = Served(quantised.save(root / name, form, family), 1e-3)
    models_on_disk = list(served)
    base = served["base"].reference
    for name, targets, rank in (("base-legal", EVERYWHERE, 20), ("base-terse", ATTENTION, 4)):
        path = write_adapter(root / name, base, targets, rank=rank, alpha=16, seed=rank)
        served[name] = Served(merged(base, path), 1e-4)
    book = root / "prices.toml"
    book.write_text("\n".join(price(name, *costs) for name, costs in PRICES.items()))
    config = ""
    for name in models_on_disk:
        write_text_side(root / name)
        config += f'[[model]]\nname = "{name}"\npath = "{root / name}"\n'
        if name == "base":
            for adapter in ("base-legal", "base-terse"):
                config += f'[[model.adapter]]\nname = "{adapter}"\npath = "{root / adapter}"\n'
        if name == "awq":
            config += '[model.engine_options]\nspeculative = "ngram"\nmax_model_len = 96\n'
    return Zoo(config, book, served)


def price(model: str, uncached_input: int, output: int) -> str:
    """A cached token costs one pico-USD."""
    return (
        f'[[price]]\nmodel = "{model}"\nvalid_from = "2026-01-01"\ncache_read = "0.000001"\n'
        f'uncached_input = "0.00000{uncached_input}"\noutput = "0.00000{output}"\n'
    )
