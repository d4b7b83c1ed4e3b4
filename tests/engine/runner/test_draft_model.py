"""A draft model changes how fast a text comes, and nothing else: texts, ends and bills are those
without. Whatever it holds that is not true would show as drafts of the model itself that fail."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.__main__ import _config, _parser
from engine.core.engine_core import EngineCore
from engine.errors import ConfigError
from engine.protocol import EngineOutput, EngineRequest, SamplingParams
from engine.runner.batch.batch import SampleRow
from engine.runner.model_runner import LaunchedStep, ModelRunner
from engine.runner.sampling.sampling_tensors import SamplingScratch, logit_adjustments
from engine.runner.speculative.draft_model import Drafter
from engine.runner.speculative.guesser import RETRY_TOKENS, Guesser, Worth
from engine.scheduling.step_plan import SchedulerOutput
from engine.sequence import Sequence
from tests.engine import checkpoints
from tests.engine.core.test_complaints import traffic
from tests.engine.core.test_core import finish, ids, request, start, texts
from tests.engine.weights.test_adapters import ATTENTION, write_adapter

EVERY_FOLDER = ("llama3", "near", "qwen3_tied", "poisoned")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model; one that often agrees with it; another one; one that says nothing at all."""
    found = {name: tmp_path_factory.mktemp(name) for name in EVERY_FOLDER}
    for name, folder in found.items():
        checkpoints.save(name if name == "qwen3_tied" else "llama3", folder)
    torch.manual_seed(0)
    for name, noise in (("near", 0.03), ("poisoned", torch.nan)):
        file = found[name] / "model.safetensors"
        tensors = load_file(file)
        for tensor in tensors.values():
            if tensor.dim() >= 2:
                tensor += noise * tensor.std() * torch.randn_like(tensor)
        save_file(tensors, file, {"format": "pt"})
    return found


def drafting(folders: dict[str, Path], draft: str, **changes: Any) -> EngineCore:
    options: dict[str, Any] = {"speculative": "draft", "num_draft_tokens": 3} | changes
    return start(folders["llama3"], draft_model=folders[draft], **options)


def guesser_of(core: EngineCore) -> Guesser:
    guesser = core._stepper._guesser
    assert guesser is not None
    return guesser


def drafter_of(core: EngineCore) -> Drafter:
    drafter = guesser_of(core)._proposer
    assert isinstance(drafter, Drafter)
    return drafter


def watch(core: EngineCore) -> list[SchedulerOutput]:
    """Return the list that is filled with what the draft model computes from now on."""
    runner = drafter_of(core)._runner
    launch, launched = runner.launch, list[SchedulerOutput]()

    def watched(output: SchedulerOutput, before: LaunchedStep | None = None) -> LaunchedStep:
        launched.append(output)
        return launch(output, before)

    runner.launch = watched  # type: ignore[method-assign]
    return launched


def always_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it guess whatever it costs."""
    monkeypatch.setattr("engine.runner.speculative.guesser.Worth.slowdown", lambda self, num: 1.0)


@pytest.mark.parametrize("num_blocks", [64, 20])
@pytest.mark.parametrize("draft", ["near", "qwen3_tied", "poisoned"])
def test_drafts_change_no_token(
    folders: dict[str, Path], draft: str, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, penalised, stopped, of several choices, preempted."""
    always_guess(monkeypatch)
    options: dict[str, Any] = {"num_blocks": num_blocks, "max_model_len": 128}
    plain = texts(start(folders["llama3"], **options))
    core = drafting(folders, draft, **options)
    guessed = texts(core)
    assert guessed.keys() == plain.keys()
    for key, (said, logprobs, reason, _) in plain.items():
        assert (guessed[key][0], guessed[key][2]) == (said, reason)
        assert len(guessed[key][1]) == len(logprobs)
        for ours, theirs in zip(guessed[key][1], logprobs, strict=True):
            assert ours.chosen.token_id == theirs.chosen.token_id
            assert ours.chosen.logprob == pytest.approx(theirs.chosen.logprob, abs=1e-4)
    for request_id in {key[0] for key in plain}:
        bills = [max(t[3] for k, t in each.items() if k[0] == request_id)
                 for each in (plain, guessed)]  # fmt: skip
        assert bills[0] == bills[1]
    guesser = guesser_of(core)
    assert guesser.num_guessed > 100
    if draft == "near":
        assert 0.15 < guesser.num_right / guesser.num_guessed < 0.95
    if num_blocks == 20:
        assert core.status().num_preemptions > 0


def serve(core: EngineCore, requests: list[EngineRequest]) -> dict[tuple[str, int], list[int]]:
    """Requests that come four a step, some of which are aborted; what the others say."""
    outputs: list[EngineOutput] = []
    aborted = set()
    for number, asked in enumerate(requests):
        core.add(asked)
        if number % 4 == 3:
            outputs += core.step()
            core.check_integrity()
        if number % 5 == 4:
            aborted.add(requests[number - 2].request_id)
            core.abort(requests[number - 2].request_id)
    outputs += finish(core)
    said: dict[tuple[str, int], list[int]] = {}
    for output in outputs:
        assert output.error_code is None
        if output.request_id not in aborted:
            said.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    return said


@pytest.mark.parametrize("seed", [5, 7, 12])
@pytest.mark.parametrize("caching", [True, False])
def test_the_model_as_its_own_draft_is_always_right(
    folders: dict[str, Path], seed: int, caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few blocks, freed ones poisoned; shared prefixes, equal blocks exchanged, choices, aborts,
    preemptions: what the draft model holds of a sequence is always that sequence's."""
    always_guess(monkeypatch)
    options: dict[str, Any] = {
        "num_blocks": 11,
        "max_model_len": 160,
        "max_num_batched_tokens": 40,
        "prefix_caching": caching,
    }
    plain = serve(start(folders["llama3"], **options), traffic(seed))
    core = drafting(folders, "llama3", **options, poison_freed_blocks=True)
    launched = watch(core)
    assert serve(core, traffic(seed)) == plain
    assert core.status().num_preemptions > 0
    guesser = guesser_of(core)
    assert guesser.num_guessed > 50
    assert guesser.num_right == guesser.num_guessed
    assert max(output.num_tokens for output in launched) <= 40


def test_drafts_are_what_the_draft_model_says(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind every text, whatever was rejected before: each is the continuation of the draft
    model alone."""
    always_guess(monkeypatch)
    core = drafting(folders, "near", num_blocks=11, max_model_len=160, max_num_batched_tokens=40)
    guessed = list[tuple[list[int], list[int]]]()
    launch = core._stepper._runner.launch

    def watched(output: SchedulerOutput, before: LaunchedStep | None = None) -> LaunchedStep:
        guessed.extend((e.seq.token_ids, e.draft_token_ids) for e in output.scheduled
                       if e.draft_token_ids)  # fmt: skip
        return launch(output, before)

    core._stepper._runner.launch = watched  # type: ignore[method-assign]
    greedy = [
        msgspec.structs.replace(
            asked, sampling=msgspec.structs.replace(asked.sampling, temperature=0.0)
        )
        for asked in traffic(5)
    ]
    serve(core, greedy)
    assert core.status().num_preemptions > 0
    guesser = guesser_of(core)
    assert 0.2 < guesser.num_right / guesser.num_guessed < 0.9 and len(guessed) > 50
    draft = start(folders["near"], max_num_seqs=16, num_blocks=200)
    said: dict[str, list[int]] = {}
    for number, (text, drafts) in enumerate(guessed):
        asked = request(str(number), text, max_tokens=len(drafts), ignore_eos=True)
        draft.add(asked)
    for output in finish(draft):
        said.setdefault(output.request_id, []).extend(output.token_ids)
    assert [said[str(number)] for number in range(len(guessed))] == [ids for _, ids in guessed]


def test_blocks_that_are_exchanged_were_computed_by_nobody(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request says the same before the second, and without drafts: its full blocks take
    the place of the second one's, in which the draft model had computed."""
    always_guess(monkeypatch)
    core = drafting(folders, "llama3", poison_freed_blocks=True)
    for layer in drafter_of(core)._runner._cache:
        layer.k.fill_(torch.nan)
    is_worth_it = Worth.is_worth_it
    monkeypatch.setattr(
        Worth, "is_worth_it", lambda self, seq: seq.request_id != "a" and is_worth_it(self, seq)
    )
    text = {"max_tokens": 150, "ignore_eos": True}
    core.add(request("a", range(3, 44), **text))
    said: dict[str, list[int]] = {"a": [], "b": []}
    while len(said["a"]) < 60:
        said["a"] += ids(core.step())
    core.add(request("b", range(3, 44), **text))
    for output in finish(core):
        said[output.request_id] += output.token_ids
    assert said["a"] == said["b"]
    guesser = guesser_of(core)
    assert guesser.num_right == guesser.num_guessed > 90


@pytest.mark.nightly
@pytest.mark.parametrize("draft", ["near", "qwen3_tied"])
def test_drawn_texts_are_distributed_as_the_model_says(
    folders: dict[str, Path], draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square over the pairs of the first two tokens, of which the second is guessed by another
    model; 24 degrees of freedom exceed 60 once in 10,000 draws."""
    prompt, top_k, count = [5, 6, 7], 5, 1500
    always_guess(monkeypatch)
    core = drafting(folders, draft, max_num_seqs=32)
    pairs = Counter[tuple[int, int]]()
    said: dict[str, list[int]] = {str(seed): [] for seed in range(count)}
    options: dict[str, Any] = {"temperature": 1.0, "top_k": top_k, "max_tokens": 3}
    for first in range(0, count, 500):
        for seed in range(first, first + 500):
            core.add(request(str(seed), prompt, seed=seed, ignore_eos=True, **options))
        for output in finish(core):
            said[output.request_id] += output.token_ids
    for text in said.values():
        pairs[text[0], text[1]] += 1
    guesser = guesser_of(core)
    assert guesser.num_guessed > 0.9 * count
    assert (0.1 if draft == "near" else 0) <= guesser.num_right / guesser.num_guessed < 0.9

    def likely(token_ids: list[int]) -> dict[int, float]:
        values, chosen = checkpoints.logits("llama3", token_ids)[-1].topk(top_k)
        return dict(zip(chosen.tolist(), values.softmax(-1).tolist(), strict=True))

    expected = {
        (one, two): count * p * q
        for one, p in likely(prompt).items()
        for two, q in likely([*prompt, one]).items()
    }
    assert pairs.keys() <= expected.keys()
    usual = {pair: number for pair, number in expected.items() if number >= 5}
    rest = count - sum(usual.values())
    statistic = sum((pairs[pair] - number) ** 2 / number for pair, number in usual.items())
    if rest >= 5:
        statistic += (count - sum(pairs[pair] for pair in usual) - rest) ** 2 / rest
    assert len(usual) > 10 and statistic < 60


def test_a_useless_draft_is_given_up_and_costs_nothing_then(folders: dict[str, Path]) -> None:
    core = drafting(folders, "qwen3_tied")
    launched = watch(core)
    core.add(request("r", range(3, 60), max_tokens=200, ignore_eos=True))
    num_tokens, quiet = 0, 0
    while core.has_work():
        before = len(launched)
        num_tokens += sum(len(output.token_ids) for output in core.step())
        quiet += len(launched) == before
    assert num_tokens == 200
    assert guesser_of(core).num_right < 0.2 * guesser_of(core).num_guessed
    assert quiet > RETRY_TOKENS


def test_what_drafting_takes_is_part_of_what_verifying_costs(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right drafts that take longer than the steps they save are given up, too."""
    core = drafting(folders, "llama3")
    now_s = 0.0

    def takes(seconds: float, runner: ModelRunner) -> None:
        launch = runner.launch

        def launched(output: SchedulerOutput, before: LaunchedStep | None = None) -> LaunchedStep:
            nonlocal now_s
            now_s += seconds
            return launch(output, before)

        monkeypatch.setattr(runner, "launch", launched)

    monkeypatch.setattr("engine.core.stepper.time", SimpleNamespace(perf_counter=lambda: now_s))
    model = core._stepper._runner
    assert isinstance(model, ModelRunner)
    takes(0.002, model)
    takes(0.02, drafter_of(core)._runner)
    core.add(request("r", [5, 6, 7], max_tokens=80, ignore_eos=True))
    finish(core)
    guesser = guesser_of(core)
    assert guesser._worth.slowdown(1) > 4
    assert guesser.num_right == guesser.num_guessed < 40


def test_a_long_text_is_caught_up_with_in_portions(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a step as many tokens as are left of its budget, never in two steps in a row, and the
    time of such a step is nobody's measure."""
    always_guess(monkeypatch)
    core = drafting(folders, "llama3", max_num_batched_tokens=32, itl_target_s=0)
    stepper, launched = core._stepper, watch(core)
    observed = list[bool]()
    observe = core._scheduler.pace.observe

    def noted(*args: Any) -> None:
        observed.append(True)
        observe(*args)

    monkeypatch.setattr(core._scheduler.pace, "observe", noted)
    core.add(request("r", range(3, 123), max_tokens=20, ignore_eos=True))
    while stepper._scheduler.has_unfinished() and not ids(core.step()):
        assert not launched
    portions = list[int]()
    while guesser_of(core).num_guessed == 0:
        before, told = len(launched), len(observed)
        core.step()
        portions.append(sum(output.num_tokens for output in launched[before:]))
        if guesser_of(core).num_guessed == 0:
            assert len(observed) - told == (portions[-1] == 0)
    *catching_up, drafted = portions
    assert catching_up == [31, 0, 31, 0, 31, 0, 31]
    assert sum(catching_up) + drafted > 120
    finish(core)
    assert guesser_of(core).num_right == guesser_of(core).num_guessed


def test_a_draft_model_with_a_shorter_context(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guesses until its context is full, and the text goes on without."""
    always_guess(monkeypatch)
    checkpoints.save("llama3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    core = drafting(folders | {"short": tmp_path}, "short")
    launched = watch(core)
    asked = request("r", range(3, 43), max_tokens=60, ignore_eos=True)
    core.add(asked)
    text = ids(finish(core))
    plain = start(folders["llama3"])
    plain.add(asked)
    assert text == ids(finish(plain))
    ends = [e.start + e.num_new_tokens for output in launched for e in output.scheduled]
    assert max(ends) == 64
    assert guesser_of(core).num_right == guesser_of(core).num_guessed > 10


def test_drafts_for_adapters_come_from_the_model_as_it_is(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_guess(monkeypatch)
    adapter = write_adapter(
        tmp_path / "a", checkpoints.build("llama3"), ATTENTION, rank=4, alpha=1, seed=1
    )
    said = []
    for changes in ({}, {"draft_model": folders["llama3"], "speculative": "draft"}):
        core = start(folders["llama3"], adapters={"a": adapter}, **changes)
        for name in ("", "a"):
            params = SamplingParams(max_tokens=30, temperature=0.8, seed=3, ignore_eos=True)
            core.add(EngineRequest(request_id=f"r{name}", prompt_token_ids=[5, 6, 7],
                                   sampling=params, adapter=name))  # fmt: skip
        outputs = finish(core)
        said.append(
            {name: ids([o for o in outputs if o.request_id == name]) for name in "r ra".split()}
        )
    assert said[0] == said[1] and said[0]["r"] != said[0]["ra"]
    assert 0 < guesser_of(core).num_right < guesser_of(core).num_guessed


@pytest.mark.parametrize("which", ["launch", "collect"])
def test_a_failing_draft_fails_no_request(
    folders: dict[str, Path],
    which: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Told once for those that run then; the next request has its drafts again."""
    always_guess(monkeypatch)
    core = drafting(folders, "llama3")
    asked = request("r", [5, 6, 7], max_tokens=20, ignore_eos=True)
    core.add(asked)
    text = ids(finish(core))
    right = guesser_of(core).num_right
    assert right > 0

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(drafter_of(core)._runner, which, fail)
        core.add(asked)
        assert ids(finish(core)) == text
        assert [r.message for r in caplog.records if "drafting failed" in r.message] == [
            "drafting failed, no more of it for 1 sequences"
        ]
    core.add(asked)
    assert ids(finish(core)) == text
    assert guesser_of(core).num_right == 2 * right


def test_history_never_ends_behind_what_is_sent() -> None:
    """A draft behind drafts is penalised for what the host knows and the token before it."""
    seq = Sequence(
        request_id="r",
        index=0,
        order=(0, 0),
        prompt_token_ids=[4, 5, 6],
        sampling=SamplingParams(max_tokens=10, repetition_penalty=1.2),
        seed=0,
        cache_salt="",
        output_token_ids=[7],
    )
    rows = [SampleRow(seq, num_output_tokens, []) for num_output_tokens in (1, 2, 5)]
    found = logit_adjustments(
        rows, 20, frozenset(), torch.device("cpu"), SamplingScratch(), torch.tensor([7, 8, 9])
    )
    assert found is not None
    assert found.lengths.tolist() == [4, 5, 5]
    texts = [row[:n].tolist() for row, n in zip(found.history, found.lengths.tolist(), strict=True)]
    assert texts == [[4, 5, 6, 7], [4, 5, 6, 7, 8], [4, 5, 6, 7, 9]]


def test_memory_is_counted(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    alone = start(folders["qwen3_tied"]).resolved.kv_bytes_per_token
    plain = start(folders["llama3"]).resolved
    both = drafting(folders, "qwen3_tied").resolved
    assert both.kv_bytes_per_token == plain.kv_bytes_per_token + alone
    assert both.step_timeout_s > plain.step_timeout_s
    assert "draft model's KV cache" in caplog.text
    room = 100 * 16 * both.kv_bytes_per_token
    sized = drafting(folders, "qwen3_tied", num_blocks=None, kv_cache_bytes=room)
    assert sized.resolved.num_blocks == 100
    poisoned = drafting(folders, "qwen3_tied", poison_freed_blocks=True)
    on_free = poisoned._scheduler.cache.pool._on_free
    assert on_free is not None
    on_free(5)
    for runner in (poisoned._stepper._runner, drafter_of(poisoned)._runner):
        assert all(bool(layer.k[5].isnan().all() & layer.v[5].isnan().all())
                   for layer in runner._cache)  # fmt: skip


def test_what_cannot_be_drafted_with_is_told(folders: dict[str, Path], tmp_path: Path) -> None:
    model, window = folders["llama3"], checkpoints.save("mistral_window", tmp_path / "window")
    for changes, told in (
        ({"speculative": "draft"}, "draft_model is None"),
        ({"draft_model": model}, "speculative is off"),
        ({"draft_model": model, "speculative": "ngram"}, "speculative is ngram"),
        ({"draft_model": tmp_path / "no", "speculative": "draft"}, "does not exist"),
        ({"draft_model": window, "speculative": "draft"}, "draft_model has a sliding window"),
        ({"draft_model": model, "speculative": "draft", "run_ahead": True}, "exclude each other"),
    ):
        with pytest.raises(ConfigError, match=told):
            start(model, **changes)
    with pytest.raises(ConfigError, match="^model has a sliding window"):
        start(window, draft_model=model, speculative="draft")
    other = checkpoints.save("llama3", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    with pytest.raises(ConfigError, match="vocab_size of 200, the model 199"):
        start(model, draft_model=other, speculative="draft")
    headless = tmp_path / "headless"
    checkpoints.build("llama3").model.save_pretrained(headless)
    with pytest.raises(ConfigError, match="has no head"):
        start(model, draft_model=headless, speculative="draft")


def test_the_command_line_names_it() -> None:
    arguments = ["--model", "m", "--listen", "unix:/s", "--speculative", "draft"]
    config = _config(_parser().parse_args([*arguments, "--draft-model", "d"]))
    assert (config.speculative, config.draft_model) == ("draft", Path("d"))
