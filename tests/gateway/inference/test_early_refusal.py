"""A request that would come too late wherever it went is refused before anything is reserved."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.fake.engine import FakeCore
from engine.protocol import LaneStatus, StepCosts
from gateway.fleet.engine_view import EngineView
from gateway.fleet.errors import ReplicaOverloaded
from gateway.fleet.router import RoutedRequest
from gateway.fleet.sent_work import SentWork
from gateway.inference.generate import refuse_what_comes_too_late
from gateway.lanes import Priority, Slo

COSTS = StepCosts(prompt_token_s=1e-3)


def test_what_a_client_took_to_send_a_request_is_no_reason_to_refuse_it() -> None:
    """Its objective says when its answer comes too late, from its first byte; what is refused is
    what the engines would make too late."""
    view = EngineView(SentWork())
    lanes = {"interactive": LaneStatus(waiting_tokens=500)}
    view.heard(msgspec.structs.replace(FakeCore().status(), costs=COSTS, lanes=lanes))
    routed = RoutedRequest(replicas=(), soonest_s=0.5, views=[view], num_tokens=100)
    refused: list[int] = []

    def refuse(upload_s: float, spent_s: float) -> None:
        meter = SimpleNamespace(
            slo=Slo(ttft_s=1.0, ttft_per_prefill=1.0, tpot_s=0.05),
            idle_prefill_s=None,
            received_at=time.perf_counter() - upload_s - spent_s,
            refused_early=refused.append,
        )
        call: Any = SimpleNamespace(
            meter=meter, begun_at=time.monotonic() - spent_s, current_priority=Priority()
        )
        refuse_what_comes_too_late(call, routed, 100)

    refuse(100.0, 0.0)
    assert refused == []
    with pytest.raises(ReplicaOverloaded):
        refuse(0.0, 10.0)
    assert refused == [100]
