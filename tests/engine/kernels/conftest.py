"""Chooses where the kernels' tests run: on the GPU if there is one, else in Triton's interpreter,
which `tests/conftest.py` turns on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bench.gpu.findings import poisoned as poisoned_memory

NATIVE = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"


@pytest.fixture(autouse=True, scope="session")
def triton() -> None:
    pytest.importorskip("triton")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return where the kernels run in this process."""
    return torch.device("cuda" if NATIVE else "cpu")


@pytest.fixture(scope="module")
def poisoned() -> Iterator[None]:
    """Memory that a wrapper takes for its results, by whichever of torch's makers, begins as what
    is not a number, or is beyond any index: what a kernel leaves unwritten shows."""
    with poisoned_memory():
        yield


@pytest.fixture
def products_without_place(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies with the host's BLAS, which sums a row in an order that depends on
    where in the tile it stands. A matrix unit does not; in double precision it does not show."""
    if device.type == "cpu":
        monkeypatch.setattr(np, "matmul", _exact_matmul)


def _exact_matmul(
    a: NDArray[np.float32], b: NDArray[np.float32], dtype: np.dtype[np.float32]
) -> NDArray[np.float32]:
    return (a.astype(np.float64) @ b.astype(np.float64)).astype(dtype)
