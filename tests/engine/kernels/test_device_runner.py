"""The device's runner says, token for token, what the plain one says: kernel by kernel and from
graphs, a step ahead or not, whatever lies in its buffers between steps."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import BLOCK_SIZE
from engine.models.decoder import Decoder
from engine.protocol import EngineRequest
from engine.runner.device.cuda_graphs import Decode
from engine.runner.device.device_runner import DeviceRunner, StepLimits, graph_backend
from engine.runner.model_runner import LaunchedStep
from engine.runner.speculative.draft_model import Drafter
from engine.runner.speculative.guesser import Guesser, NgramProposer
from engine.scheduling.step_plan import SchedulerOutput
from engine.sequence import Sequence
from engine.weights.loader import load_model
from tests.engine import checkpoints
from tests.engine.constraints import Residues
from tests.engine.kernels.device_runs import (
    LIMITS,
    MIXTURE,
    VOCAB,
    Said,
    ask,
    load,
    run,
    runner_of,
    tokens,
)
from tests.engine.weights.test_adapters import ATTENTION, write_adapter

# Padding computes with poison, and numpy, on which the interpreter runs, says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_p": 0.8, "logprobs": 2},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
    {"temperature": 0.0, "presence_penalty": 1.5, "logprobs": 0},
    {"top_k": 7, "logit_bias": {5: 2.0}, "min_tokens": 3, "stop_token_ids": (5, 9)},
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def graphs_of(model: Decoder, num_blocks: int = 24, limits: StepLimits = LIMITS) -> DeviceRunner:
    backend = graph_backend(model.device)
    runner = runner_of(model, backend, num_blocks=num_blocks, limits=limits)
    assert isinstance(runner, DeviceRunner)
    return runner


def poison(runner: DeviceRunner) -> None:
    """Everything that a step must bring itself, and everything that it must not read."""
    runner._buffers.inputs.fill_(0x7F)
    runner._buffers.tables.fill_(1 << 30)
    runner._graph_memory.logits.fill_(torch.nan)
    runner._graph_memory.attended.fill_(torch.nan)


def traffic(seed: int, num_requests: int) -> list[tuple[int, EngineRequest]]:
    draw = random.Random(seed)
    requests = []
    for number in range(num_requests):
        prompt = [draw.randrange(3, VOCAB) for _ in range(draw.choice([1, 3, 15, 17, 30]))]
        sampling = SAMPLINGS[(number + seed) % len(SAMPLINGS)]
        asked = ask(number, prompt, max_tokens=draw.randint(2, 6), **sampling)
        requests.append((draw.randrange(4), asked))
    return requests


def assert_same(found: Said, wanted: Said) -> None:
    assert tokens(found) == tokens(wanted)
    for key, parts in wanted.items():
        ours = [entry for _, entries in found[key] for entry in entries]
        theirs = [entry for _, entries in parts for entry in entries]
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            every = zip([a.chosen, *a.top], [b.chosen, *b.top], strict=True)
            assert all(x.token_id == y.token_id for x, y in every)
            assert a.chosen.logprob == pytest.approx(b.chosen.logprob, abs=1e-4)


def test_random_traffic(device: torch.device, tmp_path: Path) -> None:
    model = load(tmp_path, device)
    assert against_plain(model, traffic(0, 5)) == []


@pytest.mark.nightly
def test_preempted_sequences(device: torch.device, tmp_path: Path) -> None:
    """Three that come to need three blocks each, in six."""
    model = load(tmp_path, device)
    requests = [(i, ask(i, range(3, 18), max_tokens=19, **SAMPLINGS[i + 1])) for i in range(3)]
    assert against_plain(model, requests, num_blocks=6) != []


def against_plain(
    model: Decoder, requests: list[tuple[int, EngineRequest]], num_blocks: int = 24
) -> list[Sequence]:
    """Compare what is said a step ahead, from graphs and between poison. Who was preempted."""
    plain = run(runner_of(model, num_blocks=num_blocks), model, requests)
    runner = graphs_of(model, num_blocks)
    replayed, preempted = count_replays(runner), watch_writes(runner)
    found = run(
        runner,
        model,
        requests,
        ahead=True,
        penalties_ahead=True,
        before_step=lambda: poison(runner),
    )
    assert_same(found, plain)
    assert len(replayed) >= 3
    return preempted


@pytest.mark.nightly
def test_experts_and_a_window(device: torch.device, tmp_path: Path) -> None:
    """Padding is routed to experts, too, and tables lose the blocks before the window."""
    model = load(tmp_path, device, **MIXTURE)
    requests = [(0, ask(i, [3 + (7 * j + i) % 50 for j in range(n)], max_tokens=5))
                for i, n in enumerate((29, 2, 1))]  # fmt: skip
    plain = run(runner_of(model), model, requests)
    runner = graphs_of(model)
    assert_same(run(runner, model, requests, before_step=lambda: poison(runner)), plain)


def count_replays(runner: DeviceRunner) -> list[Decode]:
    """Return the list that is filled with what is replayed from now on."""
    assert runner._graphs is not None
    graphs, replayed = runner._graphs, list[Decode]()
    replay = graphs.replay

    def counted(decode: Decode) -> None:
        replayed.append(decode)
        replay(decode)

    graphs.replay = counted  # type: ignore[method-assign]
    return replayed


def watch_writes(runner: DeviceRunner) -> list[Sequence]:
    """Every launch writes the keys of its own tokens, and no others. Who is preempted from now
    on."""
    launch, (layer,), size = runner.launch, runner._cache, BLOCK_SIZE
    preempted = list[Sequence]()

    def watched(output: SchedulerOutput, before: LaunchedStep | None = None) -> LaunchedStep:
        preempted.extend(output.preempted)
        keys = layer.k.clone()
        launched = launch(output, before)
        same = (keys == layer.k) | (keys.isnan() & layer.k.isnan())
        written = (~same).any(-1).any(1).nonzero().tolist()
        own = {
            (entry.seq.block_table[at // size], at % size)
            for entry in output.scheduled
            for at in range(entry.start, entry.start + entry.num_new_tokens)
        }
        assert {tuple(place) for place in written} <= own
        return launched

    runner.launch = watched  # type: ignore[method-assign]
    return preempted


@pytest.mark.nightly
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_drafts_are_verified(num_draft_tokens: int, device: torch.device, tmp_path: Path) -> None:
    """Kernel by kernel, or from graphs, between poison: right guesses and wrong ones, sequences
    with fewer than others and with none; one is penalised for what it said."""
    model = load(tmp_path, device)
    again = {"logit_bias": dict.fromkeys((7, 8, 9), 60.0), "temperature": 1.0, "max_tokens": 7}
    requests = [(i, ask(i, [7, 8, 9] * (2 + i), **again)) for i in range(2)]
    requests.append((0, ask(2, [3, 4, 5, 6], max_tokens=6, temperature=0.3)))
    requests.append((0, ask(3, [7, 8] * 4, frequency_penalty=0.2, **again)))
    plain = run(runner_of(model), model, requests)
    guesser = Guesser(NgramProposer(3))
    runner = graphs_of(model, limits=replace(LIMITS, num_draft_tokens=num_draft_tokens))
    replayed = count_replays(runner)
    found = run(runner, model, requests, guesser=guesser, before_step=lambda: poison(runner))
    assert_same(found, plain)
    assert 0 < guesser.num_right < guesser.num_guessed
    assert ({decode.queries for decode in replayed} >= {1, 4}) == (num_draft_tokens > 0)
    assert any(decode.queries > 1 and decode.num_seqs > 1 for decode in replayed) == (
        num_draft_tokens > 0
    )


@pytest.mark.nightly
def test_grammars(device: torch.device, tmp_path: Path) -> None:
    """From graphs, a step ahead and behind drafts, beside rows without and over poison."""
    model = load(tmp_path, device)
    requests = []
    for i, bias in enumerate((100.0, 5.0, 100.0, 3.0)):
        sampling = SAMPLINGS[i] | {"logit_bias": {9: bias}}
        prompt = ([9, 9, 9], [9, 9, 7])[i % 2] * (i + 1)
        requests.append((i % 2, ask(i, [*prompt, 9], max_tokens=6, **sampling)))
    rules = {"0": Residues(), "1": Residues(4), "3": Residues()}
    plain = run(runner_of(model), model, requests, constraints=rules)
    for key, rule in rules.items():
        said = tokens(plain)[key]
        assert all(rule.fits(said[:i], token_id) for i, token_id in enumerate(said))
    assert len(tokens(plain)["1"]) == 4
    runner = graphs_of(model)
    replayed = count_replays(runner)
    ahead: dict[str, Any] = {"ahead": True, "penalties_ahead": True}
    found = run(
        runner, model, requests, **ahead, constraints=rules, before_step=lambda: poison(runner)
    )
    assert_same(found, plain)
    assert replayed
    guesser = Guesser(NgramProposer(3))
    assert_same(run(runner, model, requests, guesser=guesser, constraints=rules), plain)
    assert 0 < guesser.num_right < guesser.num_guessed


@pytest.mark.nightly
def test_drafts_come_from_graphs(device: torch.device, tmp_path: Path) -> None:
    """The model is its own draft, over a cache of its own. What is drawn without penalties is
    always right, and all is decodes but the prompt and what was said in a plain step."""
    model = load(tmp_path, device)
    drafts, eager = graphs_of(model), 0
    launch, replayed = drafts.launch, count_replays(drafts)

    def counted(output: SchedulerOutput, before: LaunchedStep | None = None) -> LaunchedStep:
        nonlocal eager
        count = len(replayed)
        launched = launch(output, before)
        eager += len(replayed) == count
        return launched

    drafts.launch = counted  # type: ignore[method-assign]
    requests = [(0, ask(0, [3, 4, 5], max_tokens=14, **SAMPLINGS[2]))]
    guesser = guess_alike(model, drafts, requests, has_graphs=True)
    assert guesser.num_right == guesser.num_guessed > 5
    assert eager == 2 and len(replayed) == 8


@pytest.mark.nightly
def test_drafts_behind_drafts_are_penalised_less(device: torch.device, tmp_path: Path) -> None:
    """For what the host knows of the text: not all that verifies them does. Two sequences of
    which one is caught up with in portions."""
    model = load(tmp_path, device)
    requests = [(i, ask(i, range(3, 6 + 9 * i), max_tokens=6, **SAMPLINGS[2 + i])) for i in (0, 1)]
    guesser = guess_alike(model, graphs_of(model), requests)
    assert guesser.num_right > 0


def guess_alike(
    model: Decoder,
    drafts: DeviceRunner,
    requests: list[tuple[int, EngineRequest]],
    has_graphs: bool = False,
) -> Guesser:
    """Return the guesser, after checking that the output with it is the output without."""
    limits = {"max_num_tokens": LIMITS.max_num_tokens, "max_model_len": LIMITS.max_model_len}
    guesser = Guesser(Drafter(drafts, 3, block_size=BLOCK_SIZE, has_graphs=has_graphs, **limits))
    found = run(
        graphs_of(model), model, requests, guesser=guesser, before_step=lambda: poison(drafts)
    )
    assert_same(found, run(runner_of(model), model, requests))
    return guesser


@pytest.mark.nightly
def test_adapters_in_graphs(device: torch.device, tmp_path: Path) -> None:
    base = checkpoints.save("llama3", tmp_path / "base")
    adapters = {
        name: write_adapter(
            tmp_path / name, checkpoints.build("llama3"), ATTENTION, rank=4, alpha=16, seed=seed
        )
        for seed, name in enumerate(("first", "second"))
    }
    model = load_model(base, dtype="float32", device=device, adapters=adapters)
    requests = [
        (0, ask(i, [5, 6, 7 + i], max_tokens=2, temperature=0.0, adapter=name))
        for i, name in enumerate(("first", "", "second"))
    ]
    plain = run(runner_of(model), model, requests)
    runner = graphs_of(model)
    replayed = count_replays(runner)
    assert_same(run(runner, model, requests), plain)
    assert [decode.adapted for decode in replayed] == [True]
    run(runner, model, [(0, ask(0, [5], max_tokens=2))])
    # A prompt of one token is no different from a decode.
    assert [decode.adapted for decode in replayed] == [True, False, False]
    said = tokens(plain)
    assert len({tuple(text) for text in said.values()}) == 3


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Make whatever would make the host wait for a CUDA device an error."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        yield
        torch.cuda.set_sync_debug_mode("default")
        return
    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__"):
            patch.setattr(Tensor, name, refused(name, getattr(Tensor, name)))
        yield


def refused(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter itself may look at tensors: it is the device."""

    def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        assert caller.startswith("triton."), f"{caller} waits for the device: {name}"
        return method(self, *args, **kwargs)

    return call


def test_launching_waits_for_nothing(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, decodes from graphs, adjusted rows and log-probabilities, a step ahead."""
    model = load(tmp_path, device)
    runner = graphs_of(model)
    launch, launched = runner.launch, []

    def guarded(output: Any, before: Any = None) -> Any:
        with no_waiting(device):
            launched.append(launch(output, before))
        return launched[-1]

    monkeypatch.setattr(runner, "launch", guarded)
    prompts = ([3, 4, 5] * 9, [6], [7, 8])
    requests = [
        (0, ask(i, prompt, max_tokens=3, **SAMPLINGS[i + 2])) for i, prompt in enumerate(prompts)
    ]
    said = run(runner, model, requests, ahead=True, penalties_ahead=True)
    assert [len(text) for text in tokens(said).values()] == [3, 3, 3]
    assert len(launched) >= 4
    with pytest.raises(AssertionError, match="waits"), no_waiting(torch.device("cpu")):
        torch.ones(1).item()


def test_a_launch_that_failed_leaves_no_trace(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device never got the tables of the failed step; the next request has the same blocks."""
    model = load(tmp_path, device)
    asked = [(0, ask(0, range(3, 40), max_tokens=3))]
    plain = run(runner_of(model), model, asked)
    runner = graphs_of(model, limits=replace(LIMITS, max_num_seqs=1))

    def fail(*_: Any) -> Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(runner, "_states", fail)
    with pytest.raises(AssertionError, match="engine_step_failed"):
        run(runner, model, asked)
    monkeypatch.undo()
    assert_same(run(runner, model, asked), plain)
