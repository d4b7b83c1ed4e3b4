"""Follows the health of an installation on a disk of its own, in front of an upstream: readiness,
administration, metrics and the command line tell the same, and that it is over."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.journeys.upstream_settings import BIG_KEY
from tests.journeys.upstreams import LiveUpstream, answers, good, live_upstreams
from tests.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.in_order]

CONFIG = """
[[model]]
name = "big"
upstream = "http://me:{password}@127.0.0.1:{port}/v1"
api_key_env = "BIG_KEY"
"""
PASSWORD = "hunter2-in-the-url"
DISK = "size=320m"


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """A small file system, in memory."""
    with tempfile.TemporaryDirectory(prefix="tgd-", dir="/tmp") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", folder]
        if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
            pytest.skip("only root may mount a file system")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="module")
def upstream() -> Iterator[LiveUpstream]:
    with live_upstreams(1) as (opened,):
        yield opened


@pytest.fixture(scope="module")
def stack(disk: Path, upstream: LiveUpstream) -> Iterator[Stack]:
    config = CONFIG.format(password=PASSWORD, port=upstream.port)
    stack = Stack(disk / "home", config=config, workers=2, env={"BIG_KEY": BIG_KEY})
    stack.log = Path(tempfile.mkstemp(prefix="tgd-", suffix=".log")[1])
    try:
        yield stack.start()
        stack.stop()
    finally:
        stack.clean_up()
        stack.log.unlink()


def ask(stack: Stack) -> int:
    body = {"model": "big", "messages": [{"role": "user", "content": "Hello!"}]}
    return httpx.post(
        f"{stack.base_url}/v1/chat/completions", json=body, headers=bearer(stack), timeout=30
    ).status_code


def bearer(stack: Stack, name: str = "api_key") -> dict[str, str]:
    return {"authorization": f"Bearer {stack.credentials[name]}"}


def ready(stack: Stack) -> tuple[int, dict[str, Any]]:
    answer = httpx.get(f"{stack.base_url}/health/ready", timeout=30)
    assert BIG_KEY not in answer.text and PASSWORD not in answer.text
    assert "127.0.0.1" not in answer.text
    return answer.status_code, answer.json()


def administration(stack: Stack, path: str) -> Any:
    headers = bearer(stack, "admin_key")
    return httpx.get(f"{stack.base_url}{path}", headers=headers, timeout=30).json()


def degraded(stack: Stack) -> dict[str, str]:
    return {each["kind"]: each["state"] for each in ready(stack)[1]["degraded"]}


def in_every_worker(stack: Stack, kind: str, state: str) -> bool:
    return stack.metric("tollgate_components", kind=kind, state=state) == 2


def test_an_upstream_that_answers_401_is_told_everywhere_and_recovers(
    stack: Stack, upstream: LiveUpstream
) -> None:
    upstream.play(good)
    assert ask(stack) == 200
    stack.wait("both know", lambda: in_every_worker(stack, "upstream", "ok"))
    assert ready(stack) == (200, {"status": "ready", "missing": [], "degraded": []})
    upstream.play(answers(401, f"{BIG_KEY} is wrong"))
    assert ask(stack) == 503
    stack.wait("both know", lambda: in_every_worker(stack, "upstream", "unauthorised"))
    status, told = ready(stack)
    assert (status, told["status"], told["missing"]) == (200, "degraded", [])
    (part,) = told["degraded"]
    assert (part["kind"], part["name"], part["state"]) == ("upstream", "big/0", "unauthorised")
    (model,) = administration(stack, "/v1/admin/models")["data"]
    assert model["available"] is False
    (replica,) = model["replicas"]
    assert replica["available"] is replica["authorised"] is False and replica["reachable"] is True
    assert replica["last_error"] == "answered 401" and replica["since"] == part["since"]
    found = json.loads(stack.run("status", "--json"))
    asked = administration(stack, "/v1/admin/health")
    assert found["components"][-1] == asked["components"][-1]
    assert (found["status"], found["components"][-1]["since"]) == ("degraded", part["since"])
    states = {each["kind"]: each["state"] for each in found["components"]}
    assert states == {**dict.fromkeys(states, "ok"), "upstream": "unauthorised"}
    shown = stack.run("status")
    assert "degraded" in shown and "unauthorised" in shown and "answered 401" in shown
    assert BIG_KEY not in json.dumps(found) + shown and PASSWORD not in json.dumps(found) + shown
    upstream.play(good)
    assert ask(stack) == 200
    stack.wait("both know", lambda: in_every_worker(stack, "upstream", "ok"))
    assert administration(stack, "/v1/admin/models")["data"][0]["available"] is True


def test_a_full_disk_makes_every_worker_unready_and_kills_none(
    stack: Stack, upstream: LiveUpstream, disk: Path
) -> None:
    upstream.play(good)
    workers = stack.pids("gateway", "worker")
    filler = os.open(disk / "filler", os.O_CREAT | os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space"):
            while True:
                os.write(filler, bytes(64 * 1024))
    finally:
        os.close(filler)
    stack.wait("both refuse", lambda: {ready(stack)[0] for _ in range(8)} == {503})
    stack.wait("requests are refused", lambda: {ask(stack) for _ in range(4)} == {503})
    assert ready(stack)[1]["missing"] == ["spool"]
    stack.wait("both tell", lambda: in_every_worker(stack, "spool", "full"))
    assert stack.metric("tollgate_spool_free_bytes") < 256 * 1024
    (disk / "filler").unlink()
    stack.wait("it serves again", lambda: {ask(stack) for _ in range(4)} == {200})
    stack.wait("both are ready", lambda: {ready(stack)[0] for _ in range(8)} == {200})
    stack.wait("all is well", lambda: degraded(stack) == {})
    assert sorted(stack.pids("gateway", "worker")) == sorted(workers)
