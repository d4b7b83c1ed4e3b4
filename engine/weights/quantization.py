"""How checkpoints store linear layers in fewer bits (`quantization_config` chooses the reader), and
the scales of a float8 KV cache.

Knows names of tensors and their packing, nothing of devices. Read are:

    quant_method         tensors beside a linear layer's name
    fp8                  weight F8_E4M3 and weight_scale_inv for each block (DeepSeek-V3,
                         arXiv:2412.19437, and Qwen3-FP8), or weight_scale for the tensor
    fbgemm_fp8           weight F8_E4M3, weight_scale [N, 1]
    compressed-tensors   formats float-quantized and int-quantized: weight F8_E4M3 or I8, and
                         weight_scale for the tensor or for each output
    awq                  qweight, qzeros, scales: 4 bits in the order of its GEMM (arXiv:2306.00978)
    gptq                 qweight, qzeros, scales, g_idx: 4 or 8 bits (arXiv:2210.17323)

Scales of activations are passed over: those of the token at hand are used instead, or none.

The scales of a KV cache stand beside an attention layer's name, where `k` is either of k and v:

    k_scale                llm-compressor, Quark and AutoFP8
    k_proj.k_scale         ModelOpt
    k_proj.output_scale    compressed-tensors before it named them k_scale
    kv_scale               one for both

Each is one number, of whatever shape, or one for each KV head. All mean that what is stored in the
cache, times the scale, is the key. Nobody needs them where the cache is not float8.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from engine.errors import ConfigError, UnsupportedModel
from engine.kernels.attention.types import KVScales
from engine.kernels.linear.weights import Fp8Weight, GroupedWeight, Int8Weight, LinearWeight
from engine.layers.parallel import WHOLE, Shard

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
FP8 = ("F8_E4M3",)
INT8 = ("I8",)
INT32 = ("I32",)
WORD_BITS = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of a word, from the low end, belongs to output AWQ_ORDER[i] of its eight."""
KV_SCALE_NAMES = ("{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale", "kv_scale")


class LayerShape(NamedTuple):
    name: str
    out_features: int
    in_features: int
    """Over all ranks."""
    shard: Shard


class Tensors(Protocol):
    """The tensors of a checkpoint, or of what stands in for one."""

    @property
    def dtype(self) -> torch.dtype:
        """The activations'."""

    def take(self, name: str, shape: tuple[int, ...], shard: Shard = WHOLE) -> Tensor:
        """See `WeightSource.take`."""

    def dtype_of(self, name: str) -> str | None: ...

    def shape_of(self, name: str) -> tuple[int, ...] | None: ...

    def take_stored(
        self, name: str, shape: tuple[int, ...], dtypes: Collection[str], shard: Shard = WHOLE
    ) -> Tensor: ...

    def pass_over(self, name: str) -> None: ...


QuantizationMethod = Callable[[Tensors, LayerShape], LinearWeight | None]
"""One layer's weight; None when this layer is stored dense."""


class _Fp8(msgspec.Struct):
    weight_block_size: tuple[int, int] | None = None


class _CompressedTensors(msgspec.Struct):
    format: str


class _Awq(msgspec.Struct):
    bits: int = 4
    group_size: int = 128
    version: str = "gemm"


class _Gptq(msgspec.Struct):
    bits: int
    group_size: int
    desc_act: bool = False
    checkpoint_format: str = "gptq"


def quantization_method(config: dict[str, Any] | None) -> QuantizationMethod | None:
    """None for a checkpoint that is not quantised. Raises UnsupportedModel or ConfigError."""
    if config is None:
        return None
    method = str(config.get("quant_method", "unknown"))
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise UnsupportedModel(
            f"config.json: quantization_config ({method}) is not supported ({known})"
        )
    try:
        return METHODS[method](config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config.json: quantization_config ({method}): {error}") from error


def _fp8(config: dict[str, Any]) -> QuantizationMethod:
    block = msgspec.convert(config, _Fp8, strict=False).weight_block_size
    if block is None:
        return _read_scaled
    if min(block) < 1:
        raise ConfigError(f"config.json: quantization_config: weight_block_size {list(block)}")
    return lambda tensors, layer: _read_blocks(tensors, layer, block)


def _fbgemm(config: dict[str, Any]) -> QuantizationMethod:
    return _read_scaled


def _compressed(config: dict[str, Any]) -> QuantizationMethod:
    form = msgspec.convert(config, _CompressedTensors, strict=False).format
    if form not in ("float-quantized", "int-quantized", "naive-quantized"):
        raise UnsupportedModel(
            f"config.json: quantization_config (compressed-tensors): format {form!r} is not "
            "supported (float-quantized, int-quantized)"
        )
    return _read_scaled


def _awq(config: dict[str, Any]) -> QuantizationMethod:
    awq = msgspec.convert(config, _Awq, strict=False)
    if awq.bits != 4 or awq.version.lower() != "gemm":
        raise UnsupportedModel(
            f"config.json: quantization_config (awq): {awq.bits} bits, version {awq.version!r} is "
            "not supported (4 bits, gemm)"
        )
    return lambda tensors, layer: _read_awq(tensors, layer, awq)


def _gptq(config: dict[str, Any]) -> QuantizationMethod:
    gptq = msgspec.convert(config, _Gptq, strict=False)
    if gptq.bits not in (4, 8):
        raise UnsupportedModel(
            f"config.json: quantization_config (gptq): {gptq.bits} bits is not supported (4, 8)"
        )
    if gptq.checkpoint_format not in ("gptq", "gptq_v2"):
        raise UnsupportedModel(
            "config.json: quantization_config (gptq): checkpoint_format "
            f"{gptq.checkpoint_format!r} is not supported (gptq, gptq_v2)"
        )
    return lambda tensors, layer: _read_gptq(tensors, layer, gptq)


METHODS: dict[str, Callable[[dict[str, Any]], QuantizationMethod]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
}


def _read_blocks(
    tensors: Tensors, layer: LayerShape, block: tuple[int, int]
) -> LinearWeight | None:
    name, num_outputs, num_inputs, shard = layer
    if tensors.dtype_of(f"{name}.weight") not in FP8:
        return None
    sizes = (num_outputs, num_inputs)
    values = tensors.take_stored(f"{name}.weight", sizes, FP8, shard)
    grid = (-(-num_outputs // block[0]), -(-num_inputs // block[1]))
    if shard.parts > 1 and sizes[shard.dim] // shard.parts % block[shard.dim]:
        raise ConfigError(
            f"{name}: {shard.parts} ranks cannot share it, "
            f"their parts would cut blocks of {block[shard.dim]}"
        )
    tensors.pass_over(f"{name}.input_scale")
    scale = tensors.take_stored(f"{name}.weight_scale_inv", grid, FLOAT_DTYPES, shard)
    return Fp8Weight(values, scale.float(), block, tensors.dtype)


def _read_scaled(tensors: Tensors, layer: LayerShape) -> LinearWeight | None:
    """One scale for the tensor, or one for each output."""
    name, num_outputs, num_inputs, shard = layer
    kind = tensors.dtype_of(f"{name}.weight")
    if kind not in FP8 + INT8:
        return None
    sizes = (num_outputs, num_inputs)
    values = tensors.take_stored(f"{name}.weight", sizes, FP8 + INT8, shard)
    tensors.pass_over(f"{name}.input_scale")
    stored = tensors.shape_of(f"{name}.weight_scale")
    by_output = stored in ((num_outputs, 1), (num_outputs,)) and num_outputs > 1
    shape = stored if by_output or stored in ((), (1,), (1, 1)) else (num_outputs, 1)
    assert shape is not None
    own = shard if by_output and shard.dim == 0 else WHOLE
    scale = tensors.take_stored(f"{name}.weight_scale", shape, FLOAT_DTYPES, own)
    scale = scale.float().reshape(-1, 1).expand(len(values), 1).contiguous()
    if kind in INT8:
        return Int8Weight(values, scale[:, 0], tensors.dtype)
    return Fp8Weight(values, scale, (1, values.shape[1]), tensors.dtype)


def _read_awq(tensors: Tensors, layer: LayerShape, awq: _Awq) -> LinearWeight | None:
    """qweight [K, N / 8], qzeros [groups, N / 8]: outputs are packed, eight to a word."""
    name, num_outputs, num_inputs, shard = layer
    if tensors.dtype_of(f"{name}.qweight") is None:
        return None
    group = _group_size(awq.group_size, layer)
    num_groups, words = num_inputs // group, num_outputs // 8
    # Stored transposed: what cuts outputs here cuts dimension 1 there.
    turned = shard._replace(dim=1 - shard.dim)

    def read(suffix: str, shape: tuple[int, ...], dtypes: Collection[str]) -> Tensor:
        return tensors.take_stored(f"{name}.{suffix}", shape, dtypes, turned)

    codes = _unpack(read("qweight", (num_inputs, words), INT32), 4, AWQ_ORDER)
    zeros = _unpack(read("qzeros", (num_groups, words), INT32), 4, AWQ_ORDER)
    return GroupedWeight(
        codes=codes.t().contiguous(),
        scales=read("scales", (num_groups, num_outputs), FLOAT_DTYPES),
        zeros=zeros.to(torch.int16),
        bits=4,
        group_size=group,
        order=None,
        dtype=tensors.dtype,
    )


def _read_gptq(tensors: Tensors, layer: LayerShape, gptq: _Gptq) -> LinearWeight | None:
    """qweight [K * bits / 32, N] packs inputs, qzeros [groups, N * bits / 32] outputs; g_idx [K]
    is each input's group."""
    name, num_outputs, num_inputs, shard = layer
    if tensors.dtype_of(f"{name}.qweight") is None:
        return None
    group = _group_size(gptq.group_size, layer)
    num_groups, per_word = num_inputs // group, WORD_BITS // gptq.bits
    turned = shard._replace(dim=1 - shard.dim)

    def read(suffix: str, shape: tuple[int, ...], dtypes: Collection[str]) -> Tensor:
        return tensors.take_stored(f"{name}.{suffix}", shape, dtypes, turned)

    packed = read("qweight", (num_inputs // per_word, num_outputs), INT32)
    codes = _unpack(packed.t().contiguous(), gptq.bits)
    zeros = _unpack(read("qzeros", (num_groups, num_outputs // per_word), INT32), gptq.bits)
    zeros = zeros.to(torch.int16)
    if gptq.checkpoint_format == "gptq":
        zeros += 1  # version 1 stores zero points less one, and loses what does not fit
    order = _gptq_order(tensors, layer, group)
    return GroupedWeight(
        codes=codes if order is None else codes.index_select(1, order),
        scales=read("scales", (num_groups, num_outputs), FLOAT_DTYPES),
        zeros=zeros,
        bits=gptq.bits,
        group_size=group,
        order=order,
        dtype=tensors.dtype,
    )


def _gptq_order(tensors: Tensors, layer: LayerShape, group: int) -> Tensor | None:
    """Inputs sorted by their group; None when they are in order already."""
    name, _, num_inputs, shard = layer
    if tensors.dtype_of(f"{name}.g_idx") is None:
        return None
    groups = tensors.take_stored(f"{name}.g_idx", (num_inputs,), INT32).long()
    expected = torch.arange(num_inputs, device=groups.device) // group
    if torch.equal(groups, expected):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], expected):
        raise ConfigError(f"{name}.g_idx does not put {group} inputs into each group")
    if shard.dim == 1 and shard.parts > 1:
        raise UnsupportedModel(f"{name}: desc_act cannot be cut over ranks by inputs")
    return order


def _group_size(stated: int, layer: LayerShape) -> int:
    """Inputs in a group of this rank; -1 states one group of all."""
    name, _, num_inputs, shard = layer
    group = num_inputs if stated == -1 else stated
    local = num_inputs // shard.parts if shard.dim == 1 else num_inputs
    if group < 1 or num_inputs % group or local % group:
        raise ConfigError(
            f"{name}: groups of {group} do not divide {num_inputs} inputs on {shard.parts} ranks"
        )
    return group


def _unpack(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 [R, C] as uint8 [R, C * 32 / bits], from the low end of each word."""
    per_word = WORD_BITS // bits
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    fields = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    if order is not None:
        place = torch.argsort(torch.tensor(order, device=words.device))
        fields = fields.index_select(2, place)
    return fields.reshape(words.shape[0], words.shape[1] * per_word).to(torch.uint8)


def read_kv_scales(tensors: Tensors, name: str, num_kv_heads: int, shard: Shard) -> KVScales | None:
    """Return the scales of this rank's heads; None where nothing is stored. Raises ConfigError when
    one of the two is missing, has another shape or is no scale.
    """
    stored = [_stored_kv_scale(tensors, name, which) for which in "kv"]
    if stored == [None, None]:
        return None
    absent = next((which for which, found in zip("kv", stored, strict=True) if not found), None)
    if absent is not None:
        raise ConfigError(f"{name} has a scale for its cache, but {absent}_scale is missing")
    k, v = (_read_kv_scale(tensors, str(found), num_kv_heads, shard) for found in stored)
    return KVScales(k, v)


def _stored_kv_scale(tensors: Tensors, name: str, which: str) -> str | None:
    names = (f"{name}.{form.format(which)}" for form in KV_SCALE_NAMES)
    return next((each for each in names if tensors.dtype_of(each) is not None), None)


def _read_kv_scale(tensors: Tensors, name: str, num_kv_heads: int, shard: Shard) -> Tensor:
    shape = tensors.shape_of(name)
    if shape is None or torch.Size(shape).numel() not in (1, num_kv_heads):
        shape = (num_kv_heads,)
    scale = tensors.take_stored(name, shape, FLOAT_DTYPES).float().reshape(-1)
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise ConfigError(f"{name} is not a scale: {scale.tolist()}")
    own = scale.expand(num_kv_heads).chunk(shard.parts)[shard.place]
    return own.contiguous()
