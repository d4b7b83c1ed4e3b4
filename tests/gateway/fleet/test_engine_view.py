"""A view knows what a replica has to do, by its status and by what all workers sent it since."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.fairness import LANE_RANKS
from engine.protocol import Lane, LaneStatus, StepCosts
from gateway.fleet.engine_view import IN_PHASE_S, RECENT_S, EngineView
from gateway.fleet.predicted_time import ModelCosts, Prompt
from gateway.fleet.sent_work import SentWork
from gateway.fleet.slots import SharedSlots
from tests.engine.scheduling.scheduling import Clock
from tests.gateway.fleet.test_predicted_time import status_of

COSTS = StepCosts(prompt_token_s=1e-3)
IDLE = status_of(costs=COSTS, max_step_tokens=512)
PROMPT = Prompt(500)
LANE: Lane = "interactive"
RANK = LANE_RANKS[LANE]


def busy(tokens: int) -> LaneStatus:
    return LaneStatus(waiting_tokens=tokens)


def test_a_status_says_what_waits_and_time_takes_it_away() -> None:
    clock = Clock()
    view = EngineView(SentWork(), clock=clock)
    view.heard(status_of(costs=COSTS, max_step_tokens=512, lanes={LANE: busy(3000)}))
    assert view.seconds_to_first_token(PROMPT, LANE) == pytest.approx(3.0 + 0.5)
    clock.now += 2
    assert view.seconds_to_first_token(PROMPT, LANE) == pytest.approx(1.0 + 0.5)
    clock.now += 2
    assert view.seconds_to_first_token(PROMPT, LANE) == pytest.approx(0.5), "never less"
    assert clock.now - view.heard_at_s == pytest.approx(4.0)


def test_all_workers_know_at_once_what_one_sent() -> None:
    clock, sent = Clock(), SentWork()
    one, other = (EngineView(sent, clock=clock) for _ in range(2))
    for view in (one, other):
        view.heard(IDLE)
    one.send(PROMPT, LANE)
    one.send(PROMPT, LANE)
    for view in (one, other):
        assert view.seconds_to_first_token(PROMPT, LANE) == pytest.approx(1.0 + 0.5)
        assert view.recent_s == pytest.approx(1.0)
    # What was sent is in the next status, and counts once.
    for view in (one, other):
        view.heard(status_of(costs=COSTS, max_step_tokens=512, lanes={LANE: busy(1000)}))
        assert view.seconds_to_first_token(PROMPT, LANE) == pytest.approx(1.0 + 0.5)


def test_what_was_sent_to_an_idle_replica_does_not_count_as_done_before_it_came() -> None:
    clock, sent = Clock(), SentWork()
    one, other = (EngineView(sent, clock=clock) for _ in range(2))
    for view in (one, other):
        view.heard(IDLE)
    clock.now += 100
    one.send(PROMPT, LANE)
    assert other.seconds_to_first_token(PROMPT, LANE) == pytest.approx(1.0)


def test_a_prompt_waits_for_the_step_in_flight() -> None:
    """A status is said before a step: when the next ones begin is known for a while."""
    clock, sent = Clock(), SentWork()
    view, other = (EngineView(sent, clock=clock) for _ in range(2))
    costs = StepCosts(step_s=0.05, prompt_token_s=1e-3)
    decoding = status_of(costs=costs, max_step_tokens=513, lanes={LANE: LaneStatus(num_running=1)})
    for each in (view, other):
        each.heard(decoding)
    clock.now += 0.07
    own_s = 0.5 + 0.05
    assert view.seconds_to_first_token(PROMPT, LANE) == pytest.approx(0.03 + own_s)
    view.send(PROMPT, LANE)
    for each in (view, other):
        found = each.seconds_to_first_token(PROMPT, LANE)
        assert found == pytest.approx(0.03 + own_s + own_s), "one behind it does not wait twice"
    view.heard(decoding)
    clock.now += 2 * IN_PHASE_S
    assert view.seconds_to_first_token(PROMPT, LANE) == pytest.approx(0.025 + own_s), "half of it"
    view.heard(status_of(costs=costs, max_step_tokens=513))
    assert view.seconds_to_first_token(PROMPT, LANE) == pytest.approx(own_s), "nothing runs"


def test_a_view_that_knows_no_costs_takes_those_of_its_model() -> None:
    clock, costs = Clock(), ModelCosts()
    known, fresh = (EngineView(SentWork(), costs, clock=clock) for _ in range(2))
    lanes = {LANE: busy(3000)}
    fresh.heard(status_of(max_step_tokens=512, lanes=lanes))
    assert not fresh.price.is_learnt
    known.heard(IDLE)
    fresh.heard(status_of(max_step_tokens=512, lanes=lanes))
    assert fresh.price.is_learnt
    assert fresh.seconds_to_first_token(PROMPT, LANE) == pytest.approx(3.0 + 0.5)


def test_recent_work_fades() -> None:
    clock, sent = Clock(), SentWork()
    view = EngineView(sent, clock=clock)
    view.heard(IDLE)
    view.send(PROMPT, LANE)
    view.seconds_to_first_token(PROMPT, LANE)
    assert view.recent_s == pytest.approx(0.5)
    clock.now += 10 * RECENT_S
    view.seconds_to_first_token(PROMPT, LANE)
    assert view.recent_s < 0.5 * 1e-3


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["send", "hear", "wait"]), st.integers(0, 3), st.integers(1, 4_000)
        ),
        max_size=60,
    )
)
def test_views_agree_and_never_know_of_less_than_nothing(acts: list[tuple[str, int, int]]) -> None:
    clock, sent = Clock(), SentWork()
    views = [EngineView(sent, clock=clock) for _ in range(4)]
    for act, who, amount in acts:
        if act == "send":
            views[who].send(Prompt(amount), [*LANE_RANKS][who % 3])
        elif act == "wait":
            clock.now += amount / 1000
        else:
            status = status_of(costs=COSTS, max_step_tokens=512, lanes={LANE: busy(amount)})
            for view in views:
                view.heard(status)
        found = [view.seconds_to_first_token(PROMPT, LANE) for view in views]
        assert min(found) >= PROMPT.missing * min(view.price.token_s for view in views)
    for view in views:
        view.heard(IDLE)
    assert len({view.seconds_to_first_token(PROMPT, LANE) for view in views}) == 1


SENDER = """
import sys, time
from pathlib import Path
from gateway.fleet.sent_work import SentWork
sent = SentWork(Path(sys.argv[1]))
sent.add("interactive", float(sys.argv[2]))
print("sent", flush=True)
sys.stdin.read()
"""


def test_processes_share_it_and_a_killed_one_leaves_nothing_that_lasts(tmp_path: Path) -> None:
    path = tmp_path / "sent" / "replica"
    mine = SentWork(path)
    mine.add(LANE, 1.0)
    clock = Clock()
    view = EngineView(mine, clock=clock)
    view.heard(IDLE)
    found = []
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", SENDER, str(path), "2.0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        assert child.stdin and child.stdout
        assert child.stdout.readline() == b"sent\n"
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
        found.append(view.seconds_to_first_token(PROMPT, LANE))
    assert mine.totals()[RANK] == pytest.approx(1.0 + 3 * 2.0)
    assert found == pytest.approx([2.5, 4.5, 6.5])
    view.heard(IDLE)
    assert view.seconds_to_first_token(PROMPT, LANE) == pytest.approx(0.5), "all of it is gone"
    mine.close()


def test_a_worker_that_finds_no_row_counts_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SharedSlots, "take", lambda _: None)
    sent = SentWork(tmp_path / "replica")
    sent.add(LANE, 1.0)
    assert sent.totals()[RANK] == 1.0
    assert "counts by itself" in caplog.text
    sent.close()
