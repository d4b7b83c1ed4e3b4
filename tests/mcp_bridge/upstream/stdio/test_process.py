"""Servers as processes: nothing outlives them, and nothing of ours is within their reach."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from mcp_bridge.upstream.launch_errors import (
    BadLaunch,
    CannotIsolate,
    DigestMismatch,
    StartFailed,
    StdioError,
    TooManyProcesses,
)
from mcp_bridge.upstream.launch_spec import FileDigest, LaunchSpec, ProcessLimits
from mcp_bridge.upstream.stdio import uids
from mcp_bridge.upstream.stdio.isolation import NoIsolation, OwnUid, choose_isolation
from mcp_bridge.upstream.stdio.process import Launcher, ProcessOwner, ServerProcess
from mcp_bridge.upstream.stdio.uids import NoUid, UidLeases, runs_as
from tests.mcp_bridge.upstream.stdio.servers import (
    FIRST_UID,
    OWNER,
    UIDS_OF_A_RUN,
    children,
    living,
    python_spec,
)

CYCLES = 1000
AT_ONCE = 8
LOOPS_OWN = 3
"""Descriptors that a loop opens when it first needs them."""
CAT = LaunchSpec(name="cat", command="/bin/cat")
HIDES = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        code = "import time; print('hidden', flush=True); time.sleep(600)"
        os.execv(sys.executable, [sys.executable, "-c", code, MARK])
    os._exit(0)
os.wait()
sys.stdin.read()
"""


async def started(
    launcher: Launcher, spec: LaunchSpec, owner: ProcessOwner = OWNER
) -> ServerProcess:
    return await launcher.start(spec, owner, {})


async def cycles(launcher: Launcher, number: int) -> None:
    """Half of them leave when asked, half are killed while they run."""
    before = children()
    open_files = len(os.listdir("/proc/self/fd"))
    left = iter(range(number))

    async def cycle() -> None:
        for each in left:
            process = await started(launcher, CAT)
            process.stdin.write(b"%d\n" % each)
            assert await process.stdout.readline() == b"%d\n" % each
            if each % 2:
                os.kill(process.pid, signal.SIGKILL)
            await process.stop()
            assert process.returncode == (-signal.SIGKILL if each % 2 else 0)

    await asyncio.gather(*(cycle() for _ in range(AT_ONCE)))
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) <= open_files + LOOPS_OWN
    assert launcher.num_running == 0


async def test_cycles_leave_no_orphan(launcher: Launcher, scratch: Path) -> None:
    await cycles(launcher, 100)
    assert [each.name for each in (scratch / "servers").iterdir()] == ["caches"]


@pytest.mark.nightly
def test_a_thousand_cycles_leave_no_orphan(scratch: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On the loop that gateways run, under uids where we may: eight servers and the threads that
    clear up behind them open and close descriptors at the same time."""
    leases = UidLeases(scratch / "uids", first=FIRST_UID)
    isolation = OwnUid(leases) if os.geteuid() == 0 else NoIsolation()
    launcher = Launcher(isolation, scratch / "servers")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(cycles(launcher, CYCLES))
    assert [each.name for each in (scratch / "servers").iterdir()] == ["caches"]
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []
    assert not any(runs_as(FIRST_UID + number) for number in range(UIDS_OF_A_RUN))


async def test_what_hides_in_a_session_of_its_own_is_found_by_its_uid(
    uid_launcher: Launcher,
) -> None:
    mark = f"hidden-from-the-group-{os.getpid()}"
    process = await started(uid_launcher, python_spec(HIDES.replace("MARK", repr(mark))))
    assert await process.stdout.readline() == b"hidden\n"
    assert any(line.endswith(mark) for line in living(mark))
    await process.stop()
    assert living(mark) == []


async def test_what_hides_dies_with_the_sandbox(sandbox_launcher: Launcher) -> None:
    mark = f"hidden-in-the-sandbox-{os.getpid()}"
    script = HIDES.replace("MARK", repr(mark))
    spec = LaunchSpec(name="script", command="/usr/bin/python3", args=("-c", script))
    if not os.path.exists(spec.command):
        pytest.skip("no python that belongs to the system")
    process = await started(sandbox_launcher, spec)
    assert await process.stdout.readline() == b"hidden\n"
    await process.stop()
    assert living(mark) == []


async def test_who_ignores_all_requests_is_killed(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcp_bridge.upstream.stdio.process.STDIN_GRACE_S", 0.05)
    monkeypatch.setattr("mcp_bridge.upstream.stdio.process.TERM_GRACE_S", 0.05)
    script = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True: time.sleep(1)
"""
    process = await started(launcher, python_spec(script))
    await process.stdout.readline()
    await process.stop()
    assert process.returncode == -signal.SIGKILL


async def test_one_that_is_stuck_writing_hears_that_its_stdin_is_closed(launcher: Launcher) -> None:
    script = """
import os, sys
os.write(1, b"x" * 3_000_000)
sys.stdin.read()
sys.exit(7)
"""
    process = await started(launcher, python_spec(script))
    await process.stdout.read(1)
    await process.stop()
    assert process.returncode == 7


async def test_a_server_dies_with_the_gateway(scratch: Path) -> None:
    """kill -9 of who started it: the kernel tells the server."""
    script = textwrap.dedent(f"""
        import asyncio, pathlib
        from mcp_bridge.upstream.stdio.isolation import NoIsolation
        from mcp_bridge.upstream.stdio.process import Launcher
        from tests.mcp_bridge.upstream.stdio.servers import OWNER, python_spec

        async def main():
            launcher = Launcher(NoIsolation(), pathlib.Path({str(scratch)!r}))
            process = await launcher.start(python_spec("import time; time.sleep(600)"), OWNER, {{}})
            print(process.pid, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """)
    gateway = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={"PYTHONPATH": os.getcwd()}
    )
    assert gateway.stdout is not None
    server = psutil.Process(int(gateway.stdout.readline()))
    assert server.is_running()
    gateway.kill()
    gateway.wait()
    gateway.stdout.close()
    gone, alive = psutil.wait_procs([server], timeout=60)
    assert (len(gone), alive) == (1, [])


async def test_another_uid_reads_nothing_of_ours(uid_launcher: Launcher, scratch: Path) -> None:
    """And its folder is empty and its own."""
    secret = scratch / "secret.json"
    secret.write_text("canary")
    secret.chmod(0o600)
    public = scratch / "public"
    public.write_text("for all")
    public.chmod(0o644)
    script = f"""
import os
here = os.getcwd()
open("mine", "w").write("x")
print(os.getuid(), os.listdir(here), oct(os.stat("mine").st_mode & 0o777))
for path in ({str(public)!r}, {str(secret)!r}, "/proc/{os.getpid()}/environ"):
    try:
        print(open(path).read())
    except PermissionError:
        print("refused")
"""
    process = await started(uid_launcher, python_spec(script))
    written = await process.stdout.read()
    await process.stop()
    assert written.decode().splitlines() == [
        f"{FIRST_UID} ['mine'] 0o600",
        "for all",
        "refused",
        "refused",
    ]


async def test_two_tenants_have_two_processes_and_two_uids(uid_launcher: Launcher) -> None:
    """And the same one has the same uid again, which nobody else ever gets."""
    script = "import os, sys; print(os.getuid(), os.getgid(), os.getgroups(), flush=True)"
    seen: dict[str, list[bytes]] = {}
    for tenant in ("org_a", "org_b", "org_a", "org_b"):
        owner = ProcessOwner(tenant=tenant, credential_set="x")
        process = await started(uid_launcher, python_spec(script), owner)
        seen.setdefault(tenant, []).append(await process.stdout.readline())
        await process.stop()
    assert seen == {
        "org_a": [b"%d %d []\n" % (FIRST_UID, FIRST_UID)] * 2,
        "org_b": [b"%d %d []\n" % (FIRST_UID + 1, FIRST_UID + 1)] * 2,
    }


async def test_a_sandbox_has_no_files_of_ours(sandbox_launcher: Launcher, scratch: Path) -> None:
    secret = scratch / "secret.json"
    secret.write_text("canary")
    for network, expected in ((True, b"online"), (False, b"offline")):
        look = f"cat {secret}; cat {Path(__file__)}; ls /proc | grep -c '^[0-9]';"
        look += " test $(grep -c : /proc/net/dev) -gt 1 && echo online || echo offline"
        spec = LaunchSpec(name="look", command="/bin/sh", args=("-c", look), network=network)
        process = await started(sandbox_launcher, spec)
        written = await process.stdout.read()
        await process.stop()
        assert b"canary" not in written and b"sandbox_launcher" not in written
        if not network:
            assert expected in written
        assert int(written.split()[0]) < 6


async def test_memory_beyond_the_limit_is_refused(launcher: Launcher) -> None:
    script = """
import sys
print(len(bytearray(16 * 1024**2)), flush=True)
try:
    print(len(bytearray(512 * 1024**2)), flush=True)
except MemoryError:
    print("no room", flush=True)
"""
    limits = ProcessLimits(data_bytes=256 * 1024**2)
    process = await started(launcher, python_spec(script, limits=limits))
    assert await process.stdout.read() == b"16777216\nno room\n"
    await process.stop()


async def test_limits_stand_before_the_server_runs(uid_launcher: Launcher) -> None:
    script = """
import resource, json
names = ["NOFILE", "NPROC", "CPU", "FSIZE", "CORE", "AS", "DATA"]
print(json.dumps([resource.getrlimit(getattr(resource, "RLIMIT_" + n)) for n in names]), flush=True)
"""
    limits = ProcessLimits(open_files=77, processes=33, cpu_s=5, file_bytes=4096)
    process = await started(uid_launcher, python_spec(script, limits=limits))
    found = await process.stdout.readline()
    await process.stop()
    both = [77, 33, 5, 4096, 0, limits.address_space_bytes, limits.data_bytes]
    assert found.decode().strip() == str([[each, each] for each in both])


async def test_bounds_on_how_many_run(scratch: Path) -> None:
    launcher = Launcher(NoIsolation(), scratch / "s", max_processes=3, max_of_a_tenant=2)
    running = [await started(launcher, CAT) for _ in range(2)]
    with pytest.raises(TooManyProcesses, match="cat: 2 servers of this tenant run already"):
        await started(launcher, CAT)
    other = ProcessOwner(tenant="org_b", credential_set="x")
    running.append(await started(launcher, CAT, other))
    with pytest.raises(TooManyProcesses, match="cat: 3 servers run already"):
        await started(launcher, CAT, ProcessOwner(tenant="org_c", credential_set="x"))
    for process in running:
        await process.stop()
    assert launcher.num_running == 0
    await (await started(launcher, CAT)).stop()


async def test_what_cannot_be_started_is_named_and_leaves_nothing(
    launcher: Launcher, scratch: Path
) -> None:
    script = scratch / "server.sh"
    script.write_text("#!/bin/sh\ncat\n")
    script.chmod(0o755)
    digests = (FileDigest(path=str(script), sha256="0" * 64),)
    cases: list[tuple[LaunchSpec, dict[str, str], type[StdioError], str]] = [
        (LaunchSpec(name="x", command="/nowhere"), {}, BadLaunch, "x: command: is no file"),
        (CAT, {"TOKEN": "t"}, BadLaunch, "cat: credentials.TOKEN: is no credential"),
        (
            LaunchSpec(name="x", command=str(script), digests=digests),
            {},
            DigestMismatch,
            "is not what was pinned",
        ),
    ]
    for spec, credentials, error, text in cases:
        with pytest.raises(error, match=text):
            await launcher.start(spec, OWNER, credentials)
    assert launcher.num_running == 0
    assert [each.name for each in (scratch / "servers").iterdir()] == ["caches"]


async def test_a_folder_that_others_cannot_reach_is_refused(scratch: Path) -> None:
    closed = scratch / "closed"
    closed.mkdir(mode=0o700)
    if os.geteuid() != 0:
        with pytest.raises(CannotIsolate, match="only root"):
            OwnUid(UidLeases(scratch / "uids"))
        return
    with pytest.raises(StartFailed, match="closed: other users may not traverse it"):
        Launcher(choose_isolation("uid", scratch / "uids"), closed / "servers")


def test_a_machine_that_can_isolate_nothing_is_told_so(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcp_bridge.upstream.stdio.isolation.may_change_uid", lambda: False)
    monkeypatch.setenv("PATH", str(scratch))
    with pytest.raises(CannotIsolate, match=r"bwrap\(1\) is not installed"):
        choose_isolation("auto", scratch / "uids")
    assert isinstance(choose_isolation("none", scratch / "uids"), NoIsolation)


def test_uids_are_given_once_and_have_an_end(scratch: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root ends what runs under another uid")
    first, second = (UidLeases(scratch / "uids", first=FIRST_UID, count=3) for _ in range(2))
    mine, same_key = first.take("a"), second.take("a")
    other = second.take("b")
    assert len({mine.uid, same_key.uid, other.uid}) == 3
    with pytest.raises(NoUid, match="all 3 uids have been given"):
        first.take("c")
    mine.release()
    mine.release()
    again = second.take("a")
    assert again.uid == mine.uid
    for lease in (same_key, other, again):
        lease.release()


def test_what_a_dead_gateway_left_is_swept(scratch: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root ends what runs under another uid")
    leases = UidLeases(scratch / "uids", first=FIRST_UID)
    lease = leases.take("a")
    left = subprocess.Popen(["setpriv", f"--reuid={lease.uid}", "--clear-groups", "sleep", "600"])
    while psutil.Process(left.pid).uids().real != lease.uid:
        assert left.poll() is None
    assert leases.sweep() == 0, "it is in use"
    assert left.poll() is None
    lease.release()
    assert leases.sweep() == 1
    assert left.wait(timeout=60) == -signal.SIGKILL
    assert leases.sweep() == 0, "nothing of it is left"


async def test_what_ends_a_uid_has_no_environment_of_ours(
    uid_launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs under the uid of the server, which may read it."""
    run, environments = subprocess.run, []

    def seen(*arguments: Any, **options: Any) -> Any:
        environments.append(options.get("env"))
        return run(*arguments, **options)

    monkeypatch.setattr(uids.subprocess, "run", seen)
    process = await started(uid_launcher, python_spec("import time; time.sleep(60)"))
    await process.stop()
    assert environments and all(each == {"PATH": uids.PATH} for each in environments)
