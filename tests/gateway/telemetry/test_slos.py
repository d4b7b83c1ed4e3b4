"""A request is judged by the objective of its lane and model: by first token and by pace."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.generation_events import MeteredUsage, RawBody, ReplicaEvent, TextDelta
from gateway.lanes import (
    SLO_OUTCOMES,
    LaneSlos,
    ModelSlos,
    ServedRequest,
    Slo,
    SloOutcome,
    SloTable,
    judge,
)
from gateway.settings.file import SettingsError
from gateway.settings.load import load
from gateway.telemetry.latency_counts import BOUNDS_US
from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.request_meter import RequestMeter
from tests.budget import examples

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
SECONDS = st.floats(0, 100)
SERVED = st.builds(
    ServedRequest,
    status=st.sampled_from([200, 400, 429, 499, 500, 502, 503]),
    duration_s=SECONDS,
    ttft_s=st.none() | SECONDS,
    tpot_s=st.none() | SECONDS,
    output_tokens=st.integers(0, 1000),
)


def served(
    ttft_s: float | None, tpot_s: float | None = None, *, status: int = 200, tokens: int = 9
) -> ServedRequest:
    return ServedRequest(status, 2.0, ttft_s, tpot_s, tokens)


@pytest.mark.parametrize(
    ("request_", "outcome"),
    [
        (served(1.0, 0.1), "met"),
        (served(1.0), "met"),  # one token
        (served(1.001, 0.1), "late_first_token"),
        (served(1.0, 0.101), "slow_tokens"),
        (served(9.0, 9.0), "late_first_token"),  # the first part that it missed
        (served(None, tokens=11), "met"),  # whole after 2 s: 1 s and ten times 0.1 s
        (served(None, tokens=10), "slow_tokens"),
        (served(None, tokens=0), None),  # embeddings
        (served(0.1, 0.1, status=502), "failed"),
        (served(None, status=503), "failed"),  # no room
        (served(None, status=429), None),
        (served(None, status=400), None),
        (served(None, status=499), "late_first_token"),  # left after 2 s without a token
        (served(0.1, 0.05, status=499), "met"),
        (served(0.1, 0.5, status=499), "slow_tokens"),
        (served(None, status=499)._replace(duration_s=0.9), None),
    ],
)
def test_a_request_is_judged(request_: ServedRequest, outcome: SloOutcome | None) -> None:
    assert judge(SLO, request_) == outcome


@settings(max_examples=examples(500))
@given(request=SERVED, faster=st.floats(0, 1))
def test_who_is_served_faster_is_judged_no_worse(request: ServedRequest, faster: float) -> None:
    rank: dict[SloOutcome | None, int] = {"met": 0, None: 0, "slow_tokens": 1}
    quicker = request._replace(
        duration_s=request.duration_s * faster,
        ttft_s=None if request.ttft_s is None else request.ttft_s * faster,
        tpot_s=None if request.tpot_s is None else request.tpot_s * faster,
    )
    before, after = judge(SLO, request), judge(SLO, quicker)
    assert rank.get(after, 2) <= rank.get(before, 2)
    assert before is None or before in SLO_OUTCOMES


def test_a_model_has_objectives_of_its_own() -> None:
    own = Slo(ttft_s=1.5, tpot_s=0.015)
    table = SloTable(LaneSlos(), {"r1": ModelSlos(interactive=own)})
    assert table.of("r1", "interactive") == own
    assert table.of("r1", "batch") == LaneSlos().batch == table.of("other", "batch")
    assert table.of("other", "interactive") == Slo(ttft_s=0.45, tpot_s=0.04), "MLPerf's"


MODEL = '[[model]]\nname = "far"\nupstream = "http://127.0.0.1:1/v1"\n'


def test_objectives_are_settings(tmp_path: Path) -> None:
    file = tmp_path / "tollgate.toml"
    file.write_text(
        "[slo]\ntarget = 0.95\nagentic = {ttft_s = 3, tpot_s = 0.2}\n"
        + MODEL
        + "slo.interactive = {ttft_s = 9, tpot_s = 1}\n"
    )
    slos = load({"home": tmp_path, "config": file}, {}).slos
    assert slos.target == 0.95
    assert slos.of("far", "agentic") == Slo(ttft_s=3, tpot_s=0.2)
    assert slos.of("far", "interactive") == Slo(ttft_s=9, tpot_s=1)
    assert slos.of("near", "interactive") == LaneSlos().interactive
    for wrong, complaint in (
        ("[slo]\ntarget = 1.0\n", "slo.target: expected `float` < 1.0"),
        ("[slo]\nbatch = {ttft_s = 0, tpot_s = 1}\n", "slo.batch.ttft_s: expected `float` > 0.0"),
        ("[slo]\nbatch = {ttft_s = 1}\n", "slo.batch.tpot_s: missing"),
        (MODEL + "slo.target = 0.9\n", r"model\[0\].slo.target: unknown key"),
    ):
        file.write_text(wrong)
        with pytest.raises(SettingsError, match=complaint):
            load({"home": tmp_path, "config": file}, {})


def test_goodput_is_counted_by_model_lane_and_outcome() -> None:
    telemetry = Telemetry(models=["m"])
    for status in (200, 200, 503, 429):
        meter = RequestMeter(telemetry, "m")
        meter.judge(status)
        assert meter.slo_outcome is None, "refused before anybody understood it"
        meter.promise("agentic", Slo(ttft_s=60, tpot_s=60))
        if status == 200:
            meter.received(step(1), streams=False)
        meter.judge(status)
    late = RequestMeter(telemetry, "m", received_at=time.perf_counter() - 70)
    late.promise("interactive", Slo(ttft_s=60, tpot_s=60))
    late.received(step(1), streams=False)
    late.judge(200)
    assert late.slo_outcome == "late_first_token"
    found = {
        (sample.labels["lane"], sample.labels["outcome"]): sample.value
        for family in telemetry.registry.collect()
        for sample in family.samples
        if sample.name == "tollgate_slo_requests_total"
    }
    assert found == {
        ("agentic", "met"): 2,
        ("agentic", "failed"): 1,
        ("interactive", "late_first_token"): 1,
    }


def test_the_pace_is_that_of_all_generations_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the rounds of a tool loop tools run; that is nobody's pace of tokens."""
    now = 100.0
    monkeypatch.setattr("gateway.telemetry.request_meter.time.perf_counter", lambda: now)
    meter = RequestMeter(Telemetry(models=["m"]), "m")
    meter.received(step(2), streams=False)
    assert meter.tpot_s is None
    now += 0.3
    meter.received(step(5), streams=False)
    assert meter.tpot_s == pytest.approx(0.1)
    now += 50
    again = meter.again()
    again.received(step(1), streams=False)
    now += 0.5
    again.received(step(2), streams=False)
    assert meter.tpot_s == pytest.approx(0.8 / 4)
    again.received(
        ReplicaEvent(items=(RawBody(b"{}"),), usage=MeteredUsage(output=9), finished=True),
        streams=False,
    )
    assert meter.tpot_s == pytest.approx(0.8 / 4), "a whole body tells no pace"


def test_a_step_of_several_tokens_is_as_many_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("gateway.telemetry.request_meter.time.perf_counter", lambda: now)
    telemetry = Telemetry(models=["m"])
    meter = RequestMeter(telemetry, "m")
    for after_s, output in ((1.0, 4), (0.3, 7), (0.02, 8), (9.0, 6), (0.02, 7)):
        now += after_s
        meter.received(step(output), streams=False)  # an upstream may tell of fewer in the end
    assert meter.gaps.counts is not None
    by_bucket = {n: count for n, count in enumerate(meter.gaps.counts) if count}
    assert by_bucket == {bucket_of(0.1): 3, bucket_of(0.02): 2}
    value = telemetry.registry.get_sample_value
    assert value("tollgate_inter_token_latency_seconds_count", {"model": "m"}) == 5
    assert meter.gaps.tokens == 3, "the mean is of all time and all tokens, as they were told"


def bucket_of(seconds: float) -> int:
    return sum(bound <= seconds * 1e6 for bound in BOUNDS_US)


def step(output: int) -> ReplicaEvent:
    return ReplicaEvent(
        items=(TextDelta(index=0, text="x"),), usage=MeteredUsage(uncached_input=3, output=output)
    )
