"""kill -9 and SIGSTOP of engines, one of which joined over TLS, amid answers of every surface, and
kill -9 of the relay that it joined by, through a whole worker: no client
sees an error or another token, each is billed once, and the engines' counts equal the books."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import msgspec
import pytest
import redis
import sqlalchemy as sa

from billing.ingestion import settle_late
from billing.reconciliation.agreement import Agreement, agree
from engine.transport.client import EngineClient
from gateway.bookkeeping.engine_counts import engine_counts
from gateway.home import Home
from gateway.inference import settlement
from gateway.inference.attempt import RESUMED
from gateway.settings.models import FIRST_JOINED
from tests.budget import cycles
from tests.chaos.mortal_engines import A_CALL, MODEL, MortalEngines
from tests.databases import Databases
from tests.gateway.conftest import be_patient
from tests.gateway.fuzz import speaking
from tests.gateway.fuzz.conversations import FuzzRequest
from tests.gateway.routes.openapi.running import Running, running
from tests.journeys.sdk.sdk_shapes import said, said_by, said_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

KILLS = cycles(500, daily=20)
STOPS = cycles(20, daily=1)
NUMBERS = (2, 3, FIRST_JOINED)
"""The engines' numbers: the model is the third one, and its further engines come behind all; the
last one is of another machine, over TLS."""
CLIENTS = 4
MAX_RESUMES = 100
"""As many as one answer may need where engines die more often than it takes to say it."""
ORPHANS_WAIT_S = 6.0
"""In place of a minute: nothing here takes so long to book."""
TIMEOUT_S = 60.0
NOBODY_THERE = (503, 529)
"""The statuses of a request that was not begun, by surface."""
USER = {"role": "user", "content": "Go on."}
TOOL = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [USER], "seed": 1}
FUNCTION = {"name": "f", "parameters": TOOL}
RESPONSES: dict[str, Any] = {"model": MODEL, "input": "Go on."}
MESSAGES: dict[str, Any] = {"model": MODEL, "max_tokens": 90, "messages": [USER]}
ASKED = (
    ("chat", "/v1/chat/completions", CHAT),
    ("chat", "/v1/chat/completions", CHAT | {"seed": 2, "stop": ["STOP h", "never"]}),
    ("chat", "/v1/chat/completions", CHAT | {"seed": 3, "n": 3, "max_tokens": 40}),
    (
        "chat",
        "/v1/chat/completions",
        CHAT | {"seed": A_CALL, "tools": [{"type": "function", "function": FUNCTION}]},
    ),
    ("chat", "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 1}),
    ("chat", "/v1/chat/completions", {"model": MODEL, "messages": [USER], "temperature": 0}),
    (
        "completions",
        "/v1/completions",
        {"model": MODEL, "prompt": ["One", "and two"], "seed": 2, "echo": True, "max_tokens": 60},
    ),
    ("responses", "/v1/responses", RESPONSES),
    (
        "responses",
        "/v1/responses",
        RESPONSES | {"tools": [{"type": "function", **FUNCTION}]},
    ),
    ("messages", "/v1/messages", MESSAGES),
    (
        "messages",
        "/v1/messages",
        MESSAGES | {"tools": [{"name": "f", "input_schema": TOOL}]},
    ),
)
REQUESTS = [FuzzRequest(surface=surface, path=path, body=body) for surface, path, body in ASKED]


class Gaps:
    """The times for which clients heard nothing where another engine went on. From any thread."""

    def __init__(self) -> None:
        self._found: list[tuple[float, float]] = []
        """When each began and ended, in monotonic seconds."""
        self.stops: list[tuple[float, float]] = []
        """The same of the times for which an engine was stopped."""

    def listen(self) -> Callable[[bytes], None]:
        """Return what hears the parts of one stream."""
        last_at = time.monotonic()

        def hear(part: bytes) -> None:
            nonlocal last_at
            now = time.monotonic()
            if RESUMED in part:
                self._found.append((last_at, now))
            last_at = now

        return hear

    def describe(self) -> str:
        """Say how long they were at kills, and how long at stops."""
        at_stops = [
            (began, ended)
            for began, ended in self._found
            if any(began < until and ended > since for since, until in self.stops)
        ]
        at_kills = [each for each in self._found if each not in at_stops]
        return f"at kills {described(at_kills)}, at stops {described(at_stops)}"


def described(times: Sequence[tuple[float, float]]) -> str:
    lengths = sorted(ended - began for began, ended in times)
    if not lengths:
        return "no gap"
    p50, p99 = (lengths[len(lengths) * part // 100] for part in (50, 99))
    return f"{len(lengths)} gaps (p50 {p50:.3f} s, p99 {p99:.3f} s)"


class Arena:
    """A worker in front of engines that die, and clients who know what they are to be told."""

    def __init__(self, worker: Running, engines: MortalEngines, folder: Path) -> None:
        self.worker, self.engines = worker, engines
        self.home = Home(folder / "home")
        self.told: dict[str, tuple[int, int] | None] = {}
        self.num_resumed, self.gaps = 0, Gaps()
        headers = {"authorization": f"Bearer {worker.everything}"}
        self.http = httpx.Client(base_url=worker.url, headers=headers, timeout=TIMEOUT_S)
        self._numbers = count()
        self.exact: list[speaking.Answer] = []

    @property
    def clients(self) -> dict[int, EngineClient]:
        found = self.worker.services.engines[MODEL]
        return dict(zip(NUMBERS, found.values(), strict=True))

    def learn(self) -> None:
        """Ask for everything once, undisturbed."""
        self.exact = [self.ask(each, stream=False) for each in REQUESTS]

    def ask(self, asked: FuzzRequest, *, stream: bool) -> speaking.Answer:
        """Ask, and again where no engine was there to begin with."""
        while True:
            heard = self.gaps.listen()
            answer = speaking.send(self.http, asked, stream=stream, heard=heard)
            if answer.status not in NOBODY_THERE:
                break
            time.sleep(0.05)
        assert answer.status == 200, answer.content
        self.num_resumed += answer.content.count(RESUMED)
        answer = msgspec.structs.replace(answer, content=answer.content.replace(RESUMED, b""))
        self.told[answer.request_id] = speaking.told(asked, answer)
        return answer

    def ask_on(self, stop: Event) -> None:
        while not stop.is_set():
            number = next(self._numbers)
            asked, exact = REQUESTS[number % len(REQUESTS)], self.exact[number % len(REQUESTS)]
            stream = number % 3 > 0
            answer = self.ask(asked, stream=stream)
            if stream:
                speaking.check_same(asked, exact, answer)
            else:
                assert text_of(asked, answer) == text_of(asked, exact)

    def until(self, what: str, condition: Callable[[], bool], poll_s: float = 0.005) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not in {TIMEOUT_S} s"
            time.sleep(poll_s)

    def busy_one(self, rng: random.Random) -> int:
        """Wait until an engine has something to lose, and return its number."""

        def busy() -> list[int]:
            return [number for number, client in self.clients.items() if client._streams]

        self.until("one is asked", lambda: bool(busy()))
        return rng.choice(busy() or NUMBERS)

    def kill(self, *numbers: int) -> None:
        """Kill them, and start them again: when this returns they are back."""
        before = {each: self.clients[each].status.engine_id for each in numbers}
        for number in numbers:
            self.engines.kill(number)
        for number in numbers:
            self.engines.begin(number)
        for number, client in self.clients.items():
            if number in before:
                self.until(
                    f"engine {number} is back",
                    lambda c=client, n=number: c.connected and c.status.engine_id != before[n],
                )

    def kill_relay(self) -> None:
        """Kill what the engine of another machine comes by, and start it again."""
        client = self.clients[NUMBERS[-1]]
        self.engines.relay.kill()
        self.until("the engine is away", lambda: not client.connected)
        self.engines.relay.begin()
        self.until("the engine is back", lambda: client.connected)

    def stop(self, number: int) -> None:
        """Stop one until all it had has gone elsewhere, then let it go on."""
        client, since = self.clients[number], time.monotonic()
        self.engines.signal(number, signal.SIGSTOP)
        try:
            self.until(f"engine {number} is left", lambda: bool(client._left))
        finally:
            self.engines.signal(number, signal.SIGCONT)
            self.gaps.stops.append((since, time.monotonic()))
        self.until(f"engine {number} has aborted it", lambda: not client._left)

    # What the books say.

    async def settle(self) -> None:
        services = self.worker.services
        async with asyncio.timeout(TIMEOUT_S):
            while services.generation.open_calls or services.spool._open:
                await asyncio.sleep(0.01)
        assert await services.shipper.drain(TIMEOUT_S)

    async def bills(self) -> dict[str, tuple[int, int]]:
        query = sa.text(
            "SELECT request_id, sum(uncached_input + cache_read), sum(output + reasoning_output)"
            f" FROM usage_events WHERE kind = 'usage' AND model = '{MODEL}' GROUP BY request_id"
        )
        async with self.worker.services.system_db.connect() as conn:
            return {row[0]: (int(row[1]), int(row[2])) for row in await conn.execute(query)}

    async def agreement(self) -> Agreement:
        counts = partial(engine_counts, self.home, ())
        found = await agree(self.worker.services.system_db, self.home.spool, counts)
        return found

    async def waste(self) -> dict[str, int]:
        query = sa.text(
            "SELECT finish, sum(uncached_input + cache_read + output) FROM usage_events"
            f" WHERE kind = 'waste' AND model = '{MODEL}' GROUP BY finish"
        )
        async with self.worker.services.system_db.connect() as conn:
            return {row[0]: int(row[1]) for row in await conn.execute(query)}


def text_of(asked: FuzzRequest, answer: speaking.Answer) -> Any:
    """Return the content of a whole answer, without its names and times."""
    read = speaking.check_whole(asked, answer, strict=True)
    match asked.surface:
        case "chat":
            return said(read, usage=True)
        case "responses":
            return said_in(read)
        case "messages":
            return said_by(read, usage=True)
    return answer.json["choices"], answer.json["usage"]


@pytest.fixture(scope="module")
def arena(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Arena]:
    lent = asyncio.run(databases.lend())
    with redis.from_url(redis_server_url) as store:
        store.flushdb()
    folder = tmp_path_factory.mktemp("resume")
    home = Home(folder / "home")
    home.create()
    engines = MortalEngines(home, NUMBERS)
    more = f'[[model]]\nname = "{MODEL}"\npath = "{folder}/penny"\nreplicas = 2\njoined = 1\n'
    more += f'[fleet]\nmax_resumes = {MAX_RESUMES}\njoin_listen = "{engines.relay.address}"\n'
    with pytest.MonkeyPatch.context() as patch:
        be_patient(patch)
        patch.setattr(settle_late, "ORPHAN_WAIT_S", ORPHANS_WAIT_S)
        waiting = partial(settle_late.settle_orphan, wait_s=ORPHANS_WAIT_S)
        patch.setattr(settlement, "settle_orphan", waiting)
        try:
            engines.relay.begin()
            for number in NUMBERS:
                engines.begin(number)
            url = databases.url(lent.name)
            with running(folder, url, redis_server_url, more=more) as worker:
                found = Arena(worker, engines, folder)
                with found.http:
                    yield found
        finally:
            engines.end()
    asyncio.run(databases.take_back(lent))


def test_no_stream_dies_with_its_engine(arena: Arena) -> None:
    rng, stop = random.Random(5), Event()
    arena.learn()
    with ThreadPoolExecutor(CLIENTS) as threads:
        asking: list[Future[None]] = [threads.submit(arena.ask_on, stop) for _ in range(CLIENTS)]
        try:
            for number in range(KILLS):
                victim = arena.busy_one(rng)
                time.sleep(rng.uniform(0.0, 0.1))  # wherever in it that is
                others = [each for each in NUMBERS if each != victim]
                arena.kill(victim, *(others if number % 10 == 9 else ()))
                if number % (KILLS // STOPS) == 0:
                    arena.stop(arena.busy_one(rng))
                    arena.kill_relay()
                failed = [each for each in asking if each.done()]
                assert not failed, failed[0].exception()
        finally:
            stop.set()
    for each in asking:
        each.result()
    assert arena.num_resumed >= KILLS / 2, "hardly anything was lost"
    print(f"{KILLS} kills, {STOPS} stops: {arena.gaps.describe()}")
    arena.worker.run(arena.settle())
    bills = arena.worker.run(arena.bills())
    assert {each: bills.get(each) for each in arena.told} == arena.told
    assert bills.keys() == arena.told.keys()

    def balances() -> bool:
        found = arena.worker.run(arena.agreement())
        return not found.problems and not found.num_waiting

    try:
        arena.until("the books balance", balances, poll_s=1.0)
    except AssertionError:
        raise AssertionError(arena.worker.run(arena.agreement()).problems) from None
    waste = arena.worker.run(arena.waste())
    assert waste["failover"] > 0
