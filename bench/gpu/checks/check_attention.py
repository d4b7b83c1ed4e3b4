"""Attention over the paged cache: prefill, decode, both in one step, and what is deterministic.

Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from bench.gpu.findings import LIMITS, Finding, differing, relative
from bench.gpu.paged_steps import BLOCK_SIZE, PagedStep, shape_of
from bench.gpu.place import Place
from engine.kernels.attention.types import AttentionMetadata, DeviceMetadata, to_device

FP8 = torch.float8_e4m3fn
HEADS = {64: (9, 3), 80: (32, 32), 96: (32, 8), 128: (32, 8), 256: (16, 4)}
"""By head_dim, the query and KV heads of models that have it."""
Seqs = Sequence[tuple[int, int]]


def _dtypes(place: Place) -> list[tuple[torch.dtype, torch.dtype | None]]:
    """Return the types of queries and cache."""
    half = [(torch.float16, None), (torch.float16, FP8)]
    return half if place.tiny else [(torch.bfloat16, None), *half, (torch.bfloat16, FP8)]


def _grid(place: Place, seqs: Seqs, kind: str) -> Iterator[Finding]:
    """Every head_dim with every dtype, fresh inputs each."""
    seed = 1
    for head_dim, heads in HEADS.items():
        if place.tiny and head_dim not in (64, 80):
            continue
        for dtype, cache in _dtypes(place):
            seed += 10
            own = (3, 1) if place.tiny else heads
            shape = shape_of(own, head_dim, place.device, dtype, cache)
            step = PagedStep(place, shape, seqs, seed=seed)
            case = f"{kind} d{head_dim} {_name(dtype)}/{_name(cache or dtype)}"
            yield Finding(case, relative(step.run(), step.exact()), LIMITS[dtype])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").removesuffix("_e4m3fn")


def prefill(place: Place) -> Iterator[Finding]:
    seqs: Seqs = [(301, 301), (77, 1100), (2, 19), (1000, 1729)]
    yield from _grid(place, place.pick(seqs, [(19, 19), (3, 40)]), "prefill")
    long: Seqs = place.pick([(130, 16_384 + 130)], [(5, 133)])
    shape = shape_of(place.pick((32, 8), (2, 1)), place.pick(128, 64), place.device, place.half)
    step = PagedStep(place, shape, long, seed=5)
    yield Finding("prefill on 16k", relative(step.run(), step.exact()), LIMITS[place.half])


def decode(place: Place) -> Iterator[Finding]:
    seqs: Seqs = [(1, 2500), (1, 777), (1, 129), (1, 64), (1, 17), (1, 1)]
    yield from _grid(place, place.pick(seqs, [(1, 70), (1, 16), (1, 1)]), "decode")
    cases: list[tuple[str, tuple[int, int], Seqs]] = [
        ("16k, one", (32, 8), [(1, 16_385)]),
        ("16k among short", (32, 8), [(1, 16_384), *[(1, 100)] * 40]),
        ("batch 256", (32, 8), [(1, n) for n in range(1200, 176, -4)]),
        ("group 7", (28, 4), [(1, 4095), (1, 33)]),
        ("group 16", (16, 1), [(1, 4097)]),
    ]
    if place.tiny:
        cases = [("split", (2, 1), [(1, 300), (1, 20)]), ("group 7", (7, 1), [(1, 33)])]
    for seed, (case, heads, own) in enumerate(cases):
        shape = shape_of(heads, place.pick(128, 64), place.device, place.half)
        step = PagedStep(place, shape, own, seed=1000 + seed)
        yield Finding(case, relative(step.run(), step.exact()), LIMITS[place.half])


def windows(place: Place) -> Iterator[Finding]:
    """Tokens outside the window lie in blocks that must not be read."""
    seqs: Seqs = [(1, 9000), (1, 4097), (1, 12), (600, 5000), (300, 300)]
    seqs = place.pick(seqs, [(1, 90), (1, 12), (20, 70)])
    for window in place.pick((1, 33, 1000, 4096), (1, 33)):
        for cache in (None, FP8):
            shape = shape_of((4, 2), place.pick(128, 64), place.device, place.half, cache)
            step = PagedStep(place, shape, seqs, window=window, seed=window)
            case = f"window {window} {_name(cache or place.half)}"
            yield Finding(case, relative(step.run(), step.exact()), LIMITS[place.half])


def verify(place: Place) -> Iterator[Finding]:
    """Several proposed tokens of a sequence go through the decode kernel."""
    for tokens in place.pick((2, 5, 8), (3,)):
        lengths = place.pick((3000, 700, 41), (60, 20))
        shape = shape_of(place.pick((32, 8), (4, 2)), place.pick(128, 64), place.device, place.half)
        step = PagedStep(place, shape, [(tokens, n) for n in lengths], seed=tokens)
        meta = to_device(step.metadata, shape)
        meta = DeviceMetadata(
            query_start=meta.query_start,
            seq_lens=meta.seq_lens,
            block_tables=meta.block_tables,
            slots=meta.slots,
            num_single=len(lengths),
            max_query_len=tokens,
            max_seq_len=meta.max_seq_len,
            max_single_query_len=tokens,
        )
        error = relative(step.run(meta), step.exact())
        yield Finding(f"{tokens} proposed", error, LIMITS[place.half])


def mixed(place: Place) -> Iterator[Finding]:
    """Random steps of decodes and chunks together."""
    for seed in range(place.pick(12, 2)):
        draw = np.random.default_rng(seed)
        longest = place.pick(3000, 60)
        singles = sorted(draw.integers(1, longest, draw.integers(0, place.pick(40, 3))))[::-1]
        seqs = [(1, int(n)) for n in singles]
        for _ in range(int(draw.integers(1, place.pick(5, 3)))):
            new = int(draw.integers(2, longest // 3))
            seqs.append((new, new + int(draw.integers(0, longest))))
        heads = place.pick([(32, 8), (28, 4), (9, 3), (8, 8)], [(2, 2), (3, 1)])
        window = [None, place.pick(500, 24)][seed % 2]
        shape = shape_of(heads[seed % len(heads)], 64, place.device, place.half)
        step = PagedStep(place, shape, seqs, window=window, seed=seed)
        case = f"step {seed} of {len(seqs)} sequences"
        yield Finding(case, relative(step.run(), step.exact()), LIMITS[place.half])


def far_blocks(place: Place) -> Iterator[Finding]:
    """A cache whose offsets do not fit in 32 bits."""
    heads, head_dim = place.pick((32, 8), (4, 2)), place.pick(128, 64)
    per_block = heads[1] * BLOCK_SIZE * head_dim
    beyond = place.pick((1 << 31) // per_block + 3, 3)
    shape = shape_of(heads, head_dim, place.device, place.half)
    seqs: Seqs = place.pick([(1, 1500), (200, 700)], [(1, 30), (9, 20)])
    step = PagedStep(place, shape, seqs, seed=3, first_block=beyond)
    error = relative(step.run(), step.exact())
    yield Finding(f"from block {beyond}", error, LIMITS[place.half])


def deterministic(place: Place) -> Iterator[Finding]:
    """A prompt's bits, computed at once, in chunks, token by token at its end, and beside others.

    In the interpreter products are the host's, whose sums depend on a row's place: there the same
    is asked within rounding."""
    lengths = place.pick((1300, 600), (70, 40))
    limit = 1e-3 if place.tiny else 0.0
    for cache in (None, FP8):
        for window in place.pick((None, 500), (24,)):
            shape = shape_of(
                place.pick((32, 8), (4, 2)), 64, place.device, place.half, cache, deterministic=True
            )
            step = PagedStep(place, shape, [(n, n) for n in lengths], seed=9)
            step.window = window
            whole = step.run()
            mode = f"{_name(cache or place.half)} window {window}"
            if place.tiny:
                yield Finding(mode, relative(whole, step.exact()), LIMITS[place.half])
            for case, batches in _cuts(step).items():
                wrong = 0.0
                for batch, rows in batches:
                    found = step.run(to_device(batch, shape), rows)
                    wanted = whole[rows]
                    wrong += relative(found, wanted.double()) if limit else differing(found, wanted)
                yield Finding(f"{mode} {case}", wrong, limit)


Cut = tuple[AttentionMetadata, torch.Tensor]


def _cuts(step: PagedStep) -> dict[str, list[Cut]]:
    """Other ways to compute the two sequences of `step`, which are all new."""
    first, second = (total for _, total in step.seqs)
    edges = [0, 5, first // 3, first // 2 + 1, first]
    return {
        "in chunks": [_batch(step, [(0, a, b)]) for a, b in pairwise(edges)],
        "chunks beside a chunk": [
            _batch(step, [(0, 3, first), (1, second // 2, second)]),
            _batch(step, [(1, 0, second), (0, first // 2, first)]),
        ],
        "last tokens alone": [_batch(step, [(0, n - 1, n)]) for n in (1, 65 % first, first)],
        "last tokens together": [_batch(step, [(0, first - 1, first), (1, second - 1, second)])],
        "a token beside a chunk": [_batch(step, [(1, second - 1, second), (0, 7, first)])],
    }


def _batch(step: PagedStep, parts: Sequence[tuple[int, int, int]]) -> Cut:
    """(sequence, first token, end) of each part, single tokens first; and the parts' rows."""
    starts = np.concatenate([[0], np.cumsum(step.metadata.query_lens)])
    rows = np.concatenate([starts[seq] + np.arange(a, b) for seq, a, b in parts])
    lens = np.array([b - a for _, a, b in parts])
    ends = np.array([b for _, _, b in parts])
    tables = step.metadata.block_tables[[seq for seq, _, _ in parts]]
    batch = AttentionMetadata(lens, ends, tables, int((lens == 1).sum()))
    return batch, torch.from_numpy(rows).to(step.shape.device)


CHECKS = {
    "attention: prefill": prefill,
    "attention: decode": decode,
    "attention: windows": windows,
    "attention: proposed tokens": verify,
    "attention: mixed steps": mixed,
    "attention: a cache beyond 2**31": far_blocks,
    "attention: deterministic": deterministic,
}
