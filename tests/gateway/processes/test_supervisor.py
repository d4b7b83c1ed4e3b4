"""`tollgate up` as a process: one life, a kill -9, a rolling restart, and starts that must fail."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from click.testing import CliRunner

from gateway.cli.main import tollgate
from gateway.home import Home
from gateway.processes import supervisor
from tests.databases import with_cluster
from tests.scratch import make_scratch

ROOT = Path(__file__).resolve().parents[3]
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
READY = "Tollgate is ready"
UPSTREAM_ONLY = '[[model]]\nname = "far"\nupstream = "http://127.0.0.1:1/v1"\n'


class Up:
    """One home, and the `tollgate up` that runs on it at the moment."""

    def __init__(self, folder: Path, config: str = UPSTREAM_ONLY) -> None:
        self.home = folder / "home"
        self.config = folder / "tollgate.toml"
        self.config.write_text(config)
        self.output = folder / "output"

    def launch(self, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "gateway", "up", "--port", "0", *flags]
        command += ["--home", str(self.home), "--config", str(self.config)]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
            )
        return self.process

    def start(self, *flags: str) -> None:
        self.launch(*flags)
        until(lambda: "Tollgate is ready" in self.said() or self.process.poll() is not None)
        assert self.process.poll() is None, self.said()

    def runs(self) -> bool:
        process = getattr(self, "process", None)
        return process is not None and process.poll() is None

    def said(self) -> str:
        return self.output.read_text()

    def url(self) -> str:
        found: str = json.loads((self.home / "credentials.json").read_text())["base_url"]
        return found

    def ready(self) -> bool:
        return httpx.get(self.url().removesuffix("/v1") + "/health/ready").status_code == 200

    def pids(self, name: str = "") -> dict[str, int]:
        """Registered children by name."""
        found = {}
        for path in self.home.glob(f"run/{name}*.pid"):
            with suppress(FileNotFoundError):  # it has ended since
                line = path.read_text().split()
                if line:
                    found[path.stem] = int(line[1])
        return found

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, number: int = signal.SIGINT) -> int:
        """Signal it and return its exit status. No child may remain."""
        children = self.children()
        self.process.send_signal(number)
        status = self.process.wait(STOP_TIMEOUT_S)
        assert psutil.wait_procs(children, timeout=60)[1] == []
        return status


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def made() -> Iterator[Up]:
    folder = make_scratch()
    up = Up(folder)
    yield up
    if up.runs():
        up.end()
    shutil.rmtree(folder)


@pytest.fixture
def fresh() -> Iterator[Up]:
    """Its first start makes everything."""
    with made() as up:
        yield up


@pytest.fixture
def up(fresh: Up) -> Up:
    with_cluster(Home(fresh.home))
    return fresh


@pytest.fixture(scope="module")
def kept() -> Iterator[Up]:
    """For who needs a running one, whatever it lived through. It may be ended."""
    with made() as up:
        with_cluster(Home(up.home))
        yield up


@pytest.fixture
def running(kept: Up) -> Up:
    """Run two workers."""
    if not kept.runs():
        kept.start("--workers", "2")
    return kept


@pytest.mark.slow
def test_one_life(fresh: Up) -> None:
    up = fresh
    up.start("--workers", "2")
    assert up.ready()
    path = up.home / "credentials.json"
    known = json.loads(path.read_text())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert set(known) == {"base_url", "api_key", "admin_key"}
    bearer = {"Authorization": f"Bearer {known['api_key']}"}
    assert httpx.get(f"{known['base_url']}/models", headers=bearer).status_code == 200
    assert known["api_key"] not in up.said(), "a key in an output that is kept"
    for log in (up.home / "logs").iterdir():
        assert known["api_key"] not in log.read_text(), log
    assert sorted(name.partition("-")[0] for name in up.pids()) == [
        *("postgres", "redis", "worker", "worker"),
    ]

    second = subprocess.run(
        [*(sys.executable, "-m", "gateway", "up"), "--home", up.home, "--config", up.config],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 2
    assert second.stderr == f"tollgate: {up.home} is in use by a running `tollgate up`\n"

    for name in ("worker-0", "redis", "postgres"):
        (before,) = up.pids(name).values()
        os.kill(before, signal.SIGKILL)
        until(lambda name=name, before=before: list(up.pids(name).values()) not in ([], [before]))
        until(up.ready)

    assert up.end() == 0
    assert up.pids() == {}
    keys = path.read_text()
    up.start()
    assert [line for line in path.read_text().splitlines() if "key" in line] == [
        line for line in keys.splitlines() if "key" in line
    ]
    assert up.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_a_rolling_restart_refuses_nobody(running: Up) -> None:
    up = running
    before = up.pids("worker")
    up.process.send_signal(signal.SIGHUP)
    answers = []
    while "All workers are new." not in up.said():
        answers.append(up.ready())
        time.sleep(0.01)
    assert len(answers) > 10 and all(answers)
    after = up.pids("worker")
    assert len(after) == 2 and not set(before) & set(after)
    assert not [pid for pid in before.values() if psutil.pid_exists(pid)]


@pytest.mark.nightly
@pytest.mark.slow
def test_what_a_kill_9_leaves_is_gone_after_the_next_start(running: Up) -> None:
    up = running
    orphans = up.children()
    assert len(orphans) >= 3
    (worker,) = up.pids("worker-0").values()
    os.kill(worker, signal.SIGSTOP)  # it cannot hear that its parent died, and holds the port
    up.process.kill()
    up.process.wait()
    up.start("--port", up.url().removesuffix("/v1").rpartition(":")[2])
    assert "Ended worker-0-" in up.said()
    assert psutil.wait_procs(orphans, timeout=60)[1] == []
    assert up.ready()
    assert up.end() == 0


NEGLIGENT = """
import ctypes, subprocess, sys
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
started = []
for _ in sys.stdin:
    started.append(subprocess.Popen(sys.argv[1:], stdout=sys.stderr))
    print(started[-1].pid, flush=True)
"""
"""Starts its arguments once for each line, and reaps nothing: a container's PID 1, say."""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_kill_9_of_everything_under_a_parent_that_reaps_nothing(up: Up) -> None:
    command = [sys.executable, "-m", "gateway", "up", "--port", "0", "--home", str(up.home)]
    command += ["--config", str(up.config)]
    with up.output.open("wb") as output:
        parent = subprocess.Popen(
            [sys.executable, "-c", NEGLIGENT, *command],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
        )
    assert parent.stdin is not None and parent.stdout is not None
    try:
        for number in (1, 2):
            parent.stdin.write(b"start\n")
            parent.stdin.flush()
            started = psutil.Process(int(parent.stdout.readline()))
            until(lambda n=number, it=started: up.said().count(READY) == n or gone(it))
            assert up.said().count(READY) == number, up.said()
            assert up.ready()
            everything = [started, *started.children(recursive=True)]
            assert len(everything) >= 4
            postmaster = psutil.Process(up.pids("postgres")["postgres"])
            started.suspend()  # it would reap, and tell Postgres to leave in good order
            for each in (postmaster, *everything):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            until(lambda each=everything: all(gone(it) for it in each))
            assert postmaster.status() == psutil.STATUS_ZOMBIE
            assert (up.home / "postgres" / "postmaster.pid").exists()
    finally:
        for child in psutil.Process(parent.pid).children(recursive=True):
            child.kill()
        parent.stdin.close()
        parent.wait(STOP_TIMEOUT_S)
        parent.stdout.close()


def gone(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.nightly
@pytest.mark.slow
def test_an_engine_that_cannot_start_ends_the_start(up: Up) -> None:
    folder = up.home.parent / "broken"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["NoSuchForCausalLM"]}')
    files = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors")
    for name in files:
        shutil.copy(ROOT / "models" / "penny" / name, folder / name)
    process = up.launch("--model", str(folder))
    assert process.wait(START_TIMEOUT_S) == 1, up.said()
    (line,) = [each for each in up.said().splitlines() if each.startswith("tollgate: ")]
    assert line.startswith("tollgate: engine-0: ") and "NoSuchForCausalLM" in line
    assert (up.home / "logs" / "engine-0.log").read_text().count("NoSuchForCausalLM") == 1
    assert up.pids() == {}


@pytest.mark.nightly
@pytest.mark.slow
def test_an_engine_that_cannot_start_later_in_life_is_tried_again(up: Up) -> None:
    folder = up.home.parent / "penny"
    shutil.copytree(ROOT / "models" / "penny", folder)
    up.start("--model", str(folder))
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text('{"architectures": ["NoSuchForCausalLM"]}')
    os.kill(up.pids("engine")["engine-0"], signal.SIGKILL)
    log = up.home / "logs" / "engine-0.log"
    until(lambda: log.read_text().count("NoSuchForCausalLM") >= 2)
    assert up.process.poll() is None, up.said()
    (folder / "config.json").write_text(config)
    until(up.ready)
    assert up.end() == 0


def test_a_port_in_use_is_one_line_and_starts_nothing(up: Up) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert up.launch("--port", str(port)).wait(START_TIMEOUT_S) == 2
    assert up.said() == (
        f"tollgate: host, port: 127.0.0.1:{port}: Address already in use; "
        "--port or TOLLGATE_PORT chooses another\n"
    )
    assert up.pids() == {}


@pytest.mark.slow
def test_a_start_shows_its_stages_and_a_card_to_go_on_with(up: Up) -> None:
    """With penny, as a newcomer starts it; the printed call can be pasted."""
    up.config.write_text("[engine]\nnum_blocks = 700\n")
    up.start()
    until(lambda: "Ctrl-C" in up.said())
    stages, card, curl, after = up.said().split("\n\n")
    begun = [line.removeprefix("Starting: ") for line in stages.splitlines() if "Starting" in line]
    assert {"databases", "migrations", "workers", "model penny"} <= set(begun)
    done = [line.split(",")[0] for line in stages.splitlines() if line.startswith("Ready: ")]
    assert set(done) == {
        "Ready: databases",
        "Ready: migrations",
        "Ready: workers",
        "Ready: model penny",
    }
    assert "penny: 700 KV blocks of 16 tokens, context of " in stages
    assert card.splitlines()[0].startswith("Console   http://127.0.0.1:")
    assert card.splitlines()[1] == f"API base  {up.url()}"
    assert f"Keys      {up.home}/credentials.json (" in card
    assert "Model     penny: 5 M parameters, shows the road, knows little; " in card
    called = subprocess.run(
        ["/bin/sh", "-c", curl], capture_output=True, text=True, timeout=60, check=False
    )
    assert called.returncode == 0, called.stderr
    answer = json.loads(called.stdout)["choices"][0]["message"]["content"]
    assert len(answer.split()) >= 2, answer
    assert after.startswith("Next      `tollgate status`")
    assert after.splitlines()[-1] == "Stop      Ctrl-C"


@pytest.mark.slow
def test_on_a_terminal_stages_are_drawn(up: Up) -> None:
    """A key may stand on a terminal, which keeps nothing."""
    parent, child = os.openpty()
    command = [sys.executable, "-m", "gateway", "up", "--port", "0", "--home", str(up.home)]
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    up.process = subprocess.Popen(
        [*command, "--config", str(up.config)],
        cwd=ROOT,
        env=environ,
        stdout=child,
        stderr=child,
        start_new_session=True,
    )
    os.close(child)
    said = b""
    try:
        while b"Ctrl-C" not in said:
            readable, _, _ = select.select([parent], [], [], START_TIMEOUT_S)
            assert readable, said
            said += os.read(parent, 65536)
        for stage in (b"databases", b"migrations", b"workers"):
            assert stage in said
        assert "✓".encode() in said and b"\x1b[" in said
        assert json.loads((up.home / "credentials.json").read_text())["api_key"].encode() in said
        assert b"/oauth/link?token=" in said, "so may a link that signs in"
        up.process.send_signal(signal.SIGINT)
        while b"Stopping." not in said:
            said += os.read(parent, 65536)
        assert up.process.wait(STOP_TIMEOUT_S) == 0
    finally:
        os.close(parent)


@pytest.mark.parametrize(("address", "host"), [("::1", "[::1]"), ("127.0.0.1", "127.0.0.1")])
async def test_readiness_is_asked_for_under_the_address_that_is_served(
    address: str, host: str
) -> None:
    """An IPv6 address stands in brackets in `Host`: without, the gateway refuses the request."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, address, 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await supervisor._probe(address, port) == ""
    assert f"\r\nHost: {host}:{port}\r\n".encode() in asked[0]


def command(up: Up, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `tollgate ARGUMENTS` for the home, in this process: imports are a second each."""
    where = ["--home", str(up.home), "--config", str(up.config)]
    given = [] if "--home" in arguments else where
    done = CliRunner().invoke(tollgate, [*arguments, *given], prog_name="tollgate")
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def models(up: Up, key: str | None = None) -> list[str]:
    key = key or json.loads(credentials_of(up))["api_key"]
    bearer = {"Authorization": f"Bearer {key}"}
    found = httpx.get(f"{up.url()}/models", headers=bearer).json()
    return sorted(each["id"] for each in found["data"])


def credentials_of(up: Up) -> str:
    return (up.home / "credentials.json").read_text()


@pytest.mark.slow
def test_a_reload_is_in_force_in_all_workers_or_in_none(running: Up) -> None:
    up = running
    before = up.pids("worker")
    try:
        up.config.write_text(UPSTREAM_ONLY + UPSTREAM_ONLY.replace("far", "near"))
        tried = command(up, "reload", "--dry-run")
        assert (tried.returncode, tried.stderr) == (0, "")
        assert (
            "+ models.near = " in tried.stdout and "1 setting would change at once." in tried.stdout
        )
        assert models(up) == ["far"]
        (change,) = json.loads(command(up, "reload", "--dry-run", "--json").stdout)["changes"]
        assert change in tried.stdout
        up.config.write_text("max_batch_lines = 7\n" + UPSTREAM_ONLY)
        tried = command(up, "reload", "--dry-run")
        assert "~ max_batch_lines: 50000 -> 7" in tried.stdout
        assert "1 setting would change by new workers." in tried.stdout
        up.config.write_text(UPSTREAM_ONLY + UPSTREAM_ONLY.replace("far", "near"))

        done = command(up, "reload")
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("1 setting has changed. All workers have these settings.\n")
        for _ in range(20):  # whichever worker answers
            assert models(up) == ["far", "near"]
        assert up.pids("worker") == before, "nobody was replaced"

        for text, reason in (
            ("nonsense = 1\n" + UPSTREAM_ONLY, "nonsense"),
            (
                'host = "127.0.0.2"\n' + UPSTREAM_ONLY,
                "only a restart of `tollgate up` changes host: ",
            ),
            (UPSTREAM_ONLY + 'api_key_env = "NO_SUCH_KEY"\n', "NO_SUCH_KEY"),
        ):
            up.config.write_text(text)
            refused = command(up, "reload")
            assert refused.returncode == 1 and reason in refused.stderr, refused.stderr
            assert "the old settings stay in force" in refused.stderr
        assert models(up) == ["far", "near"] and up.pids("worker") == before
    finally:
        up.config.write_text(UPSTREAM_ONLY)
    assert command(up, "reload").returncode == 0 and models(up) == ["far"]


@pytest.mark.slow
def test_what_is_stored_by_api_is_in_force_in_all_workers(running: Up) -> None:
    up = running
    before = up.pids("worker")
    admin = {"Authorization": f"Bearer {json.loads(credentials_of(up))['admin_key']}"}
    with httpx.Client(base_url=f"{up.url()}/admin/", headers=admin) as client:

        def is_in_force() -> bool:
            """Told by the supervisor, once all workers have reported it."""
            homes = client.get("settings").json()["homes"]
            return [each["in_force"] for each in homes] == [True]

        until(is_in_force)
        body = {"name": "added", "content": {"upstream": "http://127.0.0.1:1/v1"}}
        made = client.post("settings/models", json=body | {"api_key": "sk-canary"})
        assert made.status_code == 201, made.text
        until(is_in_force)
        for _ in range(20):  # whichever worker answers
            assert models(up) == ["added", "far"]
        assert up.pids("worker") == before, "nobody was replaced"
        saved = (up.home / "run/settings.json").read_text()
        assert '"sealed_key"' in saved and "sk-canary" not in saved

        up.config.write_text(UPSTREAM_ONLY + UPSTREAM_ONLY.replace("far", "added"))
        assert command(up, "reload").returncode == 0
        until(lambda: client.get("settings/models/added").json()["hidden"])
        up.config.write_text(UPSTREAM_ONLY)
        assert command(up, "reload").returncode == 0
        assert models(up) == ["added", "far"], "it is stored still"
        assert client.delete("settings/models/added").status_code == 200
        until(lambda: models(up) == ["far"])


@pytest.mark.nightly
@pytest.mark.slow
def test_four_workers_answer_by_new_settings_once_reload_has_returned(up: Up) -> None:
    """Each connection comes to one of them."""
    up.config.write_text("workers = 4\n" + UPSTREAM_ONLY)
    up.start()
    key = json.loads(credentials_of(up))["api_key"]
    for round_ in range(3):
        name = f"near-{round_}"
        up.config.write_text("workers = 4\n" + UPSTREAM_ONLY + UPSTREAM_ONLY.replace("far", name))
        assert command(up, "reload").returncode == 0
        with ThreadPoolExecutor(16) as pool:
            asked = pool.map(lambda _: models(up, key), range(200))
        assert {tuple(each) for each in asked} == {("far", name)}
    assert len(up.pids("worker")) == 4
    assert up.end() == 0


@pytest.mark.nightly
@pytest.mark.slow
def test_four_workers_have_what_is_stored_within_two_seconds(up: Up) -> None:
    """By whichever connection; while Redis is silent as well."""
    up.config.write_text("workers = 4\n" + UPSTREAM_ONLY)
    up.start()
    known = json.loads(credentials_of(up))
    admin = {"Authorization": f"Bearer {known['admin_key']}"}

    def store(name: str) -> float:
        """Return the seconds until it is in force."""
        body = {"name": name, "content": {"upstream": "http://127.0.0.1:1/v1"}}
        with httpx.Client(base_url=f"{up.url()}/admin/", headers=admin, timeout=30) as client:
            assert client.post("settings/models", json=body).status_code == 201
            began = time.monotonic()
            until(lambda: client.get("settings").json()["homes"][0]["in_force"])
            return time.monotonic() - began

    store("first")
    took = [store(f"near-{round_}") for round_ in range(3)]
    with ThreadPoolExecutor(16) as pool:
        asked = pool.map(lambda _: models(up, known["api_key"]), range(100))
    assert {len(each) for each in asked} == {5}
    silent = psutil.Process(up.pids("redis")["redis"])
    silent.suspend()
    try:
        took.append(store("without-redis"))
    finally:
        silent.resume()
    assert min(took[:3]) < 2 and took[3] < 10, took
    assert len(up.pids("worker")) == 4
    assert up.end() == 0


@pytest.mark.nightly
@pytest.mark.slow
def test_a_gateway_alone_follows_what_is_stored(running: Up, tmp_path: Path) -> None:
    up = running
    saved = json.loads((up.home / "run/settings.json").read_text())["settings"]
    urls = {f"TOLLGATE_{name.upper()}": saved[name] for name in ("database_url", "redis_url")}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "gateway", "gateway", "--port", str(port)]
    command += ["--home", str(tmp_path / "alone"), "--config", str(up.config)]
    secret = {"TOLLGATE_SECRET_KEY_FILE": str(up.home / "secret.json")}
    known = json.loads(credentials_of(up))
    admin = {"Authorization": f"Bearer {known['admin_key']}"}
    body = {"content": {"upstream": "http://127.0.0.1:1/v1"}}

    def names() -> list[str]:
        with suppress(httpx.HTTPError):
            key = {"Authorization": f"Bearer {known['api_key']}"}
            found = httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=key).json()
            return sorted(each["id"] for each in found["data"])
        return []

    with httpx.Client(base_url=f"{up.url()}/admin/", headers=admin) as client:
        client.post("settings/models", json=body | {"name": "before"}).raise_for_status()
        alone = subprocess.Popen(command, cwd=ROOT, env=os.environ | urls | secret)
        try:
            until(lambda: bool(names()))
            assert names() == ["before", "far"], "in force from its start"
            client.post("settings/models", json=body | {"name": "later"}).raise_for_status()
            until(lambda: names() == ["before", "far", "later"])
            homes = client.get("settings").json()["homes"]
            assert any(each["home"].endswith("/alone") for each in homes)
            client.delete("settings/models/before").raise_for_status()
            client.delete("settings/models/later").raise_for_status()
            until(lambda: names() == ["far"])
        finally:
            alone.terminate()
            assert alone.wait(STOP_TIMEOUT_S) == 0


@pytest.mark.nightly
@pytest.mark.slow
def test_what_is_fixed_with_a_process_takes_new_workers(running: Up) -> None:
    """By day a reload is asked what it would do, and a signal brings new workers."""
    up = running
    before = up.pids("worker")
    try:
        up.config.write_text("workers = 2\nmax_batch_lines = 7\n" + UPSTREAM_ONLY)
        done = command(up, "reload")
        assert done.returncode == 0 and "All workers are new." in done.stdout, done.stderr
        assert "~ max_batch_lines: 50000 -> 7" in done.stdout
        after = up.pids("worker")
        assert len(after) == 2 and not set(before) & set(after)
    finally:
        up.config.write_text(UPSTREAM_ONLY)


def test_a_reload_of_what_does_not_run_says_so(tmp_path: Path) -> None:
    up = Up(tmp_path)
    nobody = command(up, "reload")
    assert nobody.returncode == 2
    assert nobody.stderr.startswith(f"tollgate: no `tollgate up` runs for {up.home}")


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait(running: Up) -> None:
    """A start that is interrupted twice while it waits for something that does not come. It is the
    end of the one that the other tests share."""
    up = running
    for worker in up.pids("worker").values():
        os.kill(worker, signal.SIGSTOP)  # it cannot drain
    children = up.children()
    up.process.send_signal(signal.SIGINT)
    until(lambda: "Stopping." in up.said())
    with pytest.raises(subprocess.TimeoutExpired):
        up.process.wait(1)
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(60) == 0
    assert psutil.wait_procs(children, timeout=60)[1] == []
