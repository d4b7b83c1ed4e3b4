"""Checks that the engine says of a prompt's own tokens what `transformers` says of them, whatever
the chunks, the cache, the batch and the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from engine.core.engine_core import EngineCore
from engine.errors import InvalidRequest
from engine.protocol import MAX_PROMPT_SCORES, EngineOutput, EngineRequest, TokenLogprobs
from engine.scheduling.validation import MAX_LOGPROBS, check_request
from tests.engine import checkpoints
from tests.engine.core.test_parity import SETTINGS, greedy, prompts, run, start, text

TOLERANCE = 1e-4
NUM_TOKENS = 4
NUM_TOP = 3
NAMES = ("llama3", "mistral_window", "qwen3")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: checkpoints.save(name, tmp_path_factory.mktemp(name)) for name in NAMES}


def told(
    number: int, prompt: list[int], *, num_top: int = NUM_TOP, n: int = 1, more: int = NUM_TOKENS
) -> EngineRequest:
    asked = greedy(number, prompt, more)
    sampling = msgspec.structs.replace(asked.sampling, prompt_logprobs=num_top)
    return msgspec.structs.replace(asked, sampling=sampling, n=n)


def scores_of(outputs: Sequence[EngineOutput]) -> list[TokenLogprobs]:
    """Told once, with the first token of the first choice."""
    found = [each.prompt_logprobs for each in outputs if each.index == 0]
    assert found[0] is not None and found[1:] == [None] * (len(found) - 1)
    assert all(each.prompt_logprobs is None for each in outputs if each.index > 0)
    return found[0]


def assert_scored(name: str, prompt: list[int], found: list[TokenLogprobs]) -> None:
    wanted = checkpoints.logits(name, prompt).log_softmax(dim=-1)[:-1]
    assert [each.chosen.token_id for each in found] == prompt[1:]
    for place, (row, each) in enumerate(zip(wanted, found, strict=True)):
        own = float(row[prompt[place + 1]])
        assert abs(each.chosen.logprob - own) < TOLERANCE
        assert each.rank is not None
        assert (
            int((row > own + TOLERANCE).sum()) < each.rank <= 1 + int((row > own - TOLERANCE).sum())
        )
        best = row.topk(NUM_TOP)
        assert [top.token_id for top in each.top] == best.indices.tolist()
        for top, value in zip(each.top, best.values.tolist(), strict=True):
            assert abs(top.logprob - value) < TOLERANCE


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("name", "ahead"), [(NAMES[0], True), (NAMES[1], True), (NAMES[2], False)])
def test_beside_generations(folders: dict[str, Path], name: str, ahead: bool, setting: str) -> None:
    core = start(folders[name], run_ahead=ahead, **SETTINGS[setting])
    chosen = prompts()[:6] + prompts()[9:13]
    outputs = run(
        core,
        [told(i, prompt) for i, prompt in enumerate(chosen)]
        + [greedy(100 + i, prompt, NUM_TOKENS) for i, prompt in enumerate(chosen)],
    )
    for i, prompt in enumerate(chosen):
        assert_scored(name, prompt, scores_of(outputs[str(i)]))
        assert text(outputs[str(i)]) == text(outputs[str(100 + i)])
    assert core.status().num_free_blocks == core.resolved.num_blocks


def test_what_is_cached_is_computed_again_for_it(folders: dict[str, Path]) -> None:
    name, prompt = NAMES[0], prompts()[8]
    core = start(folders[name])
    run(core, [greedy(0, prompt)])
    outputs = run(core, [told(1, prompt, n=3), greedy(2, prompt)])
    assert_scored(name, prompt, scores_of(outputs["1"]))
    assert outputs["1"][-1].usage.cached_tokens == 0
    assert outputs["2"][-1].usage.cached_tokens > 0


def test_preempted_in_the_middle_it_is_told_once(folders: dict[str, Path]) -> None:
    """A text grows into the blocks of a prompt that is half told of, and starts over."""
    name = NAMES[0]
    core = start(folders[name], num_blocks=9, max_num_batched_tokens=2)
    speaker, prompt = greedy(0, prompts()[8][:60], 60), prompts()[10][:64]
    outputs = run(core, [speaker, told(1, prompt)])
    assert core.status().num_preemptions > 0
    assert_scored(name, prompt, scores_of(outputs["1"]))


@pytest.mark.parametrize("num_top", [0, 1, MAX_LOGPROBS])
def test_as_many_as_were_asked_for(folders: dict[str, Path], num_top: int) -> None:
    core = start(folders[NAMES[0]])
    others = told(2, prompts()[4], num_top=2)
    outputs = run(core, [told(1, prompts()[3], num_top=num_top), others])
    assert {len(each.top) for each in scores_of(outputs["1"])} == {num_top}
    assert {len(each.top) for each in scores_of(outputs["2"])} == {2}


def test_more_are_refused(folders: dict[str, Path]) -> None:
    core: EngineCore = start(folders[NAMES[0]])
    with pytest.raises(InvalidRequest) as refused:
        core.add(told(1, prompts()[3], num_top=MAX_LOGPROBS + 1))
    assert refused.value.param == "prompt_logprobs"


def test_more_than_can_be_told_of_a_long_prompt_are_refused() -> None:
    prompt = [1] * (MAX_PROMPT_SCORES // 4)
    for num_top, num_more, most in ((4, 0, "at most 3 of"), (3, 1, "at most 2 of")):
        request = told(1, [1] * num_more + prompt, num_top=num_top)
        with pytest.raises(InvalidRequest, match=most) as refused:
            check_request(request, vocab_size=64, max_model_len=2**20)
        assert refused.value.param == "prompt_logprobs"
    check_request(told(1, prompt, num_top=3), vocab_size=64, max_model_len=2**20)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_PROMPT_SCORES} tokens"):
        longer = [1] * (MAX_PROMPT_SCORES + 1)
        check_request(told(1, longer, num_top=0), vocab_size=64, max_model_len=2**20)
