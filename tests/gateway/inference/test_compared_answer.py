"""An answer is counted by how it ended while a rollout compares two versions of its model."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from gateway.fleet.errors import ReplicaLost, ReplicaOverloaded, UpstreamRefused
from gateway.generate_request import GenerateRequest
from gateway.generation_events import (
    CallDelta,
    Item,
    MeteredUsage,
    RawBody,
    RawChunk,
    RawRun,
    ReplicaEvent,
    TextDelta,
)
from gateway.inference.compared_answer import ComparedAnswer, is_refusal
from gateway.inference.delivery import Delivery
from gateway.inference.generate import RateLimited
from gateway.lanes import Slo
from gateway.registry.comparison import Outcomes
from gateway.registry.version_table import ComparedRequest, Tally
from gateway.request_errors import ContextTooLong
from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.request_meter import RequestMeter

SORRY = "I’m sorry, but I can’t help with that."  # noqa: RUF001 - as models write it
SLO = Slo(ttft_s=1.0, tpot_s=0.1)


class Call:
    """A call, as far as it is read."""

    def __init__(self, received_s_ago: float = 0.0, **fields: Any) -> None:
        self.request = GenerateRequest(model="m", stream=True, include_usage=True, **fields)
        received_at = time.perf_counter() - received_s_ago
        self.meter = RequestMeter(Telemetry(models=["m"]), "m", received_at=received_at)
        self.meter.promise("interactive", SLO)


def counted(
    *items: Item,
    failure: Exception | None = None,
    call: Call | None = None,
    delivery: Delivery | None = None,
) -> Outcomes:
    tally = Tally()
    answer = ComparedAnswer(ComparedRequest(tally, 0, 2), call or Call())  # type: ignore[arg-type]
    for item in items:
        answer.received(ReplicaEvent(items=(item,), usage=MeteredUsage(output=5)))
    answer.end(failure, delivery or Delivery(60.0))
    return tally.take().get(0, Outcomes())


def chunk(content: str | None = None, reason: str | None = None, **delta: Any) -> RawChunk:
    choice = {"index": 0, "delta": {"content": content, **delta}, "finish_reason": reason}
    return RawChunk(msgspec.json.encode({"choices": [choice]}))


def body(content: str | None, reason: str = "stop", **message: Any) -> RawBody:
    choice = {"index": 0, "message": {"content": content, **message}, "finish_reason": reason}
    return RawBody(msgspec.json.encode({"choices": [choice]}))


def said(text: str, **fields: Any) -> TextDelta:
    return TextDelta(index=0, text=text, **fields)


@pytest.mark.parametrize(
    "head",
    [
        SORRY,
        "Sorry, I cannot assist with this.",
        "I'm unable to share that.",
        "As an AI language model, I can't do this.",
        "Unfortunately, I won't write it",
        "I apologize, but I must decline.",
    ],
)
def test_an_answer_that_begins_so_declines(head: str) -> None:
    assert is_refusal(head)


@pytest.mark.parametrize(
    "head", ["I can help.", "Sorry to hear that! Try this:", "Sure, I am not", "", "def cannot(i):"]
)
def test_an_answer_that_begins_so_does_not(head: str) -> None:
    assert not is_refusal(head)


@pytest.mark.parametrize(
    "items, so",
    [
        ((said("Hel"), said("lo", finish_reason="stop")), {}),
        ((said("I'm so"), said("rry, I can't", finish_reason="stop")), {"refused": 1}),
        ((said("x", finish_reason="content_filter"),), {"refused": 1}),
        ((said(" \n", finish_reason="stop"),), {"empty": 1}),
        ((said("", calls=(CallDelta(0, "f", "{}"),), finish_reason="tool_calls"),), {}),
        ((said("a b", finish_reason="length"),), {"cut_off": 1}),
        ((chunk("Hello"), chunk(None, "stop")), {}),
        ((chunk(None, refusal="No."), chunk(None, "stop")), {"refused": 1}),
        ((chunk("I cannot "), chunk("do it", "content_filter")), {"refused": 1}),
        ((chunk(""), chunk(None, "stop")), {"empty": 1}),
        ((chunk("x" * 400), chunk("y", "length")), {"cut_off": 1}),
        ((body(SORRY),), {"refused": 1}),
        ((body(None),), {"empty": 1}),
        ((body("Yes."),), {}),
        ((RawChunk(b"{"), chunk("Hi", "stop")), {}),
    ],
)
def test_how_an_answer_ended_is_counted(items: tuple[Item, ...], so: dict[str, int]) -> None:
    assert counted(*items) == Outcomes(requests=1, **so)


def test_a_run_of_an_upstreams_chunks_is_read_as_one() -> None:
    before, _, after = chunk("?").payload.partition(b"?")
    run = RawRun(before, [b"I cannot", b" do", b" that"], after)
    assert counted(run, chunk(None, "stop")) == Outcomes(requests=1, refused=1)


def test_a_completion_of_an_upstream_is_not_taken_for_empty() -> None:
    call = Call()
    call.request = msgspec.structs.replace(call.request, plain=object())  # type: ignore[arg-type]
    assert counted(chunk(""), call=call) == Outcomes(requests=1)


@pytest.mark.parametrize(
    "failure, so",
    [
        (ReplicaLost("killed"), {"requests": 1, "failed": 1}),
        (ReplicaOverloaded("full"), {"requests": 1, "failed": 1}),
        (UpstreamRefused("bad", status=400, error_type="x", error_code=None), {}),
        (ContextTooLong("long"), {}),
        (RateLimited.__new__(RateLimited), {}),
    ],
)
def test_what_is_the_callers_doing_is_not_counted(failure: Exception, so: dict[str, int]) -> None:
    assert counted(said("Hel"), failure=failure) == Outcomes(**so)


def test_an_answer_beyond_its_objective_is_late() -> None:
    assert counted(said("Hi"), call=Call(received_s_ago=2.0)).late == 1
    assert counted(body("Hi"), call=Call(received_s_ago=2.0)).late == 1
    assert counted(body("Hi"), call=Call(received_s_ago=1.2)).late == 0


def test_a_client_that_left_first_is_not_counted() -> None:
    left = Delivery(60.0)
    left.abandon()
    assert counted(delivery=left) == Outcomes()
    assert counted(said(""), delivery=left) == Outcomes(requests=1)


def test_an_answer_of_another_version_is_not_counted() -> None:
    woken = Delivery(60.0)
    woken.version = 1
    assert counted(said("Hi"), delivery=woken) == Outcomes()
