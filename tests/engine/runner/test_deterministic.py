"""--deterministic: a request's logits are the same bits alone and in any company."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.errors import ConfigError
from engine.kernels.cpu import backend as cpu_backend
from engine.kernels.linear.dispatch import TILE_ROWS, in_tiles, pack_linear
from engine.kernels.linear.weights import LinearWeight, quantise_fp8, quantise_int8
from engine.kernels.mixture.lora import add_lora, deterministic, stack_adapters
from engine.kernels.mixture.moe import pack_experts, route
from engine.kernels.mixture.types import NOBODY, LoraRows, LoraStack
from engine.kernels.pointwise.rms_norm import add_rms_norm, rms_norm
from engine.kernels.pointwise.rotary_cache import rotate
from engine.kernels.pointwise.swiglu import swiglu
from engine.layers.rotary import RotaryEmbedding
from engine.protocol import EngineRequest, SamplingParams
from engine.runner.batch.batch import SampleRow
from engine.runner.speculative.guesser import Worth
from tests.budget import examples

CPU = torch.device("cpu")
VOCAB = 211
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 640,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""Sizes at which oneDNN's float32 products are known to differ with the number of rows."""
WINDOW = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 21}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
EXPERTS = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "intermediate_size": 72,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
ODD = {"head_dim": 20, "intermediate_size": 70}
"""No kernel of the processor's takes a head, and none a row, of these sizes."""
Bits = dict[tuple[str, int], Tensor]
"""Logits by request and number of tokens said before."""


@pytest.fixture(params=["kernels", "library"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the processor's kernels, or as where nobody installed numba."""
    if request.param == "library":
        monkeypatch.setattr(cpu_backend, "_team", lambda: None)
    return str(request.param)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """One, but for what is tried on two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_threads(threads: None) -> None:
    torch.set_num_threads(2)


@dataclass(frozen=True)
class TimedRequest:
    prompt: list[int]
    num_tokens: int
    arrives: int
    """Steps of the engine before it is added."""


def start(folder: Path, changes: dict[str, Any], **options: Any) -> EngineCore:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    defaults: dict[str, Any] = {"num_blocks": 200, "deterministic": True, "dtype": "float32"}
    defaults["device"] = "cpu"
    return EngineCore(EngineConfig(model=folder, load_format="dummy", **(defaults | options)))


def serve(core: EngineCore, asked: dict[str, TimedRequest]) -> Bits:
    """Every logit that was sampled from. One that is computed twice must be the same twice."""
    bits: Bits = {}
    runner = core._stepper._runner
    sample = runner._sampler

    def note(logits: Tensor, rows: list[SampleRow]) -> Any:
        for row, values in zip(rows, logits.clone(), strict=True):
            text = (row.seq.token_ids + row.drafts)[len(row.seq.prompt_token_ids) :]
            said.setdefault((row.seq.request_id, row.num_output_tokens), {})[tuple(text)] = values
        return sample(logits, rows)

    said: dict[tuple[str, int], dict[tuple[int, ...], Tensor]] = {}
    runner._sampler = note  # type: ignore[assignment]
    texts: dict[str, list[int]] = {name: [] for name in asked}
    waiting, steps = dict(asked), 0
    try:
        while waiting or core.has_work():
            for name in [name for name, one in waiting.items() if one.arrives <= steps]:
                one = waiting.pop(name)
                sampling = SamplingParams(
                    max_tokens=one.num_tokens, temperature=0.0, ignore_eos=True
                )
                core.add(
                    EngineRequest(request_id=name, prompt_token_ids=one.prompt, sampling=sampling)
                )
            for output in core.step():
                assert output.finish_reason in (None, "length")
                texts[output.request_id] += output.token_ids
            steps += 1
    finally:
        runner._sampler = sample
    core.check_integrity()
    for (name, count), by_text in said.items():  # behind a wrong guess nobody goes on
        found = by_text.get(tuple(texts[name][:count]))
        if found is not None:
            bits[name, count] = found
    assert len(bits) == sum(one.num_tokens for one in asked.values())
    return bits


def alone(core: EngineCore, asked: dict[str, TimedRequest]) -> Bits:
    bits: Bits = {}
    for name, one in asked.items():
        bits |= serve(core, {name: TimedRequest(one.prompt, one.num_tokens, 0)})
    return bits


def differences(one: Bits, other: Bits) -> list[tuple[str, int]]:
    assert one.keys() == other.keys()
    return [key for key in one if not torch.equal(one[key], other[key])]


def draw(seed: int, count: int = 6) -> dict[str, TimedRequest]:
    """Short prompts and long answers, and prompts that begin alike; some repeat themselves, so that
    there is something to guess."""
    rng = random.Random(seed)
    common = [rng.randrange(3, VOCAB) for _ in range(20)]
    asked = {}
    for i in range(count):
        own = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 30))]
        if i % 3 == 1:
            own = own[:4] * 6
        if i % 2:
            asked[f"r{i}"] = TimedRequest(common + own, rng.randint(1, 6), rng.randint(0, 3))
        else:
            asked[f"r{i}"] = TimedRequest(own[:12], rng.randint(16, 24), rng.randint(0, 3))
    return asked


SLOWDOWN = 4.0
"""How much longer a step takes that verifies guesses: they are given up where few are right."""
SMALL: dict[str, Any] = {"num_blocks": 6, "max_model_len": 72}
"""Two sequences begin and cannot both end."""
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float32": ({}, {}),
    "bfloat16": ({}, {"dtype": "bfloat16"}),
    "float16": ({}, {"dtype": "float16"}),
    "window": (WINDOW, {"dtype": "bfloat16"}),
    "odd": (WINDOW | ODD, {}),
    "head_norms": (QWEN3, {"dtype": "bfloat16"}),
    "experts": (EXPERTS, {"dtype": "bfloat16"}),
    "int8": ({}, {"dtype": "bfloat16", "quantization": "int8"}),
    "fp8_cache": ({}, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
}


@pytest.mark.parametrize(
    "case, library",
    [(case, "kernels") for case in CASES] + [("float32", "library"), ("bfloat16", "library")],
    indirect=["library"],
)
def test_alone_and_in_any_batch(
    case: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunked, beside others, found in the prefix cache, preempted and recomputed, verified as a
    guess: always the bits of a request that had the engine to itself, its prompt in one step."""
    # It is measured, and what is guessed decides who is preempted.
    monkeypatch.setattr(Worth, "slowdown", lambda *_: SLOWDOWN)
    changes, options = CASES[case]
    asked = draw(3)
    expected = alone(start(tmp_path, changes, prefix_caching=False, **options), asked)
    core = start(tmp_path, changes, max_num_batched_tokens=24, max_num_seqs=5, **options)
    assert differences(serve(core, asked), expected) == []
    assert differences(serve(core, asked), expected) == []
    assert core.status().prefix_cache_hit_tokens > 0
    core = start(tmp_path, changes, speculative="ngram", **SMALL, **options)
    assert differences(serve(core, asked), expected) == []
    assert core.status().num_preemptions > 0
    guesser = core._stepper._guesser
    assert guesser is not None and guesser.num_guessed > 0


def test_verified_as_a_draft(tmp_path: Path) -> None:
    """The draft model itself is not deterministic."""
    asked = draw(3)
    options: dict[str, Any] = {"dtype": "bfloat16"}
    expected = alone(start(tmp_path, {}, prefix_caching=False, **options), asked)
    core = start(tmp_path, {}, speculative="draft", draft_model=tmp_path, **SMALL, **options)
    assert differences(serve(core, asked), expected) == []
    guesser = core._stepper._guesser
    assert guesser is not None and guesser.num_guessed > 0


@settings(
    max_examples=examples(6),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 7),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    changes=st.sampled_from([{}, WINDOW, ODD, EXPERTS]),
    budget=st.integers(5, 100),
    num_blocks=st.integers(8, 40),
    caching=st.booleans(),
    speculative=st.sampled_from(["off", "ngram"]),
)
def test_whatever_the_batch(
    tmp_path: Path,
    seed: int,
    count: int,
    dtype: str,
    changes: dict[str, Any],
    budget: int,
    num_blocks: int,
    caching: bool,
    speculative: str,
) -> None:
    asked = draw(seed, count)
    expected = alone(start(tmp_path, changes, dtype=dtype), asked)
    core = start(
        tmp_path,
        changes,
        dtype=dtype,
        max_num_batched_tokens=budget,
        max_num_seqs=min(budget, 6),
        num_blocks=num_blocks,
        max_model_len=72,
        prefix_caching=caching,
        speculative=speculative,
    )
    assert differences(serve(core, asked), expected) == []


def test_without_it_the_batch_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library's own products: so the tests above have something to see."""
    monkeypatch.setattr(cpu_backend, "_team", lambda: None)
    asked = draw(1)
    core = start(tmp_path, {}, deterministic=False)
    expected = alone(core, asked)
    core = start(tmp_path, {}, deterministic=False, max_num_batched_tokens=24)
    assert differences(serve(core, asked), expected) != []


def close(found: Bits, expected: Bits, names: Callable[[str], bool] = bool) -> float:
    """Largest relative error (L2) of the first logits."""
    firsts = [key for key in expected if key[1] == 0 and names(key[0])]
    return max(float((found[key] - expected[key]).norm() / expected[key].norm()) for key in firsts)


@pytest.mark.parametrize("changes", [{}, WINDOW | ODD], ids=["kernels", "odd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_it_computes_the_same_function(
    changes: dict[str, Any], dtype: str, kv_cache_dtype: str, tmp_path: Path
) -> None:
    """As the default does in float32: to its rounding, and to that of the cache."""
    asked = draw(4)
    exact = alone(start(tmp_path, changes, deterministic=False), asked)
    options: dict[str, Any] = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    tolerance = 0.12 if kv_cache_dtype == "fp8" else 1e-5 if dtype == "float32" else 0.04
    for invariant in (False, True):
        core = start(tmp_path, changes, deterministic=invariant, **options)
        assert close(alone(core, asked), exact) < tolerance
    if kv_cache_dtype == "fp8":
        plain = start(tmp_path, changes, dtype=dtype)
        stored = 2 if dtype == "bfloat16" else 4
        assert core.resolved.kv_bytes_per_token * stored == plain.resolved.kv_bytes_per_token


def test_cuda_without_float8_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from engine.runner.memory import kv_cache

    model = start(tmp_path, {})._stepper._runner._model
    monkeypatch.setattr(kv_cache, "reads_fp8", lambda device: False)
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    with pytest.raises(ConfigError, match="kv_cache_dtype is fp8"):
        kv_cache.attention_shape(model, 16, cache_dtype="fp8")


def parts(num_rows: int) -> list[slice]:
    """Rows at the front, in the middle and at the end; alone, few and all but one."""
    counts = (1, 2, 3, 7, 16, 17, num_rows - 1)
    return [slice(a, a + n) for n in counts for a in (0, 1, 5, num_rows - n) if a + n <= num_rows]


def varying(operation: Callable[[slice], Tensor], num_rows: int) -> list[slice]:
    whole = operation(slice(0, num_rows))
    return [rows for rows in parts(num_rows) if not torch.equal(operation(rows), whole[rows])]


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(64, 1536), (211, 64), (70, 33), (5, 40), (576, 192)])
def test_products_of_a_row(dtype: torch.dtype, size: tuple[int, int], library: str) -> None:
    """Its place, its neighbours and their number leave no trace; nor do the forms of a weight."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(41, size[1]), torch.randn(size), torch.randn(size[0]).to(dtype)
    x, weight = x.to(dtype), weight.to(dtype)
    forms: list[Tensor | LinearWeight] = [weight, quantise_int8(weight), quantise_fp8(weight)]
    for product in [pack_linear(form, bias, deterministic=True) for form in forms]:
        assert varying(lambda rows, product=product: product(x[rows]), len(x)) == []  # type: ignore[misc]
        assert product(x[:0]).shape == (0, size[0])
    one, exact = pack_linear(weight, bias, deterministic=True)(x), x.double() @ weight.double().t()
    exact += bias.double()
    assert (one - exact).norm() / exact.norm() < (1e-5 if dtype == torch.float32 else 8e-3)
    spoiled = x.clone()
    spoiled[1::2] *= 1e4
    assert torch.equal(product(spoiled)[::2], product(x)[::2])


def test_a_tile_is_all_that_the_library_sees() -> None:
    seen = []

    def product(tile: Tensor) -> Tensor:
        seen.append(tuple(tile.shape))
        return tile * 2

    x = torch.randn(27, 4)
    assert torch.equal(in_tiles(product)(x), x * 2)
    assert seen == [(TILE_ROWS, 4)] * 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [35, 41, 96, 1001])
def test_what_is_done_row_by_row(dtype: torch.dtype, size: int, library: str) -> None:
    torch.manual_seed(0)
    count = 2001  # enough for torch to share the work out
    x, delta, weight = (torch.randn(count, 2 * size).to(dtype) for _ in range(3))
    assert varying(lambda rows: swiglu(x[rows], deterministic=True), count) == []
    weight = weight[0]
    assert varying(lambda rows: rms_norm(x[rows].clone(), weight, 1e-5), count) == []
    added = varying(lambda rows: add_rms_norm(delta[rows], x[rows].clone(), weight, 1e-5), count)
    assert added == []
    positions = torch.randint(0, 9000, (count,))
    rotary = RotaryEmbedding(torch.rand(size), dtype, 9000, deterministic=True)
    heads = torch.randn(count, 3, 2 * size).to(dtype)

    def turned(rows: slice) -> Tensor:
        return rotate(heads[rows].clone(), rotary(positions[rows]))

    assert varying(turned, count) == []


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_of_a_token(dtype: torch.dtype, library: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(41, 64).to(dtype)
    gate_up = [quantise_int8(torch.randn(80, 64).to(dtype) / 8) for _ in range(5)]
    down = [quantise_int8(torch.randn(64, 40).to(dtype) / 6) for _ in range(5)]
    router = pack_linear(torch.randn(5, 64).to(dtype), None, deterministic=True)
    experts = pack_experts(gate_up, down, deterministic=True)
    assert varying(lambda r: experts(x[r], *route(router(x[r]), 3, normalise=True)), 41) == []


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters_of_a_row(dtype: torch.dtype, library: str) -> None:
    torch.manual_seed(0)
    num_rows, sizes = 41, (64, 32)
    x, base = torch.randn(num_rows, 1536).to(dtype), torch.randn(num_rows, 96).to(dtype)
    pairs = [[(torch.randn(5, 1536) / 39, torch.randn(n, 5)) for n in sizes] for _ in range(2)]
    plain = stack_adapters(pairs, sizes, x[:0, 0])
    slots = torch.randint(NOBODY, 2, (num_rows,)).tolist()

    def added(stack: LoraStack, rows: slice) -> Tensor:
        batch, y = LoraRows(CPU, 2), base[rows].clone()
        batch.assign([(slot, 1) for slot in slots[rows]])
        add_lora(y, x[rows], stack, batch)
        return y

    stack = deterministic(plain)
    assert varying(lambda rows: added(stack, rows), num_rows) == []
    everything = slice(0, num_rows)
    found, expected = added(stack, everything).float(), added(plain, everything).float()
    assert (found - expected).norm() / expected.norm() < (1e-5 if dtype == torch.float32 else 8e-3)
