"""Gauges show what an engine says of itself; what a replica's steps bring is timed."""

from __future__ import annotations

import time
from itertools import pairwise

import msgspec
import pytest

from engine.fairness import LANE_WEIGHTS
from engine.fake.engine import FAKE_CONFIG, FakeCore
from engine.protocol import PeerStatus
from gateway.fleet.waiting_room import WaitingRoom
from gateway.generation_events import MeteredUsage, RawBody, RawChunk, ReplicaEvent, TextDelta
from gateway.lanes import Priority
from gateway.telemetry.metrics import TTFT_BUCKETS_S, Telemetry
from gateway.telemetry.request_meter import RequestMeter


def test_the_size_of_an_engines_cache_is_measured() -> None:
    status = FakeCore(FAKE_CONFIG).status()
    telemetry = Telemetry(models=["m"])
    telemetry.engine_status("m", "m/1", status)
    line = f'tollgate_kv_cache_blocks{{model="m",replica="m/1"}} {float(status.num_blocks)}'
    assert line in telemetry.render().content.decode().splitlines()


def test_what_reading_from_other_engines_takes_is_measured() -> None:
    alone = FakeCore(FAKE_CONFIG).status()
    peer = PeerStatus(address="unix:/kv", layout=b"", read_s=0.01, read_token_s=0.001)
    telemetry = Telemetry(models=["m"])

    def shown() -> list[float | None]:
        value, labels = telemetry.registry.get_sample_value, {"model": "m", "replica": "m/1"}
        return [value(f"tollgate_kv_read_{part}_seconds", labels) for part in ("start", "token")]

    telemetry.engine_status("m", "m/1", msgspec.structs.replace(alone, peer=peer))
    assert shown() == [0.01, 0.001]
    telemetry.engine_status("m", "m/1", alone)
    assert shown() == [0, 0]


def test_the_share_of_a_rollout_is_shown_until_it_ends() -> None:
    telemetry = Telemetry(models=["m"])

    def shown() -> float | None:
        return telemetry.registry.get_sample_value("tollgate_rollout_share", {"model": "m"})

    telemetry.fleet.show_rollouts({"m": 0.25})
    assert shown() == 0.25
    telemetry.fleet.show_rollouts({})
    assert shown() == 0


def test_guesses_of_an_engine_are_measured() -> None:
    status = msgspec.structs.replace(
        FakeCore(FAKE_CONFIG).status(), num_draft_tokens=7, num_accepted_tokens=3
    )
    telemetry = Telemetry(models=["m"])
    telemetry.engine_status("m", "m", status)
    value, labels = telemetry.registry.get_sample_value, {"model": "m", "replica": "m"}
    assert value("tollgate_spec_decode_draft_tokens", labels) == 7
    assert value("tollgate_spec_decode_accepted_tokens", labels) == 3


def test_what_waits_for_upstreams_is_told_by_lane() -> None:
    rooms = [WaitingRoom(1), WaitingRoom(1)]
    for room in rooms:
        for lane in ("batch", "batch", "interactive"):
            room.join(Priority(lane=lane), 1)
    telemetry = Telemetry(models=["m"])
    telemetry.waiting_rooms("m", rooms)
    value = telemetry.registry.get_sample_value
    counted = {
        lane: tuple(
            value(f"tollgate_upstream_requests_{state}", {"model": "m", "lane": lane})
            for state in ("running", "waiting")
        )
        for lane in LANE_WEIGHTS
    }
    assert counted == {"batch": (2, 2), "interactive": (0, 2), "agentic": (0, 0)}


def test_the_gauges_of_what_is_gone_are_zero() -> None:
    """Other settings took it away; a scrape would go on finding what was seen last."""
    status, room = FakeCore(FAKE_CONFIG).status(), WaitingRoom(1)
    room.join(Priority(lane="batch"), 1)
    telemetry = Telemetry(models=["m"])
    value = telemetry.registry.get_sample_value
    gauges: list[tuple[str, dict[str, str]]] = [
        ("tollgate_kv_cache_blocks", {"model": "m", "replica": "m/1"}),
        ("tollgate_upstream_requests_running", {"model": "m", "lane": "batch"}),
        ("tollgate_mcp_upstreams", {"server": "s", "state": "closed"}),
        ("tollgate_components", {"kind": "upstream", "name": "m/0", "state": "ok"}),
    ]
    telemetry.engine_status("m", "m/1", status)
    telemetry.waiting_rooms("m", [room])
    telemetry.zero_gone(engines=[("m", "m/0"), ("m", "m/1")], rooms=["m"])
    telemetry.mcp_health(["s"], [("s", "closed")])
    telemetry.components([("upstream", "m/0", "ok")])
    assert all(value(name, labels) for name, labels in gauges)
    telemetry.zero_gone(engines=[("m", "m/0")], rooms=[])
    telemetry.mcp_health([], [])
    telemetry.components([])
    assert [value(name, labels) for name, labels in gauges] == [0, 0, 0, 0]


def timed(*events: ReplicaEvent) -> tuple[float, float]:
    """(first tokens, steps from one token to the next) of one request."""
    telemetry = Telemetry(models=["m"])
    meter = RequestMeter(telemetry, "m")
    for event in events:
        meter.received(event, streams=False)
    value, labels = telemetry.registry.get_sample_value, {"model": "m"}
    ttft = value("tollgate_time_to_first_token_seconds_count", labels)
    itl = value("tollgate_inter_token_latency_seconds_count", labels)
    return ttft or 0, itl or 0


def test_a_streams_first_token_is_timed_from_the_first_byte_read_to_the_first_written() -> None:
    telemetry = Telemetry(models=["m"])
    meter = RequestMeter(telemetry, "m", received_at=time.perf_counter() - 7)
    value, labels = telemetry.registry.get_sample_value, {"model": "m"}
    name = "tollgate_time_to_first_token_seconds"
    for event in (ReplicaEvent(), step(1), step(2)):
        meter.received(event, streams=True)
    assert meter.awaits_write and value(f"{name}_count", labels) is None
    meter.wrote_first()
    assert value(f"{name}_count", labels) == 1
    assert 7 <= (value(f"{name}_sum", labels) or 0) < 60


def test_an_attempt_waits_then_reads_then_writes() -> None:
    meter = RequestMeter(Telemetry(models=["m"]), "m")
    attempt = meter.begin_attempt("m/0")
    attempt.began_at -= 5
    meter._begun_at -= 5
    meter.received(ReplicaEvent(queue_time_s=2.0), streams=True)
    for event in (step(1), step(2), step(3, finished=True)):
        meter.received(event, streams=True)
    attempt.end()
    [_, queue, prefill, decode] = meter.stages
    assert [each.name for each in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    assert queue.ended_at == pytest.approx(queue.began_at + 2)
    assert prefill.began_at == queue.ended_at and 3 <= prefill.ended_at - prefill.began_at < 60
    assert prefill.ended_at == decode.began_at <= decode.ended_at <= attempt.ended_at


def test_buckets_are_finer_where_people_wait() -> None:
    fine = [each for each in TTFT_BUCKETS_S if 0.1 <= each <= 0.25]
    assert all(after - before <= 0.0251 for before, after in pairwise(fine))
    assert list(TTFT_BUCKETS_S) == sorted(set(TTFT_BUCKETS_S))


def step(output: int, *, items: bool = True, finished: bool = False) -> ReplicaEvent:
    return ReplicaEvent(
        items=(TextDelta(index=0, text="x"),) if items else (),
        usage=MeteredUsage(uncached_input=3, output=output),
        finished=finished,
    )


def test_the_first_token_is_timed_when_it_comes_and_not_when_it_is_shown() -> None:
    assert timed(ReplicaEvent(), step(0, items=False)) == (0, 0)
    assert timed(step(1, items=False)) == (1, 0), "half a character is a token too"
    assert timed(step(1), step(2, items=False), step(2), step(3, finished=True)) == (1, 2)
    assert timed(step(1, finished=True)) == (1, 0)


def test_a_whole_body_tells_no_first_token() -> None:
    usage = MeteredUsage(uncached_input=3, output=9)
    assert timed(ReplicaEvent(items=(RawBody(b"{}"),), usage=usage, finished=True)) == (0, 0)


def test_a_count_at_the_end_is_no_step() -> None:
    assert timed(step(9, items=False, finished=True)) == (0, 0), "a guess at what nobody saw"
    role, first = (
        ReplicaEvent(
            items=(RawChunk(b"{}"),), usage=MeteredUsage(uncached_input=3, output=n, estimated=True)
        )
        for n in (0, 1)
    )
    assert timed(role, first, step(4, items=False, finished=True)) == (1, 0)


def test_tokens_are_told_by_model_and_kind() -> None:
    telemetry = Telemetry(models=["near", "far"])
    telemetry.count_tokens("near", uncached=5, cache_read=7, cache_write=0, output=2)
    telemetry.count_tokens("far", uncached=1, cache_read=0, cache_write=3, output=0)
    counts = telemetry.token_counts()
    assert counts["near"] == {"uncached": 5, "cache_read": 7, "cache_write": 0, "output": 2}
    assert counts["far"]["cache_write"] == 3 and counts["far"]["cache_read"] == 0
