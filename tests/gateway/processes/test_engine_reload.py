"""An engine is replaced beside the old one, which ends when its last stream has."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from gateway.home import Home
from tests.databases import with_cluster
from tests.gateway.processes.test_supervisor import (
    START_TIMEOUT_S,
    UPSTREAM_ONLY,
    Up,
    command,
    until,
)
from tests.scratch import make_scratch

PENNY = UPSTREAM_ONLY + '[[model]]\nname = "penny"\npath = "models/penny"\n'
SETTINGS = "[compat]\ndialect = 'vllm'\n[engine]\nstep_timeout_s = 3600\n"
NUM_TOKENS = 100


@pytest.fixture
def up() -> Iterator[Up]:
    folder: Path = make_scratch()
    up = Up(folder, SETTINGS + PENNY)
    with_cluster(Home(up.home))
    yield up
    if up.runs():
        up.end()
    shutil.rmtree(folder)


def states_of(up: Up, model: str) -> dict[str, str]:
    """Return the states of a model's versions by their processes, as the home reports them."""
    key = json.loads((up.home / "credentials.json").read_text())["admin_key"]
    url = f"{up.url().removesuffix('/v1')}/v1/admin/settings"
    answer = httpx.get(url, headers={"authorization": f"Bearer {key}"})
    [home] = answer.json()["homes"]
    return {each["place"]: each["state"] for each in home["models"] if each["model"] == model}


def begin(client: httpx.Client, up: Up) -> httpx.Response:
    """Begin a stream that takes a while."""
    key = json.loads((up.home / "credentials.json").read_text())["api_key"]
    body = {
        "model": "penny",
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"authorization": f"Bearer {key}"}
    request = client.build_request(
        "POST", f"{up.url()}/chat/completions", json=body, headers=headers
    )
    return client.send(request, stream=True)


@pytest.mark.slow
def test_a_stream_ends_at_the_engine_that_it_began_at(up: Up) -> None:
    """The old engine stands still meanwhile, so that the stream is under way all the time."""
    up.start()
    (old,) = up.pids("engine").values()
    with httpx.Client(timeout=START_TIMEOUT_S) as client:
        answer = begin(client, up)
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        os.kill(old, signal.SIGSTOP)
        up.config.write_text(SETTINGS + "max_num_seqs = 5\n" + PENNY)
        done = command(up, "reload")
        assert done.returncode == 0, done.stderr
        changed, said = done.stdout.splitlines()
        assert changed == "+ models.penny.engine_options.max_num_seqs = 5"
        assert "The old engine of penny ends when it is done." in said
        assert done.stderr.startswith("Starting the engine of penny beside what serves.\nReady: ")
        (new,) = set(up.pids("engine").values()) - {old}
        fresh = begin(client, up)
        assert "data: [DONE]" in "\n".join(fresh.iter_lines()), "the new one serves"
        assert psutil.pid_exists(old)
        until(lambda: states_of(up, "penny") == {"engine-2": "serving", "engine-1": "draining"})
        os.kill(old, signal.SIGCONT)
        rest = "\n".join(lines)
        assert "data: [DONE]" in rest and '"error"' not in rest
        until(lambda: list(up.pids("engine").values()) == [new])
        until(lambda: states_of(up, "penny") == {"engine-2": "serving"})
    up.config.write_text(UPSTREAM_ONLY)
    gone = command(up, "reload")
    assert gone.returncode == 0 and "- models.penny = " in gone.stdout, gone.stderr
    until(lambda: not up.pids("engine"))
    until(lambda: command(up, "reconcile").stdout.endswith("The books balance.\n"))
    records = Home(up.home).usage_records()["penny"]
    assert [path.name for path in records] == ["penny.record", "penny@2.record"]
    assert up.end() == 0


@pytest.mark.nightly
@pytest.mark.slow
def test_an_engine_that_cannot_start_refuses_the_settings(up: Up) -> None:
    up.start()
    before = up.pids("engine")
    up.config.write_text(SETTINGS + "kv_cache_bytes = 1\n" + PENNY)
    refused = command(up, "reload")
    assert refused.returncode == 1 and "engine-" in refused.stderr
    assert up.pids("engine") == before and up.ready()
    until(lambda: states_of(up, "penny") == {"engine-1": "serving", "engine-2": "failed"})
    refused = command(up, "reload", "--stop-first")
    assert refused.returncode == 1 and "Starting the old engine of penny again" in refused.stderr
    assert set(up.pids("engine")) == set(before) and up.pids("engine") != before
    with httpx.Client(timeout=START_TIMEOUT_S) as client:
        # It serves again, once its workers have found it.
        until(lambda: "data: [DONE]" in "\n".join(begin(client, up).iter_lines()))
        up.config.write_text(SETTINGS + "max_num_seqs = 5\n" + PENNY)
        done = command(up, "reload", "--stop-first")
        assert done.returncode == 0, done.stderr
        assert len(up.pids("engine")) == 1 and set(up.pids("engine")) != set(before)
        assert "data: [DONE]" in "\n".join(begin(client, up).iter_lines())
    assert up.end() == 0


@pytest.mark.nightly
@pytest.mark.slow
def test_replicas_serve_while_one_of_them_dies_and_others_come_and_go(up: Up) -> None:
    up.config.write_text(SETTINGS + PENNY + "replicas = 2\n")
    up.start()
    assert up.said().count("KV blocks") == 2
    pids = up.pids("engine")
    first, second = pids["engine-1"], pids["engine-2"]
    with httpx.Client(timeout=START_TIMEOUT_S) as client:
        for _ in range(4):
            assert "data: [DONE]" in "\n".join(begin(client, up).iter_lines())
        assert "penny/1 is drained, 0 requests" in command(up, "fleet", "drain", "penny/1").stdout
        refused = command(up, "fleet", "drain", "penny/2")
        assert refused.returncode != 0 and "No other replica of penny" in refused.stderr
        for _ in range(2):
            assert "data: [DONE]" in "\n".join(begin(client, up).iter_lines())
        assert "penny: 1 of 2 replicas serve" in command(up, "fleet", "status").stdout
        command(up, "fleet", "undrain", "penny/1")
        os.kill(second, signal.SIGKILL)
        assert up.ready(), "the other one serves"
        for _ in range(4):
            assert "data: [DONE]" in "\n".join(begin(client, up).iter_lines())
        until(lambda: len(up.pids("engine")) == 2)
        until(lambda: set(states_of(up, "penny").values()) == {"serving"})
        up.config.write_text(SETTINGS + PENNY + "replicas = 3\n")
        grown = command(up, "reload")
        assert grown.returncode == 0, grown.stderr
        assert grown.stdout.startswith("~ models.penny.replicas: 2 -> 3\n")
        assert len(up.pids("engine")) == 3
        answer = begin(client, up)
        up.config.write_text(SETTINGS + PENNY)
        fewer = command(up, "reload")
        assert fewer.returncode == 0, fewer.stderr
        assert "The old engines of penny end when they are done." in fewer.stdout
        rest = "\n".join(answer.iter_lines())
        assert "data: [DONE]" in rest and '"error"' not in rest
        until(lambda: list(up.pids("engine").values()) == [first])
    until(lambda: command(up, "reconcile").stdout.endswith("The books balance.\n"))
    assert up.end() == 0
