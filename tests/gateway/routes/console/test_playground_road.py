"""The road of the playground: who is signed in asks a model under a key, and is that key to limits
and to the bill."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
import sqlalchemy as sa

from gateway.db import tenant
from gateway.tenancy.keys.keys import create_key
from gateway.tenancy.projects import create_project
from gateway.tenancy.tables import api_keys, spend_caps
from tests.gateway.fleet.upstream.scripted_upstream import Exchange, chunk
from tests.gateway.routes.console.signed_in import COOKIE, Person, sign_in
from tests.gateway.routes.openapi.running import ACTOR, CAPS, SHOWN_SERVER, TIMEOUT_S, Running
from tests.journeys.upstreams import good

BOTH = {"stream": True, "stream_options": {"include_usage": True}}
COST = {"x-tollgate-cost": "true"}


@pytest.fixture
def owner(worker: Running) -> Person:
    return sign_in(worker, worker.make_user())


@pytest.fixture
def developer(worker: Running) -> Person:
    """A member of the project."""
    where = {"project_id": worker.project_id}
    return sign_in(worker, worker.make_user(found=where, role="developer"))


def own_keys(person: Person) -> list[Any]:
    async def read() -> list[Any]:
        async with tenant(person.worker.services.db, person.org_id) as conn:
            found = sa.select(api_keys).where(api_keys.c.user_id == person.user_id)
            return list(await conn.execute(found.order_by(api_keys.c.id)))

    return person.worker.run(read())


def cap_of(person: Person) -> str:
    async def read() -> Any:
        async with tenant(person.worker.services.db, person.org_id) as conn:
            own = sa.select(spend_caps.c.id).where(spend_caps.c.key_id == own_keys_id)
            return await conn.scalar(own)

    own_keys_id = own_keys(person)[0].id
    return str(person.worker.run(read()))


def change(worker: Running, path: str, method: str = "PATCH", **body: Any) -> requests.Response:
    headers = {"authorization": f"Bearer {worker.everything}"}
    return worker.session.request(
        method, worker.url + path, json=body, headers=headers, timeout=TIMEOUT_S
    )


def booked(worker: Running, answer: Any) -> Any:
    """Return what the API tells of the request."""
    headers = {"authorization": f"Bearer {worker.everything}"}
    url = f"{worker.url}/api/v1/requests/{answer.headers['x-request-id']}"
    found = worker.session.get(url, headers=headers, timeout=TIMEOUT_S)
    assert found.ok, found.text
    return found.json()["data"]


def events_of(answer: requests.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_ones_own_key_is_made_with_a_cap_and_pays_to_the_last_token(developer: Person) -> None:
    worker = developer.worker
    answer = developer.ask(worker.project_id, headers=COST)
    assert answer.status_code == 200, answer.text
    (key,) = own_keys(developer)
    assert key.for_console and key.project_id == worker.project_id
    usage, told = answer.json()["usage"], booked(worker, answer)
    assert told["api_key_id"] == key.id, told
    assert told["tokens_prompt"] == usage["prompt_tokens"] == 20
    assert told["tokens_completion"] == usage["completion_tokens"] == 5
    assert answer.headers["x-tollgate-cost"].startswith("0.0000")
    cap = change(worker, f"{CAPS}/{cap_of(developer)}", "GET").json()
    assert (cap["period"], cap["amount_usd"], cap["hard"]) == ("day", "1", True)


def test_a_stream_is_the_apis_to_the_byte_but_for_its_names(developer: Person) -> None:
    worker = developer.worker
    events = events_of(developer.ask(worker.project_id, headers=COST, **BOTH))
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events[:-1]) == "Hello"
    assert events[-1]["usage"]["completion_tokens"] == 5
    assert events[-1]["usage"]["cost"]["amount"].startswith("0.0000")


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"x-form-token": ""}, "stale_page"),
        ({"x-form-token": "0" * 64}, "stale_page"),
        ({"x-form-token": "ü"}, "stale_page"),
        ({"sec-fetch-site": "cross-site"}, "stale_page"),
        ({"sec-fetch-site": "same-site"}, "stale_page"),
    ],
)
def test_no_other_site_asks(developer: Person, headers: dict[str, str], code: str) -> None:
    sent = {name: value.encode() for name, value in headers.items()}
    answer = developer.ask(developer.worker.project_id, headers=sent)  # type: ignore[arg-type]
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, code)
    assert own_keys(developer) == []


def test_a_token_is_of_one_browser_and_a_session_that_ended_asks_nothing(
    developer: Person, owner: Person
) -> None:
    other = developer.ask(developer.worker.project_id, headers={"x-form-token": owner.token})
    assert other.json()["error"]["code"] == "stale_page"
    for cookie in ("", "x" * 43):
        gone = Person(
            worker=developer.worker,
            org_id=developer.org_id,
            user_id=developer.user_id,
            cookie=cookie,
        )
        answer = gone.ask(developer.worker.project_id)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "signed_out")


def test_what_the_api_refuses_is_refused_in_its_words(developer: Person) -> None:
    payer = developer.worker.project_id
    answer = developer.ask(payer, model="near", temperature=9)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")
    unknown = developer.ask(payer, model='<img src=x onerror="alert(1)">')
    assert unknown.status_code == 404
    assert unknown.headers["content-type"] == "application/json"


def test_a_key_that_one_may_manage_pays_for_its_own_requests(
    owner: Person, developer: Person
) -> None:
    worker = owner.worker
    key = worker.run(worker.new_key(["inference"]))
    who = worker.run(worker.services.authenticator.authenticate(key))
    answer = owner.ask(who.key_id)
    assert answer.status_code == 200, answer.text
    assert booked(worker, answer)["api_key_id"] == who.key_id
    assert own_keys(owner) == []
    mine = worker.run(worker.new_key(["inference"], user_id=developer.user_id))
    mine_id = worker.run(worker.services.authenticator.authenticate(mine)).key_id
    assert developer.ask(mine_id).status_code == 200


def test_under_somebody_elses_key_no_server_is_called(owner: Person, developer: Person) -> None:
    """It would be shown the credentials of the key's owner."""
    worker = owner.worker
    secret = worker.run(worker.new_key(["inference", "mcp:call"], user_id=developer.user_id))
    key_id = worker.run(worker.services.authenticator.authenticate(secret)).key_id
    tool = {"type": "mcp", "server_label": SHOWN_SERVER, "require_approval": "never"}
    refused = owner.ask(key_id, tools=[tool])
    assert (refused.status_code, "mcp:call" in refused.text) == (403, True)
    assert developer.ask(key_id, tools=[tool]).status_code == 200
    assert owner.ask(key_id).status_code == 200


def test_nobody_spends_under_what_is_not_theirs(developer: Person, owner: Person) -> None:
    worker = developer.worker
    made = worker.post("/v1/admin/orgs", name=f"other of {developer.user_id}")
    elsewhere = made["organization"]["id"]
    others = worker.run(worker.new_key(["inference"]))
    others_id = worker.run(worker.services.authenticator.authenticate(others)).key_id
    owner.ask(worker.project_id)
    theirs = own_keys(owner)[0].id
    apart = worker.make_project()
    for payer in (others_id, theirs, apart, "proj_none", "key_none", elsewhere, "", "'; --", "\0"):
        answer = developer.ask(payer)
        assert answer.status_code == 404, (payer, answer.text)
    assert own_keys(developer) == []
    assert owner.ask(theirs).status_code == 404, "one's own is chosen by its project"


def test_another_organizations_key_and_project_are_not_there(owner: Person) -> None:
    worker = owner.worker
    made = worker.post("/v1/admin/orgs", name=f"wall of {owner.user_id}")
    org_id = made["organization"]["id"]

    async def make() -> tuple[str, str]:
        pepper_id, pepper = worker.services.authenticator.pepper
        async with tenant(worker.services.system_db, org_id) as conn:
            project = await create_project(conn, org_id=org_id, name="web", actor=ACTOR)
            key = await create_key(
                conn,
                org_id=org_id,
                project_id=project.id,
                name="theirs",
                scopes=["inference"],
                pepper=pepper,
                pepper_id=pepper_id,
                actor=ACTOR,
            )
        return project.id, key.row.id

    for payer in worker.run(make()):
        assert owner.ask(payer).status_code == 404


def test_a_reader_asks_nothing(worker: Running) -> None:
    where = {"project_id": worker.project_id}
    reader = sign_in(worker, worker.make_user(found=where, role="reader"))
    answer = reader.ask(worker.project_id)
    assert (answer.status_code, answer.json()["error"]["param"]) == (403, "payer")
    assert own_keys(reader) == []


def test_a_cap_that_is_reached_refuses_the_next(developer: Person) -> None:
    worker, payer = developer.worker, developer.worker.project_id
    assert developer.ask(payer, max_tokens=5).status_code == 200
    assert change(worker, f"{CAPS}/{cap_of(developer)}", amount_usd="0.00001").ok
    answer = developer.ask(payer, max_tokens=5)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "insufficient_quota")


def test_what_an_admin_revoked_is_not_made_again(developer: Person, owner: Person) -> None:
    worker, payer = developer.worker, developer.worker.project_id
    assert developer.ask(payer).status_code == 200
    (key,) = own_keys(developer)
    refused = change(worker, f"/v1/admin/keys/{key.id}/rotate", "POST")
    assert refused.status_code == 400, "nobody is shown its secret"
    url, cookies = f"{worker.url}/console/keys/{key.id}", {COOKIE: owner.cookie}
    shown = requests.get(url, cookies=cookies, timeout=TIMEOUT_S)
    assert "in the playground" in shown.text and "Rotate" not in shown.text
    assert change(worker, f"/v1/admin/keys/{key.id}", "GET").json()["for_console"] is True
    assert change(worker, f"/v1/admin/keys/{key.id}/revoke", "POST").ok
    assert developer.ask(payer).status_code == 403
    assert len(own_keys(developer)) == 1


def test_who_leaves_the_project_spends_nothing_more_there(developer: Person) -> None:
    worker, payer = developer.worker, developer.worker.project_id
    assert developer.ask(payer).status_code == 200
    path = f"/v1/organization/projects/{payer}/users/{developer.user_id}"
    assert change(worker, path, "DELETE").ok
    assert developer.ask(payer).status_code == 403


def test_two_first_requests_at_once_make_one_key(developer: Person) -> None:
    payer = developer.worker.project_id
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: developer.ask(payer).status_code, range(4)))
    assert answers == [200] * 4
    assert len(own_keys(developer)) == 1


def test_who_stops_reading_stops_the_upstream_and_pays_for_what_was_written(
    developer: Person,
) -> None:
    worker, asked = developer.worker, asyncio.Event()
    exchanges: list[Exchange] = []

    async def script(exchange: Exchange) -> None:
        exchanges.append(exchange)
        await exchange.begin_stream()
        await exchange.send(chunk("Hel"))
        await exchange.hang()
        asked.set()

    async def until_left() -> None:
        await asyncio.wait_for(asked.wait(), TIMEOUT_S)

    worker.far.script = script
    try:
        answer = developer.ask(worker.project_id, **BOTH)
        lines = answer.iter_lines()
        assert any(b"Hel" in line for line in lines)
        answer.close()
        worker.run(until_left())
    finally:
        worker.far.script = good
    assert exchanges[0].left.is_set()
