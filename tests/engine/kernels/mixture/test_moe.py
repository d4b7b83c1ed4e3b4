"""Routing, sorting and the grouped product of a mixture of experts against plain float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels.backend import uses_triton
from engine.kernels.linear.weights import (
    DenseWeight,
    Fp8Weight,
    GroupedWeight,
    LinearWeight,
    dequantise,
    quantise_fp8,
    quantise_int8,
)
from engine.kernels.mixture import moe
from engine.kernels.mixture.types import WeightKind
from tests.budget import examples

pytest.importorskip("triton")  # imported, the interpreter is seen to be on

pytestmark = pytest.mark.usefixtures("poisoned")

LIMITS = {torch.float32: 1e-5, torch.float16: 3e-3}
HIDDEN, INTERMEDIATE, EXPERTS = 64, 96, 5


def weight(form: str, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> LinearWeight:
    dense = torch.randn(num_outputs, num_inputs) / num_inputs**0.5
    if form == "dense":
        return DenseWeight(dense.to(dtype))
    if form == "int8":
        return replace(quantise_int8(dense), dtype=dtype)
    if form == "fp8 channel":
        return replace(quantise_fp8(dense), dtype=dtype)
    if form == "fp8 block":
        scale = torch.rand(-(-num_outputs // 32), -(-num_inputs // 32)) / 20
        return Fp8Weight((dense * 50).to(torch.float8_e4m3fn), scale, (32, 32), dtype)
    groups = num_inputs // 32
    order = torch.randperm(num_inputs) if form == "int4 ordered" else None
    return GroupedWeight(
        codes=torch.randint(0, 16, dense.shape, dtype=torch.uint8),
        scales=torch.rand(groups, num_outputs).half() / 40,
        zeros=torch.randint(1, 16, (groups, num_outputs), dtype=torch.int16),
        bits=4,
        group_size=32,
        order=order,
        dtype=dtype,
    )


def plain(
    x: Tensor,
    shares: Tensor,
    experts: Tensor,
    gate_up: list[LinearWeight],
    down: list[LinearWeight],
) -> Tensor:
    """One token and one expert after the other."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    wide = [[dequantise(w).double() for w in weights] for weights in (gate_up, down)]
    for t in range(len(x)):
        for share, e in zip(shares[t].double(), experts[t].tolist(), strict=True):
            gate, up = (wide[0][e] @ x[t].double()).chunk(2)
            out[t] += share * (wide[1][e] @ (gate * torch.sigmoid(gate) * up))
    return out


@pytest.mark.parametrize("dtype", LIMITS, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("num_tokens", [0, 1, 19, 50])
@pytest.mark.parametrize(
    "form", ["dense", "int8", "fp8 channel", "fp8 block", "int4", "int4 ordered"]
)
def test_experts(form: str, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    if form != "dense" and num_tokens == 50:
        pytest.skip("large tiles are the same for every form but the dense one")
    torch.manual_seed(num_tokens)
    gate_up = [weight(form, 2 * INTERMEDIATE, HIDDEN, dtype) for _ in range(EXPERTS)]
    down = [weight(form, HIDDEN, INTERMEDIATE, dtype) for _ in range(EXPERTS)]
    x = torch.randn(num_tokens, HIDDEN + 8).to(dtype)[:, :HIDDEN]
    experts = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(num_tokens)] or [experts0()])
    experts = experts[:num_tokens].int()
    experts[experts == 3] = 4  # nobody asks for the fourth, some ask twice for the fifth
    shares = torch.rand(num_tokens, 2)
    assert uses_triton(device)
    kind = moe.stack(gate_up).kind
    assert (kind is WeightKind.DENSE) == (form in ("dense", "int4 ordered"))
    found = moe.pack_experts(gate_up, down)(x, shares, experts)
    exact = plain(x, shares, experts, gate_up, down)
    assert found.shape == x.shape and found.dtype == dtype
    if num_tokens:
        assert float((found.double() - exact).norm() / exact.norm()) < LIMITS[dtype]
    if num_tokens and "fp8" not in form:  # whose products quantise the tokens, too
        sorted_way = moe._pack_sorted(gate_up, down)(x, shares, experts)
        assert float((sorted_way - exact).norm() / exact.norm()) < LIMITS[dtype]


def experts0() -> Tensor:
    return torch.zeros(2, dtype=torch.long)


@pytest.mark.parametrize(("num_experts", "top_k"), [(5, 2), (8, 1), (60, 8)])
@pytest.mark.parametrize("normalise", [False, True])
def test_routing(num_experts: int, top_k: int, normalise: bool, device: torch.device) -> None:
    torch.manual_seed(num_experts)
    logits = torch.randn(9, num_experts, device=device) * 3
    shares, experts = moe.route(logits, top_k, normalise=normalise)
    expected, ids = moe.route_reference(logits.double(), top_k, normalise=normalise)
    assert torch.equal(experts, ids)
    torch.testing.assert_close(shares, expected.float(), rtol=1e-5, atol=1e-7)


def test_a_tie_goes_to_the_lower_expert(device: torch.device) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0]], device=device)
    assert moe.route(logits, 2, normalise=True)[1].tolist() == [[1, 2]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, in the interpreter
def test_a_token_that_is_no_number_spoils_only_itself(device: torch.device) -> None:
    torch.manual_seed(4)
    gate_up = [weight("dense", 2 * INTERMEDIATE, HIDDEN, torch.float32) for _ in range(EXPERTS)]
    down = [weight("dense", HIDDEN, INTERMEDIATE, torch.float32) for _ in range(EXPERTS)]
    run = moe.pack_experts(gate_up, down)
    x, logits = torch.randn(6, HIDDEN), torch.randn(6, EXPERTS)
    whole = run(x, *moe.route(logits, 2, normalise=True))
    x[2], logits[2] = torch.nan, torch.nan
    shares, experts = moe.route(logits, 2, normalise=True)
    assert bool(((experts >= 0) & (experts < EXPERTS)).all())
    found = run(x, shares, experts)
    assert bool(found[2].isnan().all())
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], whole[others])


@given(
    chosen=st.lists(st.integers(0, 6), min_size=1, max_size=40),
    block_m=st.sampled_from([16, 32]),
)
@settings(max_examples=examples(25), deadline=None)
def test_every_assignment_has_a_place_in_a_tile_of_its_expert(
    chosen: list[int], block_m: int
) -> None:
    from engine.kernels.mixture import moe_triton

    experts = torch.tensor([chosen], dtype=torch.int32)
    places, ends, tile_experts = moe_triton.sort(experts, 7, block_m)
    seen = []
    for tile, expert in enumerate(tile_experts.tolist()):
        if expert < 0:
            continue
        for place in range(tile * block_m, min((tile + 1) * block_m, int(ends[expert]))):
            assignment = int(places[place])
            assert chosen[assignment] == expert
            seen.append(assignment)
    assert sorted(seen) == list(range(len(chosen)))
