"""Tensors from files: every part of every shape, in every dtype, whatever the chunks; and how much
memory a load takes at its highest."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.errors import ConfigError
from engine.kernels.cpu.backend import KEPT_BYTES
from engine.layers.parallel import Shard
from engine.weights.checkpoint import Checkpoint
from engine.weights.reading import (
    CHUNK_BYTES,
    MAX_THREADS,
    STAGING_PER_THREAD,
    Source,
    TensorReader,
)
from tests.budget import NIGHT

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
MIB = 1 << 20


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random bytes behind a few that belong to something else; small as any number's digits go."""
    path = tmp_path_factory.mktemp("numbers") / "data"
    values = torch.randn(4096, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    path.write_bytes(b"header" + values.numpy().tobytes())
    return path


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    dim=st.integers(0, 3),
    count=st.integers(1, 3),
    stored=st.sampled_from(DTYPES),
    wanted=st.sampled_from(DTYPES),
    chunk_bytes=st.integers(1, 400),
    data=st.data(),
)
def test_any_part_in_any_dtype(
    shape: list[int],
    dim: int,
    count: int,
    stored: torch.dtype,
    wanted: torch.dtype,
    chunk_bytes: int,
    data: st.DataObject,
    numbers: Path,
) -> None:
    dim %= len(shape)
    shape[dim] *= count
    index = data.draw(st.integers(0, count - 1))
    source = Source(numbers, len(b"header"), stored, tuple(shape))
    raw = bytearray(numbers.read_bytes()[len(b"header") :])
    whole = torch.frombuffer(raw, dtype=stored)[: torch.Size(shape).numel()].view(shape)
    expected = whole.narrow(dim, index * shape[dim] // count, shape[dim] // count).to(wanted)
    with TensorReader(CPU, chunk_bytes=chunk_bytes) as reader:
        found = reader.read(source, Shard(index, count, dim), dtype=wanted)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_a_file_that_is_cut_meanwhile_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(1000, 1000)}, path)
    stored = Checkpoint(tmp_path).find("x", (1000, 1000))
    with path.open("r+b") as file:
        file.truncate(1_000_000)
    source = Source(path, stored.offset, torch.float32, stored.shape)
    with (
        TensorReader(CPU, chunk_bytes=300_000) as reader,
        pytest.raises(ConfigError, match=r"model\.safetensors ended while it was read"),
    ):
        reader.read(source, dtype=torch.float32)


def test_nothing_is_held_afterwards(numbers: Path) -> None:
    before = set(threading.enumerate())
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    with TensorReader(CPU, chunk_bytes=64) as reader:
        reader.read(Source(numbers, 6, torch.float32, (256,)), dtype=torch.bfloat16)
        assert set(threading.enumerate()) - before
        assert reader.bytes_read == 1024
        assert 0 < reader.convert_share < 1
    assert set(threading.enumerate()) == before
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "dtype": "float32",
}
MEASURE = """
import sys, torch
from pathlib import Path
from engine.kernels.cpu.backend import kernel, uses_cpu_kernels
from engine.weights.loader import load_model

if uses_cpu_kernels(torch.device("cpu")):
    kernel("linear", "linear")  # the compiler's own memory is not the model's

def memory(field: str) -> int:
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status[field].split()[0]) * 1024

torch.set_num_threads(1)
Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak is what is resident now
before = memory("VmRSS")
assert memory("VmHWM") < before + (1 << 20)
model = load_model(Path(sys.argv[1]), dtype=sys.argv[2], device=torch.device("cpu"))
print(memory("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 219 MB in float32, in a file for the embeddings and one for every two layers."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    hidden, middle, vocab = 768, 2048, 8000
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        **{f"self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"},
        "mlp.gate_proj.weight": (middle, hidden),
        "mlp.up_proj.weight": (middle, hidden),
        "mlp.down_proj.weight": (hidden, middle),
    }
    files = {
        "outer": {
            "model.embed_tokens.weight": (vocab, hidden),
            "lm_head.weight": (vocab, hidden),
            "model.norm.weight": (hidden,),
        }
    }
    for number in range(6):
        names = {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
        files.setdefault(f"layers-{number // 2}", {}).update(names)
    for file, shapes in files.items():
        tensors = {name: torch.empty(shape).uniform_() for name, shape in shapes.items()}
        save_file(tensors, folder / f"{file}.safetensors")
    located = {name: f"{file}.safetensors" for file, names in files.items() for name in names}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": located}))
    return folder


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=NIGHT), "bfloat16"])
def test_a_load_takes_the_models_memory_and_little_more(dtype: str, large: Path) -> None:
    """Beyond the model: staging buffers where the dtype changes, one layer's parts while they are
    put together and packed, and what malloc is told to keep of what was freed. A second copy of
    the model would show, and so would the files' pages if they were mapped."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(large), dtype],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    item = 4 if dtype == "float32" else 2
    model = sum(file.stat().st_size for file in large.glob("*.safetensors")) // 4 * item
    layer = 2 * 2048 * 768 * item
    staging = 0 if dtype == "float32" else MAX_THREADS * STAGING_PER_THREAD * CHUNK_BYTES
    peak = int(done.stdout)
    kept = KEPT_BYTES + 24 * MIB
    assert 0.9 * model < peak < model + 6 * layer + min(staging, model // 2) + kept
