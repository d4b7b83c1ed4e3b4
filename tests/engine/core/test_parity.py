"""Right first: for every family the engine says what `transformers` says, token for token in
float32, whatever the chunks, the cache, the batch and the memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.config import BLOCK_SIZE, EngineConfig
from engine.core.engine_core import EngineCore
from engine.fairness import LANE_WEIGHTS
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.prefix_cache import PrefixCache
from engine.layers.parallel import SINGLE_RANK
from engine.protocol import EngineOutput, EngineRequest, SamplingParams
from engine.runner.memory.kv_cache import allocate_kv_cache, attention_shape
from engine.runner.model_runner import ModelRunner
from engine.scheduling.scheduler import Scheduler
from engine.weights.loader import load_model
from tests.budget import examples, pairs
from tests.engine import checkpoints

NUM_TOKENS = 24
TOLERANCE = 1e-4

SETTINGS: dict[str, dict[str, Any]] = {
    "whole prompts": {"max_num_batched_tokens": 2048},
    "chunks": {"max_num_batched_tokens": 24},
    "chunks, nothing cached": {"max_num_batched_tokens": 24, "prefix_caching": False},
    "preempted": {"max_num_batched_tokens": 64, "num_blocks": 9},
    "preempted, nothing cached": {"num_blocks": 9, "prefix_caching": False},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=sorted(checkpoints.MODELS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: checkpoints.save(name, tmp_path_factory.mktemp(name)) for name in checkpoints.MODELS
    }


@cache
def prompts() -> list[list[int]]:
    """17, from one token to several blocks; some share their first 48 tokens."""
    rng = random.Random(17)
    shared = [rng.randrange(checkpoints.VOCAB) for _ in range(48)]
    lengths = [1, 2, 15, 16, 17, 31, 33, 64, 90, 5, 77]
    own = [[rng.randrange(checkpoints.VOCAB) for _ in range(n)] for n in lengths]
    return own + [shared + own[i][:20] for i in range(6)]


def start(folder: Path, **changes: Any) -> EngineCore:
    options: dict[str, Any] = {"num_blocks": 400, "dtype": "float32"}
    return EngineCore(EngineConfig(model=folder, **(options | changes)))


def run(core: EngineCore, requests: Sequence[EngineRequest]) -> dict[str, list[EngineOutput]]:
    """Add all at once and step until all is said; blocks are accounted for after every step."""
    outputs: dict[str, list[EngineOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        core.add(request)
    while core.has_work():
        for output in core.step():
            outputs[output.request_id].append(output)
        core.check_integrity()
    assert all(out[-1].finished and out[-1].error_code is None for out in outputs.values())
    return outputs


def text(outputs: Sequence[EngineOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def greedy(request_id: int, prompt: list[int], max_tokens: int = NUM_TOKENS) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(request_id=str(request_id), prompt_token_ids=prompt, sampling=sampling)


@pytest.mark.parametrize(
    ("name", "setting"),
    pairs(sorted(checkpoints.MODELS), list(SETTINGS), each=1),
    indirect=["name"],
)
def test_a_batch_of_17_continues_as_transformers_does(
    name: str, folders: dict[str, Path], setting: str
) -> None:
    core = start(folders[name], **SETTINGS[setting])
    outputs = run(core, [greedy(i, prompt) for i, prompt in enumerate(prompts())])
    for i, prompt in enumerate(prompts()):
        continued = text(outputs[str(i)])
        assert len(continued) == NUM_TOKENS
        assert continued == checkpoints.repeat(name, prompt, continued)
    assert (core.status().num_preemptions > 0) == setting.startswith("preempted")
    assert core.status().num_free_blocks == core.resolved.num_blocks
    said = {token_id for out in outputs.values() for token_id in text(out)}
    assert len(said) > checkpoints.VOCAB / 3, "the reference text is degenerate"


def test_alone_and_then_from_the_cache(name: str, folders: dict[str, Path]) -> None:
    core = start(folders[name], max_num_batched_tokens=48)
    for repetition in range(2):
        for i, prompt in enumerate(prompts()[4:9], start=4):
            outputs = run(core, [greedy(i, prompt)])[str(i)]
            assert text(outputs) == checkpoints.repeat(name, prompt, text(outputs))
            assert len(text(outputs)) == NUM_TOKENS
            cached = outputs[-1].usage.cached_tokens
            full_blocks = (len(prompt) - 1) // BLOCK_SIZE
            assert cached == (full_blocks * BLOCK_SIZE if repetition else 0)


def test_logits_agree(name: str, folders: dict[str, Path]) -> None:
    """At every sampled position of a chunked, mixed batch; and no key or value that a sequence does
    not own is ever touched, for the memory starts as NaN."""
    model = load_model(folders[name], dtype="float32", device=torch.device("cpu"))
    assert model.group is SINGLE_RANK
    shape = attention_shape(model, BLOCK_SIZE)
    kv = allocate_kv_cache(shape, model.config.num_layers, 100)
    for layer in kv:
        layer.k.fill_(torch.nan)
        layer.v.fill_(torch.nan)
    runner = ModelRunner(model, kv, shape, eos_token_ids=frozenset())
    scheduler = start_scheduler(model.config.sliding_window)
    for i, prompt in enumerate(prompts()):
        scheduler.add(greedy(i, prompt, max_tokens=6))
    sampled: dict[str, list[tuple[Any, int, torch.Tensor]]] = {}
    while scheduler.has_unfinished():
        output = scheduler.schedule()
        rows, logits = runner.logits(output)
        seqs = [row.seq for row in rows]
        for seq, row in zip(seqs, logits, strict=True):
            sampled.setdefault(seq.request_id, []).append((seq, len(seq.token_ids), row.clone()))
        chosen = logits.argmax(dim=-1).tolist()
        scheduler.update(
            output,
            {(s.request_id, s.index): [(t, None)] for s, t in zip(seqs, chosen, strict=True)},
        )
    assert len(sampled) == len(prompts())
    for seen in sampled.values():
        assert len(seen) == 6
        reference = checkpoints.logits(name, seen[-1][0].token_ids)
        for _, length, row in seen:
            torch.testing.assert_close(row, reference[length - 1], rtol=0, atol=TOLERANCE)


def start_scheduler(sliding_window: int | None) -> Scheduler:
    return Scheduler(
        cache=PrefixCache(BlockPool(100), BLOCK_SIZE, sliding_window=sliding_window),
        max_num_batched_tokens=24,
        max_num_seqs=8,
        max_waiting=dict.fromkeys(LANE_WEIGHTS, 100),
        max_model_len=512,
        vocab_size=checkpoints.VOCAB,
        eos_token_ids=(),
    )


def test_a_long_text_through_a_small_window(folders: dict[str, Path]) -> None:
    """300 tokens in the blocks of one window and one chunk."""
    chunk = 16
    core = start(folders["mistral_window"], max_num_batched_tokens=chunk, num_blocks=4)
    assert core.resolved.max_model_len == 512, "a window needs no more blocks for longer texts"
    prompt = prompts()[8]
    outputs = run(core, [greedy(0, prompt, 300), greedy(1, prompt[:50], 300)])
    for i, length in ((0, len(prompt)), (1, 50)):
        said = text(outputs[str(i)])
        assert len(said) == 300
        assert said == checkpoints.repeat("mistral_window", prompt[:length], said)


@given(data=st.data())
@settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck))
def test_cached_text_equals_uncached_text(folders: dict[str, Path], data: st.DataObject) -> None:
    """Prompts that share prefixes of any length, in any number of rounds."""
    stem = prompts()[8]
    rounds = data.draw(
        st.lists(
            st.lists(
                st.tuples(st.integers(1, 80), st.integers(0, 12), st.sampled_from(["", "a"])),
                min_size=1,
                max_size=4,
            ),
            min_size=1,
            max_size=3,
        )
    )
    chunk = data.draw(st.sampled_from([7, 32, 256]))
    core = start(folders["qwen3"], max_num_batched_tokens=chunk, num_blocks=30, max_model_len=256)
    for requests in rounds:
        asked = [
            EngineRequest(
                request_id=str(i),
                prompt_token_ids=stem[:shared] + [3 + i] * own,
                sampling=SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
                cache_salt=salt,
            )
            for i, (shared, own, salt) in enumerate(requests)
        ]
        outputs = run(core, asked)
        for request in asked:
            assert text(outputs[request.request_id]) == uncached(
                folders["qwen3"], tuple(request.prompt_token_ids)
            )


@cache
def uncached(folder: Path, prompt: tuple[int, ...]) -> list[int]:
    return text(run(_uncached_core(folder), [greedy(0, list(prompt), 8)])["0"])


@cache
def _uncached_core(folder: Path) -> EngineCore:
    return start(folder, prefix_caching=False)


SAMPLINGS = st.builds(
    SamplingParams,
    max_tokens=st.just(10),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.5, 0.95, 1.0]),
    top_k=st.sampled_from([0, 3, 40]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 2**63 - 1),
    ignore_eos=st.just(True),
)


@given(
    samplings=st.lists(SAMPLINGS, min_size=2, max_size=6),
    chunk=st.sampled_from([8, 64]),
    n=st.integers(1, 3),
)
@example(
    samplings=[SamplingParams(max_tokens=10, temperature=1.0, top_p=0.5, seed=0, ignore_eos=True)]
    * 6,
    chunk=8,
    n=3,
)
@settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck))
def test_the_same_seed_says_the_same_whatever_else_is_in_the_batch(
    folders: dict[str, Path], samplings: list[SamplingParams], chunk: int, n: int
) -> None:
    requests = [
        EngineRequest(request_id=str(i), prompt_token_ids=prompts()[i + 3], sampling=sampling, n=n)
        for i, sampling in enumerate(samplings)
    ]
    # Else a sum may round otherwise in another batch, and a draw beside a bound fall behind it.
    exact: Any = {"deterministic": True}
    together = run(start(folders["llama3"], max_num_batched_tokens=chunk, **exact), requests)
    by_itself = start(folders["llama3"], prefix_caching=False, **exact)
    for request in requests:
        alone = run(by_itself, [request])[request.request_id]
        for index in range(n):
            assert text([o for o in alone if o.index == index]) == text(
                [o for o in together[request.request_id] if o.index == index]
            )
