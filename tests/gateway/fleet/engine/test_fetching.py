"""Whether an engine reads a prompt's beginning from another one, and from which."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import PeerStatus, ReplicaStatus, StepCosts
from gateway.fleet.engine_view import EngineView
from gateway.fleet.fetching import MARGIN, Fetch, Holders, source_of
from gateway.fleet.predicted_time import Prompt
from gateway.fleet.routing import candidates_of, choose, explain
from gateway.fleet.sent_work import SentWork
from tests.engine.scheduling.scheduling import Clock
from tests.gateway.fleet.test_predicted_time import status_of

COSTS = StepCosts(step_s=5e-3, prompt_token_s=1e-3)
NUM_TOKENS = 2048
NAMES = ("penny/0", "penny/1", "penny/2")


def view_of(
    number: int, layout: bytes | None = b"one", read_token_s: float = 1e-5, host: str = ""
) -> EngineView:
    """Return the view of an engine; layout: None: it reads nothing and is not read."""
    peer = None
    if layout is not None:
        peer = PeerStatus(
            address=f"unix:/kv-{number}.sock",
            layout=layout,
            read_s=0.002,
            read_token_s=read_token_s,
            host=host,
        )
    status: ReplicaStatus = msgspec.structs.replace(
        status_of(costs=COSTS, max_step_tokens=512), engine_id=f"engine-{number}", peer=peer
    )
    view = EngineView(SentWork(), clock=Clock())
    view.heard(status)
    return view


def fetches_of(views: list[EngineView], cached: list[int]) -> list[Fetch | None]:
    holders = Holders(views, cached)
    return [holders.fetch_for(at, view, NUM_TOKENS, cached[at]) for at, view in enumerate(views)]


def test_each_reads_from_another_one_that_has_most() -> None:
    views = [view_of(number) for number in range(3)]
    first, second, third = fetches_of(views, [0, 1024, 1920])
    assert first is not None and (first.source, first.front) == (2, 1920)
    assert second is not None and (second.source, second.front) == (2, 1920)
    assert second.seconds < first.seconds
    assert third is None, "nobody has more"
    source = source_of(views, first)
    assert source is not None
    assert (source.engine_id, source.address) == ("engine-2", "unix:/kv-2.sock")
    assert source.num_tokens == 1920
    assert source_of(views, None) is None


def test_nothing_is_read_from_another_layout_or_where_nobody_can() -> None:
    assert fetches_of([view_of(0), view_of(1, b"two")], [0, 1024]) == [None, None]
    assert fetches_of([view_of(0), view_of(1, None)], [0, 1024]) == [None, None]
    assert fetches_of([view_of(0, None), view_of(1)], [0, 1024]) == [None, None]


def test_a_socket_of_a_file_is_reached_on_its_own_machine_alone() -> None:
    views = [view_of(0, host="one"), view_of(1, host="one"), view_of(2, host="two"), view_of(3)]
    found = fetches_of(views, [0, 512, 1920, 1024])
    assert [None if each is None else each.source for each in found] == [3, 3, None, None]
    found = fetches_of(views, [0, 1920, 512, 1024])
    assert [None if each is None else each.source for each in found] == [1, None, 3, None]


def test_what_is_computed_as_soon_is_not_read() -> None:
    slow = view_of(0, read_token_s=0.9e-3)
    assert fetches_of([slow, view_of(1)], [0, 1024]) == [None, None]


@given(
    st.lists(st.integers(0, 16), min_size=2, max_size=5),
    st.floats(0, 2e-3),
)
def test_reading_is_always_sooner_and_never_from_itself(
    spans: list[int], read_token_s: float
) -> None:
    views = [view_of(number, read_token_s=read_token_s) for number in range(len(spans))]
    cached = [each * 128 for each in spans]
    for at, fetch in enumerate(fetches_of(views, cached)):
        if fetch is None:
            continue
        assert fetch.source != at and cached[fetch.source] > cached[at]
        assert cached[fetch.source] == max(cached)
        own, after = Prompt.of(NUM_TOKENS, cached[at]), Prompt.of(NUM_TOKENS, fetch.front)
        price = views[at].price
        saved_s = price.own_seconds(own.missing, own.cached)
        saved_s -= price.own_seconds(after.missing, after.cached)
        assert fetch.seconds <= MARGIN * saved_s


def test_a_prediction_counts_it_and_says_so() -> None:
    views = [view_of(number) for number in range(3)]
    cached = [0, 1920, 0]
    with_it = candidates_of(views, NUM_TOKENS, cached, "interactive")
    without = candidates_of(views, NUM_TOKENS, cached, "interactive", fetches=False)
    assert [each.fetch for each in without] == [None] * 3
    assert with_it[0].predicted_s < without[0].predicted_s / 5
    assert with_it[1].predicted_s == without[1].predicted_s < with_it[0].predicted_s
    views[1].send(Prompt.of(4096, 0), "interactive")  # it is busy: another one reads from it
    choice = choose(candidates_of(views, NUM_TOKENS, cached, "interactive"))
    assert choice.order[0] != 1
    said = explain(choice, [NAMES[at] for at in choice.order])
    assert "and 1920 of 1" in said and "with 1920" in said
