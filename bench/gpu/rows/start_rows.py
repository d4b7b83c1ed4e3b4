"""From the command to the first token, with the weights in the page cache.

Knows no kernel.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu.ground import Ground
from bench.gpu.models import write_config
from bench.gpu.place import Place

TIMEOUT_S = 150.0


def write_checkpoint(config: dict[str, Any], folder: Path, place: Place) -> int:
    """Random weights in bfloat16 under their published names, a file a layer; their bytes."""
    from safetensors.torch import save_file

    write_config(config, folder)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    vocab, layers = config["vocab_size"], config["num_hidden_layers"]

    def matrix(outputs: int, inputs: int, seed: int) -> Tensor:
        return place.randn(outputs, inputs, seed=seed, dtype=torch.bfloat16) / inputs**0.5

    index: dict[str, str] = {}
    size = 0
    for layer in range(layers + 1):
        name = f"model.layers.{layer}"
        if layer == layers:
            tensors = {
                "model.embed_tokens.weight": matrix(vocab, hidden, 1),
                "lm_head.weight": matrix(vocab, hidden, 2),
                "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            }
        else:
            sizes = {
                "self_attn.q_proj": (queries, hidden),
                "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden),
                "self_attn.o_proj": (hidden, queries),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }
            tensors = {
                f"{name}.{part}.weight": matrix(*wide, 10 * layer + i)
                for i, (part, wide) in enumerate(sizes.items())
            }
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{name}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        file = f"model-{layer:05}.safetensors"
        save_file({key: tensor.cpu() for key, tensor in tensors.items()}, folder / file)
        index |= dict.fromkeys(tensors, file)
        size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return size


def first_token(ground: Ground) -> dict[str, Any]:
    """Twice: the first start fills the cache of compiled kernels, the second one counts."""
    ground.drop()
    place = ground.place
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_checkpoint(ground.config, folder, place)
        first, second = (_start(place, folder) for _ in range(2))
    detail = {"first": first, "second": second, "gib": size / (1 << 30)}
    return {"figure": second["total_s"], "detail": detail}


def _start(place: Place, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.gpu.first_token", str(folder), place.device.type]
    began = time.perf_counter()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"the start ended with exit status {done.returncode}")
    said: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    # To the first token, not to the end of the process.
    said["total_s"] = said.pop("monotonic_s") - began
    return said


def graph_capture(ground: Ground) -> dict[str, Any]:
    """As the engine's own start-up table has it, of a fresh engine with dummy weights."""
    from engine.core.engine_core import EngineCore
    from engine.transport.startup import Startup

    ground.drop()
    startup = Startup()
    core = EngineCore(ground.configuration("bf16"), startup=startup)
    table = startup.table()
    del core
    seconds = seconds_of(table, "graphs")
    return {"figure": seconds, "detail": {"table": table.splitlines()}}


def seconds_of(table: str, word: str) -> float:
    """Return the seconds of the first phase in a start-up table whose name holds `word`. Raises
    RuntimeError.
    """
    for line in table.splitlines():
        before, unit, _ = line.partition(" s")
        if word in line and unit:
            return float(before.split()[-1])
    raise RuntimeError(f"the start-up table has no seconds of {word}")
