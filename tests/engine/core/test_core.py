"""The engine as its process sees it: requests in, outputs out, faults contained."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import BLOCK_SIZE, EngineConfig
from engine.core.engine_core import EngineCore
from engine.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from engine.protocol import EngineOutput, EngineRequest, SamplingParams
from engine.runner.model_runner import LaunchedStep, ModelRunner
from engine.scheduling.scheduler import MAX_TRIALS
from engine.scheduling.step_plan import SchedulerOutput
from tests.engine import checkpoints

POISON = 100
"""A token whose embedding is not a number in the `poisoned` model."""
EOS = 2


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save("llama3", tmp_path_factory.mktemp("llama3"))


@pytest.fixture(scope="session")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoints.save("llama2", tmp_path_factory.mktemp("poisoned"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    return folder


def start(folder: Path, **changes: Any) -> EngineCore:
    options: dict[str, Any] = {"num_blocks": 64, "dtype": "float32"}
    return EngineCore(EngineConfig(model=folder, **(options | changes)), clock=Clock())


def request(request_id: str, prompt: Sequence[int] = (5, 6, 7), **sampling: Any) -> EngineRequest:
    n = sampling.pop("n", 1)
    params = SamplingParams(**({"max_tokens": 8, "temperature": 0.0} | sampling))
    return EngineRequest(request_id=request_id, prompt_token_ids=list(prompt), sampling=params, n=n)


def finish(core: EngineCore) -> list[EngineOutput]:
    outputs = []
    while core.has_work():
        outputs += core.step()
        core.check_integrity()
    assert core.status().num_free_blocks == core.resolved.num_blocks
    return outputs


def ids(outputs: Sequence[EngineOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def run(core: EngineCore, asked: EngineRequest) -> list[EngineOutput]:
    core.add(asked)
    return finish(core)


def test_eos_stop_ids_and_length(folder: Path) -> None:
    """Check that what ends a text is its last token; without it the text goes on as it would
    have.
    """
    core = start(folder)
    whole = run(core, request("whole", max_tokens=30, ignore_eos=True))
    text = ids(whole)
    assert len(text) == 30 and whole[-1].finish_reason == "length"
    stop = text[3]
    assert stop not in text[:3]
    stopped = run(core, request("stop", max_tokens=30, ignore_eos=True, stop_token_ids=(stop,)))
    assert ids(stopped) == text[:4] and stopped[-1].finish_reason == "stop"
    biased = run(core, request("eos", max_tokens=30, logit_bias={EOS: 100.0}))
    assert ids(biased) == [EOS] and biased[-1].finish_reason == "stop"
    longer = run(core, request("min", max_tokens=30, min_tokens=5, logit_bias={EOS: 100.0}))
    assert ids(longer)[5:] == [EOS] and EOS not in ids(longer)[:5]
    assert ids(longer)[:5] == text[:5]


def test_the_context_ends_the_text(folder: Path) -> None:
    core = start(folder, max_model_len=32)
    outputs = run(core, request("r", [9] * 20, max_tokens=100, ignore_eos=True))
    assert len(ids(outputs)) == 12 and outputs[-1].finish_reason == "length"
    with pytest.raises(ContextLengthExceeded, match="32"):
        core.add(request("long", [9] * 32))
    with pytest.raises(InvalidRequest) as error:
        core.add(request("vocabulary", [checkpoints.VOCAB]))
    assert error.value.param == "prompt_token_ids"
    assert not core.has_work()


def test_usage_counts_and_times(folder: Path) -> None:
    """Times are those of the clock that was passed in; the second prompt is found in the cache."""
    core, prompt = start(folder, max_num_batched_tokens=32), list(range(3, 63))
    first, second = run(core, request("a", prompt)), run(core, request("b", prompt))
    for outputs, cached in ((first, 0), (second, 3 * BLOCK_SIZE)):
        assert [o.usage.generated_tokens for o in outputs] == list(range(1, 9))
        usage = outputs[-1].usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.prefilled) == (60, cached, True)
        assert usage.queue_time_s >= 1 and usage.prefill_time_s >= 1
        assert usage.first_token_time_s == usage.queue_time_s + usage.prefill_time_s
        assert [o.finished for o in outputs] == [False] * 7 + [True]
    assert ids(first) == ids(second)
    status = core.status()
    assert (status.generated_tokens, status.num_running, status.num_waiting) == (16, 0, 0)
    assert (status.prefix_cache_query_tokens, status.prefix_cache_hit_tokens) == (120, 48)
    assert status.num_steps > 16 and status.kv_cache_usage == 0.0


def test_choices_differ_and_repeat_with_their_seed(folder: Path) -> None:
    core = start(folder)
    asked = {"n": 3, "temperature": 1.0, "seed": 12, "max_tokens": 10, "ignore_eos": True}
    prompt = list(range(40))

    def choices(request_id: str, **changes: Any) -> list[list[int]]:
        outputs = run(core, request(request_id, prompt, **(asked | changes)))
        assert sum(o.finished for o in outputs) == 1
        assert outputs[-1].usage.generated_tokens == 30
        return [ids([o for o in outputs if o.index == i]) for i in range(3)]

    first = choices("a")
    assert len({tuple(c) for c in first}) == 3
    assert choices("b") == first
    assert choices("c", seed=13) != first
    assert choices("d", seed=None) != choices("e", seed=None)


def test_logprobs_of_every_token(folder: Path) -> None:
    outputs = run(start(folder), request("r", logprobs=2, max_tokens=5, ignore_eos=True))
    text = ids(outputs)
    for i, output in enumerate(outputs):
        assert output.logprobs is not None
        (logprobs,) = output.logprobs
        reference = checkpoints.logits("llama3", [5, 6, 7, *text[:i]])[-1].log_softmax(dim=-1)
        values, best = reference.topk(2)
        assert logprobs.chosen.token_id == text[i] == best[0]
        assert [t.token_id for t in logprobs.top] == best.tolist()
        assert [t.logprob for t in logprobs.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_abort_frees_at_once(folder: Path) -> None:
    core = start(folder)
    core.add(request("gone", list(range(50)), max_tokens=100))
    core.add(request("stays"))
    core.step()
    (last,) = core.abort("gone")
    assert last.finished and last.finish_reason == "abort" and last.usage.generated_tokens == 1
    core.check_integrity()
    assert core.abort("gone") == core.abort("never") == []
    outputs = finish(core)
    assert {o.request_id for o in outputs} == {"stays"} and outputs[-1].finished


def poison_steps(
    monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[SchedulerOutput], bool]
) -> list[int]:
    """Let steps raise, and return how many requests were in each that did, as they come."""
    launch, found = ModelRunner.launch, list[int]()

    def launch_or_raise(self: ModelRunner, output: SchedulerOutput, before: Any) -> Any:
        if is_bad(output):
            found.append(len({entry.seq.request_id for entry in output.scheduled}))
            raise RuntimeError("no such kernel")
        return launch(self, output, before)

    monkeypatch.setattr(ModelRunner, "launch", launch_or_raise)
    return found


@pytest.mark.parametrize("num_said", [0, 3])
def test_who_shares_a_step_with_a_request_that_breaks_it_goes_on(
    num_said: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one at which steps fail is found by steps of its own, and it alone ends."""
    good = [request(f"good{i}", [i, 8, 9] * 7, ignore_eos=True, seed=i) for i in (3, 4)]
    expected = {each.request_id: ids(run(start(folder), each)) for each in good}
    core = start(folder)

    def is_bad(output: SchedulerOutput) -> bool:
        return any(
            entry.seq.request_id == "bad" and entry.output_index == num_said and entry.samples
            for entry in output.scheduled
        )

    failed = poison_steps(monkeypatch, is_bad)
    for each in (good[0], request("bad", [5] * 20, ignore_eos=True), good[1]):
        core.add(each)
    outputs = finish(core)
    assert failed == [3, 1]
    for name, said in expected.items():
        assert ids([o for o in outputs if o.request_id == name]) == said
    bad = [o for o in outputs if o.request_id == "bad"]
    assert len(bad) == num_said + 1 and bad[-1].error_code == "engine_step_failed"
    core.check_integrity()


def test_what_fails_together_each_time_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = start(folder)
    failed = poison_steps(monkeypatch, lambda output: len(output.scheduled) > 1)
    for name in ("a", "b"):
        core.add(request(name, [5] * 20, ignore_eos=True, max_tokens=50))
    outputs = finish(core)
    assert failed == [2] * (MAX_TRIALS + 1)
    assert {o.error_code for o in outputs if o.finished} == {"engine_step_failed"}
    assert len([o for o in outputs if o.token_ids]) == 2 * MAX_TRIALS
    core.check_integrity()


def test_a_failed_step_is_told_of_and_the_engine_lives_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core = start(folder, max_num_seqs=2)
    before = ids(run(core, request("before", ignore_eos=True)))
    collect = ModelRunner.collect

    def fail_once(self: ModelRunner, launched: LaunchedStep) -> Any:
        monkeypatch.setattr(ModelRunner, "collect", collect)
        collect(self, launched)
        raise RuntimeError("out of memory")

    core.add(msgspec.structs.replace(request("b", [8] * 40, ignore_eos=True, n=2), log_id="req_1"))
    monkeypatch.setattr(ModelRunner, "collect", fail_once)
    failed = core.step()
    core.check_integrity()
    assert [(o.index, o.finished) for o in failed] == [(0, False), (1, True)]
    assert all(o.finish_reason == "error" for o in failed)
    assert all(o.error_code == "engine_step_failed" for o in failed)
    assert "out of memory" in caplog.text and "of requests req_1" in caplog.text
    core.add(request("later", ignore_eos=True))
    outputs = finish(core)
    assert {o.request_id for o in outputs} == {"later"} and ids(outputs) == before
    # What the failed step wrote is not in the prefix cache.
    assert run(core, request("again", [8] * 40))[-1].usage.cached_tokens == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_numbers_that_are_not_finite_stay_with_their_request(
    poisoned: Path, temperature: float
) -> None:
    """One request poisons its own cache; the others, in the same batch and later in the same
    blocks, say what they always say."""
    prompts = [[i, 3, 4] * 6 for i in range(3, 9)]
    bad = [*range(20, 50), POISON, *range(50, 60)]
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "seed": 4,
        "logit_bias": {POISON: -99.0},
    }

    def text_of(core: EngineCore) -> dict[str, list[int]]:
        for i, prompt in enumerate(prompts):
            core.add(request(str(i), prompt, ignore_eos=True, **sampling))
        outputs = finish(core)
        said = {str(i): ids([o for o in outputs if o.request_id == str(i)]) for i in range(6)}
        lost = [o for o in outputs if o.request_id == "bad"]
        for output in lost:
            assert output.finish_reason == "error" and output.error_code == "engine_step_failed"
        return said

    options = {"num_blocks": 20, "max_num_batched_tokens": 32}
    expected = text_of(start(poisoned, **options))
    core = start(poisoned, **options)
    for _ in range(2):
        core.add(request("bad", bad, **sampling))
        assert text_of(core) == expected


ATTACKS: dict[str, dict[str, Any]] = {
    "penalty that underflows": {"repetition_penalty": 1e-46},
    "penalty that underflows, drawn": {"repetition_penalty": 1e-46, "temperature": 1.0},
    "penalty on a forbidden stop": {
        "repetition_penalty": 1e-46,
        "min_tokens": 8,
        "stop_token_ids": (5,),
        "logit_bias": {5: 90.0},
    },
    "temperature that overflows": {"temperature": 1e300, "min_tokens": 8},
    "bias that overflows": {"logit_bias": {9: 1e39}},
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_numbers_beyond_float32_harm_nobody_else(
    attack: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused by name; were they not, only the request that brought them would end."""
    mine: dict[str, Any] = {"temperature": 1.0, "seed": 3, "logprobs": 2, "ignore_eos": True}
    evil = request("evil", **ATTACKS[attack], logprobs=2)
    alone = run(start(folder), request("victim", **mine))
    core = start(folder)
    with pytest.raises(InvalidRequest) as refused:
        core.add(evil)
    assert refused.value.param in ATTACKS[attack]

    monkeypatch.setattr(
        "engine.scheduling.validation.check_sampling", lambda params, *, vocab_size: None
    )
    core.add(evil)
    core.add(request("victim", **mine))
    outputs = finish(core)
    said = [output for output in outputs if output.request_id == "victim"]
    assert ids(said) == ids(alone) and said[-1].finish_reason == "length"
    assert [output.logprobs for output in said] == [output.logprobs for output in alone]
    lost = [output for output in outputs if output.request_id == "evil"]
    assert [output.error_code for output in lost] == ["engine_step_failed"]


def test_random_traffic_leaves_nothing_behind(folder: Path) -> None:
    """200 requests of every kind with aborts, in a cache too small for them, all accounted for."""
    rng = random.Random(5)
    core = start(
        folder, num_blocks=16, max_num_batched_tokens=40, max_num_seqs=8, max_model_len=200
    )
    ended: dict[str, int] = {}
    waiting = [f"r{i}" for i in range(200)]

    def note(outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            assert output.error_code is None
            ended[output.request_id] = ended.get(output.request_id, 0) + output.finished

    while waiting or core.has_work():
        for _ in range(min(len(waiting), rng.randrange(3))):
            core.add(
                request(
                    waiting.pop(),
                    [rng.randrange(3, 9) for _ in range(rng.randrange(1, 120))],
                    n=rng.choice([1, 1, 1, 3]),
                    temperature=rng.choice([0.0, 1.0]),
                    top_p=rng.choice([1.0, 0.9]),
                    max_tokens=rng.randrange(1, 60),
                    logprobs=rng.choice([None, 1]),
                )
            )
        note(core.step())
        if rng.random() < 0.1:
            note(core.abort(f"r{rng.randrange(200)}"))
        core.check_integrity()
    assert ended == {f"r{i}": 1 for i in range(200)}
    assert core.status().num_preemptions > 0
    assert core.status().num_free_blocks == 16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(folder: Path, dtype: str) -> None:
    core = start(folder, dtype=dtype)
    for i in range(5):
        core.add(request(str(i), [i + 3] * 20, ignore_eos=True, temperature=1.0))
    assert len(ids(finish(core))) == 40
    assert core.resolved.dtype == dtype


def test_the_cache_is_sized_from_bytes_and_cuts_the_context(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """2 x 3 layers x 2 heads x 16 channels x 4 bytes a token."""
    caplog.set_level(logging.INFO)
    core = start(folder, num_blocks=None, kv_cache_bytes=10 * 16 * 768 + 5)
    assert core.resolved.kv_bytes_per_token == 768
    assert core.resolved.num_blocks == 10
    assert core.resolved.max_model_len == 160
    assert "10 blocks, 160 tokens of 768 B" in caplog.text
    assert "max_model_len cut from 512 to the 160 tokens" in caplog.text
    assert "M parameters, float32 on cpu" in caplog.text
    free = start(folder, num_blocks=None, kv_cache_fraction=0.01)
    assert free.resolved.num_blocks > 10 and free.resolved.max_model_len == 512


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no room": ({"num_blocks": None, "kv_cache_bytes": 100}, "no KV block fits: 100 bytes"),
    "more blocks than memory": ({"num_blocks": 1 << 40}, "KV cache of 1099511627776 blocks"),
    "context beyond the model": ({"max_model_len": 513}, "max_model_len 513.*512"),
    "context of one": ({"max_model_len": 1}, "max_model_len 1 "),
    "no sequence at all": ({"max_num_seqs": 0}, "max_num_seqs is 0"),
    "guesses of nothing": ({"num_draft_tokens": 0}, "num_draft_tokens is 0"),
    "no thread": ({"num_threads": 0}, "num_threads is 0"),
    "a target in the past": ({"itl_target_s": -1.0}, "itl_target_s is -1"),
    "a target that is no number": ({"itl_target_s": float("nan")}, "itl_target_s is nan"),
    "no such folder": ({"model": Path("/nowhere")}, "/nowhere does not exist"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_start_that_cannot_be_is_explained(case: str, folder: Path) -> None:
    changes, message = CONFIGS[case]
    with pytest.raises(ConfigError, match=message):
        start(changes.pop("model", folder), **changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        start(folder, device="cuda")


def test_names_and_identity(folder: Path) -> None:
    first, second = start(folder), start(folder, served_name="penny")
    assert (first.resolved.served_name, second.resolved.served_name) == (folder.name, "penny")
    assert first.status().engine_id != second.status().engine_id
    assert second.status().eos_token_ids == [EOS] and second.status().model == "penny"


def test_a_start_loads_neither_transformers_nor_the_compiler_of_torch() -> None:
    penny = Path(__file__).resolve().parents[3] / "models" / "penny"
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from pathlib import Path\n"
        "from engine.core.engine_core import EngineCore\n"
        "from engine.config import EngineConfig\n"
        "core = EngineCore(EngineConfig(model=Path(sys.argv[1]), num_blocks=8, num_threads=1))\n"
        "print(core.resolved.served_name, 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(penny)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["penny", "False"], done.stderr


def varied_requests() -> list[EngineRequest]:
    """Greedy and sampled, penalised, stopped, with log-probabilities, several choices; prompts that
    repeat themselves, so that there is something to guess from."""
    rng = random.Random(3)
    asked = []
    for i in range(12):
        pattern = [rng.randrange(3, 20) for _ in range(rng.randint(2, 6))]
        sampling: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "ignore_eos": i % 2 == 0}
        if i % 3:
            sampling |= {"temperature": 0.3, "seed": i, "top_p": 0.9}
        if i % 4 == 1:
            sampling |= {"frequency_penalty": 0.3, "repetition_penalty": 1.1}
        if i % 4 == 2:
            sampling |= {"logprobs": 2, "n": 2}
        if i % 5 == 3:
            # Likely enough that it comes, and not at once.
            sampling |= {"stop_token_ids": (pattern[0],), "min_tokens": 2, "max_tokens": 40}
            sampling |= {"logit_bias": {pattern[0]: 4.0}}
        asked.append(request(f"r{i}", pattern * rng.randint(2, 8), **sampling))
    return asked


def texts(core: EngineCore) -> dict[tuple[str, int], tuple[list[int], list[Any], str | None, int]]:
    """Return what each choice said, with which log-probabilities, why it ended, and its bill."""
    for asked in varied_requests():
        core.add(asked)
    said: dict[tuple[str, int], tuple[list[int], list[Any], str | None, int]] = {}
    for output in finish(core):
        before = said.get((output.request_id, output.index), ([], [], None, 0))
        said[output.request_id, output.index] = (
            before[0] + output.token_ids,
            before[1] + (output.logprobs or []),
            output.finish_reason,
            output.usage.generated_tokens,
        )
    return said


def bills(said: dict[tuple[str, int], tuple[list[int], list[Any], str | None, int]]) -> Any:
    """Generated tokens of each request, all its choices ended."""
    found: dict[str, int] = {}
    for (request_id, _), (_, _, _, generated) in said.items():
        found[request_id] = max(generated, found.get(request_id, 0))
    return found


def watch_draws(core: EngineCore) -> dict[tuple[str, int], int]:
    """How many tokens of each choice the device is asked to draw from now on."""
    drawn: dict[tuple[str, int], int] = {}
    runner = core._stepper._runner
    launch = runner.launch

    def watched(output: SchedulerOutput, before: LaunchedStep | None = None) -> LaunchedStep:
        for entry in output.scheduled:
            if entry.samples:
                drawn[entry.key] = max(entry.output_index + 1, drawn.get(entry.key, 0))
        return launch(output, before)

    runner.launch = watched  # type: ignore[method-assign]
    return drawn


@pytest.mark.parametrize("num_blocks", [64, 20])
def test_running_ahead_changes_no_token_and_no_bill(folder: Path, num_blocks: int) -> None:
    """Check that what a late step computed behind a stop is one token at most, is never seen, and
    is on no bill, with and without preemption.
    """
    options: dict[str, Any] = {"num_blocks": num_blocks, "max_model_len": 128}
    core = start(folder, **options)
    drawn = watch_draws(core)
    plain = texts(core)
    assert drawn == {key: len(said) for key, (said, *_) in plain.items()}
    core = start(folder, **options, run_ahead=True)
    drawn = watch_draws(core)
    ahead = texts(core)
    assert {k: (v[0], v[2]) for k, v in ahead.items()} == {
        k: (v[0], v[2]) for k, v in plain.items()
    }
    assert bills(ahead) == bills(plain)
    for request_id, generated in bills(ahead).items():
        assert generated == sum(len(v[0]) for k, v in ahead.items() if k[0] == request_id)
    late = {drawn[key] - len(said) for key, (said, *_) in ahead.items()}
    assert late == {0, 1}, "some ended by their length, some by a token that was seen a step late"
    assert core.status().num_preemptions > 0 or num_blocks == 64


@pytest.mark.parametrize("num_blocks", [64, 20])
def test_guessing_changes_no_token(folder: Path, num_blocks: int) -> None:
    """Greedy and sampled, drafts right and wrong: the draw depends on seed and position alone."""
    options: dict[str, Any] = {"num_blocks": num_blocks, "max_model_len": 128}
    plain = texts(start(folder, **options))
    core = start(folder, **options, speculative="ngram", num_draft_tokens=3)
    guessed = texts(core)
    assert {k: (v[0], v[2]) for k, v in guessed.items()} == {
        k: (v[0], v[2]) for k, v in plain.items()
    }
    guesser = core._stepper._guesser
    assert guesser is not None and 0 < guesser.num_right < guesser.num_guessed
    status = core.status()
    assert (status.num_accepted_tokens, status.num_draft_tokens) == (
        guesser.num_right,
        guesser.num_guessed,
    )


def test_guessing_ahead_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        start(folder, speculative="ngram", run_ahead=True)
