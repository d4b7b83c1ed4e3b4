"""Whole tiny checkpoints against `transformers` on the same device.

Knows no kernel; `check_itself.py` has what needs no reference.

What is compared is what the engine said: for each token it said, the log-probability it gave is set
against the reference's for the same text, and so is how much less likely the token is there than
the reference's own choice. Equality of texts would fail on a tie.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu.engines import (
    EngineAnswer,
    EngineSwitches,
    answers,
    ask,
    configuration,
    engine,
    prompts,
)
from bench.gpu.findings import Check, Finding
from bench.gpu.place import Place

EXACT_LIMIT = 2e-4
"""The tolerance of a float32 log-probability: sums in another order, through three layers of large
weights. 1e-5 on a CPU."""
HALF_LIMIT = 0.15
"""The tolerance of the mean over all tokens in bfloat16, which is 0.02 to 0.055 on a CPU."""
QUANTISED_LIMIT = 0.45
"""The same where the weights are rounded at load, which makes another model: 0.03 and 0.14."""
LORA_TARGETS = ("q_proj", "v_proj", "down_proj")


@torch.inference_mode()
def _compared(place: Place, model: Any, said: Sequence[EngineAnswer]) -> tuple[Tensor, Tensor]:
    """For every token said: how far its log-probability is off, and how much less likely it is than
    the reference's choice."""
    off, regret = [], []
    # Plain products, of which there is no version that rounds more.
    model.set_attn_implementation("eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    for prompt, answer in zip(prompts(place), said, strict=True):
        ids = torch.tensor([prompt + answer.token_ids], device=place.device)
        logits = model(ids).logits[0, len(prompt) - 1 : -1].double()
        wanted = torch.log_softmax(logits, -1)
        chosen = wanted.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
        off.append((torch.tensor(answer.logprobs, device=place.device) - chosen).abs())
        regret.append(wanted.max(-1).values - chosen)
    return torch.cat(off), torch.cat(regret)


def _against(place: Place, model: Any, folder: Path, case: str, **fields: Any) -> Iterator[Finding]:
    """In float32 every token, in half precision their mean."""
    off, regret = _compared(place, model, answers(place, folder, dtype="float32", **fields))
    yield Finding(f"{case} float32", float(off.max()), EXACT_LIMIT)
    yield Finding(f"{case} float32, choice", float(regret.max()), EXACT_LIMIT)
    if place.tiny:
        return
    half = "bfloat16"
    off, regret = _compared(place, model, answers(place, folder, dtype=half, **fields))
    yield Finding(f"{case} {half}, mean", float(off.mean()), HALF_LIMIT)
    yield Finding(f"{case} {half}, choice, mean", float(regret.mean()), HALF_LIMIT)


def _family(name: str) -> Check:
    def check(place: Place) -> Iterator[Finding]:
        from tests.engine import checkpoints

        model = copy.deepcopy(checkpoints.build(name)).to(place.device)
        with tempfile.TemporaryDirectory() as folder:
            yield from _against(place, model, checkpoints.save(name, Path(folder)), name)

    return check


def _stored(form: str) -> Check:
    """A checkpoint as it is published quantised, against the weights it stands for. Where tokens
    are quantised, too, single ones may be far: the mean is held to its limit."""

    def check(place: Place) -> Iterator[Finding]:
        from tests.engine import quantised

        for family in place.pick(("qwen3", "qwen3_moe"), ("qwen3",)):
            with tempfile.TemporaryDirectory() as folder:
                model: Any = quantised.save(Path(folder), form, family)
                said = answers(place, Path(folder), dtype="float16")
                off, _ = _compared(place, model.to(place.device), said)
                yield Finding(f"{form} {family}", float(off.mean()), 2 * HALF_LIMIT)

    return check


def quantised_at_load(place: Place) -> Iterator[Finding]:
    from tests.engine import quantised

    model = quantised.build("qwen3", 3)
    for kind in place.pick(("int8", "fp8"), ("int8",)):
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            own = copy.deepcopy(model).to(place.device)
            off, _ = _compared(place, own, answers(place, Path(folder), quantization=kind))
            # It is another model by what the rounding of its weights makes.
            yield Finding(kind, float(off.mean()), QUANTISED_LIMIT)


def adapters(place: Place) -> Iterator[Finding]:
    """Two adapters and none in one batch, against a model whose weights hold the adapter."""
    from safetensors.torch import save_file

    from tests.engine import checkpoints

    base = checkpoints.build("llama3")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoints.save("llama3", folder / "base")
        merged, paths = {"": base}, {}
        for number, (adapter, rank) in enumerate((("one", 4), ("two", 16))):
            merged[adapter], tensors = _adapt(base, rank, seed=number)
            paths[adapter] = folder / adapter
            paths[adapter].mkdir()
            save_file(tensors, paths[adapter] / "adapter_model.safetensors")
            _write_adapter_config(paths[adapter], rank)
        names = ["one", "", "two", "one", "two"][: len(prompts(place))]
        config = configuration(
            EngineSwitches(),
            model=folder / "base",
            device=place.device.type,
            dtype="float32",
            num_blocks=128,
            max_num_batched_tokens=64,
            adapters=paths,
        )
        with engine(config) as core:
            tokens = place.pick(40, 2)
            said = ask(core, prompts(place), tokens, adapters=names, logprobs=1)
        for adapter, model in merged.items():
            own = copy.deepcopy(model).to(place.device)
            rows = [i for i, used in enumerate(names) if used == adapter]
            off, _ = _compared_some(place, own, said, rows)
            if rows:
                yield Finding(adapter or "none", float(off.max()), EXACT_LIMIT)


def _compared_some(
    place: Place, model: Any, said: Sequence[EngineAnswer], rows: Sequence[int]
) -> tuple[Tensor, Tensor]:
    empty = EngineAnswer([], [])
    return _compared(place, model, [s if i in rows else empty for i, s in enumerate(said)])


def _adapt(base: Any, rank: int, seed: int) -> tuple[Any, dict[str, Tensor]]:
    """A copy of `base` with an adapter in its weights, and the adapter as PEFT names it."""
    model, tensors = copy.deepcopy(base), {}
    draw = torch.Generator().manual_seed(seed)
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] not in LORA_TARGETS:
            continue
        a = torch.randn(rank, module.in_features, generator=draw) / module.in_features**0.5
        b = torch.randn(module.out_features, rank, generator=draw) / rank**0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        with torch.no_grad():
            module.weight += b @ a  # lora_alpha is the rank
    return model, tensors


def _write_adapter_config(folder: Path, rank: int) -> None:
    import json

    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    config |= {"target_modules": list(LORA_TARGETS), "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _published() -> tuple[list[str], list[str]]:
    """Families and quantised formats that the engine's tests write checkpoints of."""
    if find_spec("transformers") is None:
        return [], []
    from tests.engine import checkpoints, quantised

    return list(checkpoints.MODELS), list(quantised.FORMATS)


FAMILIES, FORMATS = _published()
WHOLE: dict[str, Check] = {
    **{f"engine: {name} against transformers": _family(name) for name in FAMILIES},
    **{f"engine: checkpoint in {form}": _stored(form) for form in FORMATS},
    "engine: quantised at load": quantised_at_load,
    "engine: adapters": adapters,
}
CHECKS = WHOLE if FAMILIES else {}
"""All of them run checkpoints that transformers writes."""
