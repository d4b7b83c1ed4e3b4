"""Checkpoint folders: every form that loads gives the same model, every defect is named."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import BLOCK_SIZE
from engine.errors import ConfigError, UnsupportedModel
from engine.kernels.attention.dispatch import attention_planner
from engine.kernels.attention.types import AttentionMetadata
from engine.layers.parallel import SINGLE_RANK, ParallelGroup
from engine.models.decoder import Decoder
from engine.runner.memory.free_memory import host_free_bytes
from engine.runner.memory.kv_cache import allocate_kv_cache, attention_shape
from engine.weights.loader import load_model
from engine.weights.registry import FAMILIES, load_model_config
from tests.engine import checkpoints

CPU = torch.device("cpu")
PROMPT = [5, 17, 101, 44, 90, 3, 3, 61, 150, 8, 77, 12, 9, 198, 0, 31, 64, 65]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model, written once and only read."""
    root = tmp_path_factory.mktemp("stored")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            checkpoints.save(name, root / name)
        return root / name

    return folder


@pytest.fixture
def llama(stored: Callable[[str], Path], tmp_path: Path) -> Path:
    """A folder that the test may change."""
    return shutil.copytree(stored("llama2"), tmp_path / "llama2")


def change_json(path: Path, **changes: Any) -> None:
    """Set keys; `...` removes one."""
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def logits(model: Decoder) -> Tensor:
    """Return the logits of all tokens of PROMPT, [len(PROMPT), vocab]."""
    return logits_of(model, PROMPT)


def logits_of(model: Decoder, prompt: list[int]) -> Tensor:
    """[len(prompt), vocab]; the prompt fits in two blocks."""
    shape = attention_shape(model, BLOCK_SIZE)
    cache = allocate_kv_cache(shape, model.config.num_layers, 4)
    length = torch.tensor([len(prompt)]).numpy()
    metadata = AttentionMetadata(length, length, torch.tensor([[2, 0]]).numpy(), 0)
    windows = set(model.config.windows)
    plans = {window: attention_planner(shape)(metadata, shape, window) for window in windows}
    rows = torch.arange(len(prompt))
    with torch.inference_mode():
        return model(torch.tensor(prompt), rows, plans, cache, rows).float()


def load(folder: Path, dtype: Any = "float32", group: ParallelGroup = SINGLE_RANK) -> Decoder:
    return load_model(folder, dtype=dtype, device=CPU, group=group)


def test_sharded_and_single_files_load_alike(stored: Callable[[str], Path], tmp_path: Path) -> None:
    sharded = checkpoints.save("qwen3", tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert torch.equal(logits(load(sharded)), logits(load(stored("qwen3"))))


@pytest.mark.parametrize(
    "name",
    [
        "llama3",
        "llama2_linear_rope",
        "mistral_window",
        "qwen3_tied",
        "qwen2_yarn",
        "phi3_partly_rotated",
    ],
)
def test_the_older_form_of_config_json_means_the_same(
    name: str, stored: Callable[[str], Path], tmp_path: Path
) -> None:
    """rope_theta, rope_scaling with `type`, torch_dtype; as transformers 4 wrote them."""
    new = stored(name)
    old = shutil.copytree(new, tmp_path / "old")
    raw = json.loads((old / "config.json").read_text())
    rope = raw["rope_parameters"]
    kind = rope.pop("rope_type")
    changes = {
        "partial_rotary_factor": rope.pop("partial_rotary_factor", ...),
        "rope_parameters": ...,
        "dtype": ...,
        "layer_types": ...,
        "rope_theta": rope.pop("rope_theta"),
        "torch_dtype": raw["dtype"],
        "rope_scaling": None if kind == "default" else {"type": kind, **rope},
    }
    change_json(old / "config.json", **changes)
    assert load_model_config(old) == load_model_config(new)
    torch.testing.assert_close(
        logits(load(old)), checkpoints.logits(name, PROMPT), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.15), ("float16", 0.02)])
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_half_precision_is_close(
    name: str, dtype: Any, tolerance: float, stored: Callable[[str], Path]
) -> None:
    """Relative to the spread of the logits, which is about 4."""
    found, exact = logits(load(stored(name), dtype)), checkpoints.logits(name, PROMPT)
    assert float((found - exact).pow(2).mean().sqrt() / exact.std()) < tolerance


def test_dtype_auto(stored: Callable[[str], Path], llama: Path) -> None:
    """A small model on a CPU is float32 even if it is stored in half precision."""
    assert load(stored("llama3"), "auto").dtype == torch.float32

    def halve(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].bfloat16()

    change_tensors(llama, halve)
    change_json(llama / "config.json", dtype="bfloat16")
    assert load(llama, "auto").dtype == torch.float32
    assert load(llama, "bfloat16").dtype == torch.bfloat16


def test_a_tied_checkpoint_may_repeat_its_embedding(
    stored: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(stored("llama3"), tmp_path / "tied")
    whole = logits(load(folder))
    change_tensors(folder, lambda t: t.update({"lm_head.weight": torch.zeros(199, 64)}))
    assert torch.equal(logits(load(folder)), whole)


def test_old_rotary_buffers_are_passed_over(llama: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(llama, lambda t: t.update({name: torch.zeros(8)}))
    load(llama)


NORM = "model.layers.1.input_layernorm.weight"


def _half_a_file(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def _index(folder: Path, weight_map: Any) -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


DEFECTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "does not exist"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
    "config cut off": (
        lambda f: (f / "config.json").write_text('{"a":'),
        "config.json is not a JSON object",
    ),
    "config is a list": (
        lambda f: (f / "config.json").write_text("[]"),
        "config.json is not a JSON object",
    ),
    "field missing": (
        lambda f: change_json(f / "config.json", hidden_size=...),
        "config.json: .*hidden_size",
    ),
    "field of another type": (
        lambda f: change_json(f / "config.json", vocab_size="many"),
        r"config.json: .*vocab_size",
    ),
    "no layers": (
        lambda f: change_json(f / "config.json", num_hidden_layers=0),
        "num_hidden_layers must be positive",
    ),
    "more layers than there are": (
        lambda f: change_json(f / "config.json", num_hidden_layers=2**63),
        r"config.json: .*num_hidden_layers",
    ),
    "config nested deep": (
        lambda f: (f / "generation_config.json").write_text('{"a":' * 5000),
        "generation_config.json is not a JSON object: maximum recursion",
    ),
    "window of nothing": (
        lambda f: change_json(
            f / "config.json", architectures=["MistralForCausalLM"], sliding_window=0
        ),
        "config.json: sliding_window must be positive, not 0",
    ),
    "architectures is a word": (
        lambda f: change_json(f / "config.json", architectures="LlamaForCausalLM"),
        "config.json: architectures: Expected `array",
    ),
    "architectures is a number": (
        lambda f: change_json(f / "config.json", architectures=7),
        "config.json: architectures: Expected `array",
    ),
    "heads do not divide": (
        lambda f: change_json(f / "config.json", num_key_value_heads=3),
        "num_key_value_heads",
    ),
    "odd head": (lambda f: change_json(f / "config.json", head_dim=15), "head_dim"),
    "rope without factor": (
        lambda f: change_json(f / "config.json", rope_parameters={"rope_type": "linear"}),
        "rope parameters .linear.*factor",
    ),
    "eos out of range": (
        lambda f: change_json(f / "generation_config.json", eos_token_id=[2, 199]),
        "generation_config.json: eos_token_id: 199",
    ),
    "eos is a word": (
        lambda f: change_json(f / "generation_config.json", eos_token_id="</s>"),
        "generation_config.json: eos_token_id",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
    "weights cut off": (_half_a_file, "model.safetensors is not a safetensors file"),
    "weights are text": (
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs"),
        "model.safetensors is not a safetensors file",
    ),
    "tensor missing": (
        lambda f: change_tensors(f, lambda t: t.pop(NORM)),
        f"tensor {NORM} is missing",
    ),
    "tensor too many": (
        lambda f: change_tensors(f, lambda t: t.update({"model.extra.weight": t[NORM] + 0})),
        "1 tensors belong to no layer.*model.extra.weight",
    ),
    "tensor misshapen": (
        lambda f: change_tensors(f, lambda t: t.update({NORM: torch.ones(63)})),
        rf"tensor {NORM} has shape \[63\], config.json asks for \[64\]",
    ),
    "tensor of integers": (
        lambda f: change_tensors(f, lambda t: t.update({NORM: torch.ones(64).int()})),
        f"tensor {NORM} is I32, not a float",
    ),
    "index cut off": (lambda f: (f / "model.safetensors.index.json").write_text("{"), "index.json"),
    "index names an absent file": (
        lambda f: _index(f, {NORM: "model-2.safetensors"}),
        "model-2.safetensors is missing",
    ),
    "index names another folder": (
        lambda f: _index(f, {NORM: "../llama2/model.safetensors"}),
        "outside the folder",
    ),
    "index names an absent tensor": (
        lambda f: _index(f, {"model.layers.9.x": "model.safetensors"}),
        "tensor model.layers.9.x is missing",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_named(defect: str, llama: Path) -> None:
    spoil, message = DEFECTS[defect]
    spoil(llama)
    with pytest.raises(ConfigError, match=message) as error:
        load(llama)
    assert "\n" not in error.value.message


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    "no architecture": ({"architectures": None}, "none named"),
    "rope": ({"rope_parameters": {"rope_type": "proportional"}}, "'proportional'.*llama3"),
    "old rope": (
        {"rope_parameters": ..., "rope_scaling": {"type": "mrope", "factor": 2.0}},
        "'mrope'",
    ),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "partial rotation of transformers 5": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "quantization": ({"quantization_config": {"quant_method": "higgs"}}, "higgs"),
    "dtype": ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_what_is_not_built_is_refused_by_name(what: str, llama: Path) -> None:
    changes, message = UNSUPPORTED[what]
    change_json(llama / "config.json", **changes)
    with pytest.raises(UnsupportedModel, match=message) as error:
        load(llama)
    assert "\n" not in error.value.message
    if "architecture" in what:
        assert all(name in error.value.message for name in FAMILIES)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(5, 2, (5,)), ([7, 5, 7], 2, (7, 5)), (None, [2, 3], (2, 3)), (None, None, ())],
)
def test_eos_ids(generation: Any, config: Any, expected: tuple[int, ...], llama: Path) -> None:
    """generation_config.json where it names some, else config.json; one id or several."""
    change_json(llama / "generation_config.json", eos_token_id=generation)
    change_json(llama / "config.json", eos_token_id=config)
    assert load_model_config(llama).eos_token_ids == expected
    (llama / "generation_config.json").unlink()
    wanted = (config,) if isinstance(config, int) else tuple(config or ())
    assert load_model_config(llama).eos_token_ids == wanted


def test_windows_by_layer(stored: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(stored("qwen2_mixed_windows"), tmp_path / "qwen2")
    path, window = folder / "config.json", checkpoints.WINDOW
    assert load_model_config(folder).windows == (None, window, window)
    assert load_model_config(folder).sliding_window is None
    change_json(path, layer_types=["sliding_attention"] * 3)
    assert load_model_config(folder).sliding_window == window
    change_json(path, use_sliding_window=False)
    assert load_model_config(folder).windows == (None, None, None)
    change_json(path, use_sliding_window=True, layer_types=["chunked_attention"] * 3)
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        load_model_config(folder)
    change_json(path, layer_types=["full_attention"])
    with pytest.raises(ConfigError, match="layer_types names 1 layers"):
        load_model_config(folder)


class ThreadRank:
    """One of several ranks that run as threads and meet at a barrier."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, desk: list[Tensor]):
        self.rank, self.size, self._barrier, self._desk = rank, size, barrier, desk

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._desk[self.rank] = x
        self._barrier.wait(timeout=30)
        everything = list(self._desk)
        self._barrier.wait(timeout=30)
        return everything

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).sum(dim=0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x), dim=-1)


def ranks(size: int) -> list[ThreadRank]:
    barrier, desk = threading.Barrier(size), [torch.empty(0)] * size
    return [ThreadRank(rank, size, barrier, desk) for rank in range(size)]


def test_two_ranks_make_one_model(tmp_path: Path) -> None:
    """Column- and row-parallel layers over two ranks, each with half of the heads and the cache."""
    folder = checkpoints.save("llama_biases", tmp_path)
    pair = ranks(2)
    with pytest.raises(ConfigError, match=r"vocab_size \(199\) cannot be shared evenly by 2"):
        load(folder, group=pair[0])
    pad_vocabulary(folder, 200)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda rank: logits(load(folder, group=rank)), pair))
    assert torch.equal(found[0], found[1])
    reference = checkpoints.logits("llama_biases", PROMPT)
    torch.testing.assert_close(found[0][:, :199], reference, rtol=0, atol=1e-4)


def pad_vocabulary(folder: Path, size: int) -> None:
    def pad(tensors: dict[str, Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            missing = size - len(tensors[name])
            tensors[name] = torch.cat((tensors[name], torch.zeros(missing, 64)))

    change_tensors(folder, pad)
    change_json(folder / "config.json", vocab_size=size)


def _stack_experts(folder: Path, block: str, gate: str, up: str, down: str) -> None:
    """As transformers 5 holds them: gate and up of all experts in one tensor, down in another."""

    def stack(tensors: dict[str, Tensor]) -> None:
        for layer in [f"model.layers.{i}" for i in range(3)]:
            old = f"{layer}.{block}"
            experts = range(sum(f"{old}.experts.{i}.{gate}.weight" in tensors for i in range(9)))
            parts = {
                name: [tensors.pop(f"{old}.experts.{i}.{name}.weight") for i in experts]
                for name in (gate, up, down)
            }
            pairs = zip(parts[gate], parts[up], strict=True)
            tensors[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack([*map(torch.cat, pairs)])
            tensors[f"{layer}.mlp.experts.down_proj"] = torch.stack(parts[down])
            tensors[f"{layer}.mlp.gate.weight"] = tensors.pop(f"{old}.gate.weight")

    change_tensors(folder, stack)


MIXTURES = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_stored_in_one_tensor_are_the_same_experts(name: str, tmp_path: Path) -> None:
    folder = checkpoints.save(name, tmp_path)
    single = logits(load(folder))
    _stack_experts(folder, *MIXTURES[name])
    assert torch.equal(logits(load(folder)), single)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
def test_two_ranks_share_every_expert(name: str, stacked: bool, tmp_path: Path) -> None:
    folder = checkpoints.save(name, tmp_path)
    pad_vocabulary(folder, 200)
    if stacked:
        _stack_experts(folder, *MIXTURES[name])
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda rank: logits(load(folder, group=rank)), ranks(2)))
    assert torch.equal(found[0], found[1])
    reference = checkpoints.logits(name, PROMPT)
    torch.testing.assert_close(found[0][:, :199], reference, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {"num_local_experts": ...}, "num_local_experts is missing"),
        ("mixtral", {"num_experts_per_tok": 5}, r"num_experts_per_tok \(5\)"),
        ("qwen3_moe", {"moe_intermediate_size": ...}, "moe_intermediate_size is missing"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size must be positive"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be positive"),
    ],
)
def test_experts_that_cannot_be_are_named(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = checkpoints.save(name, tmp_path)
    change_json(folder / "config.json", **changes)
    with pytest.raises(ConfigError, match=message):
        load(folder)


@pytest.mark.parametrize("name", ["phi3", "phi3_partly_rotated"])
def test_two_ranks_share_fused_projections(name: str, tmp_path: Path) -> None:
    folder = checkpoints.save(name, tmp_path)
    pad_vocabulary(folder, 200)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda rank: logits(load(folder, group=rank)), ranks(2)))
    reference = checkpoints.logits(name, PROMPT)
    torch.testing.assert_close(found[0][:, :199], reference, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 1}, r"qkv_proj.weight has shape \[128, 64\].* \[96, 64\]"),
        ({"intermediate_size": 100}, r"gate_up_proj.weight has shape \[224, 64\].* \[200, 64\]"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor: 1.5 of 16 channels"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor: 0.2 of 16 channels is no even"),
        ({"partial_rotary_factor": "most"}, "partial_rotary_factor"),
    ],
)
def test_fused_projections_that_do_not_fit_are_named(
    changes: dict[str, Any], message: str, stored: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(stored("phi3"), tmp_path / "phi3")
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    change_json(folder / "config.json", rope_parameters=rope, **changes)
    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_quantised_fused_projections_are_refused(
    stored: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(stored("phi3"), tmp_path / "phi3")
    change_json(folder / "config.json", quantization_config={"quant_method": "awq"})
    with pytest.raises(UnsupportedModel, match="quantization_config of a family .* fused"):
        load(folder)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n"}
MEMORY: dict[str, tuple[dict[str, str], int]] = {
    "no groups": ({}, 8_192_000),
    "v2, limited by the parent": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/memory.max": "5000000\n",
            "sys/fs/cgroup/a/memory.current": "3000000\n",
            "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 400000\n",
        },
        2_400_000,
    ),
    "v2, seen from inside a container": (
        {
            "proc/self/cgroup": "0::/../outside\n",
            "sys/fs/cgroup/memory.max": "1000\n",
            "sys/fs/cgroup/memory.current": "2000\n",
            "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
        },
        0,
    ),
    "v1": (
        {
            "proc/self/cgroup": "3:cpu,memory:/x\n1:name=systemd:/x\n",
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "7000000\n",
            "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "1000000\n",
            "sys/fs/cgroup/memory/x/memory.stat": "inactive_file 5\ntotal_inactive_file 50\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
        6_000_050,
    ),
}


@pytest.mark.parametrize("case", MEMORY)
def test_free_memory_is_what_the_tightest_limit_leaves(case: str, tmp_path: Path) -> None:
    files, expected = MEMORY[case]
    assert host_free_bytes(write(tmp_path, MEMINFO | files)) == expected


def test_free_memory_of_this_machine_and_of_none(tmp_path: Path) -> None:
    assert 0 < host_free_bytes(Path("/")) < 1 << 50
    with pytest.raises(ConfigError, match="kv_cache_bytes"):
        host_free_bytes(tmp_path)
