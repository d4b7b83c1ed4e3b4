"""An administrator with curl: docs/administration.md, as it stands there (at night); and over two
workers a code that twenty redeem at once, and a key that is revoked."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from tests.budget import NIGHT
from tests.docs.runner import blocks_of, run_page
from tests.gateway.auth.browsing import (
    CALLBACK,
    VERIFIER,
    answer_of,
    authorize_url,
    consent,
    hidden,
    query_of,
)
from tests.pace import pace
from tests.scratch import make_scratch
from tests.stack import ROOT, Stack

REDEEMED = 20
FRESH_CONNECTIONS = 20
REVOKED_WITHIN_S = 1.0


@pytest.fixture
def folder(stack: Stack) -> Iterator[Path]:
    """A folder as the docs have it. Its path is short, as sockets below it want."""
    made = make_scratch()
    (made / ".tollgate").symlink_to(stack.home)
    yield made
    shutil.rmtree(made)


@NIGHT
def test_the_documented_calls_work_as_they_stand_there(stack: Stack, folder: Path) -> None:
    """By day test_quotations reads the page's commands, and tests/gateway/cli runs theirs."""
    page = ROOT / "docs" / "administration.md"
    assert sum(block.is_run for block in blocks_of(page)) >= 12
    said = run_page(page, folder, f"127.0.0.1:{stack.port}")
    first, second = [line for line in said.splitlines() if line.startswith("proj_")]
    assert first == second, "done once"
    assert "412" in said.splitlines() and '"param":"nam"' in said
    for kind in ("/passwords/reset?token=", "/invites/accept?token=", '"api_key.created"'):
        assert kind in said


def test_the_first_page_of_the_tutorial_works_as_it_stands_there(
    stack: Stack, folder: Path
) -> None:
    """All of it runs at night, in tests/docs."""
    page = ROOT / "docs" / "tutorial" / "1-first-answer.md"
    said = run_page(page, folder, f"127.0.0.1:{stack.port}")
    assert '"completion_tokens":' in said and "age=" in said


def ports_of(stack: Stack) -> list[int]:
    """How many connections of clients each worker holds."""
    return [
        sum(
            each.status == psutil.CONN_ESTABLISHED and each.laddr.port == stack.port
            for each in psutil.Process(pid).net_connections("tcp")
        )
        for pid in stack.pids("gateway", "worker")
    ]


@asynccontextmanager
async def client_of_both_workers(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """A client with REDEEMED open connections, some to each worker: whoever is idle accepts one."""
    limits = httpx.Limits(max_connections=REDEEMED, max_keepalive_connections=REDEEMED)
    for _ in range(30):
        async with httpx.AsyncClient(base_url=stack.base_url, limits=limits, timeout=60) as http:
            await asyncio.gather(*(http.get("/health/ready") for _ in range(REDEEMED)))
            if min(ports_of(stack)) > 0:
                yield http
                return
    raise AssertionError("one worker accepts all connections")


async def test_of_twenty_who_redeem_a_code_over_two_workers_one_gets_a_token(stack: Stack) -> None:
    admin = {"authorization": f"Bearer {stack.credentials['admin_key']}"}
    async with client_of_both_workers(stack) as http:
        (project, *_) = (await http.get("/v1/admin/projects", headers=admin)).json()["data"]
        body = {"email": "carol@x.example", "role": "developer"}
        body["projects"] = [{"id": project["id"]}]  # type: ignore[assignment]
        invited = (await http.post("/v1/admin/invites", json=body, headers=admin)).json()
        client = {
            "client_name": "app",
            "redirect_uris": [CALLBACK],
            "token_endpoint_auth_method": "none",
            "scopes": ["openid", "inference"],
        }
        made = (await http.post("/v1/admin/oauth/clients", json=client, headers=admin)).json()
        page = await http.get(invited["url"])
        form = {**hidden(page.text), "name": "Carol", "password": "a long password"}
        assert (await http.post("/invites/accept", data=form)).status_code == 303
        asked = await http.get(authorize_url(query_of(made["id"])))
        code = answer_of(await consent(http, asked))["code"]
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": CALLBACK,
            "code_verifier": VERIFIER,
            "client_id": made["id"],
        }
        answers = await asyncio.gather(
            *(http.post("/oauth/token", data=form) for _ in range(REDEEMED))
        )
        assert len(ports_of(stack)) == 2 and min(ports_of(stack)) >= 1, "both were asked"
        won = [each for each in answers if each.status_code == 200]
        lost = {(each.status_code, each.json()["error"]) for each in answers if each not in won}
        assert len(won) == 1 and lost == {(400, "invalid_grant")}
        bearer = {"authorization": f"Bearer {won[0].json()['access_token']}"}
        until = time.monotonic() + 60.0
        while (await http.get("/v1/models", headers=bearer)).status_code != 401:
            assert time.monotonic() < until, "the reuse revoked the grant"
            await asyncio.sleep(0.05)


async def test_a_revoked_key_is_refused_within_a_second_by_every_worker(stack: Stack) -> None:
    made = stack.run("keys", "create", "--name", "short-lived")
    key = next(word for word in made.split() if word.startswith("sk-tg-"))

    async def statuses() -> set[int]:
        """Return the statuses of as many fresh connections at once, so that both workers get
        some."""
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(limits=limits) as fresh:
            headers = {"authorization": f"Bearer {key}"}
            ask = partial(fresh.get, f"{stack.base_url}/v1/models", headers=headers)
            answers = await asyncio.gather(*(ask() for _ in range(FRESH_CONNECTIONS)))
        return {answer.status_code for answer in answers}

    assert await statuses() == {200}
    (row,) = (line for line in stack.run("keys", "list").splitlines() if "short-lived" in line)
    key_id = next(word for word in row.split() if word.startswith("key_"))
    stack.run("keys", "revoke", key_id)
    async with asyncio.timeout(60), pace() as seconds:
        asked_s = seconds()
        while (found := await statuses()) != {401}:
            assert asked_s < REVOKED_WITHIN_S, found
            asked_s = seconds()
