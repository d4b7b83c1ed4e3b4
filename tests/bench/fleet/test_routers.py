"""The fleet's simulation: traces as they are published, goals by the routing that is shipped."""

from __future__ import annotations

import math
import random
from pathlib import Path

import msgspec
import pytest

from bench.fleet import __main__ as command
from bench.fleet.anchors import ANCHORS
from bench.fleet.goals import FleetGoal
from bench.fleet.ours import PredictedTime, PredictedTimeByRole
from bench.fleet.overload import capacity, refusing
from bench.fleet.overload import run as run_overload
from bench.fleet.report import FleetReport
from bench.fleet.routers import MakeRouter, faster, gpu_cost, run
from bench.fleet.spread import MOST, hot, paced
from bench.fleet.trace import (
    CONVERSATION,
    DOCUMENTS,
    TracedRequest,
    TraceError,
    make_trace,
    read_trace,
    statistics_of,
    write_trace,
)
from bench.fleet.world import FleetSetup, FleetWorld

SETUP = FleetSetup(cost=gpu_cost())
SHORT = 1_500
"""Requests of a trace: a minute or so of it."""


def conversation(seed: int) -> list[TracedRequest]:
    return faster(make_trace(CONVERSATION, seed), 3)[:SHORT]


def test_a_made_trace_has_the_published_statistics() -> None:
    found = statistics_of(make_trace(CONVERSATION, 1))
    assert found.requests == 12_031 and found.first_blocks == 1
    assert found.input_mean == pytest.approx(12_035, rel=0.03)
    assert (found.input_p50, found.input_p90) == pytest.approx((6_909, 27_367), rel=0.01)
    assert found.output_mean == pytest.approx(343, rel=0.03)
    assert found.hits == pytest.approx(0.366, abs=0.02)
    assert found.used_once == pytest.approx(0.758, abs=0.03)
    other = statistics_of(make_trace(DOCUMENTS, 1))
    assert other.input_mean == pytest.approx(15_325, rel=0.03)
    assert other.hits == pytest.approx(0.64, abs=0.04)
    assert other.first_blocks == pytest.approx(2_211, rel=0.1)


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = make_trace(DOCUMENTS, 3)[:200]
    path = tmp_path / "trace.jsonl"
    write_trace(made, path)
    read = read_trace(path)
    assert [each.hash_ids for each in read] == [each.hash_ids for each in made]
    assert all(
        one.arrival_s == pytest.approx(other.arrival_s, abs=0.5)
        for one, other in zip(read, made, strict=True)
    )


def test_requests_of_one_timestamp_are_spread_until_the_next(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 5, "output_length": 2, "hash_ids": [7]}\n'
    path.write_text((line % 0) * 3 + line % 3000 + "\n")
    assert [each.arrival_s for each in read_trace(path)] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "input_length"),
        ('{"timestamp": 0, "input_length": 1025, "output_length": 1, "hash_ids": [1]}', "hash_ids"),
        ("no JSON", ":1:"),
        ("[1]", ":1:"),
        ("\udcff", ":1:"),
        ("", "no request"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n", errors="surrogateescape")
    with pytest.raises(TraceError, match=said):
        read_trace(path)


LINE = '{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": %s}\n'


def test_a_trace_begins_at_its_first_request_and_may_leave_out_the_end_of_a_prompt(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [LINE % (1_700_000_003_000, 1030, 0, [7, 8]), LINE % (1_700_000_000_000, 512, 3, [7])]
    path.write_text("".join(lines))
    first, second = read_trace(path)
    assert (first.arrival_s, second.arrival_s) == (0.0, 3.0)
    assert len(second.hash_ids) == 3 and second.output_length == 1


@pytest.mark.parametrize("number", [1, 60])
def test_commands_take_a_trace_however_short(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(LINE % (0, 600, 9, [0, at]) for at in range(number)))
    for name in ("routers", "overload", "roles", "planner"):
        monkeypatch.setattr("sys.argv", ["bench.fleet", name, "--trace", str(path)])
        status = command.main()
        assert status == 2 if name == "planner" and number == 1 else status in (0, 1), name
    assert "G1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("{", ":1:"),
        ("", "no request"),
        (LINE % (0, 900_000, 1, [*range(1758)]), "900001 tokens"),
    ],
)
def test_a_trace_that_cannot_be_run_is_one_line(
    tmp_path: Path,
    text: str | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "trace.jsonl"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr("sys.argv", ["bench.fleet", "routers", "--trace", str(path)])
    assert command.main() == 2
    told = capsys.readouterr()
    assert said in told.err and told.err.count("\n") == 1 and not told.out


@pytest.mark.parametrize(
    "arguments",
    [
        ["routers", "--speed", "0"],
        ["routers", "--seeds", "0"],
        ["routers", "--routers", "nobody"],
        ["hot", "--trace", "trace.jsonl"],
    ],
)
def test_arguments_that_mean_nothing_are_refused(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.fleet", *arguments])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == 2


def test_a_run_is_the_same_each_time() -> None:
    trace = conversation(2)[:400]
    assert run(trace, SETUP, PredictedTime, 1) == run(trace, SETUP, PredictedTime, 1)


@pytest.mark.parametrize("router", [*ANCHORS])
def test_every_router_serves_all_and_the_shipped_one_serves_more_in_time(router: str) -> None:
    trace, make = conversation(1), ANCHORS[router]
    world = FleetWorld(SETUP)
    fates = world.run(trace, make(world, random.Random(1)))
    assert len(fates) == len(trace)
    for fate in fates:
        assert 0 <= fate.cached < fate.asked.input_length
        assert fate.asked.arrival_s < fate.first_s <= fate.last_s
    ours: MakeRouter = PredictedTime
    assert run(trace, SETUP, ours, 1).goodput >= run(trace, SETUP, make, 1).goodput


def test_replicas_work_alike_where_all_prompts_begin_alike() -> None:
    two = msgspec.structs.replace(SETUP, num_replicas=2)
    assert run(hot(SETUP, 1)[:2_000], SETUP, PredictedTime, 1).spread <= MOST
    assert run(paced(1), two, PredictedTime, 1).spread <= MOST


def test_workers_with_frozen_statuses_do_not_run_in_a_herd() -> None:
    frozen = msgspec.structs.replace(SETUP, num_replicas=4, frozen=True)
    found = run(hot(frozen, 1)[:1_000], frozen, PredictedTime, 1)
    assert found.spread <= MOST and found.goodput > 0.9


def test_the_long_are_not_the_ones_that_are_refused() -> None:
    found = run_overload(faster(conversation(1), 2), SETUP, refusing)
    assert found.refused > 0.01
    assert found.refused_tokens <= 1.3 * found.refused


def test_capacity_is_where_the_good_ones_fall_to_nine_tenths() -> None:
    known = run(conversation(1)[:50], SETUP, PredictedTime, 1)

    def reports(*goods: float) -> dict[float, FleetReport]:
        replace = msgspec.structs.replace
        return {1.0 + at: replace(known, goodput=good) for at, good in enumerate(goods)}

    assert capacity(reports(1.0, 0.95, 0.85)) == pytest.approx(2.5)
    assert capacity(reports(1.0, 0.95)) == 2.0
    assert capacity(reports(0.5, 0.4)) == 1.0


def test_a_goal_that_is_missed_is_said_and_an_unknown_command_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert FleetGoal(name="G1", text="x", reached=0.9, wanted=0.93).line().endswith("NOT MET")
    assert FleetGoal(name="G3", text="x", reached=1.1, wanted=1.15, at_most=True).is_met
    monkeypatch.setattr("sys.argv", ["bench.fleet", "nonsense"])
    assert command.main() == 2
    assert "nonsense" in capsys.readouterr().err


def test_a_prompt_that_moves_is_computed_once_and_all_is_said() -> None:
    setup = FleetSetup(cost=gpu_cost(), num_replicas=3, num_prefill=1, read_token_s=1e-5)
    requests = faster(make_trace(CONVERSATION, 1), 3.0)[:150]
    world = FleetWorld(setup)
    fates = world.run(requests, PredictedTimeByRole(world, random.Random(1)))
    assert any(fate.moves for fate in fates) and not all(fate.moves for fate in fates)
    for fate in fates:
        assert fate.first_s <= fate.last_s < math.inf
        assert fate.replica > 0
    assert all(replica.cache.num_used == 0 for replica in world.replicas)
