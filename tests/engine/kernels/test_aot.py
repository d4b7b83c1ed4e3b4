"""Every served kernel compiles for Hopper and Ampere without a GPU, and keeps its registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.engine import kernel_resources
from bench.engine.kernel_resources import (
    ALLOWED_SPILLS,
    CAPABILITIES,
    RECORD,
    ROOT,
    recorded,
    source_digest,
    spilled,
)
from engine.kernels import aot
from tests.budget import NIGHTLY

MODULES = aot.modules()


def compiled(module: str) -> dict[str, dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.engine.kernel_resources", "--module", module],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-10_000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ptxas comes with triton on Linux only")
@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile_and_do_not_spill(module: str) -> None:
    """By day only what has changed since it was recorded is compiled; by night all is."""
    pytest.importorskip("triton")
    found = (None if NIGHTLY else recorded(module)) or compiled(module)
    assert set(found) == set(map(str, CAPABILITIES))
    for capability in CAPABILITIES:
        kernels = found[str(capability)]
        # All of a module's kernels may need float8, which Ampere's instructions do not know.
        assert kernels or capability < aot.FP8_CAPABILITY, "a module lists what is served in AOT"
        assert spilled(kernels, capability) == []


@pytest.mark.parametrize(
    ("text", "is_another"),
    [("x = 1", False), ("x = 2", True), ("# why\nx = 1", False), ('"""Text."""\nx = 1', False)],
)
def test_a_record_is_of_the_code_and_not_of_its_words(
    text: str, is_another: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = tmp_path / "before.py"
    before.write_text("x = 1")
    after = tmp_path / "after.py"
    after.write_text(text)
    digests = []
    for each in (before, after):
        monkeypatch.setattr(kernel_resources, "path_of", lambda name, each=each: each)
        digests.append(source_digest("engine.kernels.changed"))
    assert (digests[0] != digests[1]) is is_another


def test_the_record_has_the_cases_that_are_served() -> None:
    """Nothing is compiled: names alone, of `python -m bench.engine.kernel_resources`'s last run."""
    pytest.importorskip("triton")
    recorded = json.loads(RECORD.read_text())["kernels"]
    served = [case for module in MODULES for case in aot.cases(module)]
    names = [case.name for case in served]
    assert len(set(names)) == len(names), "two cases of a name would be recorded as one"
    for capability in CAPABILITIES:
        wanted = {case.name for case in served if case.runs_on(capability)}
        assert set(recorded[f"sm_{capability}"]) == wanted


def test_spills_are_named() -> None:
    assert all(reason for reason in ALLOWED_SPILLS.values())
