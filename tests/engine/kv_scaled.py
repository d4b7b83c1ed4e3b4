"""A checkpoint whose keys and values need the scales that it stores, in every form that is
published; and what an engine says with it. Factors are powers of two: divided by them, keys and
values are to the bit those of the checkpoint that needs no scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.protocol import EngineRequest, SamplingParams
from tests.engine import checkpoints

MODEL = "llama3"
NUM_KV_HEADS, HEAD_DIM = 2, 16
BY_HEAD = torch.tensor([1 / 64, 512.0])
"""Factors by which each head's keys and values are larger: one number cannot serve both heads."""
ALIKE = torch.tensor([512.0, 512.0])
PROMPT = [5, 17, 101, 44, 90, 3, 3, 61, 150, 8, 77, 12, 9, 198, 0, 31, 64, 65, 7, 7, 21]
FORMS: dict[str, tuple[dict[str, tuple[int, ...]], Tensor]] = {
    "a number": ({"k_scale": (), "v_scale": ()}, ALIKE),
    "ModelOpt": ({"k_proj.k_scale": (1,), "v_proj.v_scale": (1,)}, ALIKE),
    "compressed-tensors": ({"k_proj.output_scale": (1,), "v_proj.output_scale": (1,)}, ALIKE),
    "one for both": ({"kv_scale": ()}, ALIKE),
    "a head": ({"k_scale": (NUM_KV_HEADS,), "v_scale": (NUM_KV_HEADS,)}, BY_HEAD),
    "a head, wide": ({"k_scale": (NUM_KV_HEADS, 1, 1), "v_scale": (NUM_KV_HEADS, 1, 1)}, BY_HEAD),
}
"""Names beside an attention's and their shapes; how much larger keys and values are."""


def save(folder: Path, form: str) -> Path:
    """The same function as MODEL's: queries and outputs are smaller by as much."""
    checkpoints.save(MODEL, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    names, factors = FORMS[form]
    for layer in range(checkpoints.SHAPE["num_hidden_layers"]):
        name = f"model.layers.{layer}.self_attn"
        rows = factors.repeat_interleave(HEAD_DIM)
        wide = factors.repeat_interleave(2 * HEAD_DIM)  # two query heads share a KV head
        tensors[f"{name}.k_proj.weight"] *= rows[:, None]
        tensors[f"{name}.v_proj.weight"] *= rows[:, None]
        tensors[f"{name}.q_proj.weight"] /= wide[:, None]
        tensors[f"{name}.o_proj.weight"] /= wide[None, :]
        for suffix, shape in names.items():
            number = factors if torch.Size(shape).numel() > 1 else factors[:1]
            tensors[f"{name}.{suffix}"] = number.reshape(shape).clone()
    save_file(tensors, file)
    return folder


def change(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Tensors of the first attention layer; None removes one."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for suffix, tensor in changes.items():
        tensors.pop(f"model.layers.0.self_attn.{suffix}", None)
        if tensor is not None:
            tensors[f"model.layers.0.self_attn.{suffix}"] = tensor
    save_file(tensors, file)


def start(folder: Path, device: torch.device, **options: Any) -> EngineCore:
    config = EngineConfig(
        model=folder,
        device="cuda" if device.type == "cuda" else "cpu",
        dtype="float32",
        num_blocks=16,
        max_num_batched_tokens=16,
        **({"kv_cache_dtype": "fp8"} | options),
    )
    return EngineCore(config)


def say(core: EngineCore, num_tokens: int) -> tuple[list[int], Tensor]:
    """Return what it says to a prompt that is cut into chunks, so that what is read was written by
    an earlier step; and the log-probabilities.
    """
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    core.add(EngineRequest(request_id="0", prompt_token_ids=PROMPT, sampling=sampling))
    said, logprobs = list[int](), list[float]()
    while core.has_work():
        for output in core.step():
            said += output.token_ids
            logprobs += [entry.chosen.logprob for entry in output.logprobs or []]
    assert len(said) == len(logprobs) == num_tokens
    return said, torch.tensor(logprobs)


def same(ours: tuple[list[int], Tensor], theirs: tuple[list[int], Tensor]) -> bool:
    return ours[0] == theirs[0] and bool(torch.allclose(ours[1], theirs[1], rtol=0, atol=1e-4))
