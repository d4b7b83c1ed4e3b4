"""Several prompts of one request: each says what it would say alone, and together they are one
thing to abort, to pause and to count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.errors import InvalidRequest
from engine.fake.engine import FakeCore, FakeEngine
from engine.protocol import Breakpoint, EngineOutput, EngineRequest, SamplingParams
from engine.scheduling.validation import MAX_CHOICES, MAX_EMBEDDED
from engine.transport.client import Engine, EngineClient
from tests.engine import checkpoints
from tests.engine.core.test_parity import SETTINGS, prompts, run, start
from tests.engine.peers import SMALL, Serve, collect
from tests.engine.scheduling.scheduling import drain, embedding, make, request, step

SAMPLING = SamplingParams(max_tokens=6, temperature=0.8, seed=5, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save("llama3", tmp_path_factory.mktemp("llama3"))


def together(request_id: str, found: list[list[int]], **changes: Any) -> EngineRequest:
    options: dict[str, Any] = {"sampling": SAMPLING} | changes
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=found[0],
        more_prompts=tuple(found[1:]),
        **options,
    )


def by_index(outputs: list[EngineOutput]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for output in outputs:
        found.setdefault(output.index, []).extend(output.token_ids)
    return found


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_says_what_it_says_alone(folder: Path, setting: str) -> None:
    chosen = prompts()[3:7]
    core = start(folder, **SETTINGS[setting])
    alone = run(core, [together(str(i), [prompt], n=2) for i, prompt in enumerate(chosen)])
    outputs = run(core, [together("all", chosen, n=2)])["all"]
    found = by_index(outputs)
    for i in range(len(chosen)):
        said = by_index(alone[str(i)])
        assert [found[2 * i], found[2 * i + 1]] == [said[0], said[1]]
    assert [output.finished for output in outputs].count(True) == 1 and outputs[-1].finished
    usage = outputs[-1].usage
    assert usage.prompt_tokens == sum(map(len, chosen))
    assert usage.generated_tokens == 2 * 4 * SAMPLING.max_tokens
    counted = [output.usage.prompt_tokens for output in outputs]
    assert counted == sorted(counted)
    assert core.status().num_free_blocks == core.resolved.num_blocks


def test_without_a_seed_the_same_prompt_does_not_say_the_same(folder: Path) -> None:
    unseeded = msgspec.structs.replace(SAMPLING, seed=None, temperature=2.0, max_tokens=20)
    outputs = run(start(folder), [together("r", [prompts()[3]] * 2, sampling=unseeded)])["r"]
    found = by_index(outputs)
    assert found[0] != found[1]


@pytest.mark.parametrize("budget", [7, 2048])
def test_embeddings_of_several(folder: Path, budget: int) -> None:
    core = start(folder, max_num_batched_tokens=budget)
    chosen = prompts()[:9]

    def embed(name: str, found: list[list[int]]) -> EngineRequest:
        return EngineRequest(
            request_id=name, prompt_token_ids=found[0], more_prompts=tuple(found[1:]), embed=True
        )

    alone = run(core, [embed(str(i), [prompt]) for i, prompt in enumerate(chosen)])
    outputs = run(core, [embed("all", chosen)])["all"]
    assert sorted(output.index for output in outputs) == list(range(len(chosen)))
    for output in outputs:
        wanted = alone[str(output.index)][0].embedding
        assert output.embedding is not None and wanted is not None
        found, single = np.frombuffer(output.embedding, "<f4"), np.frombuffer(wanted, "<f4")
        np.testing.assert_allclose(found, single, atol=1e-5)
    usage = outputs[-1].usage
    assert (usage.prompt_tokens, usage.generated_tokens) == (sum(map(len, chosen)), 0)


def test_what_was_prefilled_is_counted_and_the_rest_is_not() -> None:
    """Aborted in the middle: of three prompts one was through."""
    scheduler = make(max_num_batched_tokens=16, enabled=False)
    scheduler.add(
        msgspec.structs.replace(
            request("r", [1] * 10, max_tokens=8), more_prompts=([2] * 12, [3] * 12)
        )
    )
    outputs = step(scheduler)
    assert [output.index for output in outputs] == [0]
    assert outputs[0].usage.prompt_tokens == 10
    lasts = scheduler.abort("r")
    assert [last.index for last in lasts] == [0, 1, 2]
    assert [last.finished for last in lasts] == [False, False, True]
    assert (lasts[-1].usage.prompt_tokens, lasts[-1].usage.generated_tokens) == (10, 1)
    assert not drain(scheduler)


def test_one_place_in_the_queue_and_one_pause() -> None:
    scheduler = make(max_waiting=1)
    asked = request("r", [1] * 10, n=2, max_tokens=3)
    scheduler.add(msgspec.structs.replace(asked, more_prompts=([2] * 10, [3] * 10)))
    assert scheduler.num_queued == 1
    step(scheduler)
    assert scheduler.num_queued == 0
    scheduler.pause("r")
    assert not scheduler.has_work() and not step(scheduler)
    scheduler.resume("r")
    outputs = drain(scheduler)
    assert {output.index for output in outputs} == set(range(6))
    assert outputs[-1].usage.generated_tokens == 6 * 3


def test_cached_parts_are_added_up() -> None:
    scheduler = make()
    scheduler.add(request("before", [1] * 9, max_tokens=1))
    drain(scheduler)
    scheduler.add(
        msgspec.structs.replace(request("r", [1] * 9, max_tokens=1), more_prompts=([1] * 9,))
    )
    usage = drain(scheduler)[-1].usage
    assert (usage.prompt_tokens, usage.cached_tokens) == (18, 16)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (together("r", [[1]] * (MAX_CHOICES + 1)), "more_prompts"),
        (together("r", [[1]] * 50, n=3), "more_prompts"),
        (together("r", [[1], []]), "prompt_token_ids"),
        (together("r", [[1], [100]]), "prompt_token_ids"),
        (together("r", [[1] * 3, [2]], breakpoints=(Breakpoint(2, 60),)), "breakpoints"),
        (
            msgspec.structs.replace(
                embedding("r", [1]), more_prompts=tuple([2] for _ in range(MAX_EMBEDDED))
            ),
            "more_prompts",
        ),
    ],
)
def test_what_is_too_much_is_refused_by_name(asked: EngineRequest, param: str) -> None:
    scheduler = make()
    with pytest.raises(InvalidRequest) as refused:
        scheduler.add(asked)
    assert refused.value.param == param
    assert not scheduler.has_unfinished()


@pytest.mark.parametrize("kind", ["client", "fake"])
async def test_the_fake_does_alike_and_both_cross_the_socket(kind: str, serve: Serve) -> None:
    core = FakeCore(SMALL)
    engine: Engine = FakeEngine(core)
    if kind == "client":
        server = await serve(core)
        engine = await EngineClient.connect(server.address, timeout_s=30)
    sampling = msgspec.structs.replace(SAMPLING, prompt_logprobs=1)
    chosen = [[1, 2, 3], [4, 5]]
    outputs = await collect(engine, together("r", chosen, n=2, sampling=sampling))
    alone = await collect(engine, together("a", chosen[1:], n=2))
    found = by_index(outputs)
    assert [found[2], found[3]] == list(by_index(alone).values())
    told = {each.index: each.prompt_logprobs for each in outputs if each.prompt_logprobs}
    assert {index: [it.chosen.token_id for it in each] for index, each in told.items()} == {
        0: [2, 3],
        2: [5],
    }
    assert outputs[-1].usage.prompt_tokens == 5
    vectors = await collect(
        engine,
        EngineRequest(request_id="v", prompt_token_ids=[1], more_prompts=([2],), embed=True),
    )
    assert [each.index for each in vectors] == [0, 1]
    assert all(each.embedding for each in vectors)
    await engine.close()
