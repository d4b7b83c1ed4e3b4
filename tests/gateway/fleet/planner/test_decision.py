"""Decisions keep to their bounds, follow the load, and do not flap."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet.planner.decision import (
    PLANNED_LATE,
    Decision,
    PastNeed,
    PoolBounds,
    PoolObservation,
    decide,
)
from gateway.fleet.planner.sizing import (
    PoolLoad,
    PromptTransfer,
    decoders_needed,
    late_share,
    replicas_needed,
    roles_needed,
)
from gateway.lanes import Slo
from tests.budget import examples

SLO = Slo(ttft_s=1.0, tpot_s=0.05)
NOTHING = PoolLoad(prompts_s=0, decodes_s=0, mean_prompt_s=0, residual_s=0, step_s=0.01)
HOUR_S = 3600.0

loads = st.builds(
    PoolLoad,
    prompts_s=st.floats(0, 20),
    decodes_s=st.floats(0, 20),
    mean_prompt_s=st.floats(0.001, 3),
    residual_s=st.floats(0.001, 5),
    step_s=st.floats(0, 0.1),
)
observations = st.builds(
    PoolObservation,
    now_s=st.just(0.0),
    running=st.integers(0, 12),
    load=loads,
    start_s=st.floats(1, 300),
    waiting_s=st.floats(0, 500),
    batch_waiting_s=st.floats(0, 1e5),
    kv_used=st.floats(0, 12),
    late=st.floats(0, 100),
    asked=st.floats(0, 100),
    since_growth_s=st.floats(0, 1000),
    idle_for_s=st.floats(0, 5000),
    expects_some=st.booleans(),
)
bounds = st.builds(
    lambda least, more, cooldown_s: PoolBounds(
        least=least, most=max(1, least + more), slo=SLO, cooldown_s=cooldown_s
    ),
    st.integers(0, 4),
    st.integers(0, 8),
    st.floats(0, 900),
)


def run(seen: Sequence[PoolObservation], of: PoolBounds, interval_s: float = 5.0) -> list[Decision]:
    """Decide again and again, each time with as many running as were wanted before."""
    past: tuple[PastNeed, ...] = ()
    decisions: list[Decision] = []
    for number, each in enumerate(seen):
        running = decisions[-1].wanted if decisions else max(1, of.least)
        now = msgspec.structs.replace(each, now_s=number * interval_s, running=running)
        decisions.append(decide(now, of, past))
        past = decisions[-1].past
    return decisions


@given(seen=st.lists(observations, min_size=1, max_size=30), of=bounds)
@settings(max_examples=examples(200))
def test_never_below_the_least_or_above_the_most(
    seen: list[PoolObservation], of: PoolBounds
) -> None:
    for decision in run(seen, of):
        assert of.least <= decision.needed <= decision.wanted <= of.most
        assert decision.reasons and decision.reasons[0].text


@given(seen=st.lists(observations, min_size=2, max_size=60), of=bounds)
@settings(max_examples=examples(200))
def test_it_turns_around_once_a_cool_down(seen: list[PoolObservation], of: PoolBounds) -> None:
    """Between a growth and the shrinking after it lies a whole cool-down, whatever is seen."""
    grown_at_s, wanted = -HOUR_S, max(1, of.least)
    for number, decision in enumerate(run(seen, of)):
        if decision.wanted > wanted:
            grown_at_s = 5.0 * number
        elif decision.wanted < wanted:
            assert 5.0 * number - grown_at_s >= of.cooldown_s - 1e-6
        wanted = decision.wanted


@given(seen=observations, of=bounds)
@settings(max_examples=examples(200))
def test_the_last_replica_stays_while_something_is_asked(
    seen: PoolObservation, of: PoolBounds
) -> None:
    busy = msgspec.structs.replace(seen, idle_for_s=0.0)
    assert decide(busy, of).wanted >= 1


@given(seen=observations, of=bounds, factor=st.floats(1, 10))
@settings(max_examples=examples(200))
def test_more_load_never_needs_fewer(seen: PoolObservation, of: PoolBounds, factor: float) -> None:
    load = msgspec.structs.replace(
        seen.load,
        prompts_s=factor * seen.load.prompts_s,
        decodes_s=factor * seen.load.decodes_s,
    )
    more = msgspec.structs.replace(seen, load=load, waiting_s=factor * seen.waiting_s)
    assert decide(more, of).needed >= decide(seen, of).needed


@given(load=loads, replicas=st.integers(1, 30))
@settings(max_examples=examples(200))
def test_more_replicas_make_no_more_late(load: PoolLoad, replicas: int) -> None:
    before, after = (late_share(load, SLO, number) for number in (replicas, replicas + 1))
    assert 0 <= after <= before + 1e-12 <= 1 + 1e-9


def test_what_is_needed_keeps_up_with_the_work() -> None:
    load = PoolLoad(prompts_s=2.5, decodes_s=1.5, mean_prompt_s=0.2, residual_s=0.2, step_s=0.01)
    needed = replicas_needed(load, SLO, 0.99, 64)
    assert 5 <= needed <= 8 and late_share(load, SLO, needed) <= 0.01
    assert late_share(load, SLO, 4) == 1.0
    assert replicas_needed(NOTHING, SLO, 0.99, 64) == 0


def test_a_model_at_zero_comes_and_goes() -> None:
    of = PoolBounds(least=0, most=2, slo=SLO, cooldown_s=60, idle_s=600)
    idle = PoolObservation(now_s=0, running=1, load=NOTHING, start_s=5, idle_for_s=599)
    assert decide(idle, of).wanted == 1
    late = msgspec.structs.replace(idle, idle_for_s=600.0)
    assert decide(late, of).wanted == 0 and decide(late, of).reasons[0].cause == "idle"
    usual = msgspec.structs.replace(late, expects_some=True)
    assert decide(usual, of).reasons[0].cause == "usual" and decide(usual, of).wanted == 1


def test_each_reason_is_told() -> None:
    of = PoolBounds(least=1, most=9, slo=SLO, cooldown_s=60)
    seen = PoolObservation(
        now_s=0,
        running=2,
        load=NOTHING,
        start_s=5,
        waiting_s=42,
        kv_used=1.9,
        late=9,
        asked=60,
        batch_waiting_s=4000,
    )
    decision = decide(seen, of)
    causes = {each.cause: each.replicas for each in decision.reasons}
    assert causes == {"least": 1, "waiting": 2, "batches": 3, "kv": 3, "late": 3}
    quiet = msgspec.structs.replace(seen, now_s=30.0, running=3, waiting_s=0, kv_used=0, late=0)
    after = decide(msgspec.structs.replace(quiet, batch_waiting_s=0), of, decision.past)
    assert (after.needed, after.wanted) == (1, 3)
    assert after.reasons[0].cause == "cooldown" and "30 s of cool-down" in after.why


def load_with(transfer_s: float | None, *, is_learnt: bool = True) -> PoolLoad:
    """Return a load whose prompts take so long to be read; None: nobody can read them."""
    transfer = None
    if transfer_s is not None:
        transfer = PromptTransfer(seconds=transfer_s, tokens=9_000, is_learnt=is_learnt)
    return PoolLoad(
        prompts_s=2.6,
        decodes_s=1.3,
        mean_prompt_s=0.39,
        residual_s=1.1,
        step_s=0.005,
        rate=6.7,
        answer_tokens=340,
        transfer=transfer,
    )


def test_what_a_transfer_takes_counts_against_roles() -> None:
    """It is a part of the time of each token, and keeps a replica that reads busy."""
    slo = Slo(ttft_s=5.0, tpot_s=0.008)
    numbers = [decoders_needed(load_with(each), slo, 32) for each in (0.0, 0.05, 0.5)]
    assert numbers == [4, 4, 7]
    assert decoders_needed(load_with(2.0), slo, 32) is None  # no token is left the time of its step
    assert roles_needed(load_with(0.5), slo, 0.99, 9) is None
    assert roles_needed(load_with(None), slo, 0.99, 32) is None
    of_one_token = msgspec.structs.replace(load_with(0.0), answer_tokens=1.0)
    assert decoders_needed(of_one_token, slo, 32) is None
    # So slow that the reads alone keep this many replicas busy.
    assert decoders_needed(load_with(2.0), Slo(ttft_s=5.0, tpot_s=1.0), 32) == 15


def test_it_is_said_where_nothing_was_read_yet() -> None:
    seen = PoolObservation(
        now_s=0.0, running=8, load=load_with(0.05, is_learnt=False), start_s=10.0
    )
    decision = decide(seen, PoolBounds(least=1, most=32, slo=Slo(ttft_s=5.0, tpot_s=0.008)))
    assert "as assumed, nothing was read here yet" in "".join(e.text for e in decision.reasons)


def test_roles_are_named_where_fewer_would_do_with_them() -> None:
    """A strict objective of tokens leaves no time for prompts beside them."""
    load = load_with(transfer_s=0.05)
    seen = PoolObservation(now_s=0.0, running=8, load=load, start_s=10.0)
    strict, loose = Slo(ttft_s=5.0, tpot_s=0.008), Slo(ttft_s=0.5, tpot_s=0.05)
    assert replicas_needed(load, strict, 0.99, 32) == 10
    assert roles_needed(load, strict, 0.99, 32) == (4, 4)
    for slo, is_named in ((strict, True), (loose, False)):
        decision = decide(seen, PoolBounds(least=1, most=32, slo=slo))
        said = [each.text for each in decision.reasons if each.cause == "roles"]
        assert len(said) == is_named
        assert not said or "0.05 s to read 9000 tokens of a prompt, as learnt here" in said[0]
        assert decision.wanted == replicas_needed(load, slo, 1 - PLANNED_LATE * 0.01, 32)
