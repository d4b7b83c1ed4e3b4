"""A mixture of experts in five launches: route, sort, gate and up, down, sum.

route: softmax and the k largest of E logits, one program a token; ties go to the lower id.
sort: assignments i = t * k + j get their places, all of an expert side by side and every expert's
    first place a multiple of BLOCK_M, so that a tile of BLOCK_M places has one expert. One program
    counts and lays out; then one program for each 256 assignments puts them in. Which of an
    expert's places an assignment gets may differ from run to run; no row of a product depends on
    its place, so results do not.
experts: a grouped product. Grid: tiles of places times tiles of N, a strip of N for all tiles side
    by side. Gated, it multiplies with the gate's and the up's rows and stores silu(g) * u,
    [T * k, I]; else it scales by the routing weight and stores [T * k, K].
sum: over the k of a token, by torch; deterministic in their order, one after the other.

Deterministic, tiles are those of many rows in any batch: a row's products do not tell how many
there were, and neither does its sum.

Tiles beyond the places in use leave at once: grids follow from T, k and E alone, no size is read
back, and everything fits inside a CUDA graph. Moved are the weights of the experts in use once for
each strip (3 I K elements an expert), x and the two intermediates (T k (K + 2 I + K) elements).
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.aot import AotCase
from engine.kernels.mixture.types import Stack, WeightKind
from engine.kernels.triton_tiles import span_product
from engine.kernels.tuning import launch_config

SORT_TILE = 256
DENSE_TILE = 64
"""Inputs of one dot where the form of the weights does not say."""
DETERMINISTIC_ROWS = 64
"""The rows of an expert that a launch is made for when it must not depend on how many there are."""
BLOCK = tl.constexpr(int(WeightKind.BLOCK))
CHANNEL = tl.constexpr(int(WeightKind.CHANNEL))
GROUPED = tl.constexpr(int(WeightKind.GROUPED))


@triton.jit
def route_kernel(
    logits, weights, experts, num_experts, stride, TOP_K: tl.constexpr, NORMALISE: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    inside = expert < num_experts
    x = tl.load(logits + row * stride + expert, mask=inside, other=float("-inf")).to(tl.float32)
    exps = tl.exp(x - tl.max(x, axis=0))
    probability = exps / tl.sum(exps, axis=0)
    left = tl.where(inside, probability, -1.0)
    total = 0.0
    for j in tl.static_range(TOP_K):
        best = tl.max(left, axis=0)
        chosen = tl.min(tl.where(left == best, expert, EXPERTS), axis=0)
        chosen = tl.minimum(chosen, num_experts - 1)  # NaN equals nothing, and must go somewhere
        tl.store(weights + row * TOP_K + j, best)
        tl.store(experts + row * TOP_K + j, chosen)
        left = tl.where(expert == chosen, -1.0, left)
        total += best
    if NORMALISE:
        tl.debug_barrier()  # what one thread stored, another may read
        for j in tl.static_range(TOP_K):
            share = tl.load(weights + row * TOP_K + j)
            tl.store(weights + row * TOP_K + j, share / total)


@triton.jit
def layout_kernel(
    experts, cursors, ends, tile_experts, num_assignments, num_experts, num_tiles,
    BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """cursors [E]: each expert's first place; ends [E]: behind its last; tile_experts [num_tiles]:
    the expert of a tile of places, -1 for one that nobody uses."""
    expert = tl.arange(0, EXPERTS)
    counts = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, num_assignments, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < num_assignments
        chosen = tl.load(experts + at, mask=inside, other=0)
        counts += tl.histogram(chosen, EXPERTS, mask=inside)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    last_tiles = tl.cumsum(tiles, axis=0)
    firsts = (last_tiles - tiles) * BLOCK_M
    tl.store(cursors + expert, firsts, mask=expert < num_experts)
    tl.store(ends + expert, firsts + counts, mask=expert < num_experts)
    used = tl.sum(tiles, axis=0)
    for start in range(0, num_tiles, 16):
        tile = start + tl.arange(0, 16)
        owner = tl.sum((last_tiles[None, :] <= tile[:, None]).to(tl.int32), axis=1)
        owner = tl.where(tile < used, owner, -1)
        tl.store(tile_experts + tile, owner, mask=tile < num_tiles)


@triton.jit
def place_kernel(experts, cursors, places, num_assignments, TILE: tl.constexpr):
    """places [capacity]: the assignment in each place; unused places keep what they held."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < num_assignments
    chosen = tl.load(experts + at, mask=inside, other=0)
    place = tl.atomic_add(cursors + chosen, 1, mask=inside, sem="relaxed")
    tl.store(places + place, at, mask=inside)


@triton.jit
def expert_product(
    x_at, row_in, values, scales, zeros, expert, column, column_in, num_outputs, num_inputs,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the product of a tile of rows with `column`s of one expert: float32 [BLOCK_M,
    BLOCK_N]. x_at [BLOCK_M]: where rows begin. BLOCK_K: inputs of a step, for GROUPED one span.
    """
    WIDTH: tl.constexpr = BLOCK_K * BITS // 8 if KIND == GROUPED else BLOCK_K
    row_bytes = num_inputs * BITS // 8 if KIND == GROUPED else num_inputs
    inner = tl.arange(0, WIDTH)
    x_at = x_at[:, None] + inner[None, :]
    w_at = values + (expert * num_outputs + column[None, :]) * row_bytes + inner[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(tl.cdiv(num_inputs, BLOCK_K)):
        if KIND == GROUPED:
            num_groups = num_inputs // COLUMNS
            group = (expert * num_groups + step // (COLUMNS // BLOCK_K)) * num_outputs + column
            total += span_product(
                x_at, w_at, scales + group, zeros + group, row_in, column_in, BITS, WIDTH
            )
        else:
            left = num_inputs - step * BLOCK_K
            a = tl.load(x_at, mask=row_in[:, None] & (inner[None, :] < left), other=0.0)
            b = tl.load(w_at, mask=column_in[None, :] & (inner[:, None] < left), other=0.0)
            if KIND == BLOCK:
                num_groups = tl.cdiv(num_inputs, COLUMNS)
                strip = expert * tl.cdiv(num_outputs, ROWS) + column // ROWS
                at = strip * num_groups + step // (COLUMNS // BLOCK_K)
                scale = tl.load(scales + at, mask=column_in, other=0.0)
                total += tl.dot(a, b.to(a.dtype), input_precision="ieee") * scale[None, :]
            else:
                total = tl.dot(a, b.to(a.dtype), total, input_precision="ieee")
        x_at += BLOCK_K
        w_at += WIDTH
    if KIND == CHANNEL:
        at = expert * num_outputs + column
        total *= tl.load(scales + at, mask=column_in, other=0.0)[None, :]
    return total


@triton.jit
def experts_kernel(
    x, values, scales, zeros, shares, out, places, ends, tile_experts, num_tiles, num_columns,
    num_outputs, num_inputs, stride_x, GATED: tl.constexpr, TOP_K: tl.constexpr, KIND: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """num_columns: of the result; num_outputs: of the weights, twice as many when GATED. Gated, the
    row of assignment i in x is i // TOP_K, else i."""
    tile = tl.program_id(0) % num_tiles
    expert = tl.load(tile_experts + tile)
    if expert < 0:
        return
    place = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_in = place < tl.load(ends + expert)
    assignment = tl.load(places + place, mask=row_in, other=0).to(tl.int64)
    column = (tl.program_id(0) // num_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_in = column < num_columns
    expert = expert.to(tl.int64)
    if GATED:
        x_at = x + (assignment // TOP_K) * stride_x
        gate = expert_product(
            x_at, row_in, values, scales, zeros, expert, column, column_in, num_outputs, num_inputs,
            KIND, ROWS, COLUMNS, BITS, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        up = expert_product(
            x_at, row_in, values, scales, zeros, expert, column + num_columns, column_in,
            num_outputs, num_inputs, KIND, ROWS, COLUMNS, BITS, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        result = gate / (1.0 + tl.exp(-gate)) * up
    else:
        result = expert_product(
            x + assignment * stride_x, row_in, values, scales, zeros, expert, column, column_in,
            num_outputs, num_inputs, KIND, ROWS, COLUMNS, BITS, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        result *= tl.load(shares + assignment, mask=row_in, other=0.0)[:, None]
    at = assignment[:, None] * num_columns + column[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=row_in[:, None] & column_in[None, :])


def route(logits: Tensor, top_k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """See `moe.route`."""
    num_tokens, num_experts = logits.shape
    weights = logits.new_empty(num_tokens, top_k, dtype=torch.float32)
    experts = logits.new_empty(num_tokens, top_k, dtype=torch.int32)
    if num_tokens:
        route_kernel[(num_tokens,)](
            logits, weights, experts, num_experts, logits.stride(0), TOP_K=top_k,
            NORMALISE=normalise, EXPERTS=triton.next_power_of_2(num_experts), num_warps=1,
        )  # fmt: skip
    return weights, experts


def sort(experts: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places of the assignments `experts` [T, k] in tiles of `block_m`: places [capacity], ends [E]
    and tile_experts [tiles], int32; see `layout_kernel` and `place_kernel`."""
    num_assignments = experts.numel()
    used = min(num_experts, num_assignments)
    num_tiles = (num_assignments + used * (block_m - 1)) // block_m
    cursors, ends = experts.new_empty(2, num_experts)
    tile_experts = experts.new_empty(num_tiles)
    places = experts.new_empty(num_tiles * block_m)
    layout_kernel[(1,)](
        experts, cursors, ends, tile_experts, num_assignments, num_experts, num_tiles,
        BLOCK_M=block_m, EXPERTS=triton.next_power_of_2(num_experts), TILE=SORT_TILE,
    )  # fmt: skip
    place_kernel[(triton.cdiv(num_assignments, SORT_TILE),)](
        experts, cursors, places, num_assignments, TILE=SORT_TILE
    )
    return places, ends, tile_experts


def run(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Stack,
    down: Stack,
    *,
    deterministic: bool = False,
) -> Tensor:
    """x [T, K], rows contiguous; weights float32 and experts int32 [T, k] -> [T, K]"""
    num_tokens, top_k = experts.shape
    if num_tokens == 0:
        return torch.empty_like(x)
    num_experts, num_outputs = gate_up.values.shape[:2]
    assumed = DETERMINISTIC_ROWS * num_experts if deterministic else num_tokens * top_k
    shape_class = _shape_class(assumed, num_experts, gate_up.kind)
    config = launch_config("moe", shape_class, _DEFAULTS[shape_class])
    order = sort(experts, num_experts, config["BLOCK_M"])
    inner = x.new_empty(num_tokens * top_k, num_outputs // 2)
    _launch(x, gate_up, weights, inner, order, config, gated=True, top_k=top_k)
    out = x.new_empty(num_tokens * top_k, x.shape[1])
    _launch(inner, down, weights, out, order, config, gated=False, top_k=top_k)
    by_expert = out.view(num_tokens, top_k, -1)
    return _sum_in_order(by_expert) if deterministic else by_expert.sum(dim=1)


def _sum_in_order(parts: Tensor) -> Tensor:
    """[T, k, K] -> [T, K]: a reduction of torch's picks its order by the sizes."""
    total = parts[:, 0].float()
    for i in range(1, parts.shape[1]):
        total += parts[:, i]
    return total.to(parts.dtype)


def _launch(
    x: Tensor,
    stack: Stack,
    shares: Tensor,
    out: Tensor,
    order: tuple[Tensor, Tensor, Tensor],
    config: dict[str, int],
    *,
    gated: bool,
    top_k: int,
) -> None:
    places, ends, tile_experts = order
    num_tiles, num_columns = len(tile_experts), out.shape[1]
    grid = (num_tiles * triton.cdiv(num_columns, config["BLOCK_N"]),)
    experts_kernel[grid](
        x, stack.values, stack.scales, stack.zeros, shares, out, places, ends, tile_experts,
        num_tiles, num_columns, stack.values.shape[1], stack.num_inputs, x.stride(0), GATED=gated,
        TOP_K=top_k, KIND=int(stack.kind), ROWS=stack.rows, COLUMNS=stack.columns, BITS=stack.bits,
        BLOCK_K=_inner(stack), **config,
    )  # fmt: skip


def _inner(stack: Stack) -> int:
    if stack.kind is WeightKind.GROUPED:
        return stack.span
    if stack.kind is WeightKind.BLOCK:
        return min(stack.columns, 2 * DENSE_TILE)
    return DENSE_TILE


def _shape_class(num_assignments: int, num_experts: int, kind: WeightKind) -> str:
    """By how many rows an expert has if all have alike, and whether scales come within the sum."""
    rows = "m16" if num_assignments <= 16 * num_experts else "m64"
    return f"{rows}_scaled" if kind in (WeightKind.BLOCK, WeightKind.GROUPED) else rows


_DEFAULTS = {
    "m16": {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 4},
    "m64": {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3},
    "m16_scaled": {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 4},
    "m64_scaled": {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3},
}


def _aot_products() -> list[AotCase]:
    """Experts in bfloat16, int8, float8 blocks (as Qwen3's are published) and int4, with the two of
    a token that Mixtral takes and the eight that Qwen3 does."""
    kinds: dict[str, tuple[dict[str, str], dict[str, int]]] = {
        "dense": ({"values": "*bf16"}, {"KIND": 0, "BLOCK_K": 64}),
        "int8": ({"values": "*i8"}, {"KIND": 1, "BLOCK_K": 64}),
        "fp8": (
            {"values": "*fp8e4nv"},
            {"KIND": 2, "ROWS": 128, "COLUMNS": 128, "BLOCK_K": 128},
        ),
        "int4": (
            {"values": "*u8", "scales": "*fp16"},
            {"KIND": 3, "COLUMNS": 128, "BITS": 4, "BLOCK_K": 128},
        ),
    }
    pointers = {
        "x": "*bf16",
        "values": "*bf16",
        "scales": "*fp32",
        "zeros": "*i16",
        "shares": "*fp32",
        "out": "*bf16",
        "places": "*i32",
        "ends": "*i32",
        "tile_experts": "*i32",
    }
    sizes = {
        "num_tiles": "i32",
        "num_columns": "i32:16",
        "num_outputs": "i32:16",
        "num_inputs": "i32:16",
        "stride_x": "i32:16",
    }
    listed = []
    for kind, (types, form) in kinds.items():
        for shape_class, config in _DEFAULTS.items():
            if shape_class.endswith("scaled") != (kind in ("fp8", "int4")):
                continue
            for top_k, gated in itertools.product((2, 8), (True, False)):
                fixed = {"GATED": gated, "TOP_K": top_k, "ROWS": 1, "COLUMNS": 0, "BITS": 8}
                listed.append(
                    AotCase.launched(
                        f"experts_{kind}_{shape_class}_k{top_k}_{'gated' if gated else 'down'}",
                        experts_kernel,
                        pointers | types | sizes,
                        fixed | form,
                        config,
                    )
                )
    return listed


def _aot_routing() -> list[AotCase]:
    listed = []
    for num_experts, top_k in ((8, 2), (128, 8)):
        constexprs = {"TOP_K": top_k, "NORMALISE": True, "EXPERTS": num_experts}
        signature = {
            "logits": "*bf16",
            "weights": "*fp32",
            "experts": "*i32",
            "num_experts": "i32",
            "stride": "i32",
        }
        name = f"route_{num_experts}"
        listed.append(AotCase(name, route_kernel, signature, constexprs, num_warps=1))
        constexprs = {"BLOCK_M": 64, "EXPERTS": num_experts, "TILE": SORT_TILE}
        signature = {
            "experts": "*i32",
            "cursors": "*i32",
            "ends": "*i32",
            "tile_experts": "*i32",
            "num_assignments": "i32",
            "num_experts": "i32",
            "num_tiles": "i32",
        }
        listed.append(AotCase(f"layout_{num_experts}", layout_kernel, signature, constexprs))
    signature = {
        "experts": "*i32",
        "cursors": "*i32",
        "places": "*i32",
        "num_assignments": "i32",
    }
    return [*listed, AotCase("place", place_kernel, signature, {"TILE": SORT_TILE})]


AOT = [*_aot_products(), *_aot_routing()]
