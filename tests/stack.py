"""A whole Tollgate, started the way `make run` starts it, for the journey and chaos tests."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis
import sqlalchemy as sa
from click.testing import CliRunner
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from bench.tools.ports import free_port
from billing.spool.directory import closed_events
from gateway.cli.main import tollgate
from gateway.db import create_engine
from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from tests.databases import with_cluster
from tests.scratch import make_scratch

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
ONE_COMMAND = threading.Lock()
"""A runner of commands takes the process's standard output for itself."""
Series = tuple[str, dict[str, str]]
"""A metric's name, and labels that it carries."""


class Stack:
    """One `tollgate up` and what a test wants to ask of it.

    `config`: the text of its tollgate.toml, PORT standing for its port. `env`: what its environment
    has besides this process's.
    """

    def __init__(
        self,
        home: Path,
        *,
        config: str | None = None,
        workers: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.home = home
        self.port = free_port()
        self.config = _with_suites_spool(config)
        self.workers = workers
        self.env = {**os.environ, **(env or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self.clients: list[OpenAI] = []
        self.log = home.parent / f"{home.name}.log"

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def prepare(self) -> None:
        """Make what a first start would make slowly."""
        with_cluster(Home(self.home))

    def start(self) -> Stack:
        self.prepare()
        with self.log.open("ab") as log:
            begin = log.tell()
            self.process = subprocess.Popen(
                self.command(),
                cwd=ROOT,
                env=self.env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.wait_ready()
        self.wait("the start has ended", lambda: self._has_started(begin))
        return self

    def _has_started(self, begin: int) -> bool:
        """Whether all workers serve. One that answers does not tell: where another is killed while
        it still starts, the whole start fails."""
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        return b"Tollgate is ready" in self.log.read_bytes()[begin:]

    def command(self) -> list[str]:
        found = [str(BIN / "tollgate"), "up", "--home", str(self.home), "--port", str(self.port)]
        found += ["--workers", str(self.workers)]
        if self.config is not None:
            file = self.home.parent / "tollgate.toml"
            file.write_text(self.config.replace("PORT", str(self.port)))
            found += ["--config", str(file)]
        return found

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                if httpx.get(f"{self.base_url}/health/ready", timeout=30).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"not ready in {timeout_s} s:\n{self.log.read_text()[-4000:]}")

    def stop(self) -> None:
        """Ctrl-C, and no child may remain."""
        if self.process is None:
            return
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(STOP_TIMEOUT_S)
        self.process = None
        assert code in (0, 130, -signal.SIGINT), self.log.read_text()[-4000:]
        gone, alive = psutil.wait_procs(children, timeout=30)
        assert not alive, f"left behind: {alive}"

    def clean_up(self) -> None:
        """Leave nothing of ours behind, whatever the test did."""
        for client in self.clients:
            client.close()
        if self.process is not None and self.process.poll() is None:
            for child in self.kill():
                try:
                    child.kill()
                except psutil.NoSuchProcess:
                    continue

    def kill(self) -> list[psutil.Process]:
        """kill -9 of the parent; returns the children it had."""
        assert self.process is not None
        children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_TIMEOUT_S)
        self.process = None
        return children

    def pids(self, *words: str) -> list[int]:
        """Processes below this stack whose command line holds all of `words`."""
        assert self.process is not None
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                line = " ".join(child.cmdline())
            except psutil.NoSuchProcess:
                continue
            if all(word in line for word in words):
                found.append(child.pid)
        return found

    @property
    def credentials(self) -> dict[str, str]:
        content: dict[str, str] = json.loads((self.home / "credentials.json").read_text())
        return content

    def client(self, **options: Any) -> OpenAI:
        """The official SDK; closed with the stack."""
        found = {"base_url": self.credentials["base_url"], "api_key": self.credentials["api_key"]}
        found["admin_api_key"] = self.credentials["admin_key"]
        self.clients.append(OpenAI(**(found | options)))
        return self.clients[-1]

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        text = httpx.get(f"{self.base_url}/metrics", timeout=60).text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the series of `name` that carry `labels`; 0 when there is none yet."""
        wanted = set(labels.items())
        return sum(
            v for (n, found), v in self.metrics().items() if n == name and wanted <= set(found)
        )

    def worker_logs(self) -> str:
        logs = sorted((self.home / "logs").glob("worker-*.log"))
        return "".join(path.read_text() for path in logs)

    def wait_booked(self) -> None:
        """Until Postgres has what was answered before. The spools tell: a worker tells how much of
        its own waits only now and then."""

        def are_shipped() -> bool:
            spools = [lock.parent for lock in Home(self.home).spool.glob("*/lock")]
            assert spools
            try:
                return all(shipped for each in spools for _, shipped in closed_events(each))
            except FileNotFoundError:  # shipped, or adopted, as it was read
                return False

        self.wait("all usage is booked", are_shipped)

    def wait_metric(self, name: str, value: float, timeout_s: float = 90.0, **labels: str) -> None:
        deadline = time.monotonic() + timeout_s
        while (seen := self.metric(name, **labels)) != value:
            late = time.monotonic() >= deadline
            assert not late, f"{name} is {seen}, not {value}\n{self.last_lines()}"
            time.sleep(0.1)

    def last_lines(self) -> str:
        """The end of each log, which goes with the stack when its test has failed."""
        logs = [self.log, *sorted((self.home / "logs").glob("*.log"))]
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in logs)

    def wait_counted(self, work: Callable[[], Sequence[float]], *series: Series) -> None:
        """Until each of `series` has grown by what `work` says, and by no more. An answer ends
        before it is counted, so that one of an earlier test may be counted during `work`: then it
        is done again."""
        for _ in range(3):
            before = [self.metric(name, **labels) for name, labels in series]
            wanted = [old + grown for old, grown in zip(before, work(), strict=True)]
            deadline = time.monotonic() + 90
            while True:
                seen = [self.metric(name, **labels) for name, labels in series]
                if all(now >= least for now, least in zip(seen, wanted, strict=True)):
                    break
                assert time.monotonic() < deadline, f"{series} is {seen}, not {wanted}"
                time.sleep(0.1)
            if seen == wanted:
                return
        raise AssertionError(f"{series} is {seen}, not {wanted}")

    async def sql(self, statement: str) -> list[Any]:
        """Rows of the stack's own Postgres."""
        db = create_engine(embedded.postgres_url(Home(self.home)))
        try:
            async with db.connect() as connection:
                return list((await connection.execute(sa.text(statement))).all())
        finally:
            await db.dispose()

    def redis_answers(self) -> bool:
        with redis.Redis.from_url(embedded.redis_url(Home(self.home))) as store:
            try:
                return bool(store.ping())
            except redis.ConnectionError:
                return False

    def open_leases(self) -> int:
        """Reservations that nobody has settled."""
        store = redis.Redis.from_url(embedded.redis_url(Home(self.home)))
        try:
            keys = store.scan_iter("tollgate:{*}:leases")
            return sum(store.zcard(key) for key in keys)
        finally:
            store.close()

    def wait(self, what: str, check: Callable[[], bool], timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not check():
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
            time.sleep(0.1)

    def create_key(self, *options: str) -> str:
        """`tollgate keys create`; the key, as it is shown only once."""
        name = f"key-{time.monotonic_ns()}"
        made = json.loads(self.run("keys", "create", "--json", "--name", name, *options))
        key: str = made["key"]
        return key

    def run(self, *arguments: str) -> str:
        """`tollgate ARGUMENTS --home HOME`, which must succeed; in this process, which saves a
        second of imports. `tests/gateway/cli` runs it as a process."""
        with ONE_COMMAND, ThreadPoolExecutor(1) as thread:  # a loop may run in this one
            done = thread.submit(
                CliRunner().invoke, tollgate, [*arguments, "--home", str(self.home)]
            ).result()
        assert done.exit_code == 0, (done.stderr, done.exception)
        return done.stdout


class Callers:
    """Clients who ask until told to stop; one who is failed ends, and tells at the end.

    `ask`: one request of a client; it returns the request's id. `answered`: the ids, in order.
    """

    def __init__(self, ask: Callable[[], str], clients: int) -> None:
        self.answered: list[str] = []
        self._ask, self._stop = ask, threading.Event()
        self._more = threading.Condition()
        self._threads = ThreadPoolExecutor(clients)
        self._done = [self._threads.submit(self._go_on) for _ in range(clients)]

    def _go_on(self) -> None:
        while not self._stop.is_set():
            answered = self._ask()
            with self._more:
                self.answered.append(answered)
                self._more.notify_all()

    def wait_for_more(self, number: int) -> None:
        """Until as many requests were answered from now on."""
        with self._more:
            wanted = len(self.answered) + number
            done = self._more.wait_for(lambda: len(self.answered) >= wanted, timeout=120)
        assert done, [each.exception() for each in self._done if each.done()]

    def end(self) -> None:
        """Raises: what a client met."""
        self._stop.set()
        for each in self._done:
            each.result()
        self._threads.shutdown()


def _with_suites_spool(config: str | None) -> str | None:
    """Return the settings with the sync policy of spools that SUITE_SPOOL_SYNC names, for a run of
    the chaos suite with each."""
    policy = os.environ.get("SUITE_SPOOL_SYNC")
    return config if policy is None else f'{config or ""}\n[spool]\nsync = "{policy}"\n'


@contextmanager
def running(name: str = "home", **options: Any) -> Iterator[Stack]:
    """A stack with these options in a folder of its own, in which its home has this name; stopped
    as a user would, and gone."""
    folder = make_scratch()
    stack = Stack(folder / name, **options)
    try:
        yield stack.start()
        stack.stop()
    finally:
        stack.clean_up()
        shutil.rmtree(folder, ignore_errors=True)
