"""A prompt is computed by one engine for another one where that costs less."""

from __future__ import annotations

import msgspec
import pytest

from engine.protocol import LaneStatus, PeerStatus
from gateway.fleet.engine_view import EngineView
from gateway.fleet.roles import Pools, choose_by_role, choose_to_go_on, pools_of
from gateway.fleet.routing import Candidate, Choice, candidates_of, choose, explain
from gateway.fleet.sent_work import SentWork
from tests.engine.scheduling.scheduling import Clock
from tests.gateway.fleet.test_predicted_time import status_of
from tests.gateway.fleet.test_routing import COSTS

POOLS = Pools(prefill=(0,), decode=(1, 2))


def choice_of(
    num_tokens: int,
    *,
    decoding: int = 20,
    waiting: int = 0,
    read_token_s: float = 1e-6,
    latest_s: float | None = None,
    layout: bytes = b"a",
    longest: int = 100_000,
    host: str = "",
) -> Choice:
    """`waiting`: tokens of prompts at the engine of the prefill pool; `layout`: of its KV;
    `longest`: the sequence that it holds; `host`: where alone it is reached."""
    clock, views = Clock(), []
    for at in range(3):
        busy = LaneStatus(num_running=decoding) if at else LaneStatus(waiting_tokens=waiting)
        status = msgspec.structs.replace(
            status_of(costs=COSTS, max_step_tokens=512),
            block_size=16,
            max_model_len=100_000 if at else longest,
            lanes={"interactive": busy},
            peer=PeerStatus(
                address="a",
                layout=b"a" if at else layout,
                read_s=1e-3,
                read_token_s=read_token_s,
                host="box" if at else host,
            ),
        )
        views.append(EngineView(SentWork(), clock=clock))
        views[-1].heard(status)
    candidates = candidates_of(views, num_tokens, [0, 0, 0], "interactive")
    return choose_by_role(choose(candidates, POOLS.decode), views, POOLS, num_tokens, latest_s)


def test_a_long_prompt_is_computed_where_it_holds_up_nobody() -> None:
    choice = choice_of(4_000)
    assert choice.split is not None
    assert (choice.order[0], choice.split.decode) == (0, choice.order[1])
    assert choice_of(4_000, host="box").split == choice.split
    text = explain(choice, [f"m/{at}" for at in choice.order])
    assert text.startswith(f"split, prefill at 0 and decode at {choice.order[1]} after 0.0")


@pytest.mark.parametrize(
    "circumstances",
    [
        {"num_tokens": 12},
        {"num_tokens": 4_000, "decoding": 0},
        {"num_tokens": 4_000, "waiting": 100_000},
        {"num_tokens": 4_000, "read_token_s": 1.0},
        {"num_tokens": 4_000, "layout": b"other"},
        {"num_tokens": 4_000, "host": "another"},
        {"num_tokens": 4_000, "waiting": 4_000, "latest_s": 0.6},
        {"num_tokens": 4_000, "longest": 4_000},
    ],
    ids=[
        *("short", "nobody decodes", "a queue", "slow link", "other KV", "another machine"),
        *("too late", "too long"),
    ],
)
def test_it_stays_where_that_is_as_good(circumstances: dict[str, int]) -> None:
    choice = choice_of(**circumstances)  # type: ignore[arg-type]
    assert choice.split is None and sorted(choice.order) == [1, 2]


def test_an_objective_that_is_kept_lets_a_prompt_wait_for_the_others() -> None:
    """It does not wait for longer than it takes itself where nothing is promised."""
    assert choice_of(4_000, waiting=8_000).split is None
    assert choice_of(4_000, waiting=8_000, latest_s=60.0).split is not None


def test_who_goes_on_has_the_shortest_steps() -> None:
    """Prompts of late do not count: what is read leaves no trace there."""
    views = []
    for num_running in (0, 30, 3):
        views.append(EngineView(SentWork(), clock=Clock()))
        lanes = {"interactive": LaneStatus(num_running=num_running)}
        status = status_of(costs=COSTS, max_step_tokens=512)
        views[-1].heard(msgspec.structs.replace(status, lanes=lanes))
    candidates = [Candidate(0.0, 0), Candidate(0.01, 0), Candidate(0.01, 0, recent_s=50.0)]
    assert choose_to_go_on(candidates, views, POOLS.decode).order == (2, 1)


def test_one_pool_is_no_pool() -> None:
    assert pools_of([True, False, False]) == POOLS
    assert pools_of([True, True]) is None and pools_of([False]) is None
