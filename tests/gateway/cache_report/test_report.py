"""Why a prompt was not cached, as a customer is told it: on a running worker, by the official
client, and to the token.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa
from anthropic import Anthropic
from openai import OpenAI

from gateway.cache_report.report import CacheReport
from tests.databases import Databases
from tests.gateway.routes.openapi.fresh import fresh_worker
from tests.gateway.routes.openapi.running import TIMEOUT_S, Running

BLOCK = 16


@pytest.fixture(scope="module")
def worker(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """It writes no report of itself: one that it writes just then is not there yet when the tests
    look."""
    folder: Path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheReport, "start", lambda self: None)
        with fresh_worker(databases, redis_server_url, folder) as found:
            yield found


class Customer:
    """With a key of its own."""

    def __init__(self, worker: Running) -> None:
        self.worker = worker
        self.key = worker.run(worker.new_key(["inference"]))
        self.client = OpenAI(base_url=f"{worker.url}/v1", api_key=self.key, max_retries=0)
        self.anthropic = Anthropic(base_url=worker.url, api_key=self.key, max_retries=0)

    def ask(self, system: str, user: str = "Who counts?", **options: Any) -> Any:
        return self.client.chat.completions.create(
            model="near", messages=conversation(system, user), max_tokens=2, **options
        )

    def ids(self, system: str, user: str = "Who counts?") -> list[int]:
        """Return the token ids of the prompt, as the model reads it."""
        body = {"model": "near", "messages": conversation(system, user)}
        return list(self.request("POST", "/v1/tokenize", json=body)["tokens"])

    def report(self, query: str = "") -> list[Any]:
        """The results of the buckets, one behind the other, as they are by now."""
        self.worker.run(self.worker.services.cache_report.flush())
        page = self.request("GET", f"/api/v1/cache?bucket_width=1d&{query}")
        return [each for bucket in page["data"] for each in bucket["results"]]

    def request(self, method: str, path: str, key: str = "", **options: Any) -> Any:
        answer = self.worker.session.request(
            method,
            self.worker.url + path,
            headers={"authorization": f"Bearer {key or self.key}"},
            timeout=TIMEOUT_S,
            **options,
        )
        assert answer.ok, answer.text
        return answer.json()


class Used(NamedTuple):
    """As a surface tells it."""

    prompt: int
    cached: int


def chat(customer: Customer, system: str) -> Used:
    return of_chat(customer.ask(system).usage)


def chat_streamed(customer: Customer, system: str) -> Used:
    *_, last = customer.ask(system, stream=True, stream_options={"include_usage": True})
    return of_chat(last.usage)


def of_chat(usage: Any) -> Used:
    return Used(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens)


def completion(customer: Customer, system: str) -> Used:
    made = customer.client.completions.create(model="near", prompt=system, max_tokens=2)
    return of_chat(made.usage)


def completion_streamed(customer: Customer, system: str) -> Used:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    asked = customer.client.completions.create(model="near", prompt=system, max_tokens=2, **options)
    return of_chat([*asked][-1].usage)


def response(customer: Customer, system: str) -> Used:
    made = customer.client.responses.create(
        model="near", instructions=system, input="Who counts?", max_output_tokens=2
    )
    return of_response(made.usage)


def response_streamed(customer: Customer, system: str) -> Used:
    events = customer.client.responses.create(
        model="near", instructions=system, input="Who?", max_output_tokens=2, stream=True
    )
    return of_response([*events][-1].response.usage)  # type: ignore[union-attr]


def of_response(usage: Any) -> Used:
    return Used(usage.input_tokens, usage.input_tokens_details.cached_tokens)


def message(customer: Customer, system: str) -> Used:
    return of_message(customer.anthropic.messages.create(**of_anthropic(system)).usage)


def message_streamed(customer: Customer, system: str) -> Used:
    with customer.anthropic.messages.stream(**of_anthropic(system)) as stream:
        return of_message(stream.get_final_message().usage)


def of_anthropic(system: str) -> Any:
    messages = [{"role": "user", "content": "Who counts?"}]
    return {"model": "near", "system": system, "messages": messages, "max_tokens": 2}


def of_message(usage: Any) -> Used:
    return Used(usage.input_tokens + usage.cache_read_input_tokens, usage.cache_read_input_tokens)


def batch_line(customer: Customer, system: str) -> Used:
    body = {"model": "near", "messages": conversation(system, "Who counts?"), "max_tokens": 2}
    url = "/v1/chat/completions"
    line = {"custom_id": "one", "method": "POST", "url": url, "body": body}
    file = customer.client.files.create(
        file=("in.jsonl", json.dumps(line).encode()), purpose="batch"
    )
    batch = customer.client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    deadline = time.monotonic() + TIMEOUT_S
    while batch.status != "completed":
        assert time.monotonic() < deadline and batch.status in RUNS, batch
        time.sleep(0.05)
        batch = customer.client.batches.retrieve(batch.id)
    assert batch.output_file_id is not None and batch.usage is not None
    found = json.loads(customer.client.files.content(batch.output_file_id).text)
    usage = found["response"]["body"]["usage"]
    told = Used(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
    assert of_response(batch.usage) == told
    return told


RUNS = ("validating", "in_progress", "finalizing")
SURFACES = (
    chat,
    chat_streamed,
    completion,
    completion_streamed,
    response,
    response_streamed,
    message,
    message_streamed,
    batch_line,
)


@pytest.fixture
def customer(worker: Running) -> Customer:
    return Customer(worker)


def conversation(system: str, user: str) -> Any:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def text(subject: str, num_lines: int = 20) -> str:
    lines = (f"Line {number}: the {subject} counts to {number * 7}." for number in range(num_lines))
    return " ".join(lines)


def common(one: list[int], other: list[int]) -> int:
    return len(os.path.commonprefix([one, other]))


def causes(result: Any) -> dict[str, int]:
    return {cause: number for cause, number in result["causes"].items() if number}


def test_a_key_is_told_where_its_prefix_broke(customer: Customer) -> None:
    before, after = text("sparrow"), text("sparrow").replace("Line 15", "Row 15")
    used = [customer.ask(each).usage for each in (before, before, after)]
    ids, changed_ids = customer.ids(before), customer.ids(after)
    position = common(ids, changed_ids)
    assert [each.prompt_tokens for each in used] == [len(ids), len(ids), len(changed_ids)]
    cached = [each.prompt_tokens_details.cached_tokens for each in used]
    assert cached[1:] == [(len(ids) - 1) // BLOCK * BLOCK, position // BLOCK * BLOCK]
    [result] = customer.report()
    assert (result["model"], result["prefix_kind"]) == ("near", "digest")
    assert result["num_model_requests"] == 3
    assert result["input_tokens"] == sum(each.prompt_tokens for each in used)
    assert result["cached_tokens"] == sum(cached)
    assert result["hit_rate"] == round(sum(cached) / result["input_tokens"], 4)
    assert causes(result)["intact"] == 1
    [found] = [each for each in result["breaks"] if each["position"] == position]
    assert (found["cause"], found["requests"]) == ("changed", 1)
    assert found["uncached_tokens"] == len(changed_ids) - cached[2]
    place = (found["message"], found["message_index"], found["role"])
    assert place == ("messages[0]", 0, "system")
    shown = customer.request("GET", f"/api/v1/generation?id={found['last_request_id']}")
    assert shown["data"]["tokens_prompt"] == len(changed_ids)


def test_only_its_own_org_and_key_see_it(worker: Running, customer: Customer) -> None:
    """And it tells no text, whatever was asked."""
    customer.ask(text("owl"), extra_body={"prompt_cache_key": "owls"})
    customer.ask(text("owl"), "Who hoots?", extra_body={"prompt_cache_key": "owls"})
    [own] = customer.report()
    assert (own["prefix"], own["prefix_kind"], own["num_model_requests"]) == (
        "owls",
        "cache_key",
        2,
    )
    assert own["api_key_id"] is None, "nobody asked"
    assert Customer(worker).report() == [], "another key"
    day = "start_time=1&bucket_width=1d&limit=1"  # of 1970
    path = "/v1/organization/cache_report?"
    found = customer.request("GET", path + day, worker.everything)
    assert [each["results"] for each in found["data"]] == [[]] and found["has_more"]
    here = f"start_time={int(time.time()) - 60}&prefixes[]=owls&"
    groups = "".join(
        f"group_by[]={each}&" for each in ("api_key_id", "model", "prefix", "project_id")
    )
    page = customer.request("GET", path + here + groups, worker.everything)
    [seen] = [each for bucket in page["data"] for each in bucket["results"]]
    who = worker.run(worker.services.authenticator.authenticate(customer.key))
    assert (seen["api_key_id"], seen["project_id"]) == (who.key_id, who.project_id)
    assert seen["causes"] == own["causes"] and seen["breaks"] == own["breaks"]
    stranger = worker.post("/v1/admin/orgs", name="stranger")
    page = customer.request("GET", path + here + groups, stranger["admin_key"]["value"])
    assert [each["results"] for each in page["data"]] == [[]] * len(page["data"])
    assert worker.run(everything_written(worker)).isdisjoint({"owl", "hoots", "counts"})


async def everything_written(worker: Running) -> set[str]:
    """The words of all rows."""
    async with worker.services.system_db.connect() as conn:
        rows = list(await conn.scalars(sa.text("SELECT row_to_json(r)::text FROM cache_report r")))
    assert rows
    return set(re.findall(r"[A-Za-z]+", " ".join(rows)))


@pytest.mark.parametrize("surface", SURFACES)
def test_every_surface_says_how_much_was_cached(
    customer: Customer, surface: Callable[[Customer, str], Used]
) -> None:
    """The right number, and the report has the same."""
    system = text(surface.__name__)
    first, again = surface(customer, system), surface(customer, system)
    assert again.prompt == first.prompt > 128
    assert again.cached == (again.prompt - 1) // BLOCK * BLOCK, "all but the last block"
    assert first.cached < BLOCK, "no more than a template's beginning"
    [result] = customer.report("group_by[]=model")
    assert result["num_model_requests"] == 2 and causes(result)["intact"] == 1
    assert (result["input_tokens"], result["cached_tokens"]) == (
        first.prompt + again.prompt,
        first.cached + again.cached,
    )


@pytest.mark.parametrize(
    ("surface", "message", "index"),
    [(response, "input", 0), (message, "system", 0), (completion, None, None)],
)
def test_a_break_is_found_where_the_client_wrote_it(
    customer: Customer,
    surface: Callable[[Customer, str], Used],
    message: str | None,
    index: int | None,
) -> None:
    system = f"{surface.__name__} of {text('finch')}"
    surface(customer, system)
    surface(customer, system.replace("Line 15", "Row 15"))
    [result] = customer.report("group_by[]=model")
    found = [each for each in result["breaks"] if each["position"] > 128]
    assert [(each["message"], each["message_index"]) for each in found] == [(message, index)]


def test_of_an_upstream_it_is_what_that_counts(customer: Customer) -> None:
    for system in (text("heron"), text("heron") + "!", "short"):
        customer.client.chat.completions.create(
            model="far", messages=conversation(system, "Who?"), max_tokens=2
        )
    found = {each["prefix_kind"]: each for each in customer.report()}
    assert {kind: each["num_model_requests"] for kind, each in found.items()} == {
        "digest": 2,
        "short": 1,
    }
    assert causes(found["digest"]) == {"unknown": 2} and found["digest"]["breaks"] == []
    assert (found["digest"]["input_tokens"], found["digest"]["cached_tokens"]) == (40, 16)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("start_time=soon", "start_time"),
        ("bucket_width=1m", "bucket_width"),
        ("group_by[]=api_key_id", "group_by[0]"),
        ("limit=73", "limit"),
        ("page=page_1", "page"),
        ("api_key_ids[]=key_of_another", "api_key_ids"),
    ],
)
def test_a_query_that_cannot_be_is_refused_by_name(
    customer: Customer, query: str, param: str
) -> None:
    answer = customer.worker.session.get(
        f"{customer.worker.url}/api/v1/cache?{query}",
        headers={"authorization": f"Bearer {customer.key}"},
        timeout=TIMEOUT_S,
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
