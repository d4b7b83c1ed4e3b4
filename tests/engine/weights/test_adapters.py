"""Several LoRA adapters over one base, mixed in a batch: each request says what `transformers` says
with that adapter's weights merged into the model."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.__main__ import _config, _parser
from engine.config import BLOCK_SIZE, EngineConfig
from engine.core.engine_core import EngineCore
from engine.errors import ConfigError, InvalidRequest, UnsupportedModel
from engine.fake.engine import FakeCore
from engine.protocol import EngineRequest, SamplingParams
from engine.weights.loader import load_model
from tests.engine import checkpoints, quantised
from tests.engine.core.test_parity import run, text
from tests.engine.weights.test_weights import PROMPT, logits, ranks

NUM_TOKENS = 12
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERYWHERE = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def write_adapter(
    folder: Path,
    model: Any,
    targets: tuple[str, ...],
    *,
    rank: int,
    alpha: float,
    seed: int,
    **changes: Any,
) -> Path:
    """As PEFT saves one: float32 tensors under base_model.model, and what describes them."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True)
    tensors = {}
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in targets:
            num_outputs, num_inputs = module.weight.shape
            a = torch.randn(rank, num_inputs) / num_inputs**0.5
            b = torch.randn(num_outputs, rank) / rank**0.5
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.1,
        "target_modules": list(targets),
        "bias": "none",
        "use_rslora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    return folder


def merged(model: Any, folder: Path) -> Any:
    """The model with W + scale * B A in place of W."""
    config = json.loads((folder / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config["use_rslora"] else rank)
    tensors = load_file(folder / "adapter_model.safetensors")
    found = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in found.named_modules():
            a = tensors.get(f"base_model.model.{name}.lora_A.weight")
            if a is not None:
                module.weight += scale * tensors[f"base_model.model.{name}.lora_B.weight"] @ a
    return found


Family = tuple[Path, Any, dict[str, Path]]


@pytest.fixture(scope="module", params=["llama_biases", "qwen3", "qwen3_moe"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A base, and adapters of different ranks, targets and scales over it."""
    root = tmp_path_factory.mktemp(request.param)
    folder = checkpoints.save(request.param, root / "base")
    model = checkpoints.build(request.param)
    targets = ATTENTION if "moe" in request.param else EVERYWHERE
    adapters = {
        "wide": write_adapter(root / "wide", model, targets, rank=20, alpha=24, seed=1),
        "narrow": write_adapter(
            root / "narrow", model, ("v_proj", "o_proj"), rank=4, alpha=8, seed=2, use_rslora=True
        ),
    }
    return folder, model, adapters


def start(folder: Path, adapters: dict[str, Path], **changes: Any) -> EngineCore:
    options: dict[str, Any] = {
        "num_blocks": 60,
        "dtype": "float32",
        "max_num_batched_tokens": 2 * BLOCK_SIZE,
    }
    return EngineCore(EngineConfig(model=folder, adapters=adapters, **(options | changes)))


def ask(
    request_id: str, prompt: list[int], adapter: str, num_tokens: int = NUM_TOKENS
) -> EngineRequest:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling=sampling, adapter=adapter
    )


@torch.inference_mode()
def reference(model: Any, token_ids: list[int]) -> Tensor:
    return model(torch.tensor([token_ids])).logits[0].float()


def check_text(model: Any, prompt: list[int], said: list[int]) -> None:
    rows = reference(model, prompt + said)[len(prompt) - 1 : -1]
    for best, token_id in zip(rows, said, strict=True):
        assert float(best.max() - best[token_id]) < 1e-4


def test_a_mixed_batch_says_what_each_merged_model_says(family: Family) -> None:
    """All prompts are alike at their start, twice over: nobody may find another adapter's KV."""
    folder, model, adapters = family
    core = start(folder, adapters)
    models = {"": model} | {name: merged(model, path) for name, path in adapters.items()}
    prompts = {name: PROMPT + PROMPT + [7 + i] for i, name in enumerate(models)}
    answers: dict[str, list[int]] = {}
    for repetition in range(2):
        outputs = run(core, [ask(name or "base", prompts[name], name) for name in models])
        for name, exact in models.items():
            said = text(outputs[name or "base"])
            check_text(exact, prompts[name], said)
            assert answers.setdefault(name, said) == said
            cached = outputs[name or "base"][-1].usage.cached_tokens
            assert cached == (2 * BLOCK_SIZE if repetition else 0)
    assert len({tuple(said) for said in answers.values()}) == 3, "adapters that change nothing"


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_adapters_that_peft_trained_say_what_peft_says(tmp_path: Path) -> None:
    """Made, saved and run by PEFT itself; here both are served over one base, in one batch."""
    import peft  # two seconds, which all who collect this file would wait

    folder = checkpoints.save("qwen3", tmp_path / "base")
    model = copy.deepcopy(checkpoints.build("qwen3"))  # PEFT changes what it is given
    settings: dict[str, dict[str, Any]] = {
        "first": {"r": 8, "lora_alpha": 16, "target_modules": list(EVERYWHERE)},
        "second": {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], "use_rslora": True},
    }
    trained: Any = None
    torch.manual_seed(0)
    for name, setting in settings.items():
        config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **setting)
        if trained is None:
            trained = peft.get_peft_model(model, config, adapter_name=name)
        else:
            trained.add_adapter(name, config)
    trained.eval().save_pretrained(str(tmp_path / "adapters"))
    core = start(folder, {name: tmp_path / "adapters" / name for name in settings})
    outputs = run(core, [ask(name, PROMPT, name) for name in settings])
    for name in settings:
        trained.set_adapter(name)
        check_text(trained, PROMPT, text(outputs[name]))
    assert text(outputs["first"]) != text(outputs["second"])


def test_who_is_preempted_keeps_the_adapter(family: Family) -> None:
    folder, model, adapters = family
    core = start(folder, adapters, num_blocks=9, max_num_batched_tokens=512)
    names = ["wide", "", "narrow", "wide"]
    requests = [ask(str(i), PROMPT[i:], name, 60) for i, name in enumerate(names)]
    outputs = run(core, requests)
    assert core.status().num_preemptions > 0
    for i, name in enumerate(names):
        exact = merged(model, adapters[name]) if name else model
        check_text(exact, PROMPT[i:], text(outputs[str(i)]))


def test_two_ranks_share_an_adapter(tmp_path: Path) -> None:
    folder = checkpoints.save("llama_biases", tmp_path / "base")
    model = checkpoints.build("llama_biases")
    path = write_adapter(tmp_path / "a", model, EVERYWHERE, rank=8, alpha=8, seed=3)
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat((tensors[name], torch.zeros(1, 64)))
    save_file(tensors, folder / "model.safetensors")
    change_json(folder / "config.json", vocab_size=200)

    def rank_logits(rank: Any) -> Tensor:
        made = load_model(
            folder,
            dtype="float32",
            device=torch.device("cpu"),
            group=rank,
            adapters={"a": path},
        )
        assert made.adapters is not None
        made.adapters.assign([("a", len(PROMPT))])
        return logits(made)

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(rank_logits, ranks(2)))
    assert torch.equal(found[0], found[1])
    expected = reference(merged(model, path), PROMPT)
    torch.testing.assert_close(found[0][:, :199], expected, rtol=0, atol=1e-4)


def test_over_a_quantised_base(tmp_path: Path) -> None:
    exact = quantised.save(tmp_path / "base", "awq")
    path = write_adapter(tmp_path / "a", exact, EVERYWHERE, rank=8, alpha=16, seed=4)
    core = start(tmp_path / "base", {"a": path})
    outputs = run(core, [ask("0", PROMPT, "a"), ask("1", PROMPT, "")])
    for request_id, model in (("0", merged(exact, path)), ("1", exact)):
        rows = reference(model, PROMPT + text(outputs[request_id]))[len(PROMPT) - 1 : -1]
        for best, token_id in zip(rows, text(outputs[request_id]), strict=True):
            assert float(best.max() - best[token_id]) < 1e-3


def test_an_unknown_adapter_is_refused_by_name(family: Family) -> None:
    folder, _, adapters = family
    core = start(folder, adapters)
    for wrong in ("wid", "wide ", "/etc/passwd"):
        with pytest.raises(InvalidRequest, match="no such adapter") as error:
            core.add(ask("0", PROMPT, wrong))
        assert error.value.param == "adapter"
    assert not core.has_work()


def test_the_fake_engine_refuses_and_separates_alike() -> None:
    fake = FakeCore(EngineConfig(model=Path("fake"), adapters={"a": Path("a")}, num_blocks=64))
    with pytest.raises(InvalidRequest, match="no such adapter"):
        fake.add(ask("0", PROMPT, "b"))
    cached: list[int] = []
    for request_id, adapter in (("0", "a"), ("1", ""), ("2", "a")):
        fake.add(ask(request_id, PROMPT, adapter, 1))
        while fake.has_work():
            ended = [output for output in fake.step() if output.finished]
            cached += [output.usage.cached_tokens for output in ended]
    assert cached == [0, 0, BLOCK_SIZE]


def test_salt_and_adapter_make_the_namespace() -> None:
    asked = [("s", ""), ("s", "a"), ("", "a"), ("sa", ""), ("s", "b"), ("a", "s")]
    names = {
        EngineRequest(
            request_id="0",
            prompt_token_ids=[1],
            sampling=SamplingParams(max_tokens=1),
            cache_salt=salt,
            adapter=adapter,
        ).cache_namespace
        for salt, adapter in asked
    }
    assert len(names) == len(asked)


def test_the_command_line_names_adapters() -> None:
    common = ["--model", "m", "--listen", "unix:/s"]
    config = _config(_parser().parse_args([*common, "--adapter", "a=/x", "--adapter", "b=y=z"]))
    assert config.adapters == {"a": Path("/x"), "b": Path("y=z")}
    with pytest.raises(ConfigError, match="given twice"):
        _config(_parser().parse_args([*common, "--adapter", "a=x", "--adapter", "a=y"]))
    for wrong in ("a", "=x", "a="):
        with pytest.raises(SystemExit):
            _parser().parse_args([*common, "--adapter", wrong])


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


Q = "base_model.model.model.layers.0.self_attn.q_proj"
DEFECTS: dict[str, tuple[Callable[[Path], Any], type[ConfigError], str]] = {
    "no config": (
        lambda f: (f / "adapter_config.json").unlink(),
        ConfigError,
        "adapter_config.json cannot be read",
    ),
    "no tensors": (
        lambda f: (f / "adapter_model.safetensors").unlink(),
        ConfigError,
        "adapter_model.safetensors",
    ),
    "cut off": (
        lambda f: (f / "adapter_model.safetensors").write_bytes(b"1234567890"),
        ConfigError,
        "adapter_model.safetensors",
    ),
    "another method": (
        lambda f: change_json(f / "adapter_config.json", peft_type="LOHA"),
        UnsupportedModel,
        "peft_type LOHA",
    ),
    "dora": (
        lambda f: change_json(f / "adapter_config.json", use_dora=True),
        UnsupportedModel,
        "use_dora",
    ),
    "biases": (
        lambda f: change_json(f / "adapter_config.json", bias="all"),
        UnsupportedModel,
        "bias 'all'",
    ),
    "saved modules": (
        lambda f: change_json(f / "adapter_config.json", modules_to_save=["lm_head"]),
        UnsupportedModel,
        "lm_head",
    ),
    "ranks by pattern": (
        lambda f: change_json(f / "adapter_config.json", rank_pattern={"q_proj": 2}),
        UnsupportedModel,
        "rank_pattern",
    ),
    "rank": (
        lambda f: change_json(f / "adapter_config.json", r=3),
        ConfigError,
        r"q_proj.lora_A.weight has shape \[4, 64\].*\[3, 64\]",
    ),
    "rank zero": (
        lambda f: change_json(f / "adapter_config.json", r=0),
        ConfigError,
        r"r \(0\)",
    ),
    "half a pair": (
        lambda f: change_tensors(f, lambda t: t.pop(f"{Q}.lora_B.weight")),
        ConfigError,
        "q_proj.lora_B.weight is missing",
    ),
    "another module": (
        lambda f: change_tensors(
            f, lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)})
        ),
        UnsupportedModel,
        "lm_head.lora_A.weight",
    ),
}


@pytest.mark.parametrize("what", DEFECTS)
def test_what_is_not_served_is_named(what: str, tmp_path: Path) -> None:
    base = checkpoints.save("llama2", tmp_path / "base")
    model = checkpoints.build("llama2")
    path = write_adapter(tmp_path / "a", model, ("q_proj", "v_proj"), rank=4, alpha=4, seed=5)
    damage, error, message = DEFECTS[what]
    damage(path)
    with pytest.raises(error, match=message) as raised:
        start(base, {"mine": path})
    assert "adapter mine" in raised.value.message
