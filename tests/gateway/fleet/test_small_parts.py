"""The pure parts of the fleet: input estimates, refusals, the meter's arithmetic, the threads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.errors import ReplicaUnavailable, UpstreamRefused
from gateway.fleet.upstream.errors import MAX_RETRY_AFTER_S, parse_retry_after, to_fleet_error
from gateway.fleet.upstream.input_estimate import estimate_input_tokens, estimate_tokens
from gateway.fleet.upstream.meter import BrokenAnswer
from gateway.generation_events import MeteredUsage
from tests.gateway.fleet.upstream.scripted_upstream import new_meter


def test_estimates_by_length() -> None:
    assert estimate_tokens("") == 0
    assert estimate_tokens("word word word word ") == 5
    assert estimate_tokens("日本語") == 3
    assert estimate_tokens("\ud800") == 1  # half a surrogate pair is one replaced character


def test_every_text_counts_and_an_image_is_not_its_base64() -> None:
    def tokens(*content: Any, **body: Any) -> int:
        messages = [{"role": "user", "content": part} for part in content]
        return estimate_input_tokens({"messages": messages, **body}, None)

    image = {"type": "image_url", "image_url": {"url": "data:" + "A" * 100_000}}
    assert tokens("x" * 40) == 14
    assert tokens("x" * 40, "x" * 40) > tokens("x" * 80)
    assert tokens([{"type": "text", "text": "x" * 40}]) == 14
    assert tokens([image]) == 1004
    assert tokens(None) == 4
    assert tokens("x", tools=[{"type": "function", "function": {"name": "f" * 400}}]) > 100
    assert (
        estimate_input_tokens({"messages": [{"content": None, "tool_calls": [1] * 99}]}, None) > 40
    )


SENT = {"model": "big", "messages": [{"role": "user", "content": [{"type": "text"}]}], "top": 1}


def refusal(status: int, body: Any, **headers: str) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    hidden = {"sk-secret": "***", "big-32b": "big"}
    return to_fleet_error(status, headers, data, replica="r", hidden=hidden, sent=SENT)


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "too long", "code": 400, "type": None}},
        {"message": "too long", "object": "error"},
        {"detail": "too long"},
        {"error": "too long"},
        [{"error": {"message": "too long", "status": "INVALID_ARGUMENT"}}],
    ],
)
def test_refusals_in_every_spelling(body: Any) -> None:
    error = refusal(400, body)
    assert isinstance(error, UpstreamRefused)
    assert error.message == "too long"
    assert (error.error_type, error.error_code) == ("invalid_request_error", None)


@pytest.mark.parametrize("body", [b"", b"<html>", {"detail": [{"loc": []}]}, 1, []])
def test_refusals_without_words(body: Any) -> None:
    error = refusal(422, body)
    assert isinstance(error, UpstreamRefused)
    assert error.message == "The model's upstream refused the request."


def test_names_are_replaced_as_whole_words() -> None:
    error = refusal(
        400, {"error": {"message": "big-32b, not big-32bit; key sk-secret." + "x" * 2000}}
    )
    assert error.message.startswith("big, not big-32bit; key ***.x")
    assert len(error.message) == 1000


@pytest.mark.parametrize(
    "about_us",
    [
        {"message": "API key not valid. Please pass a valid API key."},
        {"message": "Your credit balance is too low to access this API."},
        {"message": "Account suspended.", "code": "insufficient_quota"},
        {"message": "no", "type": "billing_not_active"},
    ],
)
def test_what_is_about_our_account_may_come_as_a_400(about_us: dict[str, str]) -> None:
    error = refusal(400, {"error": about_us})
    assert isinstance(error, ReplicaUnavailable)


@pytest.mark.parametrize(
    ("param", "shown"),
    [
        ("top", "top"),
        ("messages", "messages"),
        ("messages[0].content", "messages[0].content"),
        ("messages.[0].content.[0].text", "messages.[0].content.[0]"),
        ("messages.0.content", "messages.0.content"),
        ("messages.7.content", "messages"),
        ("big-32b", None),
        ("inference_profile_arn", None),
        ("..", None),
        ("]messages", None),
        ("", None),
    ],
)
def test_a_param_names_what_the_client_sent(param: str, shown: str | None) -> None:
    assert refusal(400, {"error": {"message": "no", "param": param}}).param == shown


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("context_length_exceeded", "context_length_exceeded"),
        ("invalid_value", "invalid_value"),
        ("AccountOverdueError", None),
        ("vendor_x.bad_request", None),
        (400, None),
    ],
)
def test_a_code_is_one_of_openais(code: object, shown: str | None) -> None:
    error = refusal(400, {"error": {"message": "no", "code": code, "type": "vendor_x_error"}})
    assert (error.error_code, error.error_type) == (shown, "invalid_request_error")


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("see https://api.vendor.example/docs?key=1 now", "see *** now"),
        ("of org-a1b2c3d4 and proj_9Zx8y7w6, req_011CSHoEeqs5C35K", "of *** and ***, ***"),
        ("arn:aws:bedrock:us-east-1:123456789012:model/x is off", "*** is off"),
        ("key sk-proj-a1b2c3d4e5", "key ***"),
        ("'user_name' must be key-value or project_id", None),
    ],
)
def test_addresses_and_identifiers_stay_here(said: str, shown: str | None) -> None:
    assert refusal(400, {"error": {"message": said}}).message == (shown or said)


def test_a_secret_at_the_end_of_what_is_shown_is_not_cut_in_two() -> None:
    error = refusal(400, {"error": {"message": "x" * 990 + " sk-secret-and-more"}})
    assert "sk-sec" not in error.message


@pytest.mark.parametrize(
    ("headers", "expected_s"),
    [
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "9"}, 9.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, 1.0),
        ({"retry-after": "-3"}, 1.0),
        ({"retry-after": "nan"}, 1.0),
        ({"retry-after": "86400"}, MAX_RETRY_AFTER_S),
        ({}, 1.0),
    ],
)
def test_retry_after(headers: dict[str, str], expected_s: float) -> None:
    assert parse_retry_after(headers) == expected_s


def metered(usage: Any) -> MeteredUsage:
    meter = new_meter(input_tokens=99)
    event = {"choices": [], "usage": usage}
    meter.read_event(json.dumps(event).encode())
    return meter.usage


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 2}, MeteredUsage(uncached_input=5, output=2)),
        (  # reasoning beside completion_tokens, as xAI
            {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 10},
            MeteredUsage(uncached_input=5, output=5),
        ),
        (  # DeepSeek
            {"prompt_tokens": 5, "completion_tokens": 2, "prompt_cache_hit_tokens": 3},
            MeteredUsage(uncached_input=2, cache_read=3, output=2),
        ),
        (  # more cached than there is
            {
                "prompt_tokens": 5,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 9, "cache_write_tokens": 9},
            },
            MeteredUsage(cache_read=5, output=2),
        ),
        (
            {"prompt_tokens": 5.0, "completion_tokens": 2.0, "total_tokens": 7.0},
            MeteredUsage(uncached_input=5, output=2),
        ),
        ({"prompt_tokens": 5.5}, MeteredUsage(uncached_input=99, estimated=True)),
        (
            {"prompt_tokens": 0, "completion_tokens": 0},
            MeteredUsage(uncached_input=99, estimated=True),
        ),
        ({"prompt_tokens": -5}, MeteredUsage(uncached_input=99, estimated=True)),
        ({"completion_tokens": 5}, MeteredUsage(uncached_input=99, estimated=True)),
        ("five", MeteredUsage(uncached_input=99, estimated=True)),
    ],
)
def test_usage_as_vendors_tell_it(usage: Any, expected: MeteredUsage) -> None:
    assert metered(usage) == expected


def delta(text: str, **extra: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}}], **extra}).encode()


def test_text_behind_the_last_told_usage_is_estimated() -> None:
    meter = new_meter(input_tokens=99)
    told = {"prompt_tokens": 10, "completion_tokens": 4}
    meter.read_event(delta("one", usage=told))
    assert meter.usage == MeteredUsage(uncached_input=10, output=4)
    meter.read_event(delta("two"))
    meter.read_event(delta("three"))
    assert meter.usage == MeteredUsage(uncached_input=10, output=6, estimated=True)
    meter.read_event(delta("four", usage=told | {"completion_tokens": 7}))
    assert meter.usage == MeteredUsage(uncached_input=10, output=7)


def test_zeros_before_the_count_are_none_and_the_last_count_stays() -> None:
    meter = new_meter(input_tokens=99)
    zeros = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    meter.read_event(delta("one", usage=zeros))
    assert meter.usage == MeteredUsage(uncached_input=99, output=1, estimated=True)
    meter.read_event(delta("two", usage={"prompt_tokens": 10, "completion_tokens": 4}))
    meter.read_event(delta("", usage=zeros))
    assert meter.usage == MeteredUsage(uncached_input=10, output=4)


def test_only_what_is_finished_is_complete() -> None:
    told = {"prompt_tokens": 10, "completion_tokens": 4}
    meter = new_meter(n=2, input_tokens=99)
    meter.read_event(delta("one", usage=told))
    for finish_reason, complete in (("", False), (None, False), ("stop", False)):
        choice = {"index": 0, "delta": {}, "finish_reason": finish_reason}
        meter.read_event(json.dumps({"choices": [choice]}).encode())
        assert meter.complete is complete
    other = {"index": 1, "delta": {}, "finish_reason": "length"}
    meter.read_event(json.dumps({"choices": [other]}).encode())
    assert meter.complete


@pytest.mark.parametrize("choices", [[], None])
def test_the_chunk_that_is_about_usage_stays_here(choices: Any) -> None:
    meter = new_meter(input_tokens=99)
    told = {"prompt_tokens": 10, "completion_tokens": 4}
    assert meter.read_event(json.dumps({"choices": choices, "usage": told}).encode()) is None
    assert meter.usage == MeteredUsage(uncached_input=10, output=4)
    assert meter.read_event(json.dumps({"choices": choices, "usage": "odd"}).encode()) is None


@pytest.mark.parametrize(
    ("extension", "shown"),
    [
        ({"id": "req_1", "usage": {"prompt_tokens": 3}}, {"id": "req_1"}),
        ({"id": "req_1"}, {"id": "req_1"}),
        (None, None),
        ([1], [1]),
    ],
)
def test_usage_under_another_name_stays_here_too(extension: Any, shown: Any) -> None:
    meter = new_meter(input_tokens=99)
    chunk = meter.read_event(delta("one", x_groq=extension))
    assert chunk is not None
    assert json.loads(chunk.payload)["x_groq"] == shown


def test_nothing_counts_after_done() -> None:
    meter = new_meter()
    assert meter.read_event(b"[DONE]") is None
    assert meter.read_event(delta("late")) is None
    assert meter.usage.output == 0


def test_reasoning_and_arguments_are_written_by_the_model_too() -> None:
    for written in (
        {"reasoning_content": "hmm"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
        {"content": [{"type": "thinking"}]},
    ):
        meter = new_meter()
        meter.read_event(json.dumps({"choices": [{"index": 0, "delta": written}]}).encode())
        assert meter.usage.output >= 1
    meter = new_meter()
    silent = {"role": "assistant", "content": "", "refusal": None}
    meter.read_event(json.dumps({"choices": [{"index": 0, "delta": silent}]}).encode())
    assert meter.usage.output == 0


@given(st.binary(max_size=200))
def test_any_bytes_are_a_chunk_or_a_fault(data: bytes) -> None:
    meter = new_meter()
    try:
        item = meter.read_event(data)
    except BrokenAnswer:
        return
    assert item is None or json.loads(item.payload)["model"] == "m"
