"""A start: what a step needs is left free, and the log says where time and memory went."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import BLOCK_SIZE, EngineConfig
from engine.core import engine_core as core_module
from engine.core.engine_core import EngineCore
from engine.errors import ConfigError
from engine.kernels.attention.types import AttentionShape
from engine.runner.memory import sizing
from engine.transport.startup import Startup
from tests.budget import NIGHT

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "dtype": "float32",
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough for random weights."""
    folder = tmp_path_factory.mktemp("shape")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def start(folder: Path, **changes: Any) -> EngineCore:
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu"}
    return EngineCore(EngineConfig(model=folder, **(options | changes)))


class Ticks:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_table_adds_up() -> None:
    clock = Ticks()
    startup = Startup(clock)
    with startup.phase("import"):
        clock.now_s += 1.5
    clock.now_s += 0.25
    startup.spent("weights", 2.0)
    startup.spent("weights", 1.0, "0.25 GiB from disk")
    clock.now_s += 3.0
    startup.took("KV cache", 3 << 29, "16 blocks")
    startup.spent("KV cache", 0.0)
    lines = [" ".join(line.split()) for line in startup.table().splitlines()]
    assert lines == [
        "import 1.50 s",
        "weights 3.00 s 0.25 GiB from disk",
        "KV cache 0.00 s",
        "other 0.25 s",
        "total 4.75 s",
        "KV cache 1.500 GiB 16 blocks",
    ]


def started_table(folder: Path) -> tuple[str, int, int]:
    """The table of a start, its bytes of KV cache and its free blocks; for a process of its own."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("engine.core.engine_core").addHandler(handler)
    logging.getLogger("engine.core.engine_core").setLevel(logging.INFO)
    core = start(folder, num_blocks=300, num_threads=1)
    core.check_integrity()
    status = core.status()
    assert status.num_steps == 0
    table = next(line for line in lines if "where time" in line)
    return table, 300 * BLOCK_SIZE * core.resolved.kv_bytes_per_token, status.num_free_blocks


def test_a_start_says_where_time_and_memory_went(folder: Path) -> None:
    """In a fresh process: one that has freed memory before takes its weights from there."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        table, kv_bytes, num_free_blocks = fresh.submit(started_table, folder).result(timeout=120)
    seconds = dict(re.findall(r"^  (\S.*?) +(-?\d+\.\d\d) s", table, re.MULTILINE))
    assert {"config", "weights: random", "KV cache", "warm-up", "other", "total"} <= set(seconds)
    parts = sum(float(value) for name, value in seconds.items() if name != "total")
    assert parts == pytest.approx(float(seconds["total"]), abs=0.05)
    gib = dict(re.findall(r"^  (\S.*?) +(-?\d+\.\d{3}) GiB", table, re.MULTILINE))
    assert {"weights", "KV cache", "a step, at most", "free beside them"} <= set(gib)
    # 39 M parameters of float32; on a CPU the head's product is packed, the embedding is not.
    assert 0.12 <= float(gib["weights"]) <= 0.25
    assert float(gib["KV cache"]) == pytest.approx(kv_bytes / (1 << 30), abs=0.0006)
    assert num_free_blocks == 300


def test_the_kv_cache_leaves_what_a_step_needs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where all that is free is asked for."""
    step_bytes = 0
    compute = core_module.largest_step_bytes

    def note(*args: Any, **options: Any) -> int:
        nonlocal step_bytes
        step_bytes = compute(*args, **options)
        return step_bytes

    free = 600 * MIB
    monkeypatch.setattr(core_module, "largest_step_bytes", note)
    monkeypatch.setattr(sizing, "free_bytes", lambda device: free)
    resolved = start(folder, kv_cache_fraction=1.0).resolved
    block = BLOCK_SIZE * resolved.kv_bytes_per_token
    assert step_bytes > 50 * MIB
    assert 0 <= free - step_bytes - resolved.num_blocks * block < block
    free = step_bytes + block - 1
    with pytest.raises(ConfigError, match=f"no KV block fits.* a step takes up to {step_bytes}"):
        start(folder, kv_cache_fraction=1.0)


def test_more_than_is_free_is_refused_on_a_gpu_and_told_on_a_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sizing, "free_bytes", lambda device: 100 * MIB)
    start(folder, num_blocks=64)
    assert "a step of up to" in caplog.text and "do not fit in the 0.10 GiB" in caplog.text
    shape = AttentionShape(8, 4, 64, BLOCK_SIZE, torch.float16, torch.device("cuda"))
    asked = EngineConfig(model=folder, kv_cache_bytes=80 * MIB)
    with pytest.raises(ConfigError, match=r"do not fit in the 0\.10 GiB that are free on cuda"):
        sizing.num_blocks_of(asked, shape, 4096, 30 * MIB, Startup())
    fits = sizing.num_blocks_of(asked, shape, 4096, 20 * MIB, Startup())
    assert fits == 80 * MIB // (4096 * BLOCK_SIZE)


MEASURE = """
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
import torch
import engine.core.engine_core
from engine.config import EngineConfig
from engine.protocol import EngineRequest, SamplingParams

def memory(field):
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status[field].split()[0]) * 1024

num_prompts, length = (int(text) for text in sys.argv[2:])
bound = 0
compute = engine.core.engine_core.largest_step_bytes
def note(*args, **options):
    global bound
    bound = compute(*args, **options)
    return bound
engine.core.engine_core.largest_step_bytes = note
core = engine.core.engine_core.EngineCore(EngineConfig(
    model=Path(sys.argv[1]), load_format="dummy", device="cpu", num_blocks=256, num_threads=1,
    max_num_batched_tokens=num_prompts * length, max_num_seqs=num_prompts))
sampling = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, logprobs=5, seed=3)
cache_bytes = num_prompts * length * core.resolved.kv_bytes_per_token
for number in range(num_prompts):
    prompt = [number + 1] * length
    core.add(EngineRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
outputs = core.step()
assert len(outputs) == num_prompts, "one step for all of it"
print(memory("VmHWM") - before - cache_bytes, bound)
"""


@pytest.mark.parametrize(("num_prompts", "length"), [pytest.param(1, 2000, marks=NIGHT), (64, 32)])
def test_a_step_stays_below_its_bound(num_prompts: int, length: int, folder: Path) -> None:
    """One long prompt, and as many sequences as may sample at once."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder), str(num_prompts), str(length)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    peak, bound = (int(text) for text in done.stdout.split())
    assert 10 * MIB < peak < bound < 8 * peak
