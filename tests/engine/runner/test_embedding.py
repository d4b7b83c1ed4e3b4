"""Embeddings share the path of generations, and are what `transformers` computes, pooled as
sentence-transformers does it: whatever the chunks, the cache, the batch and the memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from engine.config import BLOCK_SIZE, EngineConfig, Pooling
from engine.core.engine_core import EngineCore
from engine.errors import ConfigError, ContextLengthExceeded, InvalidRequest, UnsupportedModel
from engine.protocol import EngineOutput, EngineRequest, SamplingParams
from engine.weights.embedding_head import read_embedding_head
from engine.weights.registry import load_model_config
from tests.engine import checkpoints
from tests.engine.core.test_parity import SETTINGS, greedy, prompts, run, text
from tests.engine.weights.test_adapters import ATTENTION, write_adapter

HIDDEN = checkpoints.SHAPE["hidden_size"]
TOLERANCE = 1e-5
POISON = 100
"""A token whose embedding is not a number in the `poisoned` model."""
TYPES = "sentence_transformers.models."
NUM_TOKENS = 8

Save = Callable[..., Path]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Writes `name` as sentence-transformers stores it; pooling None: as a plain language model."""
    written: dict[Any, Path] = {}

    def write(name: str, pooling: Pooling | None = None, *, normalise: bool = True) -> Path:
        key = (name, pooling, normalise)
        if key not in written:
            written[key] = checkpoints.save(name, tmp_path_factory.mktemp(name))
            if pooling is not None:
                mode = {"last": "lasttoken", "mean": "mean_tokens"}[pooling]
                kinds = ["Transformer", "Pooling", "Normalize"][: 3 if normalise else 2]
                write_modules(written[key], kinds, {f"pooling_mode_{mode}": True})
        return written[key]

    return write


def write_modules(folder: Path, kinds: Sequence[str], pooling: dict[str, Any]) -> Path:
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds) if i > 0)]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": TYPES + kind}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    settings = {"pooling_mode_cls_token": False, "word_embedding_dimension": HIDDEN} | pooling
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    return folder


def start(folder: Path, **changes: Any) -> EngineCore:
    options: dict[str, Any] = {"num_blocks": 400, "dtype": "float32"}
    return EngineCore(EngineConfig(model=folder, **(options | changes)))


def embed(number: int | str, prompt: list[int], **changes: Any) -> EngineRequest:
    return EngineRequest(request_id=f"e{number}", prompt_token_ids=prompt, embed=True, **changes)


def vector(outputs: Sequence[EngineOutput]) -> NDArray[np.float32]:
    """Return the vector of a request that went well, whose outputs these are."""
    (output,) = outputs
    assert output.finished and output.finish_reason == "stop" and output.error_code is None
    assert output.token_ids == [] and output.logprobs is None and output.embedding is not None
    assert output.usage.prefilled and output.usage.generated_tokens == 0
    return np.frombuffer(output.embedding, "<f4")


def expected(
    name: str,
    prompt: list[int],
    pooling: Pooling = "last",
    *,
    normalise: bool = True,
    dimensions: int | None = None,
) -> NDArray[np.float32]:
    """sentence-transformers' formulas, over what transformers computes of one prompt."""
    states = checkpoints.hidden(name, prompt)
    mask = torch.ones(len(prompt), 1)
    if pooling == "last":
        pooled = states[-1]
    else:
        pooled = (states * mask).sum(0) / mask.sum(0).clamp(min=1e-9)
    pooled = pooled[:dimensions]
    if normalise:
        pooled = torch.nn.functional.normalize(pooled, dim=0)
    return pooled.numpy()


def assert_close(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> None:
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * max(1, abs(wanted).max()))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize(
    ("name", "ahead"), [("llama3", True), ("qwen3", False), ("mistral_window", True)]
)
def test_beside_generations(
    save: Save, name: str, pooling: Pooling, setting: str, ahead: bool
) -> None:
    """Every prompt is embedded and continued at once, in one queue."""
    core = start(save(name, pooling), run_ahead=ahead, **SETTINGS[setting])
    requests = []
    for i, prompt in enumerate(prompts()):
        requests += [greedy(i, prompt, NUM_TOKENS), embed(i, prompt)]
    outputs = run(core, requests)
    for i, prompt in enumerate(prompts()):
        assert_close(vector(outputs[f"e{i}"]), expected(name, prompt, pooling))
        assert text(outputs[str(i)]) == checkpoints.generate(name, prompt, NUM_TOKENS)
    assert core.status().num_free_blocks == core.resolved.num_blocks
    assert core._stepper._runner._pooler._sums == {}, "a sum outlives its request"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_preempted_in_the_middle(save: Save, pooling: Pooling, cached: bool, ahead: bool) -> None:
    """A text grows into the blocks of a prompt that is half embedded, and starts over."""
    core = start(
        save("llama3", pooling),
        num_blocks=9,
        max_num_batched_tokens=2,
        prefix_caching=cached,
        run_ahead=ahead,
    )
    speaker, prompt = greedy(0, prompts()[8][:60], 60), prompts()[10][:64]
    outputs = run(core, [speaker, embed(0, prompt)])
    assert core.status().num_preemptions == 1
    assert_close(vector(outputs["e0"]), expected("llama3", prompt, pooling))
    assert outputs["e0"][0].usage.cached_tokens == 0, "as it was found at first"
    assert text(outputs["0"]) == checkpoints.generate("llama3", speaker.prompt_token_ids, 60)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_alone_and_again(save: Save, pooling: Pooling) -> None:
    """The last token is all that a second embedding computes; a mean computes all of them, and
    leaves them to others."""
    core = start(save("qwen3", pooling), max_num_batched_tokens=24)
    prompt = prompts()[8]
    full = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    for cached in (0, full if pooling == "last" else 0):
        outputs = run(core, [embed(0, prompt)])["e0"]
        assert_close(vector(outputs), expected("qwen3", prompt, pooling))
        assert outputs[0].usage.prompt_tokens == len(prompt)
        assert outputs[0].usage.cached_tokens == cached
    said = run(core, [greedy(0, prompt, 4)])["0"]
    assert said[-1].usage.cached_tokens == full
    assert text(said) == checkpoints.generate("qwen3", prompt, 4)
    assert core.status().prefix_cache_query_tokens == len(prompt) * (3 if pooling == "last" else 1)


def test_salts_and_adapters_keep_embeddings_apart(save: Save, tmp_path: Path) -> None:
    """A namespace of one tenant tells another one nothing; an adapter embeds otherwise."""
    model = checkpoints.build("llama3")
    folder = write_adapter(tmp_path / "a", model, ATTENTION, rank=4, alpha=8, seed=1)
    core = start(save("llama3"), adapters={"a": folder})
    prompt = prompts()[8]
    for salt, adapter, cached in [("x", "", 0), ("y", "", 0), ("x", "a", 0), ("x", "", 80)]:
        asked = embed(0, prompt, cache_salt=salt, adapter=adapter)
        outputs = run(core, [asked])["e0"]
        assert outputs[0].usage.cached_tokens == cached
        same = np.allclose(vector(outputs), expected("llama3", prompt), atol=1e-4)
        assert same is not bool(adapter)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_dimensions_and_length(save: Save, pooling: Pooling, normalise: bool) -> None:
    """Cut first, then brought to unit length, where the checkpoint does that."""
    core = start(save("qwen3_tied", pooling, normalise=normalise))
    prompt = prompts()[3]
    for dimensions in (None, 1, 17, HIDDEN):
        found = vector(run(core, [embed(0, prompt, dimensions=dimensions)])["e0"])
        form = {"normalise": normalise, "dimensions": dimensions}
        assert_close(found, expected("qwen3_tied", prompt, pooling, **form))


def test_a_plain_language_model_pools_its_last_token(save: Save) -> None:
    core = start(save("llama2"))
    assert (core.status().embedding_size, core.status().generates) == (HIDDEN, True)
    found = vector(run(core, [embed(0, prompts()[5])])["e0"])
    assert_close(found, expected("llama2", prompts()[5]))


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"n": 2}, "n"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": HIDDEN + 1}, "dimensions"),
        ({"sampling": SamplingParams(max_tokens=1)}, "sampling"),
        ({"embed": False, "dimensions": 8, "sampling": SamplingParams(max_tokens=1)}, "dimensions"),
        ({"embed": False}, "max_tokens"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
    ],
)
def test_what_is_refused_is_named(save: Save, changes: dict[str, Any], param: str) -> None:
    core = start(save("llama3"))
    asked = {"request_id": "e", "prompt_token_ids": [5], "embed": True} | changes
    with pytest.raises(InvalidRequest) as refused:
        core.add(EngineRequest(**asked))
    assert refused.value.param == param
    assert not core.has_work()


def test_an_embedded_prompt_may_fill_the_context(save: Save) -> None:
    core = start(save("llama3"), max_model_len=40, max_num_batched_tokens=16)
    prompt = prompts()[8]
    assert_close(vector(run(core, [embed(0, prompt[:40])])["e0"]), expected("llama3", prompt[:40]))
    with pytest.raises(ContextLengthExceeded, match="an embedding's prompt may have 40"):
        core.add(embed(0, prompt[:41]))


@pytest.mark.parametrize("architecture", ["Qwen3Model", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_tied"])
def test_a_checkpoint_without_a_head(name: str, architecture: str, tmp_path: Path) -> None:
    """As Qwen3-Embedding is stored: names without `model.`, no head, in several files."""
    checkpoints.build(name).model.save_pretrained(tmp_path, max_shard_size="100KB")
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_modules(
        tmp_path, ["Transformer", "Pooling", "Normalize"], {"pooling_mode_lasttoken": True}
    )
    core = start(tmp_path, max_num_batched_tokens=24)
    assert core.status().generates is False
    outputs = run(core, [embed(i, prompt) for i, prompt in enumerate(prompts())])
    for i, prompt in enumerate(prompts()):
        assert_close(vector(outputs[f"e{i}"]), expected(name, prompt))
    with pytest.raises(InvalidRequest, match="no head") as refused:
        core.add(greedy(0, [5]))
    assert refused.value.param == "embed" and not core.has_work()


def test_random_weights_know_no_head(tmp_path: Path) -> None:
    save_config(tmp_path, architectures=["LlamaModel"])
    core = start(tmp_path, load_format="dummy")
    assert core.status().generates is False
    assert abs(np.linalg.norm(vector(run(core, [embed(0, [5, 6])])["e0"])) - 1) < 1e-6


def save_config(folder: Path, **changes: Any) -> None:
    config = checkpoints.build("llama2").config
    named = {"architectures": ["LlamaForCausalLM"]}  # `save_pretrained` alone would write it
    (folder / "config.json").write_text(json.dumps(config.to_dict() | named | changes))


@pytest.mark.parametrize(
    ("kinds", "pooling", "named"),
    [
        (["Transformer", "Pooling", "Dense", "Normalize"], {}, "modules.json.*Dense"),
        (["Transformer"], {}, "modules.json"),
        (["BoW", "Pooling"], {}, "modules.json.*BoW"),
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": True}, "cls_token"),
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, "max_tokens"),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
            "mean_tokens and lasttoken",
        ),
        (["Transformer", "Pooling"], {}, "pooling of nothing"),
        (["Transformer", "Pooling"], {"pooling_mode": "max"}, "pooling of max"),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_mean_tokens": True, "include_prompt": False},
            "include_prompt",
        ),
    ],
)
def test_another_head_is_refused(
    tmp_path: Path, kinds: list[str], pooling: dict[str, Any], named: str
) -> None:
    save_config(write_modules(tmp_path, kinds, pooling))
    with pytest.raises(UnsupportedModel, match=named):
        start(tmp_path, load_format="dummy")


@pytest.mark.parametrize("mode", ["mean", ["mean"]])
def test_the_newer_form_of_the_pooling(tmp_path: Path, mode: Any) -> None:
    write_modules(tmp_path, ["Transformer", "Pooling"], {"pooling_mode": mode})
    head = read_embedding_head(tmp_path)
    assert (head.pooling, head.normalise) == ("mean", False)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("modules.json", b"{"),
        ("modules.json", b"[3]"),
        ("1_Pooling/config.json", b"[3]"),
        ("1_Pooling/config.json", None),
    ],
)
def test_broken_modules_are_refused(tmp_path: Path, file: str, content: bytes | None) -> None:
    write_modules(tmp_path, ["Transformer", "Pooling"], {"pooling_mode_lasttoken": True})
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=file):
        read_embedding_head(tmp_path)


def test_a_model_in_a_folder_of_its_own_is_refused(tmp_path: Path) -> None:
    write_modules(tmp_path, ["Transformer", "Pooling"], {"pooling_mode_lasttoken": True})
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UnsupportedModel, match="0_Transformer"):
        read_embedding_head(tmp_path)


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    save_config(tmp_path, is_causal=False)
    with pytest.raises(UnsupportedModel, match="is_causal"):
        load_model_config(tmp_path)


def test_a_draft_needs_a_head(save: Save, tmp_path: Path) -> None:
    checkpoints.build("llama2").model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="draft_model .* has no head"):
        start(save("llama3"), speculative="draft", draft_model=tmp_path)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_vector_that_is_no_number_harms_itself_alone(
    save: Save, tmp_path: Path, pooling: Pooling
) -> None:
    folder = save("llama2", pooling)
    for file in folder.rglob("*.json"):
        (tmp_path / file.relative_to(folder)).parent.mkdir(exist_ok=True)
        (tmp_path / file.relative_to(folder)).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    core = start(tmp_path, max_num_batched_tokens=24)
    prompt = [token_id for token_id in prompts()[8] if token_id != POISON]
    core.add(embed("bad", [POISON, *prompt]))
    for request in (embed("good", prompt), greedy(0, prompt, 4)):
        core.add(request)
    outputs: dict[str, list[EngineOutput]] = {"ebad": [], "egood": [], "0": []}
    while core.has_work():
        for output in core.step():
            outputs[output.request_id].append(output)
        core.check_integrity()
    (bad,) = outputs["ebad"]
    assert (bad.finish_reason, bad.error_code) == ("error", "engine_step_failed")
    assert bad.embedding is None and bad.finished
    assert_close(vector(outputs["egood"]), expected("llama2", prompt, pooling))
    assert text(outputs["0"]) == checkpoints.generate("llama2", prompt, 4)


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_aborted_mean_leaves_nothing(save: Save, deterministic: bool) -> None:
    """And holds one vector while it lives."""
    core = start(save("llama3", "mean"), max_num_batched_tokens=16, deterministic=deterministic)
    prompt = prompts()[8]
    core.add(embed(0, prompt))
    core.step()
    (kept,) = core._stepper._runner._pooler._sums.values()
    assert kept.untyped_storage().nbytes() == HIDDEN * kept.itemsize
    (last,) = core.abort("e0")
    assert (last.finish_reason, last.finished, last.embedding) == ("abort", True, None)
    assert last.usage.prefilled is False, "nothing to bill"
    assert core.status().num_free_blocks == core.resolved.num_blocks
    assert_close(vector(run(core, [embed(0, prompt)])["e0"]), expected("llama3", prompt, "mean"))
    assert core._stepper._runner._pooler._sums == {}


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_the_same_bits_whatever_the_steps(save: Save, pooling: Pooling) -> None:
    found = set()
    for chunk in (7, 24, 512):
        core = start(
            save("qwen3", pooling, normalise=False),
            deterministic=True,
            max_num_batched_tokens=chunk,
            prefix_caching=chunk != 24,
        )
        others = [greedy(i, prompts()[i], 4) for i in range(8)] if chunk == 24 else []
        found.add(run(core, [*others, embed(0, prompts()[8])])["e0"][0].embedding)
    assert len(found) == 1


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("speculative", ["ngram", "draft"])
def test_guesses_are_for_those_who_speak(save: Save, speculative: str, pooling: Pooling) -> None:
    """A prompt that lacks one token is no decode."""
    draft = save("llama2") if speculative == "draft" else None
    core = start(
        save("llama3", pooling),
        speculative=speculative,
        draft_model=draft,
        max_num_batched_tokens=16,
    )
    prompt = [5, 6, 7, 8] * 8 + [5]
    outputs = run(core, [embed(0, prompt), greedy(0, prompt, 4)])
    assert_close(vector(outputs["e0"]), expected("llama3", prompt, pooling))
    assert text(outputs["0"]) == checkpoints.generate("llama3", prompt, 4)
