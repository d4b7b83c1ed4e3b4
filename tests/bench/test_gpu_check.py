"""`make gpu-check`, tried in the interpreter; and what it says of what is wrong, dies or hangs."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from bench.gpu.findings import Finding, differing, poisoned, relative, summary
from bench.gpu.supervise import supervise, supervise_at_once

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("norms", "sampling: broken rows")
WITH_REFERENCE = (
    "attention: decode",
    "engine: checkpoint in awq",
    "linear: int8",
    "engine: adapters",
    "engine: checkpoint in fp8 blocks",
    "engine: checkpoint in gptq asymmetric",
)
WITHOUT_REFERENCE = (
    "engine: run ahead",
    "engine: graphs on and off",
    "engine: deterministic",
    "engine: as on the processor",
    "engine: fp8 KV",
    "engine: n-gram speculation",
    "engine: draft speculation",
    "engine: embeddings",
    "engine: grammar",
    "engine: memory",
)


def run(module: str, *arguments: str, timeout_s: float = 290) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="quick"),
        pytest.param(WITH_REFERENCE, id="with_reference", marks=pytest.mark.nightly),
        pytest.param(WITHOUT_REFERENCE, id="without_reference", marks=pytest.mark.nightly),
    ],
)
def test_the_script_runs_in_the_interpreter(names: tuple[str, ...]) -> None:
    pytest.importorskip("triton")
    only = [argument for name in names for argument in ("--only", name)]
    done = run("bench.gpu_check", "--device", "cpu", "--tiny", "--jobs", "2", *only)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in names:
        assert f"right   {name}" in done.stdout


def test_engines_are_checked_without_transformers() -> None:
    """As on a machine that lacks it: found by a child in which it cannot be imported."""
    pytest.importorskip("triton")
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from bench.gpu.place import place; place('cpu', tiny=True)\n"
        "from bench.gpu_check import _registry\n"
        "print(*(name for name in _registry() if name.startswith('engine')), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert set(done.stdout.splitlines()) == set(WITHOUT_REFERENCE), done.stderr


def test_a_machine_without_a_gpu_is_told_so_in_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run("bench.gpu_check")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines() == [
        "torch finds no CUDA device; --device cpu --tiny tries the script itself"
    ]


def test_wrong_is_wrong() -> None:
    exact = torch.ones(4, dtype=torch.float64)
    assert relative(torch.ones(4), exact) == 0
    assert math.isnan(relative(torch.tensor([1, 1, math.nan, 1]), exact))
    assert not Finding("poison", math.nan, 1.0).right
    assert differing(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])) == 1
    found = summary([Finding("a", 0.0, 0.0), Finding("b", 2.0, 1.0), Finding("c", 0.1, 1.0)])
    assert found["worst"] == "b" and found["error"] == "1 of 3 cases wrong"
    assert "error" not in summary([Finding("a", 0.5, 1.0)])
    assert summary([]) == {"error": "no case was run"}


def test_poison_is_in_all_memory_that_is_taken() -> None:
    with poisoned():
        taken = torch.empty(3), torch.ones(1).new_empty(2), torch.empty_like(torch.ones(2))
        indices = torch.empty(2, dtype=torch.int32)
    assert all(bool(tensor.isnan().all()) for tensor in taken)
    assert int(indices.min()) > 1 << 30
    with poisoned():
        inside = torch.empty
    assert torch.empty is not inside


PIECES = """
import sys, os, time
from bench.gpu.supervise import serve

def right(): return {"value": 1}
def wrong(): raise ValueError("no\\nmore")
def dies(): os._exit(3)
def hangs(): time.sleep(60)
def lost(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def says(): print("said aside"); return {}

names = sys.argv[sys.argv.index("--child") + 1:]
serve([(name, globals()[name.split("-")[0]]) for name in names])
"""


def test_what_dies_or_hangs_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gpu_pieces.py").write_text(textwrap.dedent(PIECES))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    names = ["right-1", "wrong", "dies", "says", "hangs", "lost", "right-2"]
    results = dict(supervise(["gpu_pieces"], names, piece_timeout_s=3))
    assert list(results) == names
    assert results["right-1"]["value"] == results["right-2"]["value"] == 1
    assert results["wrong"]["error"] == "ValueError: no"
    assert results["dies"]["error"] == "the process died, exit status 3"
    assert results["hangs"]["error"] == "nothing within 3 s: ended"
    assert "CUDA error" in results["lost"]["error"]
    assert "said aside" in capfd.readouterr().err


def test_several_at_once_are_all_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu_pieces.py").write_text(textwrap.dedent(PIECES))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    names = ["right-1", "dies", "right-2", "wrong"]
    results = dict(supervise_at_once(["gpu_pieces"], names, jobs=2, piece_timeout_s=10))
    assert set(results) == set(names)
    assert results["right-2"]["value"] == 1 and "error" in results["dies"]


def test_past_the_budget_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu_pieces.py").write_text(textwrap.dedent(PIECES))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    results = dict(supervise(["gpu_pieces"], ["right-1"], piece_timeout_s=3, budget_s=0))
    assert results["right-1"]["error"].startswith("not begun")
