"""Checkpoints in the quantised formats that are published, packed here from their descriptions, and
the same weights in float32 for `transformers`: the reference of the parity tests.

Every packer works on numpy integers, one element after the other where that is clearer: it shares
no code and no trick with the reader it checks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

VOCAB = 199
HIDDEN, INTERMEDIATE = 128, 256
Packed = tuple[dict[str, Tensor], Tensor]
"""Tensors by suffix, and the weight [N, K] they stand for, float32."""


def fp8_blocks(weight: Tensor, rng: np.random.Generator) -> Packed:
    """weight_scale_inv for every [64, 128]; weight = fp8 * scale_inv."""
    rows, columns = 64, 128
    num_outputs, num_inputs = weight.shape
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    exact = torch.empty(weight.shape)
    scales = torch.empty(-(-num_outputs // rows), -(-num_inputs // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = weight[at].abs().max() / 448
            values[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            exact[at] = values[at].float() * scales[i, j]
    return {"weight": values, "weight_scale_inv": scales}, exact


def fp8_tensor(weight: Tensor, rng: np.random.Generator) -> Packed:
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.02)}
    return tensors, values.float() * scale


def fp8_channel(weight: Tensor, rng: np.random.Generator) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def int8_channel(weight: Tensor, rng: np.random.Generator) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scale).round().to(torch.int8)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def _groups(
    weight: NDArray[np.float32], group_of: NDArray[np.int64], bits: int, symmetric: bool
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Codes [N, K], zeros and half-precision scales [groups, N], and what they stand for [N, K]."""
    num_outputs, num_inputs = weight.shape
    top, num_groups = 2**bits - 1, int(group_of.max()) + 1
    codes = np.zeros((num_outputs, num_inputs), np.int64)
    zeros = np.zeros((num_groups, num_outputs), np.int64)
    scales = np.zeros((num_groups, num_outputs), np.float16)
    exact = np.zeros((num_outputs, num_inputs), np.float32)
    for g in range(num_groups):
        at = np.flatnonzero(group_of == g)
        for n in range(num_outputs):
            low, high = float(weight[n, at].min()), float(weight[n, at].max())
            if symmetric:
                widest = max(-low, high)
                low, high = -widest, widest
            scales[g, n] = np.float16((high - low) / top)
            scale = float(scales[g, n])
            zeros[g, n] = 2 ** (bits - 1) if symmetric else min(max(round(-low / scale), 1), top)
            codes[n, at] = np.clip(np.rint(weight[n, at] / scale) + zeros[g, n], 0, top)
            exact[n, at] = (codes[n, at] - zeros[g, n]) * np.float32(scale)
    return codes, zeros, scales, exact


def _pack_rows(fields: NDArray[np.int64], bits: int) -> Tensor:
    """[R, C] -> int32 [R * bits / 32, C]: the first row in the lowest bits of a word."""
    per_word = 32 // bits
    words = np.zeros((fields.shape[0] // per_word, fields.shape[1]), np.uint64)
    for row in range(fields.shape[0]):
        words[row // per_word] |= fields[row].astype(np.uint64) << np.uint64(row % per_word * bits)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def awq(weight: Tensor, rng: np.random.Generator) -> Packed:
    """GEMM order: of eight neighbouring outputs, nibble i holds number (0, 2, 4, 6, 1, 3, 5, 7)."""
    codes, zeros, scales, exact = _groups(
        weight.numpy(), np.arange(weight.shape[1]) // AWQ_GROUP, 4, False
    )

    def pack(rows: NDArray[np.int64]) -> Tensor:
        words = np.zeros((rows.shape[0], rows.shape[1] // 8), np.uint64)
        for word in range(words.shape[1]):
            for nibble, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                field = rows[:, word * 8 + output].astype(np.uint64)
                words[:, word] |= field << np.uint64(nibble * 4)
        return torch.from_numpy(words.astype(np.uint32).view(np.int32))

    tensors = {
        "qweight": pack(np.ascontiguousarray(codes.T)),
        "qzeros": pack(zeros),
        "scales": torch.from_numpy(scales),
    }
    return tensors, torch.from_numpy(exact)


AWQ_GROUP = 64


def gptq(
    bits: int, group: int, *, symmetric: bool, act_order: bool, version: int = 1
) -> Callable[[Tensor, np.random.Generator], Packed]:
    def pack(weight: Tensor, rng: np.random.Generator) -> Packed:
        num_inputs = weight.shape[1]
        size = num_inputs if group == -1 else group
        group_of = np.arange(num_inputs) // size
        if act_order:
            group_of = rng.permutation(group_of)
        codes, zeros, scales, exact = _groups(weight.numpy(), group_of, bits, symmetric)
        stored = zeros - 1 if version == 1 else zeros
        tensors = {
            "qweight": _pack_rows(np.ascontiguousarray(codes.T), bits),
            "qzeros": _pack_rows(np.ascontiguousarray(stored.T), bits).t().contiguous(),
            "scales": torch.from_numpy(scales),
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }
        return tensors, torch.from_numpy(exact)

    return pack


def _gptq_config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, **more}


def _compressed(form: str, kind: str, strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor, np.random.Generator], Packed]]] = {
    "fp8 blocks": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [64, 128],
        },
        fp8_blocks,
    ),
    "fp8 static": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        fp8_channel,
    ),
    "compressed fp8": (_compressed("float-quantized", "float", "channel"), fp8_channel),
    "compressed fp8 tensor": (_compressed("float-quantized", "float", "tensor"), fp8_tensor),
    "compressed int8": (_compressed("int-quantized", "int", "channel"), int8_channel),
    "awq": (
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": AWQ_GROUP,
            "version": "gemm",
            "zero_point": True,
        },
        awq,
    ),
    "gptq": (
        _gptq_config(4, 64, desc_act=False, sym=True),
        gptq(4, 64, symmetric=True, act_order=False),
    ),
    "gptq asymmetric, act order": (
        _gptq_config(4, 32, desc_act=True, sym=False),
        gptq(4, 32, symmetric=False, act_order=True),
    ),
    "gptq v2, one group": (
        _gptq_config(4, -1, desc_act=False, sym=False, checkpoint_format="gptq_v2"),
        gptq(4, -1, symmetric=False, act_order=False, version=2),
    ),
    "gptq 8 bits, act order": (
        _gptq_config(8, 64, desc_act=True, sym=True),
        gptq(8, 64, symmetric=True, act_order=True),
    ),
}


def build(family: str, seed: int) -> transformers.PreTrainedModel:
    """A tiny model whose linear layers' sizes the formats can pack."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
    }
    torch.manual_seed(seed)
    if family == "qwen2":
        shape.pop("head_dim")
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape))
    elif family == "qwen3_moe":
        shape |= {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.6 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        model.get_input_embeddings().weight.normal_(std=1.0 / HIDDEN**0.25)
    return model.eval()


def save(
    folder: Path, form: str, family: str = "qwen3", dense: str = "layers.1.mlp.up_proj"
) -> transformers.PreTrainedModel:
    """Write a checkpoint of `form` into `folder`; all linear layers but lm_head and `dense` are
    packed. The model with the weights that the packed ones stand for."""
    config, pack = FORMATS[form]
    model, rng = build(family, len(form)), np.random.default_rng(len(form))
    tensors: dict[str, Tensor] = {}
    orders: dict[str, np.random.Generator] = {}
    for name, parameter in _by_projection(model):
        layer = name.removesuffix(".weight")
        if "_proj" not in layer or name.endswith(".bias") or layer.endswith(dense):
            tensors[name] = parameter.detach().half()
            parameter.data.copy_(tensors[name])
            continue
        # Projections of one input share its order, as where their Hessian is one.
        shared = layer.rsplit(".", 1)[0] if "down" not in layer and "o_proj" not in layer else layer
        state = orders.setdefault(shared, np.random.default_rng(rng.integers(1 << 30)))
        packed, exact = pack(parameter.detach(), np.random.default_rng(_seed_of(state)))
        tensors |= {f"{layer}.{suffix}": tensor for suffix, tensor in packed.items()}
        parameter.data.copy_(exact)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    model.config.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"architectures": [type(model).__name__], "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    return model


def _by_projection(model: transformers.PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters by their published names: what `transformers` fuses for all experts is a view for
    each projection of each."""
    for name, parameter in model.named_parameters():
        if "mlp.experts." not in name:
            yield name, parameter
            continue
        block, fused = name.rsplit(".", 1)
        for i, expert in enumerate(parameter):
            if fused == "down_proj":
                yield f"{block}.{i}.down_proj.weight", expert
            else:
                gate, up = expert.chunk(2)
                yield f"{block}.{i}.gate_proj.weight", gate
                yield f"{block}.{i}.up_proj.weight", up


def _seed_of(state: np.random.Generator) -> int:
    """The same number for as long as `state` draws nothing."""
    return int(state.bit_generator.state["state"]["state"] % (1 << 30))
