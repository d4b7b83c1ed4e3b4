"""Products with weights in float8, int8 and grouped codes, against float64 of what was stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.kernels.backend import uses_triton
from engine.kernels.linear import fp8 as fp8_linear
from engine.kernels.linear import int4 as int4_linear
from engine.kernels.linear.dispatch import pack_linear
from engine.kernels.linear.weights import (
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    LinearWeight,
    dequantise,
    quantise_fp8,
    quantise_int8,
)

pytest.importorskip("triton")  # imported, the interpreter is seen to be on

pytestmark = pytest.mark.usefixtures("poisoned")

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", LIMITS, ids=lambda dtype: str(dtype)[6:])
ROWS = pytest.mark.parametrize(
    ("num_tokens", "dtype"),
    [(0, torch.float32), (1, torch.float32), (17, torch.float32), (5, torch.float16)],
    ids=lambda value: str(value).removeprefix("torch."),
)


def error(found: Tensor, exact: Tensor) -> float:
    assert found.shape == exact.shape
    return float((found.double() - exact).norm() / exact.norm()) if exact.numel() else 0.0


def exact(weight: LinearWeight, x: Tensor, bias: Tensor | None) -> Tensor:
    stored = dequantise(replace(weight, dtype=torch.float64))
    y = x.double() @ stored.t()
    return y if bias is None else y + bias.double()


def grouped(
    num_outputs: int, num_inputs: int, bits: int, group: int, dtype: torch.dtype
) -> GroupedWeight:
    groups = num_inputs // group
    return GroupedWeight(
        codes=torch.randint(0, 2**bits, (num_outputs, num_inputs), dtype=torch.uint8),
        scales=torch.rand(groups, num_outputs).half() / 2**bits,
        zeros=torch.randint(0, 2**bits + 1, (groups, num_outputs), dtype=torch.int16),
        bits=bits,
        group_size=group,
        order=None,
        dtype=dtype,
    )


@ROWS
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(40, 96), (33, 300)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_int8(
    num_tokens: int,
    num_outputs: int,
    num_inputs: int,
    with_bias: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(num_tokens + num_outputs)
    weight = quantise_int8(torch.randn(num_outputs, num_inputs, device=device))
    weight = replace(weight, dtype=dtype)
    bias = torch.randn(num_outputs, device=device).to(dtype) if with_bias else None
    # Rows of a wider tensor: their stride is not their length.
    x = torch.randn(num_tokens, num_inputs + 16, device=device).to(dtype)[:, :num_inputs]
    assert uses_triton(device)
    found = pack_linear(weight, bias)(x)
    assert found.dtype == dtype
    assert error(found, exact(weight, x, bias)) < LIMITS[dtype]


@ROWS
@pytest.mark.parametrize(
    ("bits", "group", "num_inputs"),
    [(4, 32, 96), (4, 128, 256), (4, 256, 512), (8, 64, 128)],
)
@pytest.mark.parametrize("ordered", [False, True])
def test_grouped_codes(
    num_tokens: int,
    bits: int,
    group: int,
    num_inputs: int,
    ordered: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(num_tokens + group)
    weight = grouped(40, num_inputs, bits, group, dtype)
    if ordered:
        weight = replace(weight, order=torch.randperm(num_inputs))
    weight = replace(
        weight, **{name: getattr(weight, name).to(device) for name in ("codes", "scales", "zeros")}
    )
    bias = torch.randn(40, device=device).to(dtype) if ordered else None
    x = torch.randn(num_tokens, num_inputs, device=device).to(dtype)
    assert int4_linear.keeps(weight)
    found = pack_linear(weight, bias)(x)
    assert error(found, exact(weight, x, bias)) < LIMITS[dtype]


def test_groups_too_small_for_the_kernel_are_made_dense(device: torch.device) -> None:
    weight = grouped(24, 48, 4, 16, torch.float32)
    assert not int4_linear.keeps(weight)
    x = torch.randn(3, 48)
    assert error(pack_linear(weight, None)(x), exact(weight, x, None)) < 1e-5


FP8_FORMS: dict[str, Callable[[Tensor], tuple[Tensor, tuple[int, int]]]] = {
    "block": lambda w: (torch.rand(-(-w.shape[0] // 32), -(-w.shape[1] // 64)) + 0.1, (32, 64)),
    "channel": lambda w: (torch.rand(w.shape[0], 1) + 0.1, (1, w.shape[1])),
}


@ROWS
@pytest.mark.parametrize("form", FP8_FORMS)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(40, 200), (96, 128)])
def test_fp8(
    num_tokens: int,
    num_outputs: int,
    num_inputs: int,
    form: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Against the tokens as they were quantised: the product itself adds no error to speak of."""
    torch.manual_seed(num_tokens + num_inputs)
    dense = torch.randn(num_outputs, num_inputs)
    scale, block = FP8_FORMS[form](dense)
    values = (dense * 50).to(torch.float8_e4m3fn)
    weight = Fp8Weight(values.to(device), scale.to(device), block, dtype)
    x = torch.randn(num_tokens, num_inputs, device=device).to(dtype)
    assert fp8_linear.keeps(weight)
    found = fp8_linear.pack(weight, None)(x)
    q, scales = fp8_linear.quantise_tokens_reference(x, block[1])
    tokens = q.double() * scales.double().repeat_interleave(block[1], 1)[:, :num_inputs]
    assert error(found, exact(weight, tokens, None)) < LIMITS[dtype]
    if num_tokens:
        assert error(found, exact(weight, x, None)) < 0.06, "float8 tokens keep 4 bits"


@DTYPES
@pytest.mark.parametrize("group", [32, 96, 200])
def test_tokens_in_float8(group: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(group)
    x = torch.randn(7, 200, device=device).to(dtype) * 30
    x[2] = 0
    found, scales = fp8_linear.quantise_tokens(x, group)
    expected, expected_scales = fp8_linear.quantise_tokens_reference(x, group)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    # A division that differs in its last bit may round to the neighbour.
    wrong = (found.float() - expected.float()).abs() > 0
    assert float(wrong.float().mean()) < 0.01
    assert error(found.float(), expected.double()) < 5e-3


def test_quantised_at_load_keeps_what_the_form_can_hold() -> None:
    torch.manual_seed(3)
    dense = torch.randn(48, 256)
    dense[5] = 0
    for weight, limit in ((quantise_int8(dense), 0.01), (quantise_fp8(dense), 0.03)):
        assert error(dequantise(weight), dense.double()) < limit
        assert bool((dequantise(weight)[5] == 0).all())
        assert isinstance(weight, Int8Weight | Fp8Weight)
