"""Engines against themselves, and against the same engine on the processor: random weights, so that
nothing is needed but the repository.

Knows no kernel; `check_engine.py` has the checks against `transformers`.

In float32 a text is the same however it was computed: texts are compared. Where keys and values are
rounded, log-probabilities are, as far as the texts go together.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from bench.gpu.engines import (
    EngineAnswer,
    EngineSwitches,
    answers,
    ask,
    configuration,
    engine,
    without_graphs,
)
from bench.gpu.findings import Check, Finding, Lacking
from bench.gpu.models import write_config
from bench.gpu.place import Place
from engine.core import engine_core
from engine.kernels import backend
from engine.protocol import EngineRequest, Grammar, SamplingParams
from engine.runner.memory import step_memory

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
PENNY = Path(__file__).resolve().parents[3] / "models" / "penny"
EXACT_LIMIT = 2e-4
"""The tolerance of a float32 log-probability: sums in another order."""
HALF_LIMIT = 0.15
"""The tolerance of the mean over all tokens in bfloat16."""
TINY_LIMIT = 2e-2
"""The tolerance of a float16 log-probability."""
ROUNDED_LIMIT = 2e-2
"""The tolerance of the mean if keys and values are float8 on both sides: a value between two float8
numbers may round to either, and is then 6% off."""
WIDTH_LIMIT = 0.3
"""The same against keys and values that are not rounded; and in the interpreter, which loses a
carry into the exponent where it rounds to float8."""
VECTOR_LIMIT = 1e-4
"""The tolerance of an embedding of unit length."""
AGAIN = dict.fromkeys((7, 8, 9), 100.0)
REGEX = "[a-c]{2,5}(-[0-9]{1,3}){1,2}"
DUMMY = {"load_format": "dummy"}


def _run(
    place: Place, folder: Path, asked: EngineSwitches | None = None, **fields: Any
) -> list[EngineAnswer]:
    return answers(place, folder, asked or EngineSwitches(), **(DUMMY | fields))


def _repeating(place: Place) -> list[list[int]]:
    """Answers, which are of the same tokens (`AGAIN`), have something to be guessed from."""
    return [[7, 8, 9] * n for n in place.pick((40, 3, 17), (4,))]


def _texts(ours: Sequence[EngineAnswer], theirs: Sequence[EngineAnswer]) -> Finding:
    wrong = sum(a.token_ids != b.token_ids for a, b in zip(ours, theirs, strict=True))
    return Finding("texts", float(wrong), 0.0)


def _apart(ours: Sequence[EngineAnswer], theirs: Sequence[EngineAnswer], most: int) -> float:
    """Mean difference of the log-probabilities of the first `most` tokens, as far as they are the
    same: behind another token nothing can be compared."""
    differences = []
    for a, b in zip(ours, theirs, strict=True):
        for i in range(min(most, len(a.token_ids))):
            if a.token_ids[: i + 1] != b.token_ids[: i + 1]:
                break
            differences.append(abs(a.logprobs[i] - b.logprobs[i]))
    return sum(differences) / len(differences) if differences else math.inf


def _same(
    place: Place, case: str, ours: Sequence[EngineAnswer], theirs: Sequence[EngineAnswer]
) -> Finding:
    """Texts and log-probabilities, bit for bit. In the interpreter products are the host's, whose
    sums depend on a row's place: there within rounding."""
    pairs = list(zip(ours, theirs, strict=True))
    if place.tiny:
        texts = [(x, y) for a, b in pairs for x, y in zip(a.logprobs, b.logprobs, strict=True)]
        return Finding(case, max(abs(x - y) for x, y in texts), TINY_LIMIT)
    wrong = sum((a.token_ids, a.logprobs) != (b.token_ids, b.logprobs) for a, b in pairs)
    return Finding(case, float(wrong), 0.0)


@contextmanager
def _on_the_processor(place: Place) -> Iterator[dict[str, Any]]:
    """Engines that are built inside, with these fields, know no Triton."""
    if not place.tiny:
        yield {"device": "cpu"}
        return
    with mock.patch.object(backend, "interpreted", lambda: False):
        yield {"device": "cpu"}


def run_ahead(place: Place, folder: Path) -> Iterator[Finding]:
    """Scheduling a step ahead changes no text; batches differ, so only float32 is equal."""
    texts = [_run(place, folder, dtype="float32", run_ahead=ahead) for ahead in (True, False)]
    yield _texts(*texts)


def graphs(place: Place, folder: Path) -> Iterator[Finding]:
    """The same kernels, launched one by one or replayed. Padding a batch changes which product
    cuBLAS takes: in float32 texts stay, in half precision log-probabilities stay near."""
    for dtype in place.pick(("float32", "bfloat16"), ("float32",)):
        on = _run(place, folder, dtype=dtype, run_ahead=False)
        with without_graphs():
            off = _run(place, folder, dtype=dtype, run_ahead=False)
        if dtype == "float32":
            yield _texts(on, off)
        limit = EXACT_LIMIT if dtype == "float32" else HALF_LIMIT
        # Behind the first tokens the texts may part.
        yield Finding(f"{dtype} log-probabilities, mean", _apart(on, off, 2), limit)


def deterministic(place: Place, folder: Path) -> Iterator[Finding]:
    """Alone, among others, in other chunks, and preempted: the same bits."""
    half = place.pick("bfloat16", "float16")

    def run(**fields: Any) -> list[EngineAnswer]:
        return _run(place, folder, EngineSwitches(deterministic=True), dtype=half, **fields)

    together = run()
    yield _same(place, "in other chunks", run(max_num_batched_tokens=17), together)
    yield _same(place, "one at a time", run(max_num_seqs=1), together)
    yield _same(place, "preempted", run(num_blocks=place.pick(16, 4)), together)


def on_the_processor(place: Place, folder: Path) -> Iterator[Finding]:
    """Two implementations with not one kernel in common."""
    ours = _run(place, folder, dtype="float32")
    with _on_the_processor(place) as fields:
        theirs = _run(place, folder, dtype="float32", **fields)
    yield _texts(ours, theirs)
    yield Finding("log-probabilities, mean", _apart(ours, theirs, 40), EXACT_LIMIT)


def fp8_kv(place: Place, folder: Path) -> Iterator[Finding]:
    """A float8 cache, against the processor's; and it is no cache of full width."""
    ours = _run(place, folder, EngineSwitches(fp8_kv=True), dtype="float32")
    with _on_the_processor(place) as fields:
        theirs = _run(place, folder, EngineSwitches(fp8_kv=True), dtype="float32", **fields)
        full = _run(place, folder, dtype="float32", **fields)
    limit = place.pick(ROUNDED_LIMIT, WIDTH_LIMIT)
    yield Finding("log-probabilities, mean", _apart(ours, theirs, 4), limit)
    rounding = _apart(ours, full, 4)
    yield Finding("of full width, mean", rounding, WIDTH_LIMIT)
    yield Finding("is rounded", float(rounding == 0.0), 0.0)


def speculation(kind: str, place: Place, folder: Path) -> Iterator[Finding]:
    """Guesses, of whatever worth, change no text; a model's guesses of itself are right."""
    given: dict[str, Any] = {"speculative": kind, "num_draft_tokens": 3, "run_ahead": False}
    if kind == "draft":
        given["draft_model"] = folder
    config = {"model": folder, "dtype": "float32", "num_blocks": 128, "itl_target_s": 0.0, **DUMMY}
    config |= {"max_num_batched_tokens": 64, "max_num_seqs": 8, "device": place.device.type}
    texts = []
    for fields in (given, {"run_ahead": False}):
        with engine(configuration(EngineSwitches(), **(config | fields))) as core:
            texts.append(ask(core, _repeating(place), place.pick(40, 8), logit_bias=AGAIN))
            status = core.status()
        if fields is given:
            guessed, right = status.num_draft_tokens, status.num_accepted_tokens
            yield Finding("nothing was guessed", float(guessed == 0), 0.0)
            if kind == "draft":
                yield Finding("part of guesses that is wrong", 1 - right / max(1, guessed), 0.05)
    yield _texts(*texts)


def embeddings(place: Place, folder: Path) -> Iterator[Finding]:
    """Beside texts, cut into chunks, against the processor's."""
    ours = _embedded(place, folder, "auto" if place.device.type == "cuda" else "cpu")
    with _on_the_processor(place):
        theirs = _embedded(place, folder, "cpu")
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        yield Finding(f"prompt {number}", float(np.linalg.norm(a - b)), VECTOR_LIMIT)


def _embedded(place: Place, folder: Path, device: str) -> list[np.ndarray[Any, Any]]:
    config = configuration(
        EngineSwitches(), model=folder, dtype="float32", device=device, num_blocks=64,
        max_num_batched_tokens=24, itl_target_s=0.0, **DUMMY,
    )  # fmt: skip
    prompts = [[3 + (7 * i) % 190 for i in range(n)] for n in place.pick((130, 5, 31), (29, 5))]
    found: dict[str, np.ndarray[Any, Any]] = {}
    with engine(config) as core:
        sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        core.add(EngineRequest(request_id="text", prompt_token_ids=prompts[0], sampling=sampling))
        for number, prompt in enumerate(prompts):
            core.add(EngineRequest(request_id=str(number), prompt_token_ids=prompt, embed=True))
        while core.has_work():
            for output in core.step():
                if output.embedding is not None:
                    found[output.request_id] = np.frombuffer(output.embedding, "<f4").astype(float)
    return [found[str(number)] for number in range(len(prompts))]


def grammar(place: Place, folder: Path) -> Iterator[Finding]:
    """Check that what is said behind a grammar is of it, alone and behind guesses, at any
    temperature.
    """
    if find_spec("llguidance") is None:
        raise Lacking("llguidance is not installed")
    from engine.text.tokenizer import Tokenizer

    shutil.copy(PENNY / "tokenizer.json", folder / "tokenizer.json")
    vocab_size = json.loads((PENNY / "config.json").read_text())["vocab_size"]
    write_config(MODEL | {"vocab_size": vocab_size}, folder)
    tokenizer = Tokenizer.load(PENNY)
    for guessing in place.pick(("off", "ngram"), ("ngram",)):
        config = configuration(
            EngineSwitches(), model=folder, dtype="float32", device=place.device.type,
            num_blocks=64, max_model_len=128, speculative=guessing, **DUMMY,
        )  # fmt: skip
        with engine(config) as core:
            said = ask(
                core, [[5, 6, 7]] * place.pick(6, 2), 40, grammar=Grammar(kind="regex", text=REGEX),
                temperature=1.0, seed=4, ignore_eos=False,
            )  # fmt: skip
        texts = [tokenizer.decode([t for t in a.token_ids if t > 2]) for a in said]
        wrong = sum(re.fullmatch(REGEX, text) is None for text in texts)
        yield Finding(f"guesses {guessing}", float(wrong), 0.0)


def memory(place: Place, folder: Path) -> Iterator[Finding]:
    """The largest steps take no more than was left for them when the KV cache was sized. Where the
    allocator is not CUDA's nothing is counted, and the check is tried alone."""
    taken, estimates, estimate = list[int](), list[int](), step_memory.largest_step_bytes

    def watched(*args: Any, **options: Any) -> int:
        estimates.append(estimate(*args, **options))
        taken.append(_allocated(place))
        return estimates[-1]

    tokens, seqs = place.pick((2048, 128), (32, 4))
    config = configuration(
        EngineSwitches(), model=folder, dtype="float32", device=place.device.type, itl_target_s=0.0,
        num_blocks=place.pick(2048, 64), max_num_batched_tokens=tokens, max_num_seqs=seqs, **DUMMY,
    )  # fmt: skip
    with mock.patch.object(engine_core, "largest_step_bytes", watched), engine(config) as core:
        cache = core.resolved.num_blocks * core.resolved.block_size
        cache *= core.resolved.kv_bytes_per_token
        if place.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(place.device)
        prompts = [[3 + (i + n) % 190 for i in range(tokens // 8)] for n in range(seqs)]
        params: dict[str, Any] = {
            "temperature": 0.9,
            "top_p": 0.9,
            "repetition_penalty": 1.2,
            "seed": 1,
        }
        ask(core, prompts, place.pick(8, 2), logprobs=5, **params)
        peak = 0
        if place.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(place.device)
    over = max(0, peak - taken[0] - cache - estimates[0])
    yield Finding(f"bytes beyond {estimates[0]:,}", float(over), 0.0)


def _allocated(place: Place) -> int:
    return torch.cuda.memory_allocated(place.device) if place.device.type == "cuda" else 0


def _on_random_weights(check: Callable[[Place, Path], Iterator[Finding]]) -> Check:
    def run(place: Place) -> Iterator[Finding]:
        with tempfile.TemporaryDirectory() as name:
            yield from check(place, write_config(MODEL, Path(name)))

    return run


BUILT: dict[str, Callable[[Place, Path], Iterator[Finding]]] = {
    "run ahead": run_ahead,
    "graphs on and off": graphs,
    "deterministic": deterministic,
    "as on the processor": on_the_processor,
    "fp8 KV": fp8_kv,
    "n-gram speculation": partial(speculation, "ngram"),
    "draft speculation": partial(speculation, "draft"),
    "embeddings": embeddings,
    "grammar": grammar,
    "memory": memory,
}
CHECKS: dict[str, Check] = {
    f"engine: {name}": _on_random_weights(check) for name, check in BUILT.items()
}
