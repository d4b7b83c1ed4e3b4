"""A request's life in the scheduler: refused, finished, aborted, failed, and billed exactly."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgspec
import pytest

from engine.errors import ContextLengthExceeded, EngineError, EngineOverloaded, InvalidRequest
from engine.protocol import EngineOutput, Usage
from engine.scheduling.scheduler import Scheduler
from engine.sequence import choice_seed
from tests.engine.scheduling.scheduling import (
    EOS,
    VOCAB,
    Clock,
    drain,
    execute,
    make,
    plan,
    request,
    sequence_of,
    step,
)

# What is refused


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        ("max_tokens", {"max_tokens": 0}),
        ("min_tokens", {"min_tokens": -1}),
        ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
        ("temperature", {"temperature": -0.1}),
        ("temperature", {"temperature": math.nan}),
        ("temperature", {"temperature": math.inf}),
        ("temperature", {"temperature": 1e300}),
        ("top_p", {"top_p": 0.0}),
        ("top_p", {"top_p": 1.1}),
        ("top_k", {"top_k": -1}),
        ("min_p", {"min_p": -0.1}),
        ("min_p", {"min_p": 1.1}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("repetition_penalty", {"repetition_penalty": math.inf}),
        ("repetition_penalty", {"repetition_penalty": math.nan}),
        ("repetition_penalty", {"repetition_penalty": 1e-46}),
        ("repetition_penalty", {"repetition_penalty": 1e39}),
        ("frequency_penalty", {"frequency_penalty": 2.1}),
        ("frequency_penalty", {"frequency_penalty": -2.1}),
        ("presence_penalty", {"presence_penalty": 2.1}),
        ("presence_penalty", {"presence_penalty": math.nan}),
        ("logprobs", {"logprobs": 21}),
        ("logprobs", {"logprobs": -1}),
        ("logit_bias", {"logit_bias": {VOCAB: 1.0}}),
        ("logit_bias", {"logit_bias": {-1: 1.0}}),
        ("logit_bias", {"logit_bias": {1: math.nan}}),
        ("logit_bias", {"logit_bias": {1: 1e39}}),
        ("logit_bias", {"logit_bias": {1: -100.5}}),
        ("stop_token_ids", {"stop_token_ids": (VOCAB,)}),
        ("stop_token_ids", {"stop_token_ids": (-1,)}),
        ("n", {"n": 0}),
        ("n", {"n": 129}),
        ("prompt_token_ids", {"prompt": []}),
        ("prompt_token_ids", {"prompt": [1, VOCAB]}),
        ("prompt_token_ids", {"prompt": [1, -1]}),
        ("prompt_token_ids", {"prompt": [1] * 64}),
    ],
)
def test_refuses_by_name_what_can_never_run(param: str, changes: dict[str, Any]) -> None:
    scheduler = make()
    with pytest.raises(InvalidRequest) as caught:
        scheduler.add(request("a", **({"prompt": [1, 2]} | changes)))
    assert caught.value.param == param
    assert not scheduler.has_unfinished()
    scheduler.check_integrity()


def test_accepts_the_edge_of_every_range() -> None:
    scheduler = make()
    edges: dict[str, Any] = {
        "max_tokens": 1,
        "min_tokens": 1,
        "temperature": 0.0,
        "top_p": 1.0,
        "min_p": 1.0,
        "frequency_penalty": -2.0,
        "presence_penalty": 2.0,
        "logprobs": 20,
        "logit_bias": {0: -100.0, VOCAB - 1: 100.0},
        "stop_token_ids": (0, VOCAB - 1),
    }
    scheduler.add(request("a", [0, VOCAB - 1], n=128, **edges))
    assert len(drain(scheduler)) == 128


def test_a_prompt_that_fills_the_context_names_both_numbers() -> None:
    scheduler = make(max_model_len=32)
    with pytest.raises(ContextLengthExceeded, match="32 tokens.* 32"):
        scheduler.add(request("a", 32))
    with pytest.raises(ContextLengthExceeded, match="40 tokens.* 32"):
        scheduler.add(request("a", 40))
    scheduler.add(request("a", 31, max_tokens=5))
    (answer,) = drain(scheduler)
    assert answer.finish_reason == "length"


def test_an_id_is_refused_while_it_runs_and_free_again_after() -> None:
    scheduler = make()
    scheduler.add(request("a", 2))
    with pytest.raises(InvalidRequest) as caught:
        scheduler.add(request("a", 2))
    assert caught.value.param == "request_id"
    drain(scheduler)
    scheduler.add(request("a", 2))
    drain(scheduler)


def test_the_queue_is_bounded_in_requests_that_never_ran() -> None:
    scheduler = make(max_waiting=2, max_num_seqs=1)
    scheduler.add(request("a", 2, n=5))
    scheduler.add(request("b", 2))
    with pytest.raises(EngineOverloaded):
        scheduler.add(request("c", 2))
    step(scheduler)
    scheduler.add(request("c", 2))
    with pytest.raises(EngineOverloaded) as caught:
        scheduler.add(request("d", 2))
    assert isinstance(caught.value, EngineError) and caught.value.code == "engine_overloaded"
    assert scheduler.abort("c")
    scheduler.add(request("d", 2))
    scheduler.check_integrity()
    drain(scheduler)


# How it ends


def answers(token_ids: list[int], **sampling: Any) -> list[EngineOutput]:
    """Outputs of one request to which the model says `token_ids`."""
    scheduler = make()
    scheduler.add(request("a", 2, **sampling))
    outputs: list[EngineOutput] = []
    for token in token_ids:
        outputs += step(scheduler, token)
    assert scheduler.has_unfinished() != outputs[-1].finished
    return outputs


@pytest.mark.parametrize(
    ("token_ids", "sampling", "reason"),
    [
        ([1, 1, EOS], {}, "stop"),
        ([1, 1, EOS], {"max_tokens": 3}, "stop"),
        ([1, 1, 1], {"max_tokens": 3}, "length"),
        ([1, 1, EOS], {"ignore_eos": True, "max_tokens": 3}, "length"),
        ([1, 1, EOS], {"ignore_eos": True}, None),
        ([1, 1, 5], {"stop_token_ids": (4, 5)}, "stop"),
        ([1, 1, 5], {"stop_token_ids": (4, 5), "ignore_eos": True}, "stop"),
        ([1, EOS], {"min_tokens": 3}, None),
        ([1, 5], {"min_tokens": 3, "stop_token_ids": (5,)}, None),
        ([1, EOS, EOS], {"min_tokens": 3}, "stop"),
        ([EOS, EOS], {"min_tokens": 2, "max_tokens": 2, "ignore_eos": True}, "length"),
    ],
)
def test_finish_rules(token_ids: list[int], sampling: dict[str, Any], reason: str | None) -> None:
    outputs = answers(token_ids, **sampling)
    assert [t for o in outputs for t in o.token_ids] == token_ids, "the last token is delivered"
    assert [o.finish_reason for o in outputs] == [None] * (len(token_ids) - 1) + [reason]
    assert outputs[-1].usage.generated_tokens == len(token_ids), "and counted"


def test_max_tokens_is_cut_to_the_context() -> None:
    scheduler = make(max_model_len=16)
    scheduler.add(request("a", 10, max_tokens=1_000_000))
    outputs = drain(scheduler)
    assert len(outputs) == 6 and outputs[-1].finish_reason == "length"


# Seeds


def test_a_seed_gives_each_choice_its_documented_own() -> None:
    scheduler = make()
    scheduler.add(request("a", 2, n=2, seed=-3))
    seeds = [sequence_of(scheduler, "a", index).seed for index in range(2)]
    assert seeds == [choice_seed(-3, 0), choice_seed(-3, 1)]
    digest = hashlib.blake2b(b"-3:1", digest_size=8).digest()
    assert seeds[1] == int.from_bytes(digest, "little")


def test_without_a_seed_the_engine_draws_one() -> None:
    def drawn(engine_seed: int) -> list[int]:
        scheduler = make(seed=engine_seed)
        for name in ("a", "b"):
            scheduler.add(request(name, 2))
        return [sequence_of(scheduler, name).seed for name in ("a", "b")]

    assert drawn(1) == drawn(1) != drawn(2)
    assert len(set(drawn(1))) == 2


# The bill


def test_usage_tells_tokens_and_times() -> None:
    clock = Clock()
    scheduler = make(clock=clock, max_num_batched_tokens=4)
    clock.now = 10.0
    scheduler.add(request("a", 7, max_tokens=2))
    clock.now = 12.0
    step(scheduler)
    output = scheduler.schedule()
    clock.now = 15.0
    (first,) = execute(scheduler, output)
    clock.now = 20.0
    (last,) = step(scheduler)
    expected = Usage(
        prompt_tokens=7,
        generated_tokens=1,
        prefilled=True,
        queue_time_s=2.0,
        prefill_time_s=3.0,
        first_token_time_s=5.0,
    )
    assert first.usage == expected
    assert last.usage.generated_tokens == 2
    assert last.usage.first_token_time_s == 5.0 and last.usage.prefill_time_s == 3.0


def test_choices_share_one_bill() -> None:
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(request("a", list(range(10, 22)), n=3, max_tokens=2))
    outputs = drain(scheduler)
    assert [o.usage.generated_tokens for o in outputs] == [1, 2, 3, 4, 5, 6]
    assert {o.usage.prompt_tokens for o in outputs} == {12}
    assert {o.usage.cached_tokens for o in outputs} == {0}, "what choices share is no hit"
    assert [o.finished for o in outputs] == [False] * 5 + [True]
    assert sorted(o.index for o in outputs if o.finish_reason) == [0, 1, 2]
    assert scheduler.prefix_cache_query_tokens == 12, "one prompt, asked for once"


def test_a_first_choice_that_ends_at_once_still_lets_the_others_run() -> None:
    scheduler = make()
    scheduler.add(request("a", 5, n=3, max_tokens=1))
    outputs = drain(scheduler)
    assert sorted(o.index for o in outputs) == [0, 1, 2]
    assert [o.finished for o in outputs] == [False, False, True]


# Abort


def test_aborting_what_waits_bills_nothing() -> None:
    scheduler = make()
    scheduler.add(request("a", 5, n=2))
    first, last = scheduler.abort("a")
    unbilled = EngineOutput(
        request_id="a", usage=Usage(prompt_tokens=5), finish_reason="abort", finished=False
    )
    assert first == unbilled
    assert last == msgspec.structs.replace(unbilled, index=1, finished=True)
    assert not scheduler.has_unfinished() and scheduler.num_waiting == 0
    scheduler.check_integrity()


def test_aborting_a_prompt_under_way_bills_nothing_and_frees_its_blocks() -> None:
    scheduler = make()
    scheduler.add(request("a", 40, n=3))
    step(scheduler)
    assert scheduler.num_free_blocks < 64
    answers = scheduler.abort("a")
    assert [(o.index, o.finished) for o in answers] == [(0, False), (1, False), (2, True)]
    assert not any(o.usage.prefilled for o in answers)
    assert scheduler.num_free_blocks == 64
    scheduler.check_integrity()


def test_aborting_an_answer_bills_what_was_generated() -> None:
    scheduler = make()
    scheduler.add(request("a", 5, n=2))
    for _ in range(3):
        step(scheduler)
    answers = scheduler.abort("a")
    assert [(o.index, o.finished) for o in answers] == [(0, False), (1, True)]
    for answer in answers:
        assert answer.usage.prefilled and answer.usage.generated_tokens == 5
        assert answer.finish_reason == "abort" and answer.token_ids == []
    assert scheduler.num_free_blocks == 64
    scheduler.check_integrity()


def test_abort_ends_only_the_choices_that_were_still_open() -> None:
    scheduler = make(enabled=False)
    scheduler.add(request("a", 2, n=2))
    sampled = {("a", 0): [(EOS, None)], ("a", 1): [(1, None)]}
    scheduler.update(scheduler.schedule(), sampled)
    (answer,) = scheduler.abort("a")
    assert answer.finished and answer.index == 1 and answer.usage.generated_tokens == 2


def test_unknown_and_finished_ids_are_nothing_to_abort() -> None:
    scheduler = make()
    assert scheduler.abort("a") == []
    scheduler.add(request("a", 2))
    drain(scheduler)
    assert scheduler.abort("a") == []


def test_a_step_passes_over_what_was_aborted_meanwhile() -> None:
    scheduler = make()
    scheduler.add(request("a", 5))
    scheduler.add(request("b", 5))
    output = scheduler.schedule()
    scheduler.abort("a")
    assert [o.request_id for o in execute(scheduler, output)] == ["b"]
    assert scheduler.cache.num_cached_blocks == 1
    drain(scheduler)


# A step that raised


def failing() -> tuple[Scheduler, list[EngineOutput]]:
    """ "a" decodes, "b" (two choices) computes its prompt, "c" waits; then the step fails."""
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(request("a", 2))
    step(scheduler)
    scheduler.add(request("b", list(range(10, 30)), n=2))
    scheduler.add(request("c", 20, max_tokens=1))
    output = scheduler.schedule()
    assert plan(output) == [("a", 2, 1), ("b", 0, 7)]
    outputs = scheduler.fail_batch(output)
    scheduler.check_integrity()
    return scheduler, outputs


def test_a_failed_step_ends_its_requests_and_no_others() -> None:
    scheduler, outputs = failing()
    assert [(o.request_id, o.finish_reason, o.error_code, o.finished) for o in outputs] == [
        ("a", "error", "engine_step_failed", True),
        ("b", "error", "engine_step_failed", False),
        ("b", "error", "engine_step_failed", True),
    ]
    assert [(o.index, o.usage.generated_tokens) for o in outputs] == [(0, 1), (0, 0), (1, 0)]
    assert [o.request_id for o in drain(scheduler)] == ["c"]


def test_what_a_failed_step_computed_is_not_cached() -> None:
    scheduler, _ = failing()
    assert scheduler.cache.num_cached_blocks == 0
    assert scheduler.num_free_blocks == 64
    scheduler.add(request("again", list(range(10, 30)), max_tokens=1))
    (answer,) = [o for o in drain(scheduler) if o.request_id == "again"]
    assert answer.usage.cached_tokens == 0


def test_one_last_output_for_each_choice_that_was_in_the_failed_step() -> None:
    scheduler = make(enabled=False)
    scheduler.add(request("a", 2, n=3))
    answers = scheduler.fail_batch(scheduler.schedule())
    assert [(o.index, o.finished) for o in answers] == [(0, False), (1, False), (2, True)]
    assert not scheduler.has_unfinished()
    scheduler.check_integrity()
