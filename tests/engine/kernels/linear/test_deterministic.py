"""Products that are launched alike for any number of tokens, against float64 and against a token
alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from engine.kernels.backend import uses_triton
from engine.kernels.linear import deterministic_triton as deterministic_linear_triton
from engine.kernels.linear import fp8_triton as fp8_linear_triton
from engine.kernels.linear import int4_triton as int4_linear_triton
from engine.kernels.linear import int8_triton as int8_linear_triton
from engine.kernels.linear.dispatch import pack_linear
from engine.kernels.linear.weights import (
    Fp8Weight,
    GroupedWeight,
    LinearWeight,
    quantise_fp8,
    quantise_int8,
)
from engine.kernels.mixture import moe, moe_triton
from engine.kernels.tuning import launch_config

pytestmark = pytest.mark.usefixtures("poisoned", "products_without_place")

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3}
NUM_INPUTS = 160


@pytest.fixture(autouse=True)
def on_the_device(device: torch.device) -> Iterator[None]:
    with device:
        yield


def weight(form: str, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> LinearWeight:
    dense = torch.randn(num_outputs, num_inputs).to(dtype) / num_inputs**0.5
    match form:
        case "int8":
            return quantise_int8(dense)
        case "fp8":
            return quantise_fp8(dense)
        case "fp8 block":
            values = (dense.float() * 100).to(torch.float8_e4m3fn)
            scale = torch.rand(-(-num_outputs // 32), -(-num_inputs // 32)) / 50
            return Fp8Weight(values, scale, (32, 32), dtype)
    groups = num_inputs // 32
    return GroupedWeight(
        torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8),
        (torch.rand(groups, num_outputs) / 50).to(dtype),
        torch.randint(0, 16, (groups, num_outputs), dtype=torch.int16),
        4,
        32,
        None,
        dtype,
    )


def check_rows(operation: Callable[[slice], Tensor], num_rows: int) -> None:
    """Bits of rows at other places, in other company and other numbers, one launch each."""
    whole = operation(slice(0, num_rows))
    for start, stop in ((0, 1), (num_rows - 1, num_rows), (5, 22), (num_rows - 70, num_rows)):
        assert torch.equal(operation(slice(start, stop)), whole[start:stop])


@pytest.mark.parametrize("dtype", LIMITS, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("num_tokens", [0, 1, 67])
@pytest.mark.parametrize("num_outputs", [40, 33])
def test_dense(num_tokens: int, num_outputs: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(num_tokens)
    dense = torch.randn(num_outputs, NUM_INPUTS + 3, device=device).to(dtype)
    bias = torch.randn(num_outputs, device=device).to(dtype) if num_outputs == 33 else None
    # Rows of a wider tensor: their stride is not their length.
    wide = torch.randn(num_tokens, NUM_INPUTS + 16, device=device).to(dtype)
    x = wide[:, : NUM_INPUTS + 3]
    assert uses_triton(device)
    assert deterministic_linear_triton.multiply(x, dense, None).shape == (num_tokens, num_outputs)
    found = pack_linear(dense, bias, deterministic=True)(x)
    exact = x.double() @ dense.double().t()
    exact = exact if bias is None else exact + bias.double()
    assert found.shape == exact.shape and found.dtype == dtype
    if num_tokens:
        assert float((found.double() - exact).norm() / exact.norm()) < LIMITS[dtype]


@pytest.mark.parametrize("form", ["dense", "int8", "fp8", "fp8 block", "int4"])
def test_a_row_is_the_same_in_any_number(form: str, device: torch.device) -> None:
    torch.manual_seed(1)
    dtype = torch.float32 if form == "dense" else torch.float16
    x = torch.randn(131, NUM_INPUTS, device=device).to(dtype)
    dense = torch.randn(40, NUM_INPUTS, device=device).to(dtype)
    product = pack_linear(
        dense if form == "dense" else weight(form, 40, NUM_INPUTS, dtype), None, deterministic=True
    )
    check_rows(lambda rows: product(x[rows]), len(x))


@pytest.mark.parametrize("form", ["int8", "fp8", "int4", "experts"])
def test_launches_tell_no_number(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers above which the default takes other tiles."""
    module = {
        "int8": int8_linear_triton,
        "fp8": fp8_linear_triton,
        "int4": int4_linear_triton,
        "experts": moe_triton,
    }[form]
    asked: set[str] = set()

    def note(op: str, key: str, default: dict[str, int]) -> dict[str, int]:
        asked.add(f"{op} {key} {default}")
        return launch_config(op, key, default)

    monkeypatch.setattr(module, "launch_config", note)
    for deterministic, expected in ((True, 1), (False, 2)):
        asked.clear()
        for count in (1, 65):
            x = torch.randn(count, 64).to(torch.float16)
            if form == "experts":
                pair = [weight("int8", 64, 64, x.dtype)], [weight("int8", 64, 32, x.dtype)]
                run = moe.pack_experts(*pair, deterministic=deterministic)
                run(x, *moe.route(x[:, :1], 1, normalise=True))
            else:
                pack_linear(weight(form, 8, 64, x.dtype), None, deterministic=deterministic)(x)
        assert len(asked) == expected


@pytest.mark.parametrize("form", ["int8", pytest.param("int4", marks=pytest.mark.nightly)])
def test_experts_of_a_token_are_the_same_in_any_number(form: str, device: torch.device) -> None:
    torch.manual_seed(2)
    dtype, hidden, inner, num_experts = torch.float16, 64, 32, 3
    gate_up = [weight(form, 2 * inner, hidden, dtype) for _ in range(num_experts)]
    down = [weight(form, hidden, inner, dtype) for _ in range(num_experts)]
    run = moe.pack_experts(gate_up, down, deterministic=True)
    x, logits = torch.randn(90, hidden).to(dtype), torch.randn(90, num_experts)

    def some(rows: slice) -> Tensor:
        return run(x[rows], *moe.route(logits[rows], 2, normalise=True))

    check_rows(some, len(x))
    expected = moe._pack_sorted(gate_up, down)(x, *moe.route(logits, 2, normalise=True))
    found = some(slice(0, len(x)))
    assert float((found.float() - expected.float()).norm() / expected.float().norm()) < 4e-3
