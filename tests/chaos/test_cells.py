"""Two homes that share Postgres and not Redis, each with a worker and an engine, of which one lends
its engine to the other: the official SDK sees no error while engines are killed, requests stay at
home while there is one, and each is billed once."""

from __future__ import annotations

import asyncio
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import openai
import pytest
import redis
import requests
import sqlalchemy as sa

from billing.ingestion import settle_late
from billing.reconciliation.agreement import EngineCount, agree
from engine.transport.usage_record import records_of
from gateway.bookkeeping import engine_counts as counting
from gateway.fleet.cells.lending import EngineLender
from gateway.fleet.cells.lending_plan import lending_of
from gateway.fleet.joining.admission import JoinableModel, JoinConfig
from gateway.fleet.joining.relay import Relay
from gateway.home import Home
from gateway.net.listener import bind
from gateway.processes import embedded_databases as embedded
from gateway.settings.load import Settings, load
from gateway.settings.models import FIRST_BORROWED
from tests.budget import cycles
from tests.chaos.mortal_engines import MODEL, run_engine
from tests.databases import Databases
from tests.gateway.conftest import be_patient
from tests.gateway.routes.openapi.running import Running, running
from tests.scratch import make_scratch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROUNDS = cycles(20, daily=1)
NUMBER = 2
"""The engine's: its model is the third one."""
TIMEOUT_S = 60.0
ASKED: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Go on."}], "seed": 2}
HERE, THERE = f"{MODEL}/{NUMBER}", f"{MODEL}/us-1:{FIRST_BORROWED}"


def until(what: str, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not in {TIMEOUT_S} s"
        time.sleep(0.005)


class Cell:
    """A home with its worker, and an engine that dies."""

    worker: Running
    sdk: openai.OpenAI
    settings: Settings

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, Home(folder / "home")
        self.home.create()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.chaos.mortal_engines"])
        self._engine: ForkServerProcess | None = None

    def serve(self, worker: Running) -> None:
        self.worker = worker
        self.settings = settings_in(self.folder)
        self.sdk = openai.OpenAI(
            base_url=f"{worker.url}/v1", api_key=worker.everything, max_retries=0, timeout=TIMEOUT_S
        )

    def begin_engine(self) -> None:
        arguments = (
            f"unix:{self.home.engine_socket(NUMBER)}",
            self.home.root,
            self.home.usage_record(MODEL),
        )
        self._engine = self._context.Process(target=run_engine, args=arguments, daemon=True)
        self._engine.start()

    def kill_engine(self) -> None:
        if self._engine is not None:
            self._engine.kill()
            self._engine.join()
            self._engine = None

    def reaches(self, replica: str) -> bool:
        return bool(self.worker.services.engines[MODEL][replica].connected)

    def ask(self, **more: Any) -> tuple[str, str]:
        """Return the id of a request, and its text."""
        answer = self.sdk.chat.completions.with_raw_response.create(**ASKED, **more)
        request_id, whole = answer.headers["x-request-id"], answer.parse()
        return request_id, whole.choices[0].message.content

    def stream(self, amid: Callable[[], None]) -> tuple[str, str]:
        """As `ask`, as a stream in which something happens."""
        answer = self.sdk.chat.completions.with_raw_response.create(**ASKED, stream=True)
        said = ""
        for number, chunk in enumerate(answer.parse()):
            said += chunk.choices[0].delta.content or ""
            if number == 3:
                amid()
        return answer.headers["x-request-id"], said

    def explain(self, request_id: str) -> tuple[list[str], list[str]]:
        """Return why a request went where it went, and where it ran."""
        headers = {"authorization": f"Bearer {self.worker.everything}"}
        url = f"{self.worker.url}/v1/requests/{request_id}"
        found: list[dict[str, Any]] = []

        def is_told() -> bool:
            answer = requests.get(url, headers=headers, timeout=TIMEOUT_S)
            found[:] = [answer.json()] if answer.status_code == 200 else []
            return bool(found and found[0]["log"])

        until("the request is logged", is_told)
        ran = [each["about"] for each in found[0]["stages"] if each["name"] == "attempt"]
        return [each["reason"] for each in found[0]["routing"]], ran

    def metric(self, text: str) -> float:
        lines = requests.get(f"{self.worker.url}/metrics", timeout=TIMEOUT_S).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(text))


def settings_in(folder: Path) -> Settings:
    return load({"home": folder / "home", "config": folder / "tollgate.toml"}, {})


@contextmanager
def redis_of_its_own() -> Iterator[str]:
    home = Home(make_scratch())
    home.create()
    with asyncio.Runner() as runner:
        child = runner.run(embedded.start_redis(home, durable=False))
        yield embedded.redis_url(home)
        runner.run(child.stop(embedded.STOP_TIMEOUT_S))
    shutil.rmtree(home.root)


async def relay_of(settings: Settings, home: Home, listener: Any) -> Relay:
    """Begin what `tollgate up` runs where engines may be lent."""
    models = tuple(JoinableModel.of(each) for each in settings.models if each.borrowed)
    relay = Relay(home.join, JoinConfig(models=models, round_trips=home.round_trips))
    await relay.start(listener)
    return relay


async def lender_of(settings: Settings, home: Home) -> EngineLender:
    config = lending_of(settings.models, settings.cell)
    assert config is not None
    lender = EngineLender(home.lending)
    await lender.take_up(config)
    return lender


@pytest.fixture
def cells(
    databases: Databases,
    redis_server_url: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[Cell, Cell]]:
    """The cell eu-1, to which us-1 lends its engine."""
    be_patient(monkeypatch)
    monkeypatch.setattr(settle_late, "ORPHAN_WAIT_S", 6.0)
    lent = asyncio.run(databases.lend())
    with redis.from_url(redis_server_url) as store:
        store.flushdb()
    folders = [tmp_path_factory.mktemp(name) for name in ("eu", "us")]
    listener = bind("127.0.0.1", 0)
    join = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
    models = [f'[[model]]\nname = "{MODEL}"\npath = "{folder}/penny"\n' for folder in folders]
    eu_more = f'{models[0]}[fleet]\njoin_listen = "{join}"\n[cell]\nname = "eu-1"\n'
    eu_more += '[[cell.peer]]\nname = "us-1"\nborrow = 1\n'
    us_more = f'{models[1]}[cell]\nname = "us-1"\n[[cell.peer]]\nname = "eu-1"\n'
    us_more += f'lend_to = "{join}"\ntoken_file = "{folders[1]}/token"\n'
    url = databases.url(lent.name)
    with ExitStack() as stack:
        other_redis = stack.enter_context(redis_of_its_own())
        eu, us = map(Cell, folders)
        for each in (eu, us):
            stack.callback(each.kill_engine)
            each.begin_engine()
        eu_worker = stack.enter_context(running(folders[0], url, redis_server_url, more=eu_more))
        us_worker = stack.enter_context(
            running(folders[1], url, other_redis, more=us_more, beside=eu_worker)
        )
        for each, worker in ((eu, eu_worker), (us, us_worker)):
            each.serve(worker)
            stack.callback(each.sdk.close)
        token = eu_worker.session.post(
            f"{eu_worker.url}/v1/admin/join_tokens",
            json={"cell": "us-1"},
            headers={"authorization": f"Bearer {eu_worker.everything}"},
            timeout=TIMEOUT_S,
        )
        assert token.status_code == 201, token.text
        (folders[1] / "token").write_text(token.json()["token"])
        relay = eu_worker.run(relay_of(eu.settings, eu.home, listener))
        stack.callback(lambda: eu_worker.run(relay.close()))
        lender = us_worker.run(lender_of(us.settings, us.home))
        stack.callback(lambda: us_worker.run(lender.close()))
        for replica in (HERE, THERE):
            until(f"{replica} is there", lambda r=replica: eu.reaches(r))
        yield eu, us
    asyncio.run(databases.take_back(lent))


async def settle(worker: Running) -> None:
    services = worker.services
    async with asyncio.timeout(TIMEOUT_S):
        while services.generation.open_calls or services.spool._open:
            await asyncio.sleep(0.01)
    assert await services.shipper.drain(TIMEOUT_S)


async def bills_of(worker: Running) -> dict[str, list[str]]:
    """Return the kinds of answers' ends that each request is billed for."""
    query = sa.text(
        "SELECT request_id, array_agg(finish ORDER BY finish) FROM usage_events"
        f" WHERE kind = 'usage' AND model = '{MODEL}' GROUP BY request_id"
    )
    async with worker.services.system_db.connect() as conn:
        return {row[0]: list(row[1]) for row in await conn.execute(query)}


def counts_of(*homes: Home) -> list[EngineCount]:
    """Count the engines of all cells together."""
    records = [home.usage_record(MODEL) for home in homes]
    there = [each for record in records if [*records_of(record)] for each in [record]]
    return [*counting._counts(MODEL, frozenset({MODEL}), there)]


def test_no_request_fails_that_another_cell_could_serve(cells: tuple[Cell, Cell]) -> None:
    eu, us = cells
    told: list[str] = []
    request_id, exact = eu.ask()
    told.append(request_id)
    assert eu.explain(request_id) == (["least_work"], [HERE])
    assert eu.metric("tollgate_cell_attempts_total") == 0
    for _ in range(ROUNDS):
        # A stream whose engine is killed goes on in the other cell, and all that comes meanwhile.
        request_id, said = eu.stream(eu.kill_engine)
        assert said == exact
        assert eu.explain(request_id) == (["least_work"], [HERE, THERE])
        told.append(request_id)
        with ThreadPoolExecutor(4) as threads:
            answers = [*threads.map(lambda _: eu.ask(), range(8))]
        assert {said for _, said in answers} == {exact}
        told += [request_id for request_id, _ in answers]
        assert eu.explain(answers[-1][0]) == (["cell_down"], [THERE])

        def bring_home() -> None:
            us.kill_engine()
            eu.begin_engine()

        # One that runs there goes on at home once that engine is killed and there is one again.
        request_id, said = eu.stream(bring_home)
        assert said == exact
        told.append(request_id)
        assert eu.explain(request_id) == (["cell_down"], [THERE, HERE])
        us.begin_engine()
        until("the other cell is back", lambda: eu.reaches(THERE))
    assert eu.metric("tollgate_cell_attempts_total") >= 10 * ROUNDS
    for each in cells:
        each.worker.run(settle(each.worker))
    bills = eu.worker.run(bills_of(eu.worker))
    assert bills.keys() == set(told)
    ends = [finish for finishes in bills.values() for finish in finishes if finish != "failover"]
    assert len(ends) == len(told), "an answer is billed twice"

    def problems(*, whole: bool) -> list[str]:
        def counts() -> list[EngineCount]:
            if whole:
                return counts_of(eu.home, us.home)
            return counting.engine_counts(us.home, (), shares_books=True)

        spools = (eu if whole else us).home.spool
        return eu.worker.run(agree(eu.worker.services.system_db, spools, counts)).problems

    until("the books balance", lambda: not problems(whole=True))
    assert not problems(whole=False)
