"""Bias, minimum length, penalties and grammars, dense over the rows of a batch where any row asks.

Two launches: `_count_kernel`, grid (S, history / BLOCK), counts the tokens of the history into a
scratch of the vocabulary's size with integer atomics (exact in any order); `_adjust_kernel`, grid
(S, V / BLOCK), reads logits and counts, writes adjusted logits and zeroes the counts again. Bytes:
4 a token of history, and about (dtype + 4) * S * V, 8 more per element of penalised rows.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.aot import AotCase
from engine.kernels.sampling.types import LogitAdjustments
from engine.kernels.tuning import launch_config

SEEN = tl.constexpr(1 << 30)
"""Marks a token of the prompt; the bits below count it in the output."""
LIST_BLOCK = tl.constexpr(16)
"""Entries of a row's bias or stop list compared with a tile at once."""


@triton.jit
def _penalised(repetition_ptr, frequency_ptr, presence_ptr, row):
    none = (tl.load(repetition_ptr + row) == 1.0) & (tl.load(frequency_ptr + row) == 0.0)
    return (none & (tl.load(presence_ptr + row) == 0.0)) == 0


@triton.jit
def _count_kernel(
    history_ptr, lengths_ptr, prompt_lengths_ptr, repetition_ptr, frequency_ptr, presence_ptr,
    counts_ptr, history_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if _penalised(repetition_ptr, frequency_ptr, presence_ptr, row):
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < tl.load(lengths_ptr + row)
        said = at >= tl.load(prompt_lengths_ptr + row)
        token = tl.load(history_ptr + row * history_stride + at, mask=inside, other=0)
        count = counts_ptr + row * VOCAB + token
        tl.atomic_or(count, SEEN, mask=inside & ~said)
        tl.atomic_add(count, 1, mask=inside & said)


@triton.jit
def _adjust_kernel(
    logits_ptr, adjusted_ptr, counts_ptr, repetition_ptr, frequency_ptr, presence_ptr, lengths_ptr,
    prompt_lengths_ptr, bias_ids_ptr, bias_values_ptr, num_bias_ptr, stop_ids_ptr, num_stop_ptr,
    min_tokens_ptr, allowed_ptr, bias_stride, stop_stride, allowed_stride, VOCAB: tl.constexpr,
    BLOCK: tl.constexpr, HAS_GRAMMARS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    x = tl.load(logits_ptr + row * VOCAB + token, mask=inside, other=0.0).to(tl.float32)
    num_bias = tl.load(num_bias_ptr + row)
    for start in range(0, num_bias, LIST_BLOCK):
        at = start + tl.arange(0, LIST_BLOCK)
        ids = tl.load(bias_ids_ptr + row * bias_stride + at, mask=at < num_bias, other=-1)
        values = tl.load(bias_values_ptr + row * bias_stride + at, mask=at < num_bias, other=0.0)
        same = ids[:, None] == token[None, :]
        x += tl.sum(tl.where(same, values[:, None], 0.0), axis=0)
    num_said = tl.load(lengths_ptr + row) - tl.load(prompt_lengths_ptr + row)
    if num_said < tl.load(min_tokens_ptr + row):
        num_stop = tl.load(num_stop_ptr + row)
        for start in range(0, num_stop, LIST_BLOCK):
            at = start + tl.arange(0, LIST_BLOCK)
            ids = tl.load(stop_ids_ptr + row * stop_stride + at, mask=at < num_stop, other=-1)
            stops = tl.max((ids[:, None] == token[None, :]).to(tl.int32), axis=0)
            x = tl.where(stops > 0, float("-inf"), x)
    if _penalised(repetition_ptr, frequency_ptr, presence_ptr, row):
        seen = tl.load(counts_ptr + row * VOCAB + token, mask=inside, other=0)
        tl.store(counts_ptr + row * VOCAB + token, tl.zeros_like(seen), mask=inside)
        repetition = tl.load(repetition_ptr + row)
        scaled = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        times = (seen & (SEEN - 1)).to(tl.float32)
        presence = tl.where(times > 0, tl.load(presence_ptr + row), 0.0)
        scaled = scaled - tl.load(frequency_ptr + row) * times - presence
        x = tl.where(seen != 0, scaled, x)
    if HAS_GRAMMARS:
        word = tl.load(allowed_ptr + row * allowed_stride + token // 32, mask=inside, other=0)
        x = tl.where((word >> (token % 32)) & 1 != 0, x, float("-inf"))
    tl.store(adjusted_ptr + row * VOCAB + token, x, mask=inside)


def adjust(logits: Tensor, adjustments: LogitAdjustments) -> Tensor:
    """The adjusted logits, float32 [S, V], in `adjustments.adjusted`; `logits` [S, V] are kept."""
    rows, vocab = logits.shape
    a = adjustments
    assert logits.is_contiguous() and a.counts.is_contiguous() and a.adjusted.is_contiguous()
    assert a.counts.shape[1] == a.adjusted.shape[1] == vocab
    out = a.adjusted[:rows]
    if rows == 0:
        return out
    config = launch_config("sampling_adjust", "any", {"BLOCK": 1024, "num_warps": 4})
    block = config["BLOCK"]
    lists = (a.history, a.bias_ids, a.bias_values, a.stop_ids)
    assert all(each.stride(1) == 1 for each in lists)
    assert a.bias_ids.stride(0) == a.bias_values.stride(0)
    # Any pointer will do where none is read.
    allowed = a.stop_ids if a.allowed is None else a.allowed
    factors = (a.repetition, a.frequency, a.presence)
    _count_kernel[(rows, triton.cdiv(a.history.shape[1], block))](
        a.history, a.lengths, a.prompt_lengths, *factors, a.counts, a.history.stride(0),
        VOCAB=vocab, **config,
    )  # fmt: skip
    _adjust_kernel[(rows, triton.cdiv(vocab, block))](
        logits, out, a.counts, *factors, a.lengths, a.prompt_lengths, a.bias_ids, a.bias_values,
        a.num_bias, a.stop_ids, a.num_stop, a.min_tokens, allowed, a.bias_ids.stride(0),
        a.stop_ids.stride(0), allowed.stride(0), VOCAB=vocab, HAS_GRAMMARS=a.allowed is not None,
        **config,
    )  # fmt: skip
    return out


FLOATS = ("adjusted_ptr", "repetition_ptr", "frequency_ptr", "presence_ptr", "bias_values_ptr")


def _aot(
    name: str, kernel: triton.JITFunction, vocab: int, dtype: str, **constants: bool
) -> AotCase:
    constexprs = {"VOCAB": vocab, "BLOCK": 1024} | constants
    kinds = {"logits_ptr": f"*{dtype}", **dict.fromkeys(FLOATS, "*fp32")}
    signature = {
        arg: kinds.get(arg, "*i32" if arg.endswith("_ptr") else "i32")
        for arg in kernel.arg_names
        if arg not in constexprs
    }
    return AotCase(f"{name} {vocab} {dtype}", kernel, signature, constexprs)


AOT = [
    _aot("sampling_count", _count_kernel, 128256, "bf16"),
    *(
        _aot("sampling_adjust", _adjust_kernel, vocab, "bf16", HAS_GRAMMARS=False)
        for vocab in (32000, 128256, 151936)
    ),
    _aot("sampling_adjust", _adjust_kernel, 128256, "fp32", HAS_GRAMMARS=False),
    _aot("sampling_adjust_grammars", _adjust_kernel, 151936, "bf16", HAS_GRAMMARS=True),
]
