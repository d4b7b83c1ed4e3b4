"""An output that another engine began goes on as if it had never moved: the tokens, their
log-probabilities and the end of a run without a break, wherever it is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.errors import InvalidRequest
from engine.fake.engine import FakeCore
from engine.protocol import EngineOutput, EngineRequest, Grammar, SamplingParams, Usage
from engine.runner.speculative.guesser import Worth
from engine.sequence import choice_seed
from engine.text.tokenizer import Tokenizer
from engine.transport.step_loop import Core
from tests.budget import examples
from tests.engine import checkpoints
from tests.engine.scheduling.scheduling import drain, make, request
from tests.engine.weights.test_adapters import EVERYWHERE, write_adapter

PENNY = Path(__file__).resolve().parents[3] / "models" / "penny"
TOKENIZER = Tokenizer.load(PENNY)
EOS = 2
PROMPT = TOKENIZER.encode("<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n")
OTHER = TOKENIZER.encode("<|im_start|>user\nName two colours.<|im_end|>\n<|im_start|>assistant\n")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "x-guidance": {"whitespace_pattern": "[ ]"},
}
DRAWN: dict[str, Any] = {"temperature": 1.2, "seed": 7}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": DRAWN,
    "seed named by the gateway": {"temperature": 1.2, "seed": None},
    "nucleus": DRAWN | {"top_p": 0.8, "top_k": 40, "min_p": 0.02},
    "penalties": DRAWN
    | {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.5},
    "bias": DRAWN | {"logit_bias": {EOS: -100.0, 40: 3.0}},
    "least length": DRAWN | {"min_tokens": 9, "logit_bias": {EOS: 8.0}, "ignore_eos": False},
    "stop ids": DRAWN | {"stop_token_ids": tuple(range(3, 900, 9)), "min_tokens": 5},
    "logprobs": DRAWN | {"logprobs": 3},
    "named logprobs": DRAWN | {"logprobs": 0, "logprob_token_ids": (5, 40)},
    "prompt logprobs": {"temperature": 0.0, "prompt_logprobs": 2},
    "json": DRAWN
    | {"max_tokens": 30, "grammar": Grammar(kind="json_schema", text=json.dumps(SCHEMA))},
    "regex": DRAWN | {"grammar": Grammar(kind="regex", text="(ab|[0-9]{2}c)*!")},
}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "guessing": {"speculative": "ngram"},
    "in chunks, uncached": {"max_num_batched_tokens": 24, "prefix_caching": False},
}


class ChoiceAnswer(msgspec.Struct):
    """Holds what an engine said of one choice."""

    token_ids: list[int] = []
    logprobs: list[Any] = []
    prompt_logprobs: list[Any] | None = None
    reason: str | None = None


class Answer(msgspec.Struct):
    choices: dict[int, ChoiceAnswer] = {}
    usage: Usage | None = None
    num_last: int = 0


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def penny(engine: str = "plain") -> EngineCore:
    return start(PENNY, **ENGINES[engine])


def start(folder: Path, **changes: Any) -> EngineCore:
    options: dict[str, Any] = {"num_blocks": 400, "max_model_len": 128, "dtype": "float32"}
    options |= {"deterministic": True, "device": "cpu"}
    return EngineCore(EngineConfig(model=folder, **(options | changes)))


def ask(prompts: Sequence[list[int]] = (PROMPT,), n: int = 1, **sampling: Any) -> EngineRequest:
    return EngineRequest(
        request_id="whole",
        prompt_token_ids=prompts[0],
        more_prompts=tuple(prompts[1:]),
        sampling=SamplingParams(**({"max_tokens": 14, "ignore_eos": True} | sampling)),
        n=n,
        drawn_seed=2**64 - 5,
    )


def say(core: Core, requests: Sequence[EngineRequest]) -> dict[str, Answer]:
    """Run them side by side."""
    answers = {each.request_id: Answer() for each in requests}
    for each in requests:
        core.add(each)
    while core.has_work():
        for output in core.step():
            note(answers[output.request_id], output)
    core.check_integrity()
    assert all(each.num_last == 1 for each in answers.values())
    return answers


def note(answer: Answer, output: EngineOutput) -> None:
    choice = answer.choices.setdefault(output.index, ChoiceAnswer())
    choice.token_ids += output.token_ids
    choice.logprobs += output.logprobs or ()
    if output.prompt_logprobs is not None:
        assert choice.prompt_logprobs is None, "told twice"
        choice.prompt_logprobs = output.prompt_logprobs
    choice.reason = output.finish_reason
    answer.usage, answer.num_last = output.usage, answer.num_last + output.finished


def cut(asked: EngineRequest, whole: Answer, lengths: Sequence[int]) -> EngineRequest:
    """The request that goes on where each choice had said so much; one that was whole has ended."""
    outputs = [whole.choices[i].token_ids for i in range(len(lengths))]
    ended = tuple(i for i, length in enumerate(lengths) if length >= len(outputs[i]))
    said = [output[:length] for output, length in zip(outputs, lengths, strict=True)]
    return msgspec.structs.replace(
        asked,
        request_id=f"cut at {lengths}",
        said=tuple([] if i in ended else each for i, each in enumerate(said)),
        ended=ended,
    )


def check_rest(asked: EngineRequest, whole: Answer, lengths: Sequence[int], rest: Answer) -> None:
    open_ones = {
        i: length for i, length in enumerate(lengths) if length < len(whole.choices[i].token_ids)
    }
    assert rest.choices.keys() == open_ones.keys()
    for index, length in open_ones.items():
        exact, found = whole.choices[index], rest.choices[index]
        assert found.token_ids == exact.token_ids[length:]
        assert found.reason == exact.reason
        assert found.logprobs == exact.logprobs[length:]
        assert found.prompt_logprobs == exact.prompt_logprobs
    assert rest.usage is not None
    numbers = {index // asked.n for index in open_ones}
    prompt_tokens = sum(len(asked.prompts[number]) for number in numbers)
    generated = sum(len(each.token_ids) for each in rest.choices.values())
    resumed = sum(open_ones.values())
    assert rest.usage.prompt_tokens == prompt_tokens >= rest.usage.cached_tokens
    assert (rest.usage.generated_tokens, rest.usage.resumed_tokens) == (generated, resumed)
    assert rest.usage.input_tokens == prompt_tokens + resumed


def check_every_cut(first: Core, second: Core, asked: EngineRequest) -> None:
    whole = say(first, [asked])["whole"]
    length = len(whole.choices[0].token_ids)
    assert length > 1, "nothing to cut"
    cuts = [cut(asked, whole, [at]) for at in range(length)]
    rests = say(second, cuts)
    for at, each in enumerate(cuts):
        check_rest(asked, whole, [at], rests[each.request_id])


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("engine", ["plain"])
def test_it_goes_on_from_every_cut(engine: str, sampling: dict[str, Any]) -> None:
    if "grammar" in sampling or "stop_token_ids" in sampling:
        sampling = {"ignore_eos": False} | sampling
    check_every_cut(penny(), penny(engine), ask(**sampling))


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "plain"])
@pytest.mark.parametrize("sampling", ["greedy", "penalties", "json"])
def test_it_goes_on_in_another_engine(
    engine: str, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worth, "slowdown", lambda *_: 1.0)  # it is measured
    options = SAMPLINGS[sampling] | ({"ignore_eos": False} if sampling == "json" else {})
    check_every_cut(penny(), penny(engine), ask(**options))


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_all_choices_go_on_from_where_each_was(data: st.DataObject) -> None:
    """Several prompts and choices, of which some have ended and some have not begun."""
    n = data.draw(st.integers(1, 3))
    prompts = data.draw(st.sampled_from([(PROMPT,), (PROMPT, OTHER), (OTHER, PROMPT, OTHER)]))
    sampling = data.draw(
        st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0.0, 0.7, 1.5]),
                "seed": st.sampled_from([None, 0, 3]),
                "top_p": st.sampled_from([1.0, 0.7]),
                "repetition_penalty": st.sampled_from([1.0, 1.4]),
                "frequency_penalty": st.sampled_from([0.0, 0.9]),
                "min_tokens": st.integers(0, 4),
                "ignore_eos": st.booleans(),
                "max_tokens": st.integers(4, 8),
                "logprobs": st.sampled_from([None, 1]),
            }
        )
    )
    asked = ask(prompts, n, **sampling)
    whole = say(penny(), [asked])["whole"]
    most = [len(whole.choices[i].token_ids) for i in range(n * len(prompts))]
    lengths = [data.draw(st.integers(0, each)) for each in most]
    if lengths == most:
        lengths[-1] -= 1
    each = cut(asked, whole, lengths)
    check_rest(asked, whole, lengths, say(penny(), [each])[each.request_id])


def test_what_was_said_counts_for_the_context_and_the_bound() -> None:
    """The context leaves 100 tokens; 97 of them were said."""
    asked = ask([PROMPT * 2], temperature=0.0, max_tokens=1000)
    room = 128 - len(asked.prompt_token_ids)
    whole = say(penny(), [asked])["whole"]
    assert len(whole.choices[0].token_ids) == room
    each = cut(asked, whole, [room - 3])
    rest = say(penny(), [each])[each.request_id]
    check_rest(asked, whole, [room - 3], rest)
    assert rest.choices[0].reason == "length"


@pytest.mark.parametrize("family", ["mistral_window", "qwen3_moe"])
def test_other_models_go_on(family: str, tmp_path: Path) -> None:
    folder = checkpoints.save(family, tmp_path)
    rng = random.Random(2)
    prompt = [rng.randrange(3, checkpoints.VOCAB) for _ in range(37)]
    options: dict[str, Any] = {"num_blocks": 120, "max_num_batched_tokens": 40}
    first, second = start(folder, **options), start(folder, speculative="ngram", **options)
    check_every_cut(first, second, ask([prompt], max_tokens=20, **DRAWN))


def test_an_adapter_goes_on(tmp_path: Path) -> None:
    folder = checkpoints.save("llama3", tmp_path / "base")
    model = checkpoints.build("llama3")
    path = write_adapter(tmp_path / "a", model, EVERYWHERE, rank=8, alpha=64, seed=3)
    core = start(folder, adapters={"a": path})
    asked = ask([list(range(5, 30))], max_tokens=10, temperature=0.0)
    adapted = msgspec.structs.replace(asked, adapter="a")
    plain = say(core, [asked])["whole"].choices[0].token_ids
    assert say(core, [adapted])["whole"].choices[0].token_ids != plain
    check_every_cut(core, core, adapted)


def test_a_draft_model_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worth, "slowdown", lambda *_: 1.0)
    folder = checkpoints.save("llama3", tmp_path)
    second = start(folder, speculative="draft", draft_model=folder)
    asked = ask([list(range(5, 30))], max_tokens=10, temperature=0.0)
    check_every_cut(start(folder), second, asked)
    assert second.status().num_accepted_tokens > 0


def test_it_is_preempted_as_any_other() -> None:
    """Blocks for two of them: what was said is computed as often as need be."""
    core = start(PENNY, num_blocks=8, max_num_batched_tokens=48, prefix_caching=False)
    asked = ask(temperature=0.0, max_tokens=40)
    whole = say(penny(), [asked])["whole"]
    lengths = range(1, 7)
    cuts = [cut(asked, whole, [at]) for at in lengths]
    rests = say(core, cuts)
    assert core.status().num_preemptions > 0
    for each, at in zip(cuts, lengths, strict=True):
        check_rest(asked, whole, [at], rests[each.request_id])


def test_it_is_aborted_and_paused_as_any_other() -> None:
    asked = msgspec.structs.replace(
        ask(n=3, **DRAWN), said=([4, 5], [], [6]), ended=(1,), request_id="r"
    )
    core = penny()
    core.add(asked)
    core.pause("r")
    assert not core.has_work()
    core.resume("r")
    first = core.step()
    assert {output.index for output in first} <= {0, 2}
    last = core.abort("r")
    assert {output.index for output in last} == {0, 2}
    assert [output.finished for output in last] == [False, True]
    core.check_integrity()
    assert not core.has_work()


def test_the_named_seed_is_what_the_engine_would_draw_with() -> None:
    """And who names a seed draws as ever, whatever the gateway named."""
    seeded = ask(n=2, **DRAWN)
    other = msgspec.structs.replace(seeded, drawn_seed=1)
    plain = msgspec.structs.replace(seeded, drawn_seed=None)
    found = [say(penny(), [each])["whole"].choices for each in (seeded, other, plain)]
    assert found[0] == found[1] == found[2]
    scheduler = make()
    scheduler.add(request("r", 4, n=2))
    first, second = (seq.seed for seq in scheduler._requests["r"].sequences)
    scheduler.add(
        msgspec.structs.replace(request("s", 4, n=2), more_prompts=([1, 2],), drawn_seed=9)
    )
    seeds = [seq.seed for seq in scheduler._requests["s"].sequences]
    assert seeds == [choice_seed(9, index) for index in range(4)] and first != second
    drain(scheduler)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "of other choices": ({"said": ([1], [2])}, "said must be of 1 choices, not of 2"),
    "no token": ({"said": ([9999],)}, "said must be token ids between"),
    "nothing left": ({"said": ([1] * 14,)}, "said must be less than the 14 tokens"),
    "all ended": ({"ended": (0,)}, "ended must be fewer than all"),
    "no choice": ({"ended": (1,)}, "ended must be indices of 1 choices"),
    "out of order": ({"n": 3, "ended": (1, 0)}, "ended must be indices of 3 choices"),
    "twice": ({"n": 3, "ended": (1, 1)}, "ended must be indices of 3 choices"),
    "below all": ({"n": 3, "ended": (-1,)}, "ended must be indices of 3 choices"),
    "an embedding": (
        {"embed": True, "sampling": SamplingParams(max_tokens=0), "said": ([1],)},
        "said is not for embeddings",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_nobody_can_have_said_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        FakeCore(vocab_size=4096).add(msgspec.structs.replace(ask(), **changes))


def test_the_fake_goes_on_as_the_real_one() -> None:
    asked = ask([[5] * 40, [6] * 3], 2, seed=4)
    whole = say(FakeCore(), [asked])["whole"]
    lengths = [3, 14, 0, 13]
    each = cut(asked, whole, lengths)
    check_rest(asked, whole, lengths, say(FakeCore(), [each])[each.request_id])
