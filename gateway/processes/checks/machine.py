"""Checks the machine: the home, disk, memory, port and GPU."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from gateway.fleet.planner.machine import available_memory, weights_bytes
from gateway.home import Home
from gateway.net.listener import AddressError, bind, origin
from gateway.processes.checks.diagnosis import GIB, Diagnosis
from gateway.processes.credentials_file import read
from gateway.settings.load import Settings

LEAST_DISK_BYTES, LOW_DISK_BYTES = 1 * GIB, 5 * GIB
LEAST_MEMORY_BYTES = GIB // 2
GPU_TIMEOUT_S = 10.0
GPU_QUERY = "name,driver_version,memory.total,memory.free"
PRIVATE = ("secret.json", "credentials.json")


def check_home(settings: Settings) -> Diagnosis:
    """See whether the home can be written, and whether its secrets are this user's alone."""
    home = Home(settings.home)
    place = existing(home.root)
    if not os.access(place, os.W_OK | os.X_OK):
        advice = "choose another folder by --home, or give this user the right to write"
        return Diagnosis("home", "fails", f"{place} cannot be written", advice)
    for name in PRIVATE:
        path = home.root / name
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077:
            found = f"others may read {path}"
            return Diagnosis("home", "warning", found, f"chmod 600 {path}")
    made = "" if home.root.exists() else ", not made yet"
    return Diagnosis("home", "ok", f"{home.root}{made}")


def check_disk(settings: Settings) -> Diagnosis:
    """Compare what is free with what the spool and the databases want."""
    place = existing(settings.home)
    free = shutil.disk_usage(place).free
    found = f"{free / GIB:.1f} GiB are free at {place}"
    if free < LEAST_DISK_BYTES:
        return Diagnosis(
            "disk", "fails", found, "make room: usage is recorded here before it is booked"
        )
    if free < LOW_DISK_BYTES:
        return Diagnosis("disk", "warning", found, "make room: databases, logs and the spool grow")
    return Diagnosis("disk", "ok", found)


def check_memory(settings: Settings) -> Diagnosis:
    """Compare the memory that is available with the weights that are loaded here."""
    available = available_memory()
    if available is None:
        return Diagnosis("memory", "ok", "unknown on this system")
    weights = sum(each.most_started * weights_bytes(each.path) for each in settings.models)
    found = f"{available / GIB:.1f} GiB are available"
    if weights:
        found += f", weights on disk are {weights / GIB:.2f} GiB"
    if available < weights + LEAST_MEMORY_BYTES:
        advice = "serve a smaller or quantised model, or add memory (on a GPU its own counts)"
        return Diagnosis("memory", "warning", found, advice)
    return Diagnosis("memory", "ok", found)


async def check_port(settings: Settings) -> Diagnosis:
    """See whether the port is free, or already a Tollgate's."""
    name, address = f"port {settings.port}", origin(settings.host, settings.port)
    try:
        bind(settings.host, settings.port).close()
    except AddressError as error:
        running = await version_at(address)
        if running is not None:
            return Diagnosis(name, "ok", f"Tollgate {running} answers at {address}")
        return Diagnosis(
            name, "fails", str(error), "stop what listens there, or choose another port"
        )
    found = f"free at {settings.host}"
    if (served := await served_by(Home(settings.home))) is not None:
        found += f"; this home serves at {served}"
    return Diagnosis(name, "ok", found)


def check_metrics_port(settings: Settings, *, runs: bool) -> Diagnosis | None:
    """See whether the port of the metrics is free, where they have one. `runs`: a `tollgate up` of
    this home may have it."""
    own = settings.metrics
    if own.port is None:
        return None
    name = f"port {own.port}"
    try:
        bind(own.host, own.port).close()
    except AddressError as error:
        if runs:
            return Diagnosis(name, "ok", f"metrics are served at {origin(own.host, own.port)}")
        advice = "stop what listens there, or choose another [metrics] port"
        return Diagnosis(name, "fails", str(error), advice)
    return Diagnosis(name, "ok", f"free at {own.host}, for metrics")


async def served_by(home: Home) -> str | None:
    """Return where a `tollgate up` of this home was started with another port, if it answers."""
    try:
        known = read(home.credentials)
    except (OSError, msgspec.DecodeError):  # commands that need it name the file
        return None
    if known is None:
        return None
    address = known.base_url.removesuffix("/v1")
    return None if await version_at(address) is None else address


async def version_at(address: str) -> str | None:
    """Return the version of the Tollgate that answers there; None of anything else."""
    import httpx

    try:
        async with httpx.AsyncClient(timeout=5.0, trust_env=False) as http:
            found = (await http.get(f"{address}/version")).json()["version"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None
    return str(found)[:40]


async def check_gpu(settings: Settings) -> Diagnosis:
    """Name the GPUs and their driver, and say where this PyTorch cannot use them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Diagnosis("gpu", "ok", "no NVIDIA driver: engines compute on the CPU")
    code, said = await output_of(program, f"--query-gpu={GPU_QUERY}", "--format=csv,noheader")
    if code != 0:
        found = f"nvidia-smi fails: {said.strip()[:200] or f'status {code}'}"
        return Diagnosis("gpu", "warning", found, "repair the driver (see docs/gpu.md)")
    found = "; ".join(line.strip() for line in said.splitlines() if line.strip())
    build = torch_build()
    starts = any(model.starts_engine for model in settings.models)
    if starts and build is not None and "+cpu" in build:
        advice = "install the CUDA build of torch (see docs/gpu.md)"
        return Diagnosis("gpu", "warning", f"{found}; torch {build} cannot use it", advice)
    return Diagnosis("gpu", "ok", found or "the driver knows no GPU")


async def output_of(*command: str) -> tuple[int, str]:
    """Run a program for a bounded time; its output and errors together."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except OSError as error:
        return 1, str(error)
    try:
        said, _ = await asyncio.wait_for(process.communicate(), GPU_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return 1, f"no answer in {GPU_TIMEOUT_S:g} s"
    return process.returncode or 0, said.decode(errors="replace")


def torch_build() -> str | None:
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def existing(path: Path) -> Path:
    """Return the nearest folder above `path` that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
