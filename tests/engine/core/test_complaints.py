"""Checks what users of other engines complain of, as far as it is the engine's: one test each.

Others stand where their part is: long prefills that stall decodes and short prompts behind long
ones (`test_scheduler.py`, `test_pace.py`), preempted requests that lose their place
(`test_scheduler.py`), characters cut between tokens (`test_detokenizer.py`), memory mis-estimated
at the start (`test_start.py`), health that is green on a dead engine (`tests/chaos/`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.protocol import EngineOutput, EngineRequest, Grammar, SamplingParams, TokenLogprobs
from engine.text.tokenizer import Tokenizer
from tests.engine import checkpoints


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: checkpoints.save(name, tmp_path_factory.mktemp(name))
        for name in ("llama3", "mistral_window")
    }


def start(folder: Path, **changes: Any) -> EngineCore:
    options: dict[str, Any] = {"num_blocks": 64, "dtype": "float32", "max_model_len": 160}
    return EngineCore(EngineConfig(model=folder, **(options | changes)))


def request(name: str, prompt: list[int], *, n: int = 1, salt: str = "", **sampling: Any) -> Any:
    params = SamplingParams(**({"max_tokens": 12, "temperature": 0.0} | sampling))
    return EngineRequest(
        request_id=name, prompt_token_ids=prompt, sampling=params, n=n, cache_salt=salt
    )


def finish(core: EngineCore) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while core.has_work():
        outputs += core.step()
    core.check_integrity()
    assert core.status().num_free_blocks == core.resolved.num_blocks
    return outputs


def said(outputs: list[EngineOutput]) -> dict[tuple[str, int], list[int]]:
    texts: dict[tuple[str, int], list[int]] = {}
    for output in outputs:
        texts.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    return texts


def traffic(seed: int) -> list[EngineRequest]:
    rng = random.Random(seed)
    shared = [rng.randrange(3, 90) for _ in range(48)]
    return [
        request(
            f"r{i}",
            shared[: rng.randrange(1, 48)]
            + [rng.randrange(3, 90) for _ in range(rng.randrange(60))],
            n=rng.choice([1, 1, 2]),
            salt=rng.choice(["", "b"]),
            max_tokens=rng.randrange(1, 40),
            temperature=rng.choice([0.0, 0.8]),
            seed=i,
            ignore_eos=True,
        )
        for i in range(16)
    ]


@pytest.mark.parametrize("name", ["llama3", "mistral_window"])
@pytest.mark.parametrize("options", [{}, {"run_ahead": True}, {"speculative": "ngram"}], ids=str)
def test_no_block_is_read_after_it_was_freed(
    folders: dict[str, Path], name: str, options: dict[str, Any]
) -> None:
    """Few blocks, preemptions, shared prefixes, windows, aborts: with every freed block overwritten
    by NaN, all texts are the same. NaN would end a request with an error."""
    few: dict[str, Any] = {"num_blocks": 12, "max_num_batched_tokens": 40} | options
    texts = []
    for poison in (False, True):
        core = start(folders[name], **few, poison_freed_blocks=poison)
        outputs: list[EngineOutput] = []
        for i, asked in enumerate(traffic(5)):
            core.add(asked)
            outputs += core.step()
            if i % 5 == 4:
                core.abort(f"r{i - 2}")
        outputs += finish(core)
        assert all(output.error_code is None for output in outputs)
        aborted = {"r2", "r7", "r12"}
        texts.append({k: v for k, v in said(outputs).items() if k[0] not in aborted})
        assert name == "mistral_window" or core.status().num_preemptions > 0
    assert texts[0] == texts[1]


def test_the_poison_would_show(folders: dict[str, Path]) -> None:
    """A block that is freed too early ends its request with an error: the debug mode can fail."""
    core = start(folders["llama3"], poison_freed_blocks=True)
    core.add(request("r", list(range(3, 60)), max_tokens=30, ignore_eos=True))
    core.step()
    (seq,) = core._scheduler.running
    on_free = core._scheduler.cache.pool._on_free
    assert on_free is not None
    on_free(seq.block_table[0])
    assert any(output.error_code == "engine_step_failed" for output in core.step())


def test_log_probabilities_are_the_same_from_the_prefix_cache(folders: dict[str, Path]) -> None:
    core, prompt = start(folders["llama3"]), list(range(3, 60))
    found: list[list[TokenLogprobs]] = []
    for name in ("computed", "cached"):
        core.add(request(name, prompt, logprobs=3))
        outputs = finish(core)
        assert (outputs[-1].usage.cached_tokens > 0) == (name == "cached")
        found.append([entry for output in outputs for entry in output.logprobs or []])
    assert len(found[0]) == len(found[1]) == 12
    for computed, cached in zip(*found, strict=True):
        assert computed.chosen.token_id == cached.chosen.token_id
        assert computed.chosen.logprob == pytest.approx(cached.chosen.logprob, abs=1e-4)
        assert [t.token_id for t in computed.top] == [t.token_id for t in cached.top]


def test_tenants_never_share_a_cached_prefix(folders: dict[str, Path]) -> None:
    core, prompt = start(folders["llama3"]), list(range(3, 60))
    for salt, cached in (("a", 0), ("b", 0), ("a", 48), ("", 0), ("b", 48)):
        core.add(request("r", prompt, salt=salt))
        assert finish(core)[-1].usage.cached_tokens == cached, salt


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_aborts_leak_no_block(folders: dict[str, Path], n: int, num_steps: int) -> None:
    """At every stage: queued, in the middle of the prompt, with choices parked, while decoding."""
    for ahead in (False, True):
        core = start(folders["llama3"], max_num_batched_tokens=24, run_ahead=ahead)
        core.add(request("r", list(range(3, 60)), n=n, max_tokens=30, ignore_eos=True))
        for _ in range(num_steps):
            core.step()
        ended = core.abort("r")
        assert len(ended) == n and ended[-1].finished
        assert finish(core) == []


def test_preemption_does_not_thrash(folders: dict[str, Path]) -> None:
    """Twice as many requests as the cache holds: the work that is done twice stays a fraction."""
    core = start(folders["llama3"], num_blocks=20, max_num_seqs=16)
    computed = 0
    for i in range(16):
        core.add(request(f"r{i}", [3 + i] * 40, max_tokens=40, ignore_eos=True))
    schedule = core._scheduler.schedule

    def counted() -> Any:
        nonlocal computed
        output = schedule()
        computed += output.num_tokens
        return output

    core._scheduler.schedule = counted  # type: ignore[method-assign]
    outputs = finish(core)
    assert all(len(text) == 40 for text in said(outputs).values())
    assert core.status().num_preemptions > 0
    needed = 16 * (40 + 39)
    assert computed < 1.5 * needed, f"{computed} tokens computed, {needed} needed"


PENNY = Path(__file__).resolve().parents[3] / "models" / "penny"
GREEK = "(alpha|beta|gamma|delta|epsilon|zeta)"
ORDER = rf'\{{"order": "{GREEK}(, {GREEK}){{9}}"\}}'
SPECULATION: list[dict[str, Any]] = [
    {"speculative": "ngram"},
    {"speculative": "draft", "draft_model": PENNY},
]


def orders(tokenizer: Tokenizer, end_of_reasoning: int | None) -> list[EngineRequest]:
    """Answers that repeat themselves up to where the grammar ends, some after free reasoning."""
    ids = tokenizer.encode("<|im_start|>user\nThe order is alpha, beta, gamma.<|im_end|>\n")
    if end_of_reasoning is not None:  # quoted before an answer
        ids += [end_of_reasoning, *tokenizer.encode('{"order": "alpha'), end_of_reasoning]
    ids += tokenizer.encode("<|im_start|>assistant\n")
    grammar = Grammar(kind="regex", text=ORDER, after_token_id=end_of_reasoning)
    requests = []
    for i in range(8):
        # Likely at any time, also where the grammar forbids it.
        bias = {} if end_of_reasoning is None else {end_of_reasoning: 12.0 + 2 * (i % 2)}
        sampling = {"seed": i, "temperature": i % 3 / 2, "logit_bias": bias, "max_tokens": 150}
        requests.append(request(f"r{i}", ids, grammar=grammar, **sampling))
    return requests


@pytest.mark.parametrize("options", SPECULATION, ids=str)
def test_a_grammar_holds_behind_several_guesses_at_once(options: dict[str, Any]) -> None:
    """The very texts without guesses, in fewer steps; no guess that the grammar forbids is
    right."""
    tokenizer, texts, steps = Tokenizer.load(PENNY), [], []
    for changes in ({}, options):
        core = start(PENNY, **changes, max_model_len=256)
        for asked in orders(tokenizer, None):
            core.add(asked)
        outputs = finish(core)
        assert [o.finish_reason for o in outputs if o.finished] == ["stop"] * 8
        texts.append(said(outputs))
        steps.append(core.status().num_steps)
        for ids in texts[-1].values():
            assert re.fullmatch(ORDER, tokenizer.decode(ids))
        largest = max(len(output.token_ids) for output in outputs)
        assert largest == 1 if not changes else largest > 3
    assert texts[0] == texts[1] and steps[1] < steps[0]
    guesser = core._stepper._guesser
    assert guesser is not None and 0 < guesser.num_right <= guesser.num_guessed


@pytest.mark.parametrize("options", [{}, {"run_ahead": True}, *SPECULATION], ids=str)
def test_a_grammar_leaves_reasoning_alone_and_holds_after_it(options: dict[str, Any]) -> None:
    tokenizer = Tokenizer.load(PENNY)
    (end,) = tokenizer.encode("<|im_start|>")
    free = start(PENNY, max_model_len=256)
    for asked in orders(tokenizer, end):
        sampling = msgspec.structs.replace(asked.sampling, grammar=None)
        free.add(msgspec.structs.replace(asked, sampling=sampling))
    unbound = said(finish(free))
    core = start(PENNY, **options, max_model_len=256)
    for asked in orders(tokenizer, end):
        core.add(asked)
    num_answers = 0
    for key, ids in said(finish(core)).items():
        before = unbound[key]
        if end not in before:
            assert ids == before
            continue
        num_answers += 1
        count = before.index(end) + 1
        assert ids[:count] == before[:count]
        assert re.fullmatch(ORDER, tokenizer.decode(ids[count:])), tokenizer.decode(ids)
    assert num_answers > 3


FEW: dict[str, Any] = {"logit_bias": dict.fromkeys((5, 6, 7, 8), 100.0), "temperature": 9.0}
"""One of four tokens: there is always something to guess from, and it is mostly wrong."""
ONE: dict[str, Any] = {"logit_bias": {5: 100.0}, "temperature": 0.0}


def timed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any], **options: Any
) -> tuple[float, EngineCore]:
    """Seconds of a run by a clock on which each guess that is verified makes a step of 1 s longer
    by 0.3 s; and the engine."""
    core, now_s = start(folder, max_model_len=256, **options), [0.0]
    monkeypatch.setattr("engine.core.stepper.time.perf_counter", lambda: now_s[0])
    runner = core._stepper._runner
    launch = runner.launch

    def slow(output: Any, before: Any = None) -> Any:
        now_s[0] += 1.0 + 0.3 * sum(len(entry.draft_token_ids) for entry in output.scheduled)
        return launch(output, before)

    monkeypatch.setattr(runner, "launch", slow)
    asked = {"max_tokens": 200, "ignore_eos": True, "seed": 3} | sampling
    core.add(request("r", [5, 6, 7, 8] * 4, **asked))
    finish(core)
    monkeypatch.undo()
    return now_s[0], core


def test_speculation_is_given_up_where_it_does_not_pay(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that what is left of the loss is what finding out took, and looking again now and
    then.
    """
    plain_s, core = timed(folders["llama3"], monkeypatch, FEW)
    assert core.status().num_draft_tokens == 0
    guessed_s, core = timed(folders["llama3"], monkeypatch, FEW, speculative="ngram")
    status = core.status()
    assert 0 < status.num_accepted_tokens < status.num_draft_tokens / 2
    assert status.num_draft_tokens < 4 * 200 / 3, "most steps guess nothing"
    assert guessed_s < 1.15 * plain_s


def test_speculation_goes_on_where_it_pays(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_s, _ = timed(folders["llama3"], monkeypatch, ONE)
    guessed_s, core = timed(folders["llama3"], monkeypatch, ONE, speculative="ngram")
    status = core.status()
    assert status.num_accepted_tokens > 0.9 * status.num_draft_tokens
    assert status.num_accepted_tokens > 90, "behind one and the same token, one is guessed a step"
    assert guessed_s < 0.7 * plain_s
