"""YaRN, dynamic NTK and longrope: the engine says what `transformers` says below and above the
original length, in chunks, decoding and from the cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.config import BLOCK_SIZE, EngineConfig
from engine.core.engine_core import EngineCore
from engine.errors import ConfigError, UnsupportedModel
from engine.fairness import LANE_WEIGHTS
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.prefix_cache import PrefixCache
from engine.layers.rotary import attention_factor, inverse_frequencies
from engine.models.rope import Rope, read_rope
from engine.protocol import EngineRequest, SamplingParams
from engine.runner.memory.kv_cache import allocate_kv_cache, attention_shape
from engine.runner.model_runner import ModelRunner
from engine.scheduling.scheduler import Scheduler
from engine.weights.loader import load_model
from engine.weights.registry import load_model_config
from tests.engine import checkpoints
from tests.engine.checkpoints import LONG_ROPE, ORIGINAL_LENGTH, SCALED_LENGTH, YARN_ROPE

TOLERANCE = 1e-4
BELOW = ORIGINAL_LENGTH - 1
"""At the original length itself `transformers` keeps the base of a longer text before it."""
HEAD_DIM = 16
NAMES = sorted(checkpoints.SCALED_ROPE)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: checkpoints.save(name, tmp_path_factory.mktemp(name)))


@cache
def tokens() -> list[int]:
    rng = random.Random(18)
    return [rng.randrange(checkpoints.VOCAB) for _ in range(SCALED_LENGTH)]


@pytest.mark.parametrize("length", [BELOW, SCALED_LENGTH])
@pytest.mark.parametrize("name", NAMES)
def test_logits_agree(name: str, length: int, stored: Callable[[str], Path]) -> None:
    """An engine for texts of `length` computes what transformers computes of a text of that length:
    prompts end below and above the original length, come in chunks, and decode up to `length`."""
    model = load_model(
        stored(name), dtype="float32", device=torch.device("cpu"), max_model_len=length
    )
    shape = attention_shape(model, BLOCK_SIZE)
    kv = allocate_kv_cache(shape, model.config.num_layers, 40)
    runner = ModelRunner(model, kv, shape, eos_token_ids=frozenset())
    scheduler = start_scheduler(length)
    text = tokens()[:length]
    for prompt_length in {9, length // 2, length - 6}:
        scheduler.add(greedy(text[:prompt_length], length - prompt_length))
    reference = checkpoints.logits(name, text)
    compared = set()
    while scheduler.has_unfinished():
        output = scheduler.schedule()
        rows, logits = runner.logits(output)
        said = {}
        for row, found in zip(rows, logits, strict=True):
            position = len(row.seq.token_ids) - 1
            torch.testing.assert_close(found, reference[position], rtol=0, atol=TOLERANCE)
            compared.add(position)
            said[row.seq.request_id, row.seq.index] = [(text[position + 1], None)]
        scheduler.update(output, said)
    assert compared == set(range(8, length - 1))


def start_scheduler(max_model_len: int) -> Scheduler:
    return Scheduler(
        cache=PrefixCache(BlockPool(40), BLOCK_SIZE, sliding_window=None),
        max_num_batched_tokens=24,
        max_num_seqs=8,
        max_waiting=dict.fromkeys(LANE_WEIGHTS, 100),
        max_model_len=max_model_len,
        vocab_size=checkpoints.VOCAB,
        eos_token_ids=(),
    )


def greedy(prompt: list[int], max_tokens: int) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(request_id=str(len(prompt)), prompt_token_ids=prompt, sampling=sampling)


def start(folder: Path, **changes: Any) -> EngineCore:
    options: dict[str, Any] = {"num_blocks": 40, "dtype": "float32", "max_num_batched_tokens": 24}
    return EngineCore(EngineConfig(model=folder, **(options | changes)))


def run(core: EngineCore, request: EngineRequest) -> tuple[list[int], int]:
    """The text, and how many tokens of the prompt came from the cache."""
    core.add(request)
    said, cached = [], 0
    while core.has_work():
        for output in core.step():
            said += output.token_ids
            cached = output.usage.cached_tokens if output.finished else 0
    return said, cached


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_limited_to_the_original_length_does_not_stretch(
    name: str, stored: Callable[[str], Path]
) -> None:
    core = start(stored(name), max_model_len=BELOW)
    wanted = checkpoints.generate(name, tokens()[:17], 10)
    assert run(core, greedy(tokens()[:17], 10)) == (wanted, 0)
    assert run(core, greedy(tokens()[:17], 10)) == (wanted, BLOCK_SIZE)


@pytest.mark.parametrize("name", NAMES)
def test_the_longest_text_is_the_scaled_one(name: str, stored: Callable[[str], Path]) -> None:
    core = start(stored(name))
    assert core.resolved.max_model_len == SCALED_LENGTH
    if "dynamic" in name:
        return  # transformers has another base for every token that it adds
    wanted = checkpoints.generate(name, tokens()[:50], 20)
    assert run(core, greedy(tokens()[:50], 20)) == (wanted, 0)
    assert run(core, greedy(tokens()[:50], 20)) == (wanted, 3 * BLOCK_SIZE)
    with pytest.raises(ConfigError, match=f"max_model_len 129 .* {SCALED_LENGTH}"):
        start(stored(name), max_model_len=SCALED_LENGTH + 1)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "yarn": YARN_ROPE,
    "yarn without a factor": YARN_ROPE | {"factor": None},
    "yarn, attention_factor": YARN_ROPE | {"attention_factor": 1.3},
    "yarn, one mscale": YARN_ROPE | {"mscale": 0.7},
    "yarn, two": YARN_ROPE | {"mscale": 1.4, "mscale_all_dim": 0.7},
    "yarn, betas": YARN_ROPE | {"beta_fast": 4, "beta_slow": 2},
    "yarn, betas of none": YARN_ROPE | {"beta_fast": None, "beta_slow": None},
    "yarn, not truncated": YARN_ROPE | {"beta_fast": 4, "truncate": False},
    "yarn, no ramp": YARN_ROPE | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn, factor 1": YARN_ROPE | {"factor": 1.0},
    "yarn, large theta": YARN_ROPE | {"rope_theta": 1e6},
    "longrope": LONG_ROPE,
    "longrope, factor": LONG_ROPE | {"factor": 8.0},
    "longrope, factor 1": LONG_ROPE | {"factor": 1.0},
    "longrope, attention_factor": LONG_ROPE | {"attention_factor": 1.19},
    "dynamic": DYNAMIC,
    "dynamic, factor": DYNAMIC | {"factor": 8.0},
}


def read(parameters: dict[str, Any], *, original: int | None = None) -> Rope:
    return read_rope(
        parameters,
        theta=None,
        max_position_embeddings=SCALED_LENGTH,
        original_max_position_embeddings=original,
        rotary_dim=HEAD_DIM,
    )


@pytest.mark.parametrize("length", [None, ORIGINAL_LENGTH, SCALED_LENGTH, 2 * SCALED_LENGTH])
@pytest.mark.parametrize("variant", VARIANTS)
def test_frequencies_are_those_of_transformers(variant: str, length: int | None) -> None:
    parameters = VARIANTS[variant]
    config = transformers.LlamaConfig(
        hidden_size=HEAD_DIM,
        num_attention_heads=1,
        max_position_embeddings=SCALED_LENGTH,
        rope_parameters=dict(parameters),
    )
    initialise = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    wanted, factor = initialise(config, torch.device("cpu"), seq_len=length)
    rope = read(parameters)
    found = inverse_frequencies(HEAD_DIM, rope.theta, rope.scaling, max_model_len=length)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    assert attention_factor(rope.scaling) == pytest.approx(factor, rel=1e-12)


def test_phi_names_the_original_length_beside_the_parameters() -> None:
    """And its older checkpoints call longrope `su`."""
    inside = {"original_max_position_embeddings": 7}
    older = {"type": "su"} | {name: LONG_ROPE[name] for name in ("short_factor", "long_factor")}
    assert read(older | inside, original=ORIGINAL_LENGTH) == read(LONG_ROPE)


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "no factor": ({"rope_type": "dynamic"}, r"\(dynamic\): .*`factor`"),
    "factor below 1": (YARN_ROPE | {"factor": -4.0}, r"\(yarn\): .*factor"),
    "linear factor of 0": ({"rope_type": "linear", "factor": 0}, r"\(linear\): .*factor"),
    "factor is text": (YARN_ROPE | {"factor": "4"}, r"float.*factor"),
    "factor is true": (DYNAMIC | {"factor": True}, r"float.*factor"),
    "factor without end": (YARN_ROPE | {"factor": float("inf")}, "factor must be finite"),
    "factor beyond float32": (YARN_ROPE | {"factor": 1e9}, "factor 1000000000.0 makes a window"),
    "original length": (
        YARN_ROPE | {"original_max_position_embeddings": -32},
        "original_max_position_embeddings",
    ),
    "original length of a fraction": (
        LONG_ROPE | {"original_max_position_embeddings": 32.5},
        "original_max_position_embeddings",
    ),
    "attention factor": (YARN_ROPE | {"attention_factor": -1.0}, "attention_factor"),
    "attention factor NaN": (LONG_ROPE | {"attention_factor": float("nan")}, "attention_factor"),
    "mscale": (YARN_ROPE | {"mscale": -1.0}, "mscale"),
    "beta": (YARN_ROPE | {"beta_slow": 0.0}, "beta_slow"),
    "betas": (YARN_ROPE | {"beta_fast": 1, "beta_slow": 2}, "beta_fast 1.0 is below beta_slow"),
    "truncate": (YARN_ROPE | {"truncate": "no"}, "truncate"),
    "no lists": ({"rope_type": "longrope", "factor": 4.0}, "short_factor"),
    "short list": (LONG_ROPE | {"short_factor": [1.0] * 7}, "short_factor has 7 numbers.* 8"),
    "long list": (LONG_ROPE | {"long_factor": [1.0] * 9}, "long_factor has 9 numbers.* 8"),
    "a number for a list": (LONG_ROPE | {"long_factor": 2.0}, "long_factor"),
    "negative in a list": (LONG_ROPE | {"long_factor": [1.0] * 7 + [-1.0]}, r"long_factor\[7\]"),
    "theta": (YARN_ROPE | {"rope_theta": -1.0}, "rope_theta must be"),
    "theta is text": (YARN_ROPE | {"rope_theta": "high"}, "rope_theta must be .* not 'high'"),
    "llama3 without a passage": (
        checkpoints.LLAMA3_ROPE | {"high_freq_factor": 1.0},
        "high_freq_factor 1.0 must be above low_freq_factor",
    ),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_field_is_named(what: str) -> None:
    parameters, message = MALFORMED[what]
    with pytest.raises(ConfigError, match=f"config.json: rope parameters .*{message}"):
        read(parameters)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "proportional"}, "'proportional' is not supported .*yarn, longrope"),
        ({"rope_type": ["yarn"]}, "rope_type .'yarn'. is not supported"),
        ({"sliding_attention": {"rope_type": "yarn"}}, "'sliding_attention' are not supported"),
    ],
)
def test_an_unknown_form_is_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read(parameters)


def test_linear_and_llama3_keep_the_window_of_the_checkpoint(tmp_path: Path) -> None:
    for name in ("llama2_linear_rope", "llama3"):
        config = load_model_config(checkpoints.save(name, tmp_path / name))
        assert config.max_model_len == checkpoints.SHAPE["max_position_embeddings"]
