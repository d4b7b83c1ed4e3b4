"""Chooses where the kernels' tests run: on the GPU if there is one, else in Triton's interpreter.

The interpreter must be chosen before triton is first imported and then holds for the whole process,
so without a GPU every file of this folder is one test here, which runs the file in a child pytest:
unless it is on from the start, as `make test` has it, and who wants to run a single test:
`TRITON_INTERPRET=1 python -m pytest tests/engine/kernels/FILE::TEST`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bench.gpu.findings import poisoned as poisoned_memory

ROOT = Path(__file__).resolve().parents[3]
COMPILED = {"test_aot.py"}
"""Files that start their own children."""
CHILD_TIMEOUT_S = 280.0
WITHOUT = ("-p", "no:cacheprovider", "-p", "no:schemathesis")
"""Plugins that nothing there asks for; the second is a second of imports in every child."""
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
NATIVE = torch.cuda.is_available() and not INTERPRETED


class InterpretedFile(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        found = InterpretedTests.from_parent(self, name="in_the_interpreter")
        found.add_marker("slow")
        yield found


class InterpretedTests(pytest.Item):
    """The tests of one file, run by a child that has the interpreter on."""

    def runtest(self) -> None:
        if not HAS_TRITON:
            pytest.skip("triton is not installed")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *WITHOUT, str(self.path)],
            cwd=ROOT,
            env=os.environ | {"TRITON_INTERPRET": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=CHILD_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            pytest.fail(done.stdout[-20_000:], pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"{self.path.name} in the interpreter"


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> InterpretedFile | None:
    if INTERPRETED or NATIVE or module_path.name in COMPILED:
        return None
    return InterpretedFile.from_parent(parent, path=module_path)


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
