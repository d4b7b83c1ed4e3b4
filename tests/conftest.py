"""Real parts for every test: a throw-away Postgres and a throw-away Valkey per session (per xdist
worker), and Triton's interpreter where there is no GPU.

`postgres_url`: a migrated database without rows (`databases`). `db`: an engine on it. `redis_url`:
flushed before the test. `redis`: a client on it. Both servers die with the session, killed or not
(`gateway.processes.child_processes`).
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import ssl
import time
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import argon2
import httpcore2
import httpx
import httpx2
import pytest
import redis.asyncio
from alembic.config import Config
from alembic.script import ScriptDirectory
from argon2.profiles import CHEAPEST
from hypothesis import HealthCheck, settings
from sqlalchemy import Engine, util
from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg
from sqlalchemy.ext.asyncio import AsyncEngine
from xdist.scheduler import LoadScopeScheduling

from gateway import logs
from gateway.auth.login import passwords
from gateway.db import create_engine
from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from tests.budget import NIGHTLY, RAY, examples
from tests.databases import Databases, with_cluster
from tests.postgres_majors import NEWEST, WANTED, use_oldest
from tests.scratch import SCRATCH, make_scratch, remove_leftovers

TESTS = Path(__file__).parent
KERNELS = TESTS / "engine" / "kernels"
INTERPRETED = shutil.which("nvidia-smi") is None
"""Whether kernels run in Triton's interpreter: as they are defined, and then in their tests."""


def interpret(on: bool) -> None:
    os.environ["TRITON_INTERPRET"] = str(int(on))


interpret(INTERPRETED)

# A busy machine is slow to draw and to run; that says nothing of a strategy or of a test.
settings.register_profile(
    "shared cores",
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("shared cores")


SERVED_BY_ONE_STACK = {
    folder: folder
    for folder in ("tests/journeys", "tests/journeys/served_models", "tests/mcp_bridge/server")
} | dict.fromkeys(("tests/gateway/console", "tests/gateway/console/figures"), "the console")
"""Folders whose files are served by one, by its name."""
LONG_COLLECTION_S = 0.2
"""A full collection of garbage takes so long of the processor for half a million objects."""
PATIENCE_S = 120.0
SEED = os.environ.get("SUITE_ORDER")
"""If set, it seeds a random order of the files and of the tests within each file."""


def pytest_configure() -> None:
    """Put the folders of `tmp_path` there, too: to sync a file waits for no disk."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(SCRATCH))
    if WANTED != NEWEST:
        use_oldest(pytest.MonkeyPatch())


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        remove_leftovers()


def pytest_report_header() -> list[str]:
    budget = "nightly" if NIGHTLY else "small"
    return [f"budget: {budget}; order: {SEED or 'as written'}; Postgres: {WANTED}"]


class FilesTogether(LoadScopeScheduling):
    """Runs the tests of a file one after the other in one process, and those of all files that a
    folder's one Tollgate serves: it is started once."""

    def _split_scope(self, nodeid: str) -> str:
        path, _, _ = nodeid.partition("::")
        folder, _, _ = path.rpartition("/")
        return SERVED_BY_ONE_STACK.get(folder, path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesTogether:
    config.option.loadscopereorder = False  # those with long tests come first
    return FilesTogether(config, log)


def shuffle(items: list[pytest.Item], draw: random.Random) -> None:
    """Files stay whole: what a file shares is made once. Tests that are marked `in_order` follow
    each other as written."""
    written = {item: place for place, item in enumerate(items)}
    files = sorted({item.path for item in items})
    draw.shuffle(files)
    places = {path: place for place, path in enumerate(files)}
    draw.shuffle(items)
    items.sort(
        key=lambda item: (
            places[item.path],
            written[item] * bool(item.get_closest_marker("in_order")),
        )
    )


def spread(items: list[pytest.Item]) -> dict[Path, float]:
    """Return a place for each file, from 0 to 1, which spreads those of each room over the whole
    run: the engine's compute and wait for nothing, the gateway's wait for processes and for time,
    and three of those leave a core idle."""
    rooms: dict[str, list[Path]] = {}
    for file in dict.fromkeys(item.path for item in items):
        rooms.setdefault(file.relative_to(TESTS).parts[0], []).append(file)
    return {
        file: (number + 0.5) / len(files)
        for files in rooms.values()
        for number, file in enumerate(files)
    }


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while tests are collected: there is none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only a night has time for, and what starts Ray. Two at a time, files with long
    tests come first: what begins a long one last is waited for, and what waits leaves its core to
    short ones."""
    unwanted = [mark for mark, wanted in (("nightly", NIGHTLY), ("ray", RAY)) if not wanted]
    left_out = [item for item in items if any(map(item.get_closest_marker, unwanted))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    if SEED is not None:
        shuffle(items, random.Random(SEED))
    elif hasattr(config, "workerinput"):
        long = {item.path for item in items if item.get_closest_marker("slow") is not None}
        places = spread(items)
        items.sort(key=lambda item: (item.path not in long, places[item.path]))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Interpret in the tests of kernels alone: it is a thousand times slower than torch, which all
    other tests of an engine on a CPU, and the processes that they start, run as users do."""
    interpret(INTERPRETED and KERNELS in item.path.parents)
    HEAP.freeze_if_large()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Freeze what is imported and collected: the garbage collector walks it no more, which saves a
    sixth of what tests with an application take; and let it look less often for what comes later,
    which took as much again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    gc.callbacks.append(HEAP.note)


class Heap:
    """Watches how much tests leave alive until the end: models and compiled kernels, say."""

    def __init__(self) -> None:
        self._began_s = 0.0
        self._is_large = False

    def note(self, phase: str, info: Mapping[str, int]) -> None:
        """Take the time of a full collection: long, it walks much that stays."""
        if info["generation"] < 2:
            return
        if phase == "start":
            self._began_s = time.thread_time()
        elif time.thread_time() - self._began_s > LONG_COLLECTION_S:
            self._is_large = True

    def freeze_if_large(self) -> None:
        """Between tests: what one holds may still become garbage that it waits for."""
        if self._is_large:
            gc.collect()
            gc.freeze()
            self._is_large = False


HEAP = Heap()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object],
) -> Generator[None, object, object]:
    """Freeze what lives until the end of the session as well."""
    made = yield
    if fixturedef.scope == "session":
        gc.freeze()
    return made


@pytest.fixture(scope="session", autouse=True)
def real_parameters() -> Iterator[argon2.Parameters]:
    """A password costs next to nothing in the tests' own process; what it costs elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        found = passwords.PARAMETERS
        patch.setattr(passwords, "PARAMETERS", CHEAPEST)
        yield found


@pytest.fixture(scope="session", autouse=True)
def no_access_lines() -> Iterator[None]:
    """A gateway in the tests' own process writes its lines into no report of pytest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "write_lines", lambda lines: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def certificates() -> Iterator[None]:
    """Read once in a process: to make a client of httpx or an SDK takes 40 ms else, as does each
    request without one, and stacks are asked by the hundred whether they are ready."""
    make = ssl.create_default_context
    read = cache(lambda cafile: make(cafile=cafile))

    def of(*args: Any, **named: Any) -> ssl.SSLContext:
        is_file_alone = not args and named.keys() == {"cafile"}
        return read(named["cafile"]) if is_file_alone else make(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", of)
        patch.setattr(httpcore2, "default_ssl_context", cache(httpcore2.default_ssl_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def patient_clients() -> Iterator[None]:
    """A client of httpx waits for an answer until it hangs, unless its test says for how long: five
    seconds are short on a machine that does much else."""
    with pytest.MonkeyPatch.context() as patch:
        for library in (httpx, httpx2):
            for phase in ("connect", "read", "write", "pool"):
                patch.setattr(library._config.DEFAULT_TIMEOUT_CONFIG, phase, PATIENCE_S)
        yield


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> Iterator[None]:
    """Compile a statement once in a process, not once for each pool: a test makes three of them."""
    compiled: util.LRUCache[Any, Any] = util.LRUCache(4000)
    the_same = property(lambda engine: compiled, lambda engine, its_own: None)
    with pytest.MonkeyPatch.context() as patch:
        # Part of the cache's key: all of this class render the same.
        patch.setattr(PGDialect_asyncpg, "__eq__", lambda one, other: type(one) is type(other))
        patch.setattr(PGDialect_asyncpg, "__hash__", lambda dialect: hash(type(dialect)))
        patch.setattr(Engine, "_compiled_cache", the_same, raising=False)
        patch.setattr(util, "get_cls_kwargs", cache(util.get_cls_kwargs))
        yield


@pytest.fixture(scope="session", autouse=True)
def migrations_read_once() -> Iterator[None]:
    """Import a folder's migrations once in a process: each start of an installation reads all."""
    read: dict[str | None, ScriptDirectory] = {}
    from_config = ScriptDirectory.from_config

    def known(config: Config) -> ScriptDirectory:
        folder = config.get_main_option("script_location")
        if folder not in read:
            read[folder] = from_config(config)
        return read[folder]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptDirectory, "from_config", known)
        yield


@pytest.fixture(scope="session")
def throwaway_home() -> Iterator[Home]:
    """A home whose path is short enough for sockets, removed at the end of the session."""
    folder = make_scratch()
    home = Home(folder)
    home.create()
    yield home
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def postgres_home(throwaway_home: Home) -> Iterator[Home]:
    """The session's cluster, fsync off. Nothing is vacuumed beside the tests: they empty tables by
    the thousand, and no database lives long."""
    with_cluster(throwaway_home)
    with (throwaway_home.postgres / "postgresql.auto.conf").open("a") as settings:
        settings.write("autovacuum = off\n")
    child = asyncio.run(embedded.start_postgres(throwaway_home, durable=False))
    yield throwaway_home
    asyncio.run(child.stop(embedded.STOP_TIMEOUT_S))


@pytest.fixture(scope="session")
def databases(postgres_home: Home) -> Iterator[Databases]:
    """The session's databases."""
    made = Databases(postgres_home)
    asyncio.run(made.start())
    yield made
    made.close()


@pytest.fixture(scope="session")
def redis_server_url(throwaway_home: Home) -> Iterator[str]:
    """The session's Valkey."""
    child = asyncio.run(embedded.start_redis(throwaway_home, durable=False))
    yield embedded.redis_url(throwaway_home)
    asyncio.run(child.stop(embedded.STOP_TIMEOUT_S))


@pytest.fixture
async def postgres_url(databases: Databases) -> AsyncIterator[str]:
    """A database of this test alone with the newest schema, e.g. for `gateway.db.create_engine`."""
    lent = await databases.lend()
    yield databases.url(lent.name)
    await databases.take_back(lent)


@pytest.fixture
async def db(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    """A pool on this test's database."""
    engine = create_engine(postgres_url)
    yield engine
    await engine.dispose()


@pytest.fixture
async def redis_url(redis_server_url: str) -> str:
    """An empty Redis."""
    client = redis.asyncio.from_url(redis_server_url)
    await client.flushdb()  # others hold what many tests share
    await client.aclose()
    return redis_server_url


@pytest.fixture(name="redis")
async def redis_client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A client on the empty Redis; replies are bytes."""
    client = redis.asyncio.from_url(redis_url)
    yield client
    await client.aclose()
