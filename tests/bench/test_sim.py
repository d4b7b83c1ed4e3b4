"""The simulator: the same in every run, and the floods that it is there to show."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bench.gpu.floors import H200, decode_step_s, prefill_s
from bench.gpu.models import LLAMA_8B, shape_of
from bench.sim import __main__ as command
from bench.sim import paces, thread_team
from bench.sim.__main__ import main
from bench.sim.cost import Cost, floor, load, save
from bench.sim.fit import Case, compared, least_of
from bench.sim.orderings import FAIR, FCFS, ORDERINGS, STRICT, Ordering
from bench.sim.report import Report, jain, max_min, moved, percentile, report
from bench.sim.scenarios import SCENARIOS, Scenario, flood, long_prompt
from bench.sim.world import Session, Setup, Turn, World
from engine.scheduling.step_costs import StepWork

COST = Cost(step_s=4e-3, decode_s=2e-4, prompt_token_s=1e-4, context_token_s=3e-7, pair_s=1e-10)


def simulate(scenario: Scenario, ordering: Ordering, cost: Cost = COST) -> Report:
    return report(World(cost, ordering, scenario.setup).run(scenario.sessions, scenario.horizon_s))


def test_a_flood_of_batch_leaves_those_who_chat_alone() -> None:
    scenario = flood(COST, 1, 200)
    found = {ordering.name: simulate(scenario, ordering) for ordering in ORDERINGS}
    chats = {name: outcome.lanes["interactive"] for name, outcome in found.items()}
    assert chats["fair"].requests == chats["fcfs"].requests > 20
    assert chats["fair"].ttft_p99_s < chats["fcfs"].ttft_p99_s / 5
    assert chats["fair"].goodput > chats["fcfs"].goodput
    assert found["fair"].jain > found["fcfs"].jain
    assert found["fair"].lanes["batch"].done > 0, "what is left is batch's"


def test_it_is_the_same_by_the_seed() -> None:
    first, second, other = (
        msgspec.to_builtins(simulate(flood(COST, seed, 30), FAIR)) for seed in (3, 3, 4)
    )
    assert first == second != other


def test_a_lane_above_takes_all_from_batch_by_priority_and_not_by_counters() -> None:
    """Chats at more than the machine can do: strict priority serves batch nothing, the counters
    one part in seventeen."""
    sessions = [
        Session(0.0, lane, lane, (Turn(64, 16),))
        for lane in ("interactive", "batch")
        for _ in range(400)
    ]
    setup = Setup(max_num_seqs=8)  # of which batch may have 6
    done = {}
    for ordering in (FAIR, STRICT):
        lanes = report(World(COST, ordering, setup).run(sessions, 3.0)).lanes
        done[ordering.name] = (lanes["interactive"].done, lanes["batch"].done)
    assert done["strict"][0] > 100 and done["strict"][1] == 0
    assert done["fair"][1] > 0 and done["fair"][0] > 8 * done["fair"][1]


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_starts(name: str) -> None:
    scenario = SCENARIOS[name](COST, 1, 60)
    assert "interactive" in {session.lane for session in scenario.sessions}
    assert all(0 < session.start_s < scenario.horizon_s for session in scenario.sessions)
    longest = max(t.prompt + t.answer for s in scenario.sessions for t in s.turns)
    assert longest <= scenario.setup.max_model_len


def test_a_long_prompt_is_computed_beside_chats_and_moves_none_of_them_by_half() -> None:
    scenario = long_prompt(floor(), 1, 0, length=100_000)
    beside = simulate(scenario, FAIR, floor())
    assert beside.lanes["agentic"].done == 1
    assert 0 < beside.lanes["interactive"].done <= beside.lanes["interactive"].requests
    assert scenario.without is not None and len(scenario.without) > 100
    alone = simulate(replace(scenario, sessions=scenario.without), FAIR, floor())
    assert 1 < max(moved("interactive", beside, alone).values()) <= 1.5


def test_an_agents_turns_find_what_was_said_in_the_cache() -> None:
    turns = (Turn(100, 8), Turn(160, 8, after_s=2.0))
    outcome = World(COST, FCFS, Setup()).run([Session(1.0, "agentic", "a", turns)], 60.0)
    first, second = outcome.fates
    assert (first.cached, second.cached) == (0, 96)
    assert second.arrival_s == first.last_s + 2.0
    assert first.said == second.said == 8
    prompt = StepWork(0, 100, 0, 100 * 101 / 2).seconds(COST)
    decodes = sum(StepWork(1, 0, 100 + n, 0.0).seconds(COST) for n in range(1, 8))
    assert first.last_s - first.arrival_s == pytest.approx(prompt + decodes)


def test_the_computed_cost_is_that_of_the_floors() -> None:
    """But for adding up what they take the larger of."""
    shape, cost = shape_of(LLAMA_8B), floor()
    decode = StepWork(32, 0, 32 * 1024, 0.0).seconds(cost) - 32 * cost.decode_s
    assert decode == pytest.approx(decode_step_s(H200, shape, 32, 1024))
    prompt = StepWork(0, 8192, 0, 8192 * 8193 / 2).seconds(cost)
    assert prompt == pytest.approx(prefill_s(H200, shape, 8192), rel=0.03)


def test_shares() -> None:
    assert max_min({"a": 1.0, "b": 9.0, "c": 9.0}, {"a": 1, "b": 1, "c": 3}, 9.0) == {
        "a": 1.0,
        "b": 2.0,
        "c": 6.0,
    }
    assert jain([2.0, 2.0]) == 1.0 and jain([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0 and percentile([3.0, 1.0], 0.99) == 3.0


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    path = tmp_path / "cost.json"
    save(COST, path)
    assert load(path) == COST
    monkeypatch.setattr("sys.argv", ["bench.sim", "flood", "--size", "40", "--cost", str(path)])
    main()
    assert isinstance(capsys, pytest.CaptureFixture)
    said = capsys.readouterr().out
    row = r"^    interactive( +\d+){3}( +[0-9.]+%?){7}$"
    assert len(re.findall(row, said, re.MULTILINE)) == 3
    assert said.count("Jain") == 3


@pytest.mark.parametrize("goal", [1, 10**12])
def test_a_speed_that_is_not_met_fails(
    goal: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(COST, tmp_path / "cost.json")
    monkeypatch.setattr(command, "SPEED_SIZE", 40)
    monkeypatch.setattr(command, "SPEED_GOAL", goal)
    arguments = ["--speed", "--cost", str(tmp_path / "cost.json")]
    monkeypatch.setattr("sys.argv", ["bench.sim", *arguments])
    if goal == 1:
        main()
    else:
        with pytest.raises(SystemExit, match="slower than its goal"):
            main()


def test_rounds_of_a_case_are_joined_by_the_least_of_each_step() -> None:
    step, other = StepWork(1, 0, 5, 0.0), StepWork(0, 9, 0, 45.0)
    spans = [(0, 1)]
    quiet = Case([(other, 0.2), (step, 0.3)], spans)
    noisy = Case([(other, 0.1), (step, 9.0)], spans)
    assert least_of([noisy, quiet]) == Case([(other, 0.1), (step, 0.3)], spans)
    assert quiet.ends_s() == [0.2, 0.5] and quiet.total_s == 0.5
    with pytest.raises(AssertionError, match="differ"):
        least_of([quiet, Case([(step, 0.1), (step, 0.1)], spans)])


def test_the_simulator_is_held_to_the_engine_in_each_quantity() -> None:
    measured = {"ttft_s": 2.0, "tpot_s": 0.1, "token_s": 0.01}
    near = compared(measured, {"ttft_s": 2.2, "tpot_s": 0.09, "token_s": 0.0125})
    assert near["deviations"] == pytest.approx(
        {"ttft_s": 0.1, "tpot_s": -0.1, "tokens_per_s": -0.2}
    )
    assert not near["within"]
    assert compared(measured, measured | {"tpot_s": 0.114})["within"]
    assert not compared(measured, measured | {"ttft_s": 2.4})["within"]


def test_the_team_is_as_fast_as_the_better_of_all_threads_and_one() -> None:
    """Each of the two takes twice as long somewhere, and neither is best where load comes and
    goes."""
    found = thread_team.compare()
    for wanted, seconds in found.items():
        better = min(seconds["all threads"], seconds["one thread"])
        assert seconds["team"] <= 1.05 * better, wanted
    fixed = ("all threads", "one thread")
    worst = {name: max(s[name] / s["team"] for s in found.values()) for name in fixed}
    assert min(worst.values()) > 1.7
    changing = found["load that comes and goes"]
    assert changing["team"] < 0.85 * min(changing[name] for name in fixed)


def test_a_learnt_pace_keeps_its_target_on_any_machine_and_no_fixed_one_does_at_its_price() -> None:
    found = paces.compare()
    for by_pace in found.values():
        learnt, unlimited = by_pace["learnt"], by_pace["no limit"]
        assert learnt.itl_p99_s <= 1.1 * paces.TARGET_S
        assert learnt.seconds <= 1.07 * unlimited.seconds
    for name in set(paces.PACES) - {"learnt"}:
        is_late = any(row[name].itl_p99_s > 1.25 * paces.TARGET_S for row in found.values())
        is_slow = any(row[name].seconds > 1.15 * row["no limit"].seconds for row in found.values())
        assert is_late or is_slow, name
