"""Checks that the cost of one request is the same, to the pico-USD, in its answer, in the books and
in its customer's view. On a running worker, over HTTP."""

from __future__ import annotations

import asyncio
import csv
import json
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args

import pytest
import requests
import sqlalchemy as sa
from click.testing import CliRunner

from billing.credits.lines import sweep
from billing.ledger.spend_totals import hold_books
from billing.money import usd
from engine.fairness import LANE_WEIGHTS
from gateway.cli.main import tollgate
from gateway.cli.observe.requests import LANES, OUTCOMES
from gateway.ids import uuid7
from gateway.request_log.search import Outcome
from tests.databases import Databases
from tests.gateway.routes.openapi.fresh import fresh_worker
from tests.gateway.routes.openapi.running import TIMEOUT_S, Running

BOOKED_WITHIN_S = 60.0
ASKS = {"x-tollgate-cost": "true"}


@pytest.fixture(scope="module")
def worker(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("own")
    with fresh_worker(databases, redis_server_url, folder) as found:
        yield found


@pytest.fixture(scope="module")
def key(worker: Running) -> str:
    return worker.run(worker.new_key(["inference"]))


def ask(worker: Running, key: str, *, stream: bool, **headers: str) -> Any:
    body: dict[str, Any] = {"model": "far", "messages": [{"role": "user", "content": "hi"}]}
    body |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    headers |= {"authorization": f"Bearer {key}"}
    url = f"{worker.url}/v1/chat/completions"
    return worker.session.post(url, json=body, headers=headers, timeout=TIMEOUT_S)


def usage_of(answer: requests.Response, *, stream: bool) -> Any:
    if not stream:
        return answer.json()["usage"]
    chunks = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return json.loads(chunks[-1])["usage"]


def get(worker: Running, key: str, path: str) -> requests.Response:
    headers = {"authorization": f"Bearer {key}"}
    return worker.session.get(worker.url + path, headers=headers, timeout=TIMEOUT_S)


def booked(worker: Running, key: str, request_id: str) -> Any:
    deadline = time.monotonic() + BOOKED_WITHIN_S
    while time.monotonic() < deadline:
        answer = get(worker, key, f"/api/v1/generation?id={request_id}")
        assert answer.status_code == 200, answer.text
        found = answer.json()["data"]
        if found["status"] == "booked":
            return found
        time.sleep(0.05)
    raise AssertionError("not booked in time")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_says_what_is_booked(worker: Running, key: str, stream: bool) -> None:
    answer = ask(worker, key, stream=stream, **ASKS)
    assert answer.status_code == 200, answer.text
    usage = usage_of(answer, stream=stream)
    cost = usage["cost"]
    assert answer.headers.get("x-tollgate-cost") == (None if stream else f"{cost['amount']} USD")
    parts = cost["components"]
    assert sum(Decimal(part["amount"]) for part in parts.values()) == Decimal(cost["amount"]) > 0
    assert sum(part["quantity"] for part in parts.values()) == usage["total_tokens"]
    found = booked(worker, key, answer.headers["x-request-id"])
    assert found["cost"] == cost["amount"] and found["cancelled"] is False
    assert Decimal(str(found["total_cost"])) == Decimal(cost["amount"])
    assert found["tokens_prompt"] == usage["prompt_tokens"]
    [attempt] = [each for each in found["attempts"] if each["kind"] == "usage"]
    assert (attempt["components"], attempt["finish"]) == (parts, "done")
    [moved] = attempt["transfers"]
    assert (moved["amount"], moved["currency"]) == (cost["amount"], "USD")
    assert (moved["debit"], moved["credit"]) == (f"receivable:{worker.org_id}", "revenue:far")

    async def in_rollup() -> Any:
        async with worker.services.system_db.connect() as conn:
            query = sa.text("SELECT sum(amount_pico) FROM transfers WHERE event_id = :id")
            return await conn.scalar(query, {"id": attempt["id"]})

    assert worker.run(in_rollup()) == usd(cost["amount"])


def noted(worker: Running, request_id: str) -> Any:
    async def find() -> Any:
        async with worker.services.system_db.connect() as conn:
            query = sa.text("SELECT * FROM request_log WHERE id = CAST(:id AS uuid)")
            named = {"id": request_id.removeprefix("req_")}
            return (await conn.execute(query, named)).mappings().one_or_none()

    deadline = time.monotonic() + BOOKED_WITHIN_S
    while time.monotonic() < deadline:
        if (found := worker.run(find())) is not None:
            return found
        time.sleep(0.05)
    raise AssertionError("not noted in time")


def test_the_log_of_requests_has_what_is_booked(worker: Running, key: str) -> None:
    answer = ask(worker, key, stream=True, **ASKS)
    usage = usage_of(answer, stream=True)
    row = noted(worker, answer.headers["x-request-id"])
    assert row["cost_pico"] == usd(usage["cost"]["amount"])
    read = row["uncached_tokens"] + row["cached_tokens"] + row["written_tokens"]
    assert (read, row["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert (row["status"], row["model"], row["lane"]) == (200, "far", "interactive")
    assert (row["org"], row["project"]) == (worker.org_id, worker.project_id)
    assert 0 < row["ttft_us"] <= row["duration_us"]
    refused = ask(worker, key, stream=False, **{"x-tollgate-cost": "perhaps"})
    row = noted(worker, refused.headers["x-request-id"])
    assert (row["status"], row["output_tokens"], row["is_good"]) == (400, 0, None)


def test_who_does_not_ask_is_told_no_cost(worker: Running, key: str) -> None:
    for headers in ({}, {"x-tollgate-cost": "false"}):
        for stream in (False, True):
            answer = ask(worker, key, stream=stream, **headers)
            assert "cost" not in usage_of(answer, stream=stream)
            assert "x-tollgate-cost" not in answer.headers
    refused = ask(worker, key, stream=False, **{"x-tollgate-cost": "perhaps"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-tollgate-cost")


def test_an_org_and_a_key_may_be_set_to_be_told_and_a_request_decides(worker: Running) -> None:
    made = worker.post("/v1/admin/keys", name="k", project_id=worker.project_id)
    key, path = made["value"], f"/v1/admin/keys/{made['id']}"

    def sets(path: str, value: bool | None) -> None:
        headers = {"authorization": f"Bearer {worker.everything}"}
        body = {"shows_cost": value}
        answer = worker.session.patch(worker.url + path, json=body, headers=headers)
        assert answer.json()["shows_cost"] is value, answer.text

    def is_told(expected: bool, **headers: str) -> None:
        """Within a second every worker knows."""
        deadline = time.monotonic() + 60
        while True:
            answer = ask(worker, key, stream=False, **headers)
            told = "x-tollgate-cost" in answer.headers
            assert told == ("cost" in usage_of(answer, stream=False))
            if told == expected or time.monotonic() > deadline:
                assert told == expected
                return

    try:
        sets("/v1/admin/organization", True)
        is_told(True)
        is_told(False, **{"x-tollgate-cost": "false"})
        sets(path, False)
        is_told(False)
        is_told(True, **ASKS)
        sets(path, None)
        is_told(True)
    finally:
        sets("/v1/admin/organization", False)
    is_told(False)
    sets(path, True)
    is_told(True)


def test_tags_travel_from_the_header_into_the_books_and_the_reports(worker: Running) -> None:
    key = worker.run(worker.new_key(["inference"]))
    answer = ask(worker, key, stream=False, **{"x-tollgate-tags": "team=search, feature=chat"})
    assert answer.status_code == 200, answer.text
    plain = ask(worker, key, stream=True)
    found = booked(worker, key, answer.headers["x-request-id"])
    assert found["tags"] == {"team": "search", "feature": "chat"}
    assert booked(worker, key, plain.headers["x-request-id"])["tags"] == {}
    report = f"start_time={int(time.time()) - 86_400}&group_by[]=api_key_id&group_by[]=tag:team"
    for kind, amount in (("usage/completions", "num_model_requests"), ("costs", "amount")):
        page = get(worker, worker.everything, f"/v1/organization/{kind}?{report}")
        assert page.status_code == 200, page.text
        rows = [row for bucket in page.json()["data"] for row in bucket["results"]]
        mine = {row["tag"]: row[amount] for row in rows if row["api_key_id"] == found["api_key_id"]}
        assert set(mine) == {"search", None} and mine["search"] == mine[None]
    refused = ask(worker, key, stream=False, **{"x-tollgate-tags": "team"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-tollgate-tags")


def test_a_request_is_found_before_it_is_in_the_books(worker: Running, key: str) -> None:
    async def hold(ended: asyncio.Event, held: asyncio.Event) -> None:
        async with worker.services.system_db.begin() as conn:
            await hold_books(conn)
            held.set()
            await ended.wait()

    async def begin() -> tuple[asyncio.Event, asyncio.Task[None]]:
        ended, held = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(hold(ended, held))
        await held.wait()
        return ended, task

    async def finish(ended: asyncio.Event, task: asyncio.Task[None]) -> None:
        ended.set()
        await task

    ended, task = worker.run(begin())
    try:
        answer = ask(worker, key, stream=False, **ASKS)
        request_id = answer.headers["x-request-id"]
        found = get(worker, key, f"/api/v1/generation?id={request_id}").json()["data"]
    finally:
        worker.run(finish(ended, task))
    assert (found["status"], found["attempts"][0]["transfers"]) == ("pending", [])
    assert found["cost"] == usage_of(answer, stream=False)["cost"]["amount"]
    later = booked(worker, key, request_id)
    same = found.keys() - {"status", "attempts"}
    assert {name: found[name] for name in same} == {name: later[name] for name in same}


def test_a_request_says_which_credit_has_paid_it(worker: Running) -> None:
    credit = worker.made("/v1/admin/credits", org_id=worker.org_id, amount_usd="5")
    key = worker.run(worker.new_key(["inference"]))
    request_id = ask(worker, key, stream=False).headers["x-request-id"]
    cost = booked(worker, key, request_id)["cost"]
    deadline, paid_by = time.monotonic() + BOOKED_WITHIN_S, []
    while not paid_by and time.monotonic() < deadline:  # the worker's own sweep passes over ours
        worker.run(sweep(worker.services.system_db))
        [attempt] = booked(worker, key, request_id)["attempts"]
        paid_by = attempt["paid_by"]
    assert paid_by == [{"credit_id": credit, "amount": cost, "currency": "USD"}]


def test_a_request_is_its_own_keys_and_the_orgs_who_read_the_bill(
    worker: Running, key: str
) -> None:
    answer = ask(worker, key, stream=False)
    request_id = answer.headers["x-request-id"]
    completion_id = request_id.replace("req_", "chatcmpl-")
    assert booked(worker, key, completion_id)["id"] == request_id
    neighbour = worker.run(worker.new_key(["inference"]))
    by_neighbour = get(worker, neighbour, f"/api/v1/generation?id={request_id}")
    assert by_neighbour.status_code == 404
    path = "/api/v1/requests/"
    assert get(worker, worker.everything, path + request_id).json()["data"]["id"] == request_id
    assert get(worker, key, path + request_id).status_code == 403
    unknown = f"req_{uuid7().hex}"
    assert get(worker, worker.everything, path + unknown).status_code == 404
    for wrong in ("req_1", "x", f"req_{'f' * 32}"):
        refused = get(worker, key, f"/api/v1/generation?id={wrong}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "id")


def test_a_key_sees_what_it_may_spend_and_has_spent(worker: Running) -> None:
    own = worker.run(worker.new_key(["inference"]))
    fresh = get(worker, own, "/api/v1/key").json()["data"]
    assert (fresh["usage"], fresh["limit"], fresh["limit_remaining"]) == (0, None, None)
    worker.post("/v1/admin/spend-caps", key_id=fresh["id"], period="month", amount_usd="2")
    worker.post("/v1/admin/spend-caps", key_id=fresh["id"], period="day", amount_usd="1")
    amounts = []
    for _ in range(2):
        answer = ask(worker, own, stream=False, **ASKS)
        amounts.append(Decimal(answer.headers["x-tollgate-cost"].split()[0]))
        booked(worker, own, answer.headers["x-request-id"])
    seen = get(worker, own, "/api/v1/key")
    found = json.loads(seen.text, parse_float=Decimal)["data"]
    assert found["usage"] == found["usage_daily"] == found["usage_monthly"] == sum(amounts)
    assert (found["limit"], found["limit_reset"]) == (1, "daily")
    assert found["limit_remaining"] == 1 - sum(amounts)
    said = found["amounts"]
    assert Decimal(said["limit_remaining"]) == found["limit_remaining"]
    assert (said["limit"], said["currency"]) == ("1", "USD")
    assert found["rate_limit"]["requests"] == -1


def listed(worker: Running, query: str, key: str | None = None) -> Any:
    answer = get(worker, key or worker.everything, f"/v1/requests?{query}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_requests_are_listed_by_what_they_were_and_shown_whole(worker: Running) -> None:
    made = worker.post("/v1/admin/keys", name="logged", project_id=worker.project_id)
    tagged = {"x-tollgate-tags": "team=logged"}
    ids = [ask(worker, made["value"], stream=True, **tagged).headers["x-request-id"]]
    ids.append(ask(worker, made["value"], stream=False).headers["x-request-id"])
    wrong = ask(worker, made["value"], stream=False, **{"x-tollgate-cost": "perhaps"})
    ids.append(wrong.headers["x-request-id"])
    for each in ids:
        noted(worker, each)
    of_key = f"api_key_id={made['id']}"
    whole = listed(worker, of_key)
    assert [each["id"] for each in whole["data"]] == ids[::-1] and not whole["has_more"]
    page, seen = listed(worker, f"{of_key}&limit=1"), []
    while page["has_more"]:
        seen += page["data"]
        page = listed(worker, f"{of_key}&limit=1&after={page['last_id']}")
    assert [*seen, *page["data"]] == whole["data"]
    refused, plain, streamed = whole["data"]
    for query, found in (
        ("tag=team%3Dlogged", [streamed]),
        (f"{of_key}&status=400", [refused]),
        (f"{of_key}&outcome=ok", [plain, streamed]),
        (f"{of_key}&min_cost={plain['cost']['amount']}", [plain, streamed]),
        (f"{of_key}&min_cost=1000", []),
        (f"{of_key}&min_ttft_ms=0.001", [streamed]),
        (f"{of_key}&lane=batch", []),
        (f"{of_key}&model=far&project_id={worker.project_id}", [refused, plain, streamed]),
        (f"{of_key}&end_time={int(time.time()) - 3600}", []),
        (f"id={ids[0]}", [streamed]),
        ("batch_id=batch_1", []),
    ):
        assert listed(worker, query)["data"] == found, query
    assert (streamed["api_key_name"], streamed["tags"]) == ("logged", {"team": "logged"})
    bill = booked(worker, made["value"], ids[0])
    answer = get(worker, worker.everything, f"/v1/requests/{ids[0]}")
    assert answer.status_code == 200, answer.text
    one = json.loads(answer.text)
    assert one["log"] == streamed and one["bill"] == bill
    assert one["bill"]["cost"] == streamed["cost"]["amount"]
    assert {"authenticate", "admit", "attempt", "settle"} <= {
        each["name"] for each in one["stages"]
    }


def test_who_may_not_read_the_bill_lists_no_requests(worker: Running, key: str) -> None:
    assert get(worker, key, "/v1/requests").status_code == 403
    assert get(worker, key, f"/v1/requests/req_{uuid7().hex}").status_code == 403
    for missing in (f"req_{uuid7().hex}", "req_1", "x"):
        assert get(worker, worker.everything, f"/v1/requests/{missing}").status_code == 404
    for query, param in (
        ("after=x", "after"),
        ("id=x", "id"),
        ("tag=x", "tag"),
        ("min_cost=-1", "min_cost"),
        ("min_cost=x", "min_cost"),
        ("min_duration_ms=-1", "min_duration_ms"),
        ("limit=101", "limit"),
        ("outcome=odd", "outcome"),
        ("nothing=1", "nothing"),
    ):
        refused = get(worker, worker.everything, f"/v1/requests?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), query


def test_the_command_line_lists_and_shows_requests(worker: Running, key: str) -> None:
    request_id = ask(worker, key, stream=True).headers["x-request-id"]
    noted(worker, request_id)
    cost = booked(worker, key, request_id)["cost"]

    def run(*words: str) -> str:
        target = ("--url", worker.url, "--key", worker.everything)
        done = CliRunner().invoke(tollgate, ["requests", *words, *target])
        assert done.exit_code == 0, done.output
        return done.stdout

    asked = ("list", "last", "1h", "--model", "far", "--outcome", "ok")
    table = run(*asked)
    assert table.startswith("AT ") and request_id in table
    found = [json.loads(line) for line in run(*asked, "--json").splitlines()]
    assert request_id in {each["id"] for each in found}
    [row] = [each for each in csv.DictReader(run(*asked, "--csv").splitlines())
             if each["id"] == request_id]  # fmt: skip
    assert row["amount"] == cost and float(row["ttft_ms"]) > 0
    assert "No requests like these" in run("list", "--min-cost", "1000")
    shown = run("show", request_id)
    assert cost in shown and "authenticate" in shown and "uncached input" in shown
    assert json.loads(run("show", request_id, "--json"))["bill"]["cost"] == cost
    assert run("show", request_id, "--csv").startswith("name,about,began_ms,took_ms,outcome")
    assert OUTCOMES == get_args(Outcome) and set(LANES) == LANE_WEIGHTS.keys()
