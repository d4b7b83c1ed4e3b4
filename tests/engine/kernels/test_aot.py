"""Every served kernel compiles for Hopper and Ampere without a GPU, and keeps its registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.kernel_resources import ALLOWED_SPILLS, CAPABILITIES, spilled
from bench.record import RESULTS
from engine.kernels import aot

ROOT = Path(__file__).resolve().parents[3]
MODULES = aot.modules()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ptxas comes with triton on Linux only")
@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile_and_do_not_spill(module: str) -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.kernel_resources", "--module", module],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-10_000:]
    found = json.loads(done.stdout)
    assert set(found) == set(map(str, CAPABILITIES))
    for capability in CAPABILITIES:
        compiled = found[str(capability)]
        # All of a module's kernels may need float8, which Ampere's instructions do not know.
        assert compiled or capability < aot.FP8_CAPABILITY, "a module lists what is served in AOT"
        assert spilled(compiled, capability) == []


def test_the_record_has_the_cases_that_are_served() -> None:
    """Nothing is compiled: names alone, of `python -m bench.kernel_resources`'s last run."""
    pytest.importorskip("triton")
    recorded = json.loads((RESULTS / "kernels-aot.json").read_text())["kernels"]
    served = [case for module in MODULES for case in aot.cases(module)]
    names = [case.name for case in served]
    assert len(set(names)) == len(names), "two cases of a name would be recorded as one"
    for capability in CAPABILITIES:
        wanted = {case.name for case in served if case.runs_on(capability)}
        assert set(recorded[f"sm_{capability}"]) == wanted


def test_spills_are_named() -> None:
    assert all(reason for reason in ALLOWED_SPILLS.values())
