"""Measure what the gateway costs in front of an upstream that costs nothing, beside the least
possible.

`python -m bench.gateway [--seconds S] [--workers N] [--kit FOLDER] [--peers] [--rounds N]
[--profile] [--spool-sync POLICY] [--dry]`: starts the upstreams, the two passthroughs of
`bench.tools.floor` (bare ASGI, and a bare Litestar route: the same server, loop and HTTP client,
and nothing else) and, in a home of its own, `tollgate up`, everything on: keys, limits, spool,
Postgres, Redis. The same load goes straight to the upstreams and through each, in the same run; one
table shows them with ratios to the bare passthrough. Where there are two cores or more, upstreams,
load generator and stores get the last one and what is measured the others. With `--kit` upstreams
and load are in C (`bench.tools.kit`): they leave that core to the stores and to the second of two
workers, and take a tenth of the time to wake up, which counts at 20 requests a second.

`--peers` puts the other gateways that are installed (`bench.peers.gateways`) before the same
upstreams on the same core, asks the gateway for a minute at 200 requests a second, two workers for
what one was asked, counts what each side asks of the system, and shows all of it beside the goals
(`bench.tools.goals`): medians of `--rounds`, all sides in turns.

`--profile` says instead where the processor time of a whole answer goes (`bench.tools.hot_path`).

Processor time is that of the process which serves, whatever else ran on the machine meanwhile; it
is the figure to compare. Rates and latencies are only as good as the machine was quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args

import httpx
import msgspec
import psutil
import uvloop

from bench.peers.gateways import FOLDER as PEERS_FOLDER
from bench.peers.gateways import KEY, PeerGateway, answers, installed, target_of
from bench.peers.gateways import MODEL as PEERS_MODEL
from bench.tools.cancel import cancel_ms
from bench.tools.counts import Allocations, count_requests
from bench.tools.floor import PATH
from bench.tools.goals import goals_table, medians
from bench.tools.hot_path import Sampled, by_part
from bench.tools.hot_path import table as table_of_parts
from bench.tools.kit import Kit, Load, OwnLoad
from bench.tools.load import Target, percentiles_ms
from bench.tools.ports import free_port
from bench.tools.record import record
from billing.spool.sync_policy import SyncPolicy
from gateway.home import Home
from gateway.processes.embedded_databases import postgres_url, redis_url

ROOT = Path(__file__).resolve().parents[1]
CONNECTIONS = 32
RATE_PER_S = 20.0
FAST_RATE_PER_S = 200.0
STALL_S = 60.0
"""How long the gateway is watched at the fast rate, beside peers."""
COUNTED_S = 1.0
PEERS_ERROR_SHARE = 0.01
"""As much may fail of what other gateways are asked: their errors are theirs."""
PACED_MS = 10.0
PACED_STREAMS = 8
PACED_LEAST_S = 2.0
"""One such stream takes two thirds of a second."""
WARM_UP_S = 2.0
CANCELS = 50
SYNCS = 40
SYNC_BYTES = 600
"""About what one request leaves in the spool."""
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
UNLIMITED = 1_000_000_000_000
ENDLESS = "endless"
"""The model whose streams end when their client goes (`bench.tools.cancel`)."""
SIDES = {
    "straight": "straight",
    "bare": "bare ASGI",
    "litestar": "bare Litestar",
    "gateway": "gateway",
}
MODEL = """
[[model]]
name = "{name}"
upstream = "{url}"
"""
SPOOL = """
[spool]
sync = "{policy}"
"""
PLAN = """
[plan.default]
tokens_per_minute = {limit}
requests_per_minute = {limit}
max_concurrent_streams = {limit}
"""


class Kind(NamedTuple):
    """A kind of request: of which model, streamed or not, on how many connections."""

    model: str
    stream: bool
    connections: int = CONNECTIONS


KINDS = {
    "whole": Kind("each", stream=False),
    "stream": Kind("stub", stream=True),
    "each": Kind("each", stream=True),
    "paced": Kind("paced", stream=True, connections=PACED_STREAMS),
}
"""The stub's pacing: `stub` writes a whole stream at once; `each` writes each event by itself, back
to back; `paced` writes each PACED_MS after the one before."""


class Figure(NamedTuple):
    """A line of the table. `path`: to it in a side's result; of what is added, to the time that is
    compared with the upstream's own."""

    title: str
    path: str
    to_reach: str = ""
    added: bool = False


FIGURES = (
    Figure("requests/s", "whole.closed.requests_per_s", ">= 2,000"),
    Figure("CPU ms/request", "whole.cpu_ms.serving"),
    Figure("stores' CPU ms/request", "whole.cpu_ms.stores"),
    Figure("spool writes/request", "whole.spool.writes", "<= 1"),
    Figure("spool syncs/request", "whole.spool.syncs"),
    Figure("spool bytes/request", "whole.spool.bytes"),
    Figure("spool syncs/request at 20/s", "whole.spool_at_20.syncs"),
    Figure("events/s, a stream at once", "stream.closed.events_per_s", ">= 60,000"),
    Figure("events/s, each by itself", "each.closed.events_per_s", ">= 60,000"),
    Figure("CPU ms/stream, each by itself", "each.cpu_ms.serving"),
    Figure("added p50 ms at 20/s", "whole.opened.latency_ms.p50", "<= 1", added=True),
    Figure("added p99 ms at 20/s", "whole.opened.latency_ms.p99", "<= 3", added=True),
    Figure("added TTFT p50 ms, 8 paced", "paced.closed.first_byte_ms.p50", "<= 1", added=True),
    Figure("added TTFT p99 ms, 8 paced", "paced.closed.first_byte_ms.p99", added=True),
    Figure("memory MB, resident", "memory_mb.resident", "<= 150"),
    Figure("memory MB, its own share", "memory_mb.proportional"),
    Figure("cancel of upstream p50 ms", "cancel_ms.p50", "<= 100"),
    Figure("cancel of upstream p99 ms", "cancel_ms.p99", "<= 100"),
)


def share_cores() -> tuple[set[int], set[int]]:
    """(for the gateway, for the load): disjoint where possible."""
    cores = sorted(os.sched_getaffinity(0))
    return (set(cores[:-1]), {cores[-1]}) if len(cores) > 1 else (set(cores), set(cores))


@contextmanager
def process(
    command: list[str], log: Path, cores: set[int], **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs on `cores`, and so do its children; interrupted at the end."""
    with log.open("wb") as out:
        environ = {**os.environ, **env}
        started = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=environ)
    os.sched_setaffinity(started.pid, cores)
    try:
        yield started
    finally:
        started.send_signal(signal.SIGINT)
        try:
            started.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def wait_until_ready(
    url: str,
    started: subprocess.Popen[bytes],
    log: Path,
    is_ready: Callable[[], bool] | None = None,
) -> None:
    """Wait until `is_ready`, or until `url` is there. Raises: SystemExit with the end of `log`."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if started.poll() is not None:
            break
        try:
            if is_ready() if is_ready else httpx.get(url, timeout=2).status_code < 500:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise SystemExit(f"{url} is not ready:\n{log.read_text()[-4000:]}")


class Meter:
    """Processor time and memory of who serves, the time of the stores behind it, and what it writes
    to its spool, where it shows that at `metrics`."""

    def __init__(self, root: int, metrics: str | None = None) -> None:
        self._metrics = metrics
        self._root = psutil.Process(root)
        tree = self._root.children(recursive=True)
        self._workers = [child for child in tree if "worker" in arguments_of(child)]
        self._serving = self._workers or [self._root]

    def _stores(self) -> list[psutil.Process]:
        """Find what runs now: Postgres starts a process for each connection."""
        if not self._workers:
            return []
        tree = self._root.children(recursive=True)
        return [child for child in tree if child not in self._workers]

    def move_stores(self, cores: set[int]) -> None:
        """Move the stores' processes to `cores`, where what they start from now on runs too."""
        for each in self._stores():
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                each.cpu_affinity(sorted(cores))

    def cpu_s(self) -> dict[str, float]:
        """Return the processor time of each group so far, that of processes of the stores that
        have ended included: it is their parent's by then."""
        stores = 0.0
        for each in self._stores():
            with suppress(psutil.NoSuchProcess, OSError):  # it has ended meanwhile
                times = each.cpu_times()
                stores += process_s(each.pid) + times.children_user + times.children_system
        serving = sum(process_s(each.pid) for each in self._serving if each.is_running())
        return {"serving": serving, "stores": stores}

    def spool(self) -> dict[str, float]:
        """Count the spool's writes, syncs and bytes so far, of a worker alone."""
        if self._metrics is None:
            return {}
        text = httpx.get(self._metrics, timeout=10).text
        found = re.findall(r"^tollgate_spool_(writes|syncs|bytes)_total (\S+)$", text, re.MULTILINE)
        return {name: float(count) for name, count in found}

    def memory_mb(self) -> dict[str, float]:
        """Measure the memory of each process that serves: all that is resident, and where pages
        that others have, too, are shared out evenly among them."""
        found = [each.memory_full_info() for each in self._serving]
        return {
            "resident": round(sum(each.rss for each in found) / len(found) / 1e6, 1),
            "proportional": round(sum(each.pss for each in found) / len(found) / 1e6, 1),
        }


def arguments_of(process: psutil.Process) -> list[str]:
    """Return what a process was started with; nothing where it has ended meanwhile."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:  # or a zombie
        return []


def process_s(pid: int) -> float:
    """Return the processor time of a process with all its threads, to the nanosecond: `/proc` has
    it in hundredths of a second. Linux makes the id of the clock out of the process's
    (clock_getcpuclockid(3))."""
    return time.clock_gettime(~pid << 3 | 2)


def measure(
    load: Load,
    urls: Mapping[str, str],
    api_key: str | None,
    seconds: float,
    meter: Meter | None,
    kinds: Mapping[str, Kind] = KINDS,
    *,
    headers: tuple[tuple[str, str], ...] = (),
    fast_s: float | None = None,
    error_share: float = 0.0,
) -> dict[str, Any]:
    """Each kind of answer in a closed loop, whole ones in open loops as well. `fast_s`: how long at
    the fast rate; None: as long as all else. `error_share`: how much may fail."""
    result: dict[str, Any] = {}
    for name, kind in kinds.items():
        target = Target(urls[kind.model], kind.model, api_key, kind.stream, headers)
        load.closed(target, kind.connections, min(WARM_UP_S, seconds))
        before, written = (meter.cpu_s(), meter.spool()) if meter else ({}, {})
        lasting = max(seconds, PACED_LEAST_S) if name == "paced" else seconds
        closed = checked(load.closed(target, kind.connections, lasting), error_share)
        after = meter.cpu_s() if meter else {}
        cpu_ms = {
            group: round(1000 * (after[group] - before[group]) / closed["requests"], 4)
            for group in after
        }
        result[name] = {"closed": closed, "cpu_ms": cpu_ms}
        if meter:
            result[name]["spool"] = each_of(closed, written, meter.spool())
        if name == "whole":
            written = meter.spool() if meter else {}
            opened = checked(load.opened(target, RATE_PER_S, seconds), error_share)
            result[name]["opened"] = opened
            if meter:
                result[name]["spool_at_20"] = each_of(opened, written, meter.spool())
            fast = load.opened(target, FAST_RATE_PER_S, fast_s or seconds)
            result[name]["opened_200"] = checked(fast, error_share)
    if meter:
        result["memory_mb"] = meter.memory_mb()
    return result


def each_of(
    summary: dict[str, Any], before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, float]:
    """Return by how much counts have grown for each request."""
    return {name: round((after[name] - before[name]) / summary["requests"], 3) for name in after}


def checked(summary: dict[str, Any], error_share: float = 0.0) -> dict[str, Any]:
    """Return what was measured. Raises: SystemExit where more than a share of it has failed."""
    if summary["errors"] > error_share * summary["requests"] or not summary["requests"]:
        raise SystemExit(f"a measurement with errors is none: {summary}")
    return summary


def value(result: Mapping[str, Any], side: str, figure: Figure) -> float | None:
    """None where this side has no such figure."""
    found: Any = result[side]
    for name in figure.path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    figured: float | None = found
    if figure.added and figured is not None and side != "straight":
        figured -= value(result, "straight", figure) or 0.0
    return figured


def table(result: Mapping[str, Any]) -> str:
    """A line for each figure: what each side has of it, and how many times the bare passthrough's
    the gateway's is. Of what is added the upstream's own time stands under "straight"."""
    titles = [*SIDES.values(), "x bare", "to reach"]
    lines = ["".join([f"{'':32}", *(f"{title:>14}" for title in titles)])]
    for figure in FIGURES:
        values = {side: value(result, side, figure) for side in SIDES}
        cells = ["-" if each is None else f"{each:,.3f}" for each in values.values()]
        mine, least = values["gateway"], values["bare"]
        cells.append(f"{mine / least:.2f}x" if mine and least else "")
        cells.append(figure.to_reach)
        lines.append("".join([f"{figure.title:32}", *(f"{cell:>14}" for cell in cells)]))
    return "\n".join([*lines, *notes(result)])


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    synced, policy = result["sync_ms"], result["spool_sync"]
    waits = "goes out before" if policy == "group" else "waits for"
    yield (
        f"a whole answer {waits} its sync in the spool ({policy}): here alone p50 "
        f"{synced['p50']} ms, p99 {synced['p99']} ms"
    )
    if "scaled" in result:
        scaled = result["scaled"]
        yield (
            f"{scaled['workers']} workers: {scaled['requests_per_s']:,.0f} requests/s on cores "
            f"{scaled['cores']}, the load and the stores on {result['cores']['load']}: "
            f"{scaled['times']}x one worker; {scaled['times_by_cpu']}x by the processor time of a "
            "request, to reach >= 1.8"
        )


def sync_ms(folder: Path) -> dict[str, float]:
    """Measure what the disk takes to append and sync, now and then, as the spool does."""
    took_s: list[float] = []
    with (folder / "synced").open("wb", buffering=0) as file:
        for _ in range(SYNCS):
            time.sleep(1 / RATE_PER_S)
            begun_at = time.perf_counter()
            file.write(bytes(SYNC_BYTES))
            os.fdatasync(file.fileno())
            took_s.append(time.perf_counter() - begun_at)
    return percentiles_ms(took_s)


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that all sides of a run have in common."""

    folder: Path
    load: Load
    kit: Kit | None
    seconds: float
    served: set[int]
    """Cores of what is measured."""
    loaded: set[int]
    """Cores of the rest."""
    spool_sync: SyncPolicy = "group"
    """The policy of the gateway's spool."""

    def upstreams(self, stack: ExitStack) -> dict[str, str]:
        """Starts them; the base URL of each model's."""
        urls: dict[str, str] = {}
        for model, gap_ms in (("stub", None), ("each", 0.0), ("paced", PACED_MS)):
            port = free_port()
            urls[model] = f"http://127.0.0.1:{port}/v1"
            command = [sys.executable, "-m", "bench.tools.stub_upstream", str(port)]
            if gap_ms is not None:
                command.append(str(gap_ms))
                if self.kit is not None:
                    command = self.kit.stub_command(port, gap_ms)
            log = self.folder / f"{model}.log"
            started = stack.enter_context(process(command, log, self.loaded))
            wait_until_ready(urls[model], started, log)
        return urls

    def straight(self, urls: Mapping[str, str]) -> dict[str, Any]:
        return measure(self.load, urls, None, self.seconds, None)

    def floor(
        self, name: str, urls: Mapping[str, str], *options: str, kinds: Mapping[str, Kind] = KINDS
    ) -> dict[str, Any]:
        with self.started_floor(name, urls, *options) as (started, base):
            bases, meter = dict.fromkeys(urls, base), Meter(started.pid)
            return measure(self.load, bases, None, self.seconds, meter, kinds)

    @contextmanager
    def started_floor(
        self, name: str, urls: Mapping[str, str], *options: str, **environment: str
    ) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
        port, log = free_port(), self.folder / f"{name}.log"
        command = [sys.executable, "-m", "bench.tools.floor", str(port), *options]
        command += [f"{model}={url}" for model, url in urls.items()]
        with process(command, log, self.served, **environment) as started:
            wait_until_ready(f"http://127.0.0.1:{port}{PATH}", started, log)
            yield started, f"http://127.0.0.1:{port}/v1"

    def gateway(self, urls: Mapping[str, str], fast_s: float | None = None) -> dict[str, Any]:
        endless = free_port()
        models = {**urls, ENDLESS: f"http://127.0.0.1:{endless}/v1"}
        with self.serving(models, 1, self.served) as (base, key, meter):
            bases = dict.fromkeys(urls, base)
            result = measure(self.load, bases, key, self.seconds, meter, fast_s=fast_s)
            target = Target(base, ENDLESS, key, stream=True)
            result["cancel_ms"] = uvloop.run(cancel_ms(target, endless, trials=CANCELS))
        return result

    def peer(self, gateway: PeerGateway, urls: Mapping[str, str]) -> dict[str, Any]:
        """Measure another gateway, a process of its own for each upstream."""
        result: dict[str, Any] = {}
        memory_mb: list[dict[str, float]] = []
        for model in ("each", "paced"):  # the third upstream tells no peer what it is
            url = urls[model]
            of_model = {name: kind for name, kind in KINDS.items() if kind.model == model}
            kinds = {name: kind._replace(model=PEERS_MODEL) for name, kind in of_model.items()}
            with self.started_peer(gateway, url) as (started, base):
                headers, meter = gateway.headers(url), Meter(started.pid)
                bases = {PEERS_MODEL: f"{base}/v1"}
                found = measure(
                    *(self.load, bases, KEY, self.seconds, meter, kinds),
                    headers=headers,
                    error_share=PEERS_ERROR_SHARE,
                )
                memory_mb.append(found.pop("memory_mb"))
                result |= found
        url = urls[KINDS["whole"].model]
        with self.started_peer(gateway, url) as (started, base):
            result["counts"] = self.counts(started.pid, target_of(gateway, base, url))
        return result | {"memory_mb": max(memory_mb, key=lambda each: each["proportional"])}

    @contextmanager
    def started_peer(
        self, gateway: PeerGateway, url: str
    ) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
        port, log = free_port(), self.folder / f"{gateway.title}.log"
        base = f"http://127.0.0.1:{port}"
        with process(gateway.command(port, url), log, self.served) as started:
            target = target_of(gateway, base, url)
            wait_until_ready(base, started, log, lambda: answers(target))
            yield started, base

    def counts(
        self, pid: int, target: Target, home: Home | None = None, made: Allocations | None = None
    ) -> dict[str, float]:
        connections = KINDS["whole"].connections

        def ask() -> int:
            done = checked(self.load.closed(target, connections, COUNTED_S), PEERS_ERROR_SHARE)
            return int(done["requests"])

        url = None if home is None else redis_url(home)
        return count_requests(ask, pid, self.folder, redis_url=url, made=made)

    def counts_of_gateway(self, urls: Mapping[str, str]) -> dict[str, float]:
        made = Allocations(self.folder)
        with self.alone(urls, **made.environment) as (started, target, _):
            return self.counts(started.pid, target, Home(self.folder / "home1"), made)

    def counts_of_floor(self, urls: Mapping[str, str]) -> dict[str, float]:
        made = Allocations(self.folder)
        with self.started_floor("counted", urls, **made.environment) as (started, base):
            target = Target(base, KINDS["whole"].model, None, stream=False)
            return self.counts(started.pid, target, made=made)

    @contextmanager
    def alone(
        self, urls: Mapping[str, str], **environment: str
    ) -> Iterator[tuple[subprocess.Popen[bytes], Target, Path]]:
        """Start a gateway that can be sampled, with the stores of a `tollgate up` that serves
        nobody: its process, the target of whole answers, and the file of its samples."""
        file, port = self.folder / "samples.json", free_port()
        with self.serving(urls, 1, self.served) as (_, key, _):
            home = Home(self.folder / "home1")
            command = [sys.executable, "-m", "bench.tools.sampled", str(file)]
            command += ["--home", str(home.root), "--port", str(port)]
            command += ["--config", str(self.folder / "tollgate.toml")]
            stores = {
                "TOLLGATE_DATABASE_URL": postgres_url(home),
                "TOLLGATE_REDIS_URL": redis_url(home),
            }
            log = self.folder / "sampled.log"
            with process(command, log, self.served, **stores, **environment) as started:
                base = f"http://127.0.0.1:{port}"
                wait_until_ready(f"{base}/health/ready", started, log)
                yield started, Target(f"{base}/v1", KINDS["whole"].model, key, stream=False), file

    def profile(self, urls: Mapping[str, str]) -> dict[str, Any]:
        """Profile whole answers alone."""
        connections = KINDS["whole"].connections
        with self.alone(urls) as (started, target, file):
            self.load.closed(target, connections, WARM_UP_S)
            sampled = Sampled(started, file)
            sampled.begin()
            closed = checked(self.load.closed(target, connections, self.seconds))
            found = sampled.end()
        return {"us": by_part(found, closed["requests"]), "samples": found["samples"]}

    def scaled(
        self, urls: Mapping[str, str], workers: int, one: Any, cores: set[int]
    ) -> dict[str, Any]:
        """Whole answers alone, beside what `one` worker did."""
        kind = KINDS["whole"]
        with self.serving(urls, workers, cores) as (base, key, meter):
            target = Target(base, kind.model, key, kind.stream)
            self.load.closed(target, kind.connections, min(WARM_UP_S, self.seconds))
            before = meter.cpu_s()["serving"]
            closed = checked(self.load.closed(target, kind.connections, self.seconds))
            cpu_ms = 1000 * (meter.cpu_s()["serving"] - before) / closed["requests"]
        times = closed["requests_per_s"] / one["closed"]["requests_per_s"]
        return {
            **closed,
            "workers": workers,
            "cores": sorted(cores),
            "cpu_ms": round(cpu_ms, 4),
            "times": round(times, 2),
            "times_by_cpu": round(workers * one["cpu_ms"]["serving"] / cpu_ms, 2),
        }

    @contextmanager
    def serving(
        self,
        models: Mapping[str, str],
        workers: int,
        cores: set[int],
        *,
        name: str = "",
        settings: str = "",
    ) -> Iterator[tuple[str, str, Meter]]:
        """Its base URL, a key, and who measures it. `name`: of one of several that run side by
        side; `settings`: more of its file."""
        home, port = self.folder / f"home{name or workers}", free_port()
        config, log = self.folder / f"tollgate{name}.toml", self.folder / f"up{name or workers}.log"
        written = [MODEL.format(name=model, url=url) for model, url in models.items()]
        spool = SPOOL.format(policy=self.spool_sync)
        config.write_text("".join([*written, PLAN.format(limit=UNLIMITED), spool, settings]))
        command = [str(Path(sys.executable).parent / "tollgate"), "up", "--home", str(home)]
        command += ["--port", str(port), "--config", str(config), "--workers", str(workers)]
        base = f"http://127.0.0.1:{port}"
        with process(command, log, cores) as started:
            wait_until_ready(base + "/health/ready", started, log)
            meter = Meter(started.pid, f"{base}/metrics" if workers == 1 else None)
            meter.move_stores(self.loaded)
            key = json.loads((home / "credentials.json").read_text())["api_key"]
            yield f"{base}/v1", key, meter


@contextmanager
def open_bench(
    seconds: float, kit_sources: Path | None, spool_sync: SyncPolicy = "group"
) -> Iterator[Bench]:
    """A bench in a folder of its own, with the kit of `kit_sources` or with our own load."""
    served, loaded = share_cores()
    with tempfile.TemporaryDirectory(prefix="tg-bench-", dir="/tmp") as name:
        folder = Path(name)
        kit = None if kit_sources is None else Kit(kit_sources, folder)
        yield Bench(
            folder=folder,
            load=OwnLoad() if kit is None else kit,
            kit=kit,
            seconds=seconds,
            served=served,
            loaded=loaded,
            spool_sync=spool_sync,
        )


def run(bench: Bench, workers: int, peers: Mapping[str, PeerGateway]) -> dict[str, Any]:
    """`peers`: measured in the same run; then the gateway is counted and watched as well."""
    load_average = round(os.getloadavg()[0], 2)
    os.sched_setaffinity(0, bench.loaded)
    result: dict[str, Any] = {
        "cores": {"served": sorted(bench.served), "load": sorted(bench.loaded)},
        "seconds_each": bench.seconds,
        "load_average_before": load_average,
        "load": "ours" if bench.kit is None else "C",
        "sync_ms": sync_ms(bench.folder),
        "spool_sync": bench.spool_sync,
    }
    with ExitStack() as stack:
        urls = bench.upstreams(stack)
        result["straight"] = bench.straight(urls)
        result["bare"] = bench.floor("bare", urls)
        result["litestar"] = bench.floor("litestar", urls, "--litestar")
        for name, peer in peers.items():
            result[name] = bench.peer(peer, urls)
        result["gateway"] = bench.gateway(urls, STALL_S if peers else None)
        whole = result["gateway"]["whole"]
        if workers > 1:
            is_apart = len(bench.served) >= workers
            cores = bench.served if is_apart else bench.served | bench.loaded
            result["scaled"] = bench.scaled(urls, workers, whole, cores)
        if peers:
            # On the core that one had: what shares its core with load and stores takes longer.
            two = bench.scaled(urls, 2, whole, bench.served)
            whole["two_workers_times"] = round(two["cpu_ms"] / whole["cpu_ms"]["serving"], 3)
            result["gateway"]["counts"] = bench.counts_of_gateway(urls)
            result["bare"]["counts"] = bench.counts_of_floor(urls)
    return result


def run_profile(bench: Bench) -> dict[str, Any]:
    """Beside what whole answers take on the passthroughs."""
    os.sched_setaffinity(0, bench.loaded)
    kinds = {"whole": KINDS["whole"]}
    with ExitStack() as stack:
        urls = bench.upstreams(stack)
        floors = {
            "bare": bench.floor("bare", urls, kinds=kinds),
            "litestar": bench.floor("litestar", urls, "--litestar", kinds=kinds),
        }
        floors_us = {
            SIDES[side]: 1000 * found["whole"]["cpu_ms"]["serving"]
            for side, found in floors.items()
        }
        return {"floors_us": floors_us, **bench.profile(urls)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--workers", type=int, default=1, help="beside one, as many as this")
    parser.add_argument("--kit", type=Path, help="folder with stub.c and lg.c: upstream and load")
    parser.add_argument(
        "--peers",
        type=Path,
        nargs="?",
        const=PEERS_FOLDER,
        help="beside the gateways that `bench.peers.gateways` installed there",
    )
    parser.add_argument("--rounds", type=int, default=1, help="figures are their medians")
    parser.add_argument(
        "--profile", action="store_true", help="where a request's processor time goes, instead"
    )
    parser.add_argument(
        "--spool-sync", choices=get_args(SyncPolicy), default="group", help="`[spool] sync`"
    )
    parser.add_argument("--dry", action="store_true", help="print the result, record nothing")
    options = parser.parse_args()
    if options.peers is not None and options.kit is None:
        parser.error("--peers: they ask for what only the upstreams of --kit answer")
    with open_bench(options.seconds, options.kit, options.spool_sync) as bench:
        if options.profile:
            name, result = "gateway_profile", run_profile(bench)
            print(table_of_parts(result["us"], result["floors_us"]))
        else:
            suffix = "" if options.spool_sync == "group" else f"_{options.spool_sync}"
            peers = {} if options.peers is None else installed(options.peers)
            rounds = [run(bench, options.workers, peers) for _ in range(options.rounds)]
            name, result = f"gateway{suffix}", medians(rounds)
            print(table(result))
            if options.peers is not None:
                name = f"{name}_peers"
                print(goals_table(result, {each: peers[each].title for each in peers}))
    print(json.dumps(result))
    if not options.dry:
        print(record(name, result))


if __name__ == "__main__":
    main()
