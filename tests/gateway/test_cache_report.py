"""Why a prompt was not cached, as a customer is told it: on a running worker, by the official
client, and to the token.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from openai import OpenAI

from tests.databases import Databases
from tests.gateway.openapi.running import TIMEOUT_S, Running, running

BLOCK = 16


@pytest.fixture(scope="module")
def worker(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    lent = asyncio.run(databases.lend())
    with redis.from_url(redis_server_url) as store:
        store.flushall()
    folder: Path = tmp_path_factory.mktemp("cache")
    with running(folder, databases.url(lent.name), redis_server_url) as found:
        yield found
    asyncio.run(databases.take_back(lent))


class Customer:
    """With a key of its own."""

    def __init__(self, worker: Running) -> None:
        self.worker = worker
        self.key = worker.run(worker.new_key(["inference"]))
        self.client = OpenAI(base_url=f"{worker.url}/v1", api_key=self.key, max_retries=0)

    def ask(self, system: str, user: str = "Who counts?", **options: Any) -> Any:
        return self.client.chat.completions.create(
            model="near", messages=conversation(system, user), max_tokens=2, **options
        )

    def ids(self, system: str, user: str = "Who counts?") -> list[int]:
        """Of the prompt, as the model reads it."""
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
