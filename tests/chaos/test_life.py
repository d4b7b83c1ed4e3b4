"""The life of an installation on a disk of its own: its upstream refuses it, the disk fills,
workers come and go, Redis dies, everything stops and starts again, and what it has written down on
the way. The tests follow each other on one stack."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from bench.tools.ports import free_port
from tests.chaos.load import check_books
from tests.gateway.fleet.upstream.scripted_upstream import Exchange, chunk, usage_chunk
from tests.journeys.reports import costs_pico, events, usage_of_today
from tests.journeys.served_models.configuration import BIG_KEY
from tests.journeys.upstreams import LiveUpstream, answers, askers, good, live_upstreams
from tests.stack import BIN, Stack

pytestmark = [pytest.mark.slow, pytest.mark.in_order]

DRAIN_S = 12.0
STOP_S = DRAIN_S + 30.0
"""The drain, and a bounded time for each part to close; a loaded machine needs some of it."""
CONFIG = """
drain_timeout_s = {drain_s}
log_level = "debug"
[[model]]
name = "penny"
path = "models/penny"
[[model]]
name = "slow"
upstream = "http://me:{password}@127.0.0.1:{port}/v1"
api_key_env = "BIG_KEY"
[[model]]
name = "narrow"
upstream = "http://127.0.0.1:{port}/v1"
max_concurrency = 2
[plan.default]  # enough for every test here, also right after Redis has lost its counters
tokens_per_minute = 1_000_000_000
"""
PASSWORD = "hunter2-in-the-url"
DISK = "size=320m"
PROMPT_WORDS = ("xylophone-7319", "quagmire-2048")
PROMPT: Any = [{"role": "user", "content": f"Tell me of a {PROMPT_WORDS[0]} {PROMPT_WORDS[1]}."}]


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """A small file system, in memory, if this user may make one."""
    with tempfile.TemporaryDirectory(prefix="tgd-", dir="/tmp") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", folder]
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        try:
            yield Path(folder)
        finally:
            if mounted:
                subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="module")
def upstream() -> Iterator[LiveUpstream]:
    with live_upstreams(1) as (opened,):
        yield opened


@pytest.fixture(scope="module")
def stack(disk: Path, upstream: LiveUpstream) -> Iterator[Stack]:
    config = CONFIG.format(drain_s=DRAIN_S, password=PASSWORD, port=upstream.port)
    stack = Stack(disk / "home", config=config, workers=2, env={"BIG_KEY": BIG_KEY})
    stack.log = Path(tempfile.mkstemp(prefix="tgd-", suffix=".log")[1])
    try:
        yield stack.start()
        stack.stop()
    finally:
        stack.clean_up()
        stack.log.unlink()


class Gated:
    """A script that streams three tokens, slowly enough for a checkpoint to reach the disk, and
    goes on when `gate` is set."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.begin_stream()
        for text in ("one", " two", " three"):
            await exchange.send(chunk(text))
            await asyncio.sleep(0.3)
        while not self.gate.is_set() and not exchange.left.is_set():
            await asyncio.sleep(0.02)
        await exchange.send(chunk(" four"), chunk(finish="stop"), usage_chunk(), "[DONE]")
        await exchange.end_stream()


def ask(client: OpenAI, model: str = "slow", **options: Any) -> Any:
    return client.chat.completions.create(model=model, messages=PROMPT, **options)


def read_three(stream: Any) -> None:
    texts = ""
    while texts != "one two three":
        texts += next(stream).choices[0].delta.content or ""


def workers(stack: Stack) -> list[int]:
    return stack.pids("gateway", "worker")


def worker_in_front_of(stack: Stack, upstream: LiveUpstream) -> int:
    """The one worker with an open exchange; both may have idle connections."""
    assert len(upstream.exchanges) == 1
    (found,) = askers(stack, upstream)
    return found


def post(stack: Stack, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    """On a connection of its own."""
    return httpx.post(
        f"{stack.base_url}{path}",
        headers=bearer(stack),
        json={"model": "slow", "messages": PROMPT, **fields},
        timeout=30,
    )


def bearer(stack: Stack, name: str = "api_key") -> dict[str, str]:
    return {"authorization": f"Bearer {stack.credentials[name]}"}


def readiness(stack: Stack) -> tuple[int, dict[str, Any]]:
    answer = httpx.get(f"{stack.base_url}/health/ready", timeout=60)
    assert BIG_KEY not in answer.text and PASSWORD not in answer.text
    assert "127.0.0.1" not in answer.text
    return answer.status_code, answer.json()


def ready(stack: Stack) -> int:
    return readiness(stack)[0]


def administration(stack: Stack, path: str) -> Any:
    headers = bearer(stack, "admin_key")
    return httpx.get(f"{stack.base_url}{path}", headers=headers, timeout=30).json()


def listed(stack: Stack, name: str) -> Any:
    models = administration(stack, "/v1/admin/models")["data"]
    return next(model for model in models if model["id"] == name)


def component(health: Any, name: str) -> Any:
    return next(each for each in health["components"] if each["name"] == name)


def degraded(stack: Stack) -> dict[str, str]:
    return {each["kind"]: each["state"] for each in readiness(stack)[1]["degraded"]}


def in_every_worker(stack: Stack, kind: str, state: str) -> bool:
    return stack.metric("tollgate_components", kind=kind, state=state) == 2


def in_no_worker(stack: Stack, kind: str, state: str) -> bool:
    return stack.metric("tollgate_components", kind=kind, state=state) == 0


def test_an_upstream_that_answers_401_is_told_everywhere_and_recovers(
    stack: Stack, upstream: LiveUpstream
) -> None:
    upstream.play(good)
    assert post(stack).status_code == 200
    well = (200, {"status": "ready", "missing": [], "degraded": []})
    stack.wait("both are ready", lambda: all(readiness(stack) == well for _ in range(8)))
    upstream.play(answers(401, f"{BIG_KEY} is wrong"))
    assert post(stack).status_code == 503
    stack.wait("both know", lambda: in_every_worker(stack, "upstream", "unauthorised"))
    status, told = readiness(stack)
    assert (status, told["status"], told["missing"]) == (200, "degraded", [])
    (part,) = told["degraded"]
    assert (part["kind"], part["name"], part["state"]) == ("upstream", "slow/0", "unauthorised")
    model = listed(stack, "slow")
    assert model["available"] is False
    (replica,) = model["replicas"]
    assert replica["available"] is replica["authorised"] is False and replica["reachable"] is True
    assert replica["last_error"] == "answered 401" and replica["since"] == part["since"]
    found = json.loads(stack.run("status", "--json"))
    asked = administration(stack, "/v1/admin/health")
    refused = component(found, "slow/0")
    assert refused == component(asked, "slow/0")
    assert (found["status"], refused["since"]) == ("degraded", part["since"])
    states = {each["name"]: each["state"] for each in found["components"]}
    upstreams = {"slow/0": "unauthorised", "narrow/0": "unknown"}
    assert states == {**dict.fromkeys(states, "ok"), **upstreams}
    shown = stack.run("status")
    assert "degraded" in shown and "unauthorised" in shown and "answered 401" in shown
    assert BIG_KEY not in json.dumps(found) + shown and PASSWORD not in json.dumps(found) + shown
    upstream.play(good)
    assert post(stack).status_code == 200
    stack.wait("both know", lambda: in_no_worker(stack, "upstream", "unauthorised"))
    assert listed(stack, "slow")["available"] is True


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Leave no room on the disk."""
    filler = os.open(disk / "filler", os.O_CREAT | os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space"):
            while True:
                os.write(filler, bytes(64 * 1024))
        yield
    finally:
        os.close(filler)
        (disk / "filler").unlink()


def test_a_full_disk_makes_every_worker_unready_and_kills_none(
    stack: Stack, upstream: LiveUpstream, disk: Path
) -> None:
    if not disk.is_mount():
        pytest.skip("only root may mount a file system")
    upstream.play(good)
    before, billed = workers(stack), len(events(stack, "slow"))
    answered = 0

    def ask_four() -> set[int]:
        nonlocal answered
        statuses = [post(stack).status_code for _ in range(4)]
        answered += statuses.count(200)
        return set(statuses)

    with full(disk):
        stack.wait("both refuse", lambda: {ready(stack) for _ in range(8)} == {503})
        stack.wait("requests are refused", lambda: ask_four() == {503})
        # A few bytes come free now and then: what a part deletes, another one takes.
        stack.wait("it is told", lambda: readiness(stack)[1]["missing"] == ["spool"])
        stack.wait("both tell", lambda: in_every_worker(stack, "spool", "full"))
        stack.wait("metrics tell", lambda: stack.metric("tollgate_spool_free_bytes") < 256 * 1024)
    stack.wait("it serves again", lambda: ask_four() == {200})
    stack.wait("both are ready", lambda: {ready(stack) for _ in range(8)} == {200})
    stack.wait("all is well", lambda: degraded(stack) == {})
    assert sorted(workers(stack)) == sorted(before)
    assert len(events(stack, "slow")) == billed + answered, "who was refused pays nothing"


def test_the_credentials_and_the_secret_are_for_this_user_alone(stack: Stack) -> None:
    for name in ("credentials.json", "secret.json"):
        assert (stack.home / name).stat().st_mode & 0o777 == 0o600, name
    for name in ("logs", "run", "spool"):
        assert (stack.home / name).stat().st_mode & 0o777 == 0o700, name
    assert stack.home.stat().st_mode & 0o066 == 0, "nobody else lists it or writes to it"
    assert set(stack.credentials) == {"base_url", "api_key", "admin_key"}


def test_a_second_start_on_the_same_home_is_refused_with_one_line(stack: Stack) -> None:
    command = [str(BIN / "tollgate"), "up", "--home", str(stack.home), "--port", str(free_port())]
    before = stack.credentials
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert str(stack.home) in line and "in use" in line
    assert done.stdout == ""
    assert stack.credentials == before
    assert ready(stack) == 200


def test_a_worker_that_is_told_to_leave_finishes_its_stream_while_the_others_serve(
    stack: Stack, upstream: LiveUpstream
) -> None:
    script = Gated()
    upstream.play(script)
    stream = ask(stack.client(max_retries=0), stream=True)
    read_three(stream)
    leaving = worker_in_front_of(stack, upstream)
    os.kill(leaving, signal.SIGTERM)
    statuses = []
    for _ in range(20):
        statuses += [ready(stack), post(stack, model="penny", max_tokens=2).status_code]
    assert set(statuses) == {200}
    assert leaving in workers(stack), "it waits for its stream"
    script.gate.set()
    rest = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in rest) == " four"
    assert rest[-1].choices[0].finish_reason == "stop"
    stack.wait("it has left, and another has come", lambda: is_new(stack, leaving))
    last = events(stack, "slow")[-1]
    written = last.output + last.reasoning_output
    assert (last.finish, written, last.estimated) == ("done", 5, False)


@pytest.mark.nightly
def test_never_more_than_an_upstream_takes_while_workers_are_replaced_under_load(
    stack: Stack, upstream: LiveUpstream
) -> None:
    """SIGHUP, one worker after the other: for a while the old one brings to an end what it has
    beside the new one. Its places are those of all of them."""
    now = most = 0
    done = threading.Event()

    async def counts(exchange: Exchange) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)
        now -= 1
        await good(exchange)

    def ask_on() -> set[int]:
        statuses = set()
        while not done.is_set():
            statuses.add(post(stack, model="narrow").status_code)
        return statuses

    def were_answered(number: int) -> None:
        wanted = len(upstream.exchanges) + number
        stack.wait(f"{number} more were answered", lambda: len(upstream.exchanges) >= wanted)

    upstream.play(counts)
    assert stack.process is not None
    before = set(workers(stack))
    with ThreadPoolExecutor(6) as pool:
        asking = [pool.submit(ask_on) for _ in range(6)]
        try:
            were_answered(10)
            stack.process.send_signal(signal.SIGHUP)
            stack.wait("all are new", lambda: are_others(set(workers(stack)), before))
            were_answered(10)
        finally:
            done.set()
    assert set().union(*(each.result(30) for each in asking)) == {200}
    assert most == 2


def are_others(found: set[int], before: set[int]) -> bool:
    return len(found) == 2 and not found & before


def is_new(stack: Stack, old: int) -> bool:
    found = workers(stack)
    return len(found) == 2 and old not in found


def test_metrics_stay_right_when_a_worker_is_killed(stack: Stack, upstream: LiveUpstream) -> None:
    upstream.play(good)

    def ask_twelve() -> tuple[int]:
        assert {post(stack).status_code for _ in range(12)} == {200}
        return (12,)

    stack.wait_counted(ask_twelve, ("tollgate_requests_total", {"model": "slow"}))
    finished = stack.metric("tollgate_requests_total", model="slow")
    upstream.play(Gated())
    stream = ask(stack.client(max_retries=0), stream=True)
    read_three(stream)
    killed = worker_in_front_of(stack, upstream)
    os.kill(killed, signal.SIGKILL)
    with pytest.raises((openai.APIConnectionError, httpx.TransportError, openai.APIError)):
        list(stream)
    stack.wait("another worker has come", lambda: is_new(stack, killed))
    stack.wait_ready()
    stack.wait("the stream is billed", lambda: events(stack, "slow")[-1].finish == "recovered")
    found = events(stack, "slow")
    assert 1 <= found[-1].output <= 3, "the last checkpoint is up to half a second old"
    assert found[-1].estimated
    for kind, components in (
        ("output", ("output", "reasoning_output")),
        ("uncached", ("uncached_input",)),
    ):
        total = sum(getattr(event, each) for event in found for each in components)
        stack.wait_metric("tollgate_tokens_total", total, model="slow", kind=kind)
    assert stack.metric("tollgate_requests_total", model="slow") == finished
    stack.wait_metric("tollgate_spool_backlog_events", 0)
    stack.wait_metric("tollgate_num_requests_running", 0)
    stack.wait("the reservation came back", lambda: stack.open_leases() == 0)


def test_without_redis_requests_are_served_and_what_they_used_is_known_when_it_is_back(
    stack: Stack, upstream: LiveUpstream
) -> None:
    upstream.play(good)
    before = workers(stack)
    answers: list[httpx.Response] = []

    def noticed() -> bool:
        for pid in stack.pids("valkey-server"):
            os.kill(pid, signal.SIGKILL)
        answers.append(post(stack))
        return "Redis runs no limiter script" in stack.worker_logs()

    stack.wait("it is noticed", noticed)
    stack.wait("it is ready again", lambda: ready(stack) == 200)
    answers += [post(stack) for _ in range(10)]
    assert {answer.status_code for answer in answers} == {200}
    assert workers(stack) == before, "nobody had to be started again"
    stack.wait("Redis is back", stack.redis_answers)
    stack.wait("what could not be settled is settled now", lambda: stack.open_leases() == 0)


def balances_of(stack: Stack) -> list[Any]:
    return asyncio.run(stack.sql("SELECT * FROM balances ORDER BY account"))


def test_a_stop_ends_open_streams_in_bounded_time_bills_them_and_the_next_start_knows_it_all(
    stack: Stack, upstream: LiveUpstream
) -> None:
    upstream.play(Gated())
    client = stack.client(max_retries=0)
    made = stack.client(api_key=stack.create_key(), max_retries=0)
    ask(made, "penny", max_tokens=3)
    known, before = stack.credentials, len(events(stack, "slow"))
    stack.wait_booked()
    used = {model: usage_of_today(client, models=[model]) for model in ("penny", "slow")}
    costs, balances = costs_pico(client), balances_of(stack)
    streams = [ask(client, stream=True) for _ in range(3)]
    for stream in streams:
        read_three(stream)
    began = time.monotonic()
    stopping = threading.Thread(target=stack.stop)
    stopping.start()
    for stream in streams:
        with pytest.raises(openai.APIError, match="stopped before the answer was complete"):
            assert not [c for c in stream if c.choices[0].finish_reason], "never a fake stop"
        assert time.monotonic() - began < STOP_S
    stopping.join(STOP_S)
    assert not stopping.is_alive()
    stack.start()
    assert stack.credentials == known
    fresh = stack.client(max_retries=0)
    ended = events(stack, "slow")[before:]
    assert [(each.output, each.estimated, each.finish) for each in ended] == [
        (3, True, "error")
    ] * 3
    assert usage_of_today(fresh, models=["penny"]) == used["penny"]
    slow = usage_of_today(fresh, models=["slow"])
    assert slow["output_tokens"] == used["slow"]["output_tokens"] + 9
    assert slow["num_model_requests"] == used["slow"]["num_model_requests"] + 3
    assert costs_pico(fresh) == costs, "slow has no price"
    assert balances_of(stack) == balances
    assert ask(made, "penny", max_tokens=3).usage.completion_tokens > 0
    asyncio.run(check_books(stack))


def test_no_file_holds_a_key_or_a_prompt(stack: Stack, upstream: LiveUpstream) -> None:
    """The last: it ends the stack."""

    async def refuses(exchange: Exchange) -> None:
        error = {"message": f"cannot do: {json.dumps(exchange.body['messages'])}"}
        await exchange.answer({"error": error}, 400)

    async def breaks(exchange: Exchange) -> None:
        await exchange.answer(json.dumps(exchange.body["messages"]).encode())

    for script, status in ((refuses, 400), (breaks, 503)):
        upstream.play(script)
        assert post(stack).status_code == status
    bad_fields: list[dict[str, Any]] = [
        {"model": "penny", "messages": PROMPT_WORDS[0]},
        {"model": "penny", "stop": 5},
        {"model": PROMPT_WORDS[1]},
        {"model": "penny", PROMPT_WORDS[0]: 1},
    ]
    for fields in bad_fields:
        assert post(stack, **fields).status_code in (400, 404)
    assert post(stack, path=f"/v1/{PROMPT_WORDS[0]}").status_code == 404
    made = stack.create_key()
    assert stack.client(api_key=made).models.list().data
    given = [stack.credentials["api_key"], stack.credentials["admin_key"], made]
    keys = {*given, *(client.api_key for client in stack.clients)}
    stack.stop()
    secret = [word.encode() for word in (*keys, *PROMPT_WORDS)]
    files = {path for path in stack.home.rglob("*") if path.is_file()}
    assert {"worker-0.log", "worker-1.log", "postgres.log"} <= {path.name for path in files}
    files = files - {stack.home / "credentials.json"} | {stack.log}
    assert [path for path in files if any(word in path.read_bytes() for word in secret)] == []
