"""A customer's day with the official SDK: models, chat, stream, cache, and the bill, to the
pico-USD."""

from __future__ import annotations

import time
import tomllib
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.journeys.reports import PICO, costs_pico, events, eventually, usage_of_today
from tests.stack import Stack

pytestmark = pytest.mark.slow

BOOK = Path(__file__).resolve().parents[2] / "billing/pricing/price_books/2026-11.toml"
LONG_TEXT = " ".join(f"Line {n}: the quick brown fox counts to {n * 7}." for n in range(40))


def prices() -> dict[str, int]:
    """Pico-USD per token of penny, straight from the file that ships."""
    (row,) = (
        r
        for r in tomllib.loads(BOOK.read_text())["price"]
        if r["model"] == "penny" and "tier" not in r
    )
    keys = ("uncached_input", "cache_read", "cache_write", "output")
    return {key: round(float(row[key]) * PICO) // 10**6 for key in keys}


def bill(usage: Any) -> int:
    """Compute by hand what a customer owes, from the usage in the answer, in pico-USD."""
    price = prices()
    cached: int = usage.prompt_tokens_details.cached_tokens
    pico: int = (
        (usage.prompt_tokens - cached) * price["uncached_input"]
        + cached * price["cache_read"]
        + usage.completion_tokens * price["output"]
    )
    return pico


def ask(client: OpenAI, text: str, **options: Any) -> Any:
    options = {"max_tokens": 24, "temperature": 0, **options}
    return client.chat.completions.create(
        model="penny", messages=[{"role": "user", "content": text}], **options
    )


def test_the_models_are_listed_and_one_can_be_retrieved(stack: Stack) -> None:
    client = stack.client()
    assert [model.id for model in client.models.list().data] == ["penny"]
    assert client.models.retrieve("penny").id == "penny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody")
    assert caught.value.code == "model_not_found"


def test_penny_answers_in_a_whole_sentence(stack: Stack) -> None:
    answer = ask(stack.client(), "Hello, who are you?", max_tokens=80)
    assert answer.object == "chat.completion"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content.strip()[-1] in ".!?"
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens > 3


def test_a_stream_says_the_same_as_the_whole_and_its_usage_comes_when_asked(stack: Stack) -> None:
    client = stack.client()
    whole = ask(client, "What is Tollgate?", max_tokens=40)
    chunks = list(
        ask(
            client,
            "What is Tollgate?",
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}
    plain = list(ask(client, "What is Tollgate?", max_tokens=4, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in plain)


def test_the_second_long_prompt_is_cached_and_cheaper_by_the_price_books_difference(
    stack: Stack,
) -> None:
    client = stack.client()
    stack.wait_booked()
    before = costs_pico(client)
    first = ask(client, LONG_TEXT, seed=7).usage
    eventually(lambda: costs_pico(client), before + bill(first))
    second = ask(client, LONG_TEXT, seed=7).usage
    eventually(lambda: costs_pico(client), before + bill(first) + bill(second))
    cached = second.prompt_tokens_details.cached_tokens
    more = cached - first.prompt_tokens_details.cached_tokens
    assert second.prompt_tokens == first.prompt_tokens
    assert cached > first.prompt_tokens * 0.9
    assert cached % 16 == 0
    assert second.completion_tokens == first.completion_tokens
    price = prices()
    saved = more * (price["uncached_input"] - price["cache_read"])
    assert bill(first) - bill(second) == saved > 0


def test_usage_and_costs_agree_with_what_the_answers_said(stack: Stack) -> None:
    client = stack.client()
    stack.wait_booked()
    before, cost = usage_of_today(client), costs_pico(client)
    answers = [ask(client, f"Count to {n}.", n=2, temperature=0.8).usage for n in (3, 4)]
    expected = {
        "input_tokens": sum(u.prompt_tokens for u in answers),
        "output_tokens": sum(u.completion_tokens for u in answers),
        "input_cached_tokens": sum(u.prompt_tokens_details.cached_tokens for u in answers),
        "num_model_requests": 2,
    }
    expected = {key: before.get(key, 0) + value for key, value in expected.items()}
    eventually(lambda: usage_of_today(client), expected)
    eventually(lambda: costs_pico(client), cost + sum(map(bill, answers)))


def test_an_answer_that_its_client_does_not_wait_for_is_cut_off_and_billed(stack: Stack) -> None:
    client = stack.client(max_retries=0)
    stack.wait_booked()
    before, shown = len(events(stack, "penny")), ""
    long: Any = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    long["extra_headers"] = {"x-request-timeout-ms": "600"}
    with pytest.raises(openai.APIError) as cut:
        for chunk in ask(client, "Tell me a story.", stream=True, **long):
            shown += chunk.choices[0].delta.content or ""
    assert cut.value.code == "deadline_exceeded" and shown
    with pytest.raises(openai.InternalServerError) as late:
        ask(client, "Tell me a story.", **long)
    assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
    stack.wait("both are billed", lambda: len(events(stack, "penny")) == before + 2)
    for event in events(stack, "penny")[before:]:
        assert (event.finish, event.estimated) == ("disconnect", False)
        assert 0 < event.output < 4000, "what was generated by then"
    stack.wait_metric("tollgate_num_requests_running", 0, model="penny")


def test_usage_can_be_grouped_and_paged(stack: Stack) -> None:
    usage = stack.client().admin.organization.usage
    before = len(events(stack, "penny"))
    ask(stack.client(), "Hello!", max_tokens=4)
    stack.wait("it is counted", lambda: len(events(stack, "penny")) > before)
    hour = int(time.time()) // 3600 * 3600
    page = usage.completions(
        start_time=hour - 2 * 3600, bucket_width="1h", group_by=["model", "api_key_id"], limit=1
    )
    seen = []
    while True:
        assert page.object == "page" and len(page.data) <= 1
        seen += page.data
        if not page.has_more:
            break
        page = usage.completions(
            start_time=hour - 2 * 3600,
            bucket_width="1h",
            group_by=["model", "api_key_id"],
            limit=1,
            page=str(page.next_page),
        )
    assert [bucket.start_time for bucket in seen][:3] == [hour - 7200, hour - 3600, hour]
    rows = [row for bucket in seen for row in bucket.results]
    assert {row.model for row in rows} == {"penny"}  # type: ignore[union-attr]
    assert all(row.api_key_id.startswith("key_") for row in rows)  # type: ignore[union-attr]


def test_the_responses_carry_the_headers_that_clients_read(stack: Stack) -> None:
    raw = stack.client().chat.completions.with_raw_response.create(
        model="penny", messages=[{"role": "user", "content": "Hi"}], max_tokens=4
    )
    headers = raw.headers
    assert headers["x-request-id"].startswith("req_")
    assert raw.parse()._request_id == headers["x-request-id"]
    assert headers["openai-version"] == "2020-10-01"
    assert int(headers["openai-processing-ms"]) >= 0
    for kind in ("requests", "tokens"):
        limit = int(headers[f"x-ratelimit-limit-{kind}"])
        assert 0 <= int(headers[f"x-ratelimit-remaining-{kind}"]) < limit
        assert headers[f"x-ratelimit-reset-{kind}"].endswith("s")


def test_sampling_options_are_honoured(stack: Stack) -> None:
    client = stack.client()
    story = "Tell me a story about a bear."  # whose name, town and friends penny makes up
    a, b, c = (ask(client, story, temperature=1.0, seed=seed) for seed in (11, 11, 12))
    text = [answer.choices[0].message.content for answer in (a, b, c)]
    assert text[0] == text[1] != text[2]
    stop = ask(client, "What is Tollgate?", max_tokens=60, stop=[" "]).choices[0]
    assert " " not in stop.message.content and stop.finish_reason == "stop"
    length = ask(client, "Tell me a story.", max_tokens=5)
    assert (length.choices[0].finish_reason, length.usage.completion_tokens) == ("length", 5)
    forced = ask(
        client,
        "Hi",
        max_tokens=12,
        extra_body={"ignore_eos": True, "min_tokens": 12, "top_k": 5, "min_p": 0.01},
    )
    assert forced.usage.completion_tokens == 12
    shown = ask(client, "Hi", max_tokens=3, logprobs=True, top_logprobs=2).choices[0].logprobs
    assert len(shown.content) == 3
    for token in shown.content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 2
        assert bytes(token.bytes).decode(errors="replace") == token.token


def test_metrics_count_what_happened(stack: Stack) -> None:
    def four() -> tuple[int, int]:
        answers = [ask(stack.client(), "Hello!", max_tokens=6) for _ in range(4)]
        return sum(answer.usage.completion_tokens for answer in answers), 4

    tokens = ("tollgate_tokens_total", {"model": "penny", "kind": "output"})
    requests = ("tollgate_requests_total", {"model": "penny", "status": "200"})
    stack.wait_counted(four, tokens, requests)
    stack.wait_metric("tollgate_num_requests_running", 0)
    stack.wait_metric("tollgate_num_requests_waiting", 0)
    stack.wait_metric("tollgate_kv_cache_usage_perc", 0)
    for histogram in ("time_to_first_token", "inter_token_latency", "request_queue_time"):
        assert stack.metric(f"tollgate_{histogram}_seconds_count", model="penny") > 0
    text = httpx.get(f"{stack.base_url}/metrics").text
    assert stack.credentials["api_key"] not in text
    assert "key_" not in text.replace("{key_id}", ""), "but as routes name theirs"


def test_the_schema_is_served(stack: Stack) -> None:
    schema = httpx.get(f"{stack.base_url}/schema/openapi.json").json()
    assert "/v1/chat/completions" in schema["paths"]
    assert httpx.get(f"{stack.base_url}/schema").status_code == 200
