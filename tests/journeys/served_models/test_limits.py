"""Checks what plans and scopes let pass, across two workers that share one Redis: each refusal says
when to come back, and consumes nothing."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from gateway.audit.log import COMMAND_LINE
from gateway.db import create_engine
from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from gateway.secret import Secret
from gateway.tenancy.keys.keys import PEPPER_PURPOSE, create_key
from gateway.tenancy.orgs import find_org
from gateway.tenancy.projects import find_project
from tests.gateway.fleet.upstream.scripted_upstream import Exchange, Script, chunk, completion
from tests.journeys.upstreams import LiveUpstream, askers, good
from tests.stack import Stack

pytestmark = pytest.mark.slow

TOKENS_PER_MINUTE = 60_000
TOKENS_PER_S = TOKENS_PER_MINUTE // 60
BURST = TOKENS_PER_MINUTE // 6
PATIENCE_S = 60.0
HELLO: Any = [{"role": "user", "content": "Say hello to the world."}]


@pytest.fixture
def upstream(upstreams: dict[str, LiveUpstream]) -> LiveUpstream:
    return upstreams["limited"]


def uses(tokens: int, answered: int) -> Script:
    """Every answer is said to have used so many tokens in all, `answered` of them its own."""
    usage = {"prompt_tokens": tokens - answered, "completion_tokens": answered}
    usage["total_tokens"] = tokens

    async def script(exchange: Exchange) -> None:
        await exchange.answer(completion(usage=usage))

    return script


async def endless(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.send(chunk("and so on"))
    await exchange.hang()


def limited(stack: Stack, plan: str, **options: Any) -> OpenAI:
    """A client with a new key on this plan, which does not retry unless told to."""
    return stack.client(api_key=stack.create_key("--plan", plan), **{"max_retries": 0, **options})


def ask(client: OpenAI, **options: Any) -> Any:
    options = {"messages": HELLO, "max_tokens": 100, **options}
    return client.chat.completions.create(model="limited", **options)


def refused(client: OpenAI, **options: Any) -> openai.RateLimitError:
    with pytest.raises(openai.RateLimitError) as caught:
        ask(client, **options)
    assert caught.value.code == "rate_limit_exceeded"
    return caught.value


def test_spent_tokens_are_a_429_that_says_when_and_the_sdks_own_retry_succeeds(
    stack: Stack, upstream: LiveUpstream
) -> None:
    overdrawn = 8_000  # so much that a slow machine cannot make it good in between
    upstream.play(uses(BURST + overdrawn, answered=100))
    client = limited(stack, "tokens")
    # Half of the burst by its size, and no more than a token a byte of what it can be.
    dense: Any = [{"role": "user", "content": "0" * 2 * BURST}]
    raw = client.chat.completions.with_raw_response.create(
        model="limited", messages=dense, max_tokens=100
    )
    assert raw.headers["x-ratelimit-limit-tokens"] == str(TOKENS_PER_MINUTE)
    left = int(raw.headers["x-ratelimit-remaining-tokens"])
    assert BURST // 2 - 400 < left < BURST // 2
    assert "x-ratelimit-limit-requests" not in raw.headers, "nothing limits them"
    stack.wait("it is settled, which the answer does not wait for", lambda: not stack.open_leases())
    before = time.monotonic()
    error = refused(client)
    headers = error.response.headers
    assert (error.type, error.param) == ("tokens", None)
    assert "tokens per minute" in error.message and str(TOKENS_PER_MINUTE) in error.message
    wait_ms = int(headers["retry-after-ms"])
    assert 500 < wait_ms <= 1_000 * (overdrawn + 200) // TOKENS_PER_S
    assert int(headers["retry-after"]) == -(-wait_ms // 1000)
    assert headers["x-should-retry"] == "true"
    assert headers["x-ratelimit-limit-tokens"] == str(TOKENS_PER_MINUTE)
    assert headers["x-ratelimit-remaining-tokens"] == "0"
    assert headers["x-ratelimit-reset-tokens"].endswith("s")
    patient = client.with_options(max_retries=2)
    assert ask(patient).choices[0].message.content == "Hello there"
    waited_ms = 1_000 * (time.monotonic() - before)
    assert waited_ms > wait_ms - 100, "it came too early to have waited"
    assert len(upstream.exchanges) == 2


def test_too_many_requests_are_a_429_that_consumes_nothing(
    stack: Stack, upstream: LiveUpstream
) -> None:
    """Ten at once and then one a second, however many are refused in between."""
    upstream.play(good)
    client = limited(stack, "requests")
    refusals: list[openai.RateLimitError] = []

    def passes(_: int) -> bool:
        try:
            ask(client)
        except openai.RateLimitError as error:
            refusals.append(error)
            return False
        return True

    began = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        passed = sum(threads.map(passes, range(30)))
    assert 10 <= passed <= 11 + time.monotonic() - began
    until = time.monotonic() + PATIENCE_S
    while not passes(0):
        assert time.monotonic() < until, "refusals used up what came back"
    passed += 1
    assert passed <= 11 + time.monotonic() - began
    assert len(upstream.exchanges) == passed
    headers = refusals[0].response.headers
    assert refusals[0].type == "requests"
    assert headers["x-ratelimit-limit-requests"] == "60"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert "x-ratelimit-limit-tokens" not in headers, "nothing limits them"
    assert headers["retry-after"] == "1"
    assert 1 <= int(headers["retry-after-ms"]) <= 1000


@pytest.mark.nightly
@pytest.mark.parametrize("scope", ["organization", "project"])
def test_a_plan_of_an_org_or_a_project_binds_its_keys_together(
    stack: Stack, upstream: LiveUpstream, scope: str
) -> None:
    """Given and taken from the command line; the keys have no plan of their own."""
    upstream.play(good)
    org = f"acme-{scope}"
    stack.run("orgs", "create", "--name", org)
    stack.run("projects", "create", "--name", "shop", "--org", org)
    owner = ("--org", org, "--project", "shop")
    keys = [stack.create_key(*owner), stack.create_key(*owner)]
    clients = [stack.client(api_key=key, max_retries=0) for key in keys]
    for _ in range(6):
        assert all(ask(client) for client in clients), "nothing limits them yet"
    place = (org,) if scope == "organization" else ("shop", "--org", org)
    group = "orgs" if scope == "organization" else "projects"
    stack.run(group, "set-plan", *place, "--plan", "requests")
    time.sleep(3)  # by then every worker goes by it
    passed, refusals = 0, []
    began = time.monotonic()
    for turn in range(30):
        try:
            ask(clients[turn % 2])
            passed += 1
        except openai.RateLimitError as error:
            refusals.append(error)
    assert 10 <= passed <= 11 + time.monotonic() - began
    assert len(refusals) == 30 - passed
    assert f"for this {scope[:3] if scope == 'organization' else scope} on" in refusals[0].message
    stack.run(group, "set-plan", *place, "--no-plan")
    time.sleep(3)
    assert all(ask(client) for client in clients)


@pytest.mark.parametrize("retries", [0, 2])
def test_what_can_never_fit_says_so_and_is_not_retried(
    stack: Stack, upstream: LiveUpstream, retries: int
) -> None:
    upstream.play(good)
    client = limited(stack, "tokens", max_retries=retries)
    long: Any = [{"role": "user", "content": "far too long " * 25_000}]
    errors = []

    def one() -> tuple[int]:
        errors.append(refused(client, messages=long))
        return (1,)

    stack.wait_counted(one, ("tollgate_requests_total", {"status": "429"}))
    error = errors[-1]
    headers = error.response.headers
    assert "retry-after" not in headers and "retry-after-ms" not in headers
    assert headers["x-should-retry"] == "false"
    assert "can never fit" in error.message
    assert upstream.exchanges == []
    assert ask(client), "and it has consumed nothing"


def test_a_small_plan_serves_small_requests_that_set_no_maximum(
    stack: Stack, upstream: LiveUpstream
) -> None:
    """The length of an answer is guessed, and a guess refuses nobody for good."""
    upstream.play(good)
    client = limited(stack, "small")
    answer = client.chat.completions.create(model="limited", messages=HELLO)
    assert answer.usage is not None and answer.usage.total_tokens == 25
    error = refused(client, messages=[{"role": "user", "content": "too long " * 250}])
    assert error.response.headers["x-should-retry"] == "false"


def test_a_bad_request_and_a_failed_one_give_back_what_they_reserved(
    stack: Stack, upstream: LiveUpstream
) -> None:
    client = limited(stack, "requests")
    with pytest.raises(openai.BadRequestError):
        ask(client, max_tokens=-1)

    async def fails(exchange: Exchange) -> None:
        await exchange.answer({"error": {"message": "no"}}, 500)

    upstream.play(fails)
    for _ in range(3):
        with pytest.raises(openai.InternalServerError):
            ask(client)
    stack.wait("what failed is settled", lambda: stack.open_leases() == 0)
    upstream.play(good)
    answer = client.chat.completions.with_raw_response.create(model="limited", messages=HELLO)
    assert answer.headers["x-ratelimit-remaining-requests"] == "9"


def test_only_so_many_streams_at_once(stack: Stack, upstream: LiveUpstream) -> None:
    upstream.play(endless)
    client = limited(stack, "streams")
    streams = [ask(client, stream=True) for _ in range(2)]
    for stream in streams:
        assert next(stream).choices[0].delta.content == "and so on"
    for stream in (True, False):
        error = refused(client, stream=stream)
        assert "concurrent requests" in error.message and "limit 2" in error.message
        assert int(error.response.headers["retry-after"]) >= 1
        assert int(error.response.headers["retry-after-ms"]) >= 1
    streams[0].close()
    upstream.wait_left(upstream.exchanges[0], 30.0)
    stack.wait("the place is free again", lambda: stack.open_leases() == 1)
    streams[0] = ask(client, stream=True)
    assert next(streams[0]).choices
    refused(client)
    for stream in streams:
        stream.close()
    stack.wait("all are settled", lambda: stack.open_leases() == 0)


async def test_a_flood_through_two_workers_never_passes_the_bound(
    stack: Stack, upstream: LiveUpstream
) -> None:
    """At most B + 60 r tokens in any minute; over t seconds that is B + r t."""
    used, clients, wanted = 200, 24, 60
    upstream.play(uses(used, answered=used - 10))
    key = await asyncio.to_thread(stack.create_key, "--plan", "tokens")
    request = {"model": "limited", "messages": HELLO, "max_tokens": used - 10}
    seen: list[int] = []

    async def flood(http: httpx.AsyncClient) -> None:
        while seen.count(200) < wanted and time.monotonic() < until:
            answer = await http.post("/v1/chat/completions", json=request)
            seen.append(answer.status_code)
            await asyncio.sleep(0.05)

    headers = {"authorization": f"Bearer {key}"}
    # A connection per request: whichever worker is free accepts it.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=stack.base_url, headers=headers, timeout=30, limits=limits
    ) as http:
        began = time.monotonic()
        until = began + PATIENCE_S
        await asyncio.gather(*(flood(http) for _ in range(clients)))
        took_s = time.monotonic() - began
    assert set(seen) == {200, 429}
    passed = seen.count(200)
    assert passed == len(upstream.exchanges)
    assert passed * used <= BURST + TOKENS_PER_S * took_s
    assert passed >= wanted, "and what is due does pass"
    assert len(askers(stack, upstream)) == 2


async def test_a_key_expires(stack: Stack, upstream: LiveUpstream) -> None:
    upstream.play(good)
    pepper = Secret.load(Home(stack.home).secret).current
    db = create_engine(embedded.postgres_url(Home(stack.home)))
    expires_at = datetime.now(tz=UTC) + timedelta(seconds=6)
    try:
        async with db.begin() as conn:
            org = await find_org(conn, name="default")
            project = await find_project(conn, org_id=org.id, name="default")
            made = await create_key(
                conn,
                org_id=org.id,
                project_id=project.id,
                name="soon over",
                scopes=["inference"],
                pepper=pepper.derive(PEPPER_PURPOSE),
                pepper_id=pepper.id,
                expires_at=expires_at,
                actor=COMMAND_LINE,
            )
    finally:
        await db.dispose()
    client = stack.client(api_key=made.secret, max_retries=0)
    with suppress(openai.AuthenticationError):
        assert await asyncio.to_thread(ask, client)
    left_s = (expires_at - datetime.now(tz=UTC)).total_seconds()
    assert upstream.exchanges or left_s <= 0, "it was refused before"
    await asyncio.sleep(max(0.0, left_s))
    for _ in range(8):
        with pytest.raises(openai.AuthenticationError) as caught:
            await asyncio.to_thread(ask, client)
        assert caught.value.code == "invalid_api_key"
    listed = await asyncio.to_thread(stack.run, "keys", "list")
    (line,) = (line for line in listed.splitlines() if line.endswith("soon over"))
    assert " expired " in line and made.secret not in listed


def test_a_key_does_what_its_scopes_say_and_nothing_else(
    stack: Stack, upstream: LiveUpstream
) -> None:
    upstream.play(good)
    reader = stack.client(api_key=stack.create_key("--scope", "usage:read"), max_retries=0)
    for call in (lambda: ask(reader), reader.models.list):
        with pytest.raises(openai.PermissionDeniedError) as caught:
            call()
        assert caught.value.code == "insufficient_permissions"
    assert upstream.exchanges == []
    mere = stack.client(admin_api_key=stack.credentials["api_key"], max_retries=0)
    usage = mere.admin.organization.usage
    for report in (usage.costs, usage.completions):
        with pytest.raises(openai.PermissionDeniedError, match="usage:read"):
            report(start_time=1)
    allowed = stack.client(admin_api_key=reader.api_key).admin.organization.usage
    assert allowed.costs(start_time=int(time.time()) - 60).object == "page"
