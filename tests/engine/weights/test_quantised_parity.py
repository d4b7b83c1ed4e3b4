"""Every published form of a quantised checkpoint is served by name and says what `transformers`
says with the weights that it stands for; and what cannot be read is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import BLOCK_SIZE, EngineConfig
from engine.core.engine_core import EngineCore
from engine.errors import ConfigError, UnsupportedModel
from engine.layers.parallel import SINGLE_RANK, ParallelGroup
from engine.models.decoder import Decoder
from engine.protocol import EngineRequest, SamplingParams
from engine.weights.loader import load_model
from tests.engine import quantised
from tests.engine.weights.test_weights import logits_of, ranks

PROMPT = [5, 17, 101, 44, 90, 3, 3, 61, 150, 8, 77, 12, 9, 198, 0, 31, 64, 65]
TOLERANCE = 1e-3
NUM_TOKENS = 12
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load(folder: Path, group: ParallelGroup = SINGLE_RANK, **options: Any) -> Decoder:
    return load_model(folder, device=CPU, group=group, **({"dtype": "float32"} | options))


@torch.inference_mode()
def reference(model: Any, token_ids: list[int]) -> Tensor:
    return model(torch.tensor([token_ids])).logits[0].float()


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A form's folder, written once and only read, and the model it stands for."""
    root = tmp_path_factory.mktemp("quantised")

    @cache
    def written(form: str) -> tuple[Path, Any]:
        # Every second one has biases, and no norms of queries and keys.
        family = ("qwen3", "qwen2")[list(quantised.FORMATS).index(form) % 2]
        folder = root / form.replace(" ", "_")
        return folder, quantised.save(folder, form, family)

    return written


Stored = Callable[[str], tuple[Path, Any]]


@pytest.fixture
def changed(stored: Stored, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a form's folder that the test may change."""
    return lambda form: shutil.copytree(stored(form)[0], tmp_path / "changed")


@pytest.mark.parametrize("form", quantised.FORMATS)
def test_a_quantised_checkpoint_is_the_model_it_stands_for(form: str, stored: Stored) -> None:
    folder, exact = stored(form)
    found = logits_of(load(folder), PROMPT)
    torch.testing.assert_close(found, reference(exact, PROMPT), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("form", ["fp8 blocks", "compressed int8", "awq", "gptq"])
def test_so_is_a_mixture_of_experts(form: str, tmp_path: Path) -> None:
    """One projection of one layer's experts is left dense."""
    exact = quantised.save(tmp_path, form, "qwen3_moe", dense="layers.1.mlp.experts.2.up_proj")
    found = logits_of(load(tmp_path), PROMPT)
    torch.testing.assert_close(found, reference(exact, PROMPT), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("form", quantised.FORMATS)
def test_it_is_served_by_name(form: str, stored: Stored) -> None:
    folder, exact = stored(form)
    core = EngineCore(
        EngineConfig(
            model=folder,
            served_name="packed",
            dtype="float32",
            num_blocks=40,
            max_num_batched_tokens=BLOCK_SIZE,
        )
    )
    assert core.status().model == "packed"
    prompts = [PROMPT, PROMPT[3:9]]
    said = generate(core, prompts)
    for prompt, text in zip(prompts, said, strict=True):
        rows = reference(exact, prompt + text)[len(prompt) - 1 : -1]
        for best, token_id in zip(rows, text, strict=True):
            # Where two tokens are as good as equal, either may be said.
            assert float(best.max() - best[token_id]) < TOLERANCE


def generate(core: EngineCore, prompts: list[list[int]]) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    said: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        core.add(EngineRequest(request_id=str(i), prompt_token_ids=prompt, sampling=sampling))
        said[str(i)] = []
    while core.has_work():
        for output in core.step():
            assert output.error_code is None
            said[output.request_id] += output.token_ids
    return list(said.values())


@pytest.mark.parametrize("asked", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dense_checkpoint_is_quantised_when_it_is_loaded(
    asked: Any, dtype: Any, tmp_path: Path
) -> None:
    """All rows at once and, for what only few rows use, one at a time."""
    model = quantised.build("qwen3", 5)
    model.save_pretrained(tmp_path)
    whole = reference(model, PROMPT)
    found = logits_of(load(tmp_path, quantization=asked, dtype=dtype), PROMPT)
    limit = {"int8": 0.05, "fp8": 0.12}[asked]
    error = float((found - whole).norm() / whole.norm())
    assert 1e-4 < error < limit
    if dtype == "bfloat16":
        dense = logits_of(load(tmp_path, dtype=dtype), PROMPT)
        assert not torch.equal(found, dense)


def test_a_quantised_checkpoint_is_not_quantised_again(stored: Stored) -> None:
    with pytest.raises(ConfigError, match=r"int8.*quantised \(awq\) already"):
        load(stored("awq")[0], quantization="int8")


@pytest.mark.parametrize("form", ["fp8 static", "fbgemm", "compressed int8", "awq", "gptq"])
def test_two_ranks_share_it(form: str, stored: Stored, changed: Callable[[str], Path]) -> None:
    folder, exact = changed(form), stored(form)[1]
    _pad_vocabulary(folder)
    pair = ranks(2)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda rank: logits_of(load(folder, rank), PROMPT), pair))
    assert torch.equal(found[0], found[1])
    expected = reference(exact, PROMPT)
    torch.testing.assert_close(found[0][:, : quantised.VOCAB], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("form", "message"),
    [("fp8 blocks", "cut blocks of"), ("gptq asymmetric, act order", "desc_act cannot be cut")],
)
def test_what_two_ranks_cannot_share(
    form: str, message: str, changed: Callable[[str], Path]
) -> None:
    folder = changed(form)
    _pad_vocabulary(folder)
    with pytest.raises(ConfigError, match=message):
        load(folder, ranks(2)[0])


def _pad_vocabulary(folder: Path) -> None:
    """199 is odd."""
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        row = torch.zeros(1, quantised.HIDDEN, dtype=tensors[name].dtype)
        tensors[name] = torch.cat((tensors[name], row))
    save_file(tensors, folder / "model.safetensors")
    change_json(folder, vocab_size=quantised.VOCAB + 1)


def change_json(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


REFUSED: dict[str, tuple[str, dict[str, Any], type[ConfigError], str]] = {
    "method": ("awq", {"quant_method": "aqlm"}, UnsupportedModel, "aqlm"),
    "awq bits": ("awq", {"bits": 3}, UnsupportedModel, r"\(awq\): 3 bits"),
    "awq layout": ("awq", {"version": "gemv"}, UnsupportedModel, "gemv"),
    "gptq bits": ("gptq", {"bits": 3}, UnsupportedModel, r"\(gptq\): 3 bits"),
    "gptq layout": ("gptq", {"checkpoint_format": "marlin"}, UnsupportedModel, "marlin"),
    "gptq groups": ("gptq", {"group_size": 100}, ConfigError, "groups of 100 do not divide 128"),
    "compressed format": (
        "compressed fp8",
        {"format": "pack-quantized"},
        UnsupportedModel,
        "pack-quantized",
    ),
    "field of another type": ("gptq", {"bits": "four"}, ConfigError, r"\(gptq\): .*bits"),
    "blocks": ("fp8 blocks", {"weight_block_size": [0, 128]}, ConfigError, "weight_block_size"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_named(what: str, changed: Callable[[str], Path]) -> None:
    form, changes, error, message = REFUSED[what]
    folder = changed(form)
    change_json(folder, quantization_config=quantised.FORMATS[form][0] | changes)
    with pytest.raises(error, match=message):
        load(folder)


def _scale_gone(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.0.self_attn.q_proj.scales"]


def _scale_misshapen(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.scales"] = torch.zeros(3, 128)


def _codes_are_floats(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.self_attn.q_proj.qweight"
    tensors[name] = tensors[name].float()


def _odd_groups(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.g_idx"][0] = 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_scale_gone, "q_proj.scales is missing"),
        (_scale_misshapen, r"q_proj.scales has shape \[3, 128\]"),
        (_codes_are_floats, "q_proj.qweight is F32, not I32"),
        (_odd_groups, "g_idx does not put 64 inputs into each group"),
    ],
)
def test_damaged_tensors_are_named(
    damage: Any, message: str, changed: Callable[[str], Path]
) -> None:
    folder = changed("gptq")
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load(folder)
