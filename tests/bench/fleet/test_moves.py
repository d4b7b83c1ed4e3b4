"""The simulation of requests that move, with the decision that is shipped."""

from __future__ import annotations

import msgspec

from bench.fleet.moves.moves import AFTER_BURST, run
from bench.fleet.trace import CONVERSATION, make_trace

CASE = msgspec.structs.replace(AFTER_BURST, num_requests=600)


def test_who_waits_longest_gains_where_a_replica_joins() -> None:
    requests = make_trace(CONVERSATION, 1)
    stayed, moved = (run(CASE, requests, moves=moves) for moves in (False, True))
    assert (stayed.moved, moved.moved > 5) == (0, True)
    assert moved.p90_s < stayed.p90_s
