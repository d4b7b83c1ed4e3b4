"""Adapters' products over any mixture of rows, against float64; and a whole engine that runs
quantised linear layers, a mixture of experts and adapters through the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels.backend import uses_triton
from engine.kernels.mixture.lora import add_lora, stack_adapters
from engine.kernels.mixture.types import NOBODY, LoraRows
from tests.budget import examples

pytest.importorskip("triton")  # imported, the interpreter is seen to be on

pytestmark = pytest.mark.usefixtures("poisoned")

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3}
Pairs = list[list[tuple[Tensor, Tensor] | None]]


def adapters(sizes: Sequence[int], num_inputs: int, ranks: Sequence[int]) -> Pairs:
    """The last adapter leaves the first projection alone."""
    made: Pairs = [
        [
            (torch.randn(rank, num_inputs) / num_inputs**0.5, torch.randn(size, rank) / rank**0.5)
            for size in sizes
        ]
        for rank in ranks
    ]
    made[-1][0] = None
    return made


def exact(y: Tensor, x: Tensor, pairs: Pairs, slots: list[tuple[int, int]], sizes: Any) -> Tensor:
    out = y.double().clone()
    row = 0
    for slot, count in slots:
        for t in range(row, row + count):
            start = 0
            for part, size in enumerate(sizes):
                pair = None if slot == NOBODY else pairs[slot][part]
                if pair is not None:
                    a, b = (matrix.to(x.dtype).double() for matrix in pair)
                    out[t, start : start + size] += b @ (a @ x[t].double())
                start += size
        row += count
    return out


@pytest.mark.parametrize("dtype", LIMITS, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(
    ("sizes", "num_inputs", "ranks"),
    [((40,), 72, (4, 16)), ((48, 24, 24), 64, (8, 33, 1)), ((130, 130), 1100, (16, 5))],
)
@pytest.mark.parametrize("slots", [[(0, 1)], [(NOBODY, 3), (1, 20), (0, 1), (1, 2)], [(NOBODY, 4)]])
def test_mixed_rows(
    sizes: tuple[int, ...],
    num_inputs: int,
    ranks: tuple[int, ...],
    slots: list[tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(num_inputs)
    assert uses_triton(device)
    pairs = adapters(sizes, num_inputs, ranks)
    stack = stack_adapters(pairs, sizes, torch.empty(0, dtype=dtype, device=device))
    num_rows = sum(count for _, count in slots)
    x = torch.randn(num_rows, num_inputs + 8, device=device).to(dtype)[:, :num_inputs]
    y = torch.randn(num_rows, sum(sizes), device=device).to(dtype)
    expected = exact(y, x, pairs, slots, sizes)
    rows = LoraRows(device, len(ranks))
    rows.assign(slots)
    before = y.clone()
    add_lora(y, x, stack, rows)
    assert float((y.double() - expected).norm() / expected.norm()) < LIMITS[dtype]
    row = 0
    for slot, count in slots:
        if slot == NOBODY:
            assert torch.equal(y[row : row + count], before[row : row + count])
        row += count


@given(
    slots=st.lists(st.tuples(st.integers(NOBODY, 2), st.integers(1, 40)), min_size=1, max_size=6)
)
@settings(max_examples=examples(12), deadline=None)
def test_any_composition_of_a_batch(slots: list[tuple[int, int]]) -> None:
    """The rows of one object after those of another: what an earlier step left is not seen."""
    torch.manual_seed(1)
    sizes, pairs = (24, 16), adapters((24, 16), 32, (4, 8, 2))
    stack = stack_adapters(pairs, sizes, torch.empty(0))
    rows = LoraRows(torch.device("cpu"), 3)
    rows.assign([(0, 30), (2, 50)])
    rows.assign(slots)
    num_rows = sum(count for _, count in slots)
    x, y = torch.randn(num_rows, 32), torch.zeros(num_rows, 40)
    expected = exact(y, x, pairs, slots, sizes)
    add_lora(y, x, stack, rows)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_tensors_keep_their_place_while_they_suffice() -> None:
    rows = LoraRows(torch.device("cpu"), 2)
    rows.reserve(100)
    places = rows.rows.data_ptr(), rows.tile_slots.data_ptr()
    for slots in ([(0, 100)], [(1, 1)], [(NOBODY, 50), (1, 50)]):
        rows.assign(slots)
        assert places == (rows.rows.data_ptr(), rows.tile_slots.data_ptr())


@pytest.mark.nightly
def test_the_whole_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same engine with the kernels off."""
    from tests.engine import checkpoints
    from tests.engine.core.test_parity import run, text
    from tests.engine.weights.test_adapters import ATTENTION, ask, start, write_adapter

    folder = checkpoints.save("qwen3_moe", tmp_path / "base")
    model = checkpoints.build("qwen3_moe")
    path = write_adapter(tmp_path / "a", model, ATTENTION, rank=4, alpha=8, seed=1)
    requests = [ask("0", [5, 17, 101, 44], "a", 2), ask("1", [5, 17, 101], "", 2)]
    said = []
    for interpret in "10":
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        outputs = run(start(folder, {"a": path}, num_blocks=16, quantization="int8"), requests)
        said.append([text(outputs[request_id]) for request_id in ("0", "1")])
    assert said[0] == said[1]
