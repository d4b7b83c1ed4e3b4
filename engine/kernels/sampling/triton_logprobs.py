"""Log-probabilities of the token drawn and of the k most likely ones, from the raw logits.

    logprob_i = x_i - max x - log(sum exp(x - max x))

Grid (S); rows that ask for nothing end at once. Passes over a row, which stays in the L2 cache: two
for the sum, and one for each of the k, which finds what comes next in the order of falling logits,
lower ids first.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.aot import AotCase
from engine.kernels.sampling.types import RowLogprobs
from engine.kernels.tuning import launch_config


@triton.jit
def _tile(row_ptr, token, VOCAB: tl.constexpr):
    return tl.load(row_ptr + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)


@triton.jit
def _next(row_ptr, value, token, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The (logit, id) that follows (value, token) in the order of the answer."""
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_id = tl.full((BLOCK,), VOCAB, tl.int32)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
        ids = start + tl.arange(0, BLOCK)
        x = _tile(row_ptr, ids, VOCAB)
        after = (x < value) | ((x == value) & (ids > token))
        # An id of VOCAB says that nothing was found yet, so that -inf can be found too.
        better = after & (ids < VOCAB) & ((x > best) | (best_id == VOCAB))
        best = tl.where(better, x, best)
        best_id = tl.where(better, ids, best_id)
    found = tl.max(tl.where(best_id < VOCAB, best, float("-inf")), axis=0)
    return found, tl.min(tl.where(best == found, best_id, VOCAB), axis=0)


@triton.jit
def _logprobs_kernel(
    logits_ptr, token_ids_ptr, asked_ptr, ids_ptr, values_ptr, columns, VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """ids int32, values float32: [S, columns]."""
    row = tl.program_id(0).to(tl.int64)
    asked = tl.load(asked_ptr + row)
    if asked >= 0:
        row_ptr = logits_ptr + row * VOCAB
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
            best = tl.maximum(best, _tile(row_ptr, start + tl.arange(0, BLOCK), VOCAB))
        most = tl.max(best, axis=0)
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
            sums += tl.exp(_tile(row_ptr, start + tl.arange(0, BLOCK), VOCAB) - most)
        shift = most + tl.log(tl.sum(sums, axis=0))
        chosen = tl.load(token_ids_ptr + row)
        held = (chosen >= 0) & (chosen < VOCAB)
        x = tl.load(row_ptr + chosen, mask=held, other=float("-inf")).to(tl.float32)
        at = row * columns
        tl.store(ids_ptr + at, chosen.to(tl.int32))
        tl.store(values_ptr + at, x - shift)
        value, token = tl.full((), float("inf"), tl.float32), tl.full((), -1, tl.int32)
        for column in range(1, asked + 1):
            value, token = _next(row_ptr, value, token, VOCAB, BLOCK)
            tl.store(ids_ptr + at + column, token)
            tl.store(values_ptr + at + column, value - shift)


def logprobs(logits: Tensor, token_ids: Tensor, asked: Tensor, most: int) -> RowLogprobs:
    """As `engine.kernels.sampling.dispatch.logprobs`."""
    assert logits.is_contiguous()
    rows, vocab = logits.shape
    ids = torch.empty(rows, 1 + most, dtype=torch.int32, device=logits.device)
    values = torch.empty(rows, 1 + most, dtype=torch.float32, device=logits.device)
    if rows:
        config = launch_config("sampling_logprobs", f"vocab{vocab}", DEFAULT)
        _logprobs_kernel[(rows,)](
            logits, token_ids, asked, ids, values, 1 + most, VOCAB=vocab, **config
        )
    return RowLogprobs(ids, values)


DEFAULT = {"BLOCK": 4096, "num_warps": 16}


def _aot(vocab: int, dtype: str) -> AotCase:
    signature = {
        "logits_ptr": f"*{dtype}",
        "token_ids_ptr": "*i64",
        "asked_ptr": "*i32",
        "ids_ptr": "*i32",
        "values_ptr": "*fp32",
        "columns": "i32",
    }
    constexprs = {"VOCAB": vocab, "BLOCK": DEFAULT["BLOCK"]}
    return AotCase(
        f"sampling_logprobs {vocab} {dtype}",
        _logprobs_kernel,
        signature,
        constexprs,
        num_warps=DEFAULT["num_warps"],
    )


AOT = [_aot(128256, "bf16"), _aot(151936, "bf16"), _aot(128256, "fp32")]
