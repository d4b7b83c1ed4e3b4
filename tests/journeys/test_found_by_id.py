"""The id that a client saw finds what went wrong, in the logs of the process where it did; and
metrics have their own listener in the same product."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bench.tools.ports import free_port
from tests.scratch import make_scratch
from tests.stack import ROOT, Stack, running

pytestmark = pytest.mark.slow

IN_WORKER, IN_ENGINE = 76, 77
"""How many tokens a request asks for that is to fail there."""
CONFIG = """
[[model]]
name = "penny"
path = "models/penny"

[metrics]
port = METRICS

[logs]
stdout = true
"""
METRICS_PORT = free_port()
PROMPT = "The plumage of the heron is nobody's business"
FAULTS = f"""
import sys

sys.path.insert(0, {str(ROOT)!r})


def fails_in(place, tokens):
    if tokens == {{"worker": {IN_WORKER}, "engine": {IN_ENGINE}}}[place]:
        raise RuntimeError("provoked in the " + place)


if "worker" in sys.orig_argv:
    from gateway.fleet.engine.replica import EngineReplica

    stream = EngineReplica.stream

    def failing_stream(self, prepared, **options):
        fails_in("worker", prepared.payload.request.sampling.max_tokens)
        return stream(self, prepared, **options)

    EngineReplica.stream = failing_stream
if "engine" in sys.orig_argv:
    from engine.runner.model_runner import ModelRunner

    launch = ModelRunner.launch

    def failing_launch(self, output, before=None):
        for each in output.scheduled:
            fails_in("engine", each.seq.sampling.max_tokens)
        return launch(self, output, before)

    ModelRunner.launch = failing_launch
"""
"""Python runs it first in each process."""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    folder = make_scratch()
    (folder / "sitecustomize.py").write_text(FAULTS)
    config = CONFIG.replace("METRICS", str(METRICS_PORT))
    with running(env={"PYTHONPATH": str(folder)}, config=config) as started:
        yield started
    (folder / "sitecustomize.py").unlink()


def ask(stack: Stack, max_tokens: int) -> httpx.Response:
    body = {"model": "penny", "messages": [{"role": "user", "content": PROMPT}]}
    return httpx.post(
        f"{stack.base_url}/v1/chat/completions",
        headers={"authorization": f"Bearer {stack.credentials['api_key']}"},
        json={**body, "max_tokens": max_tokens},
        timeout=60,
    )


def lines_of(stack: Stack, request: str) -> list[dict[str, Any]]:
    """Return the lines of all processes that name a request, once it has its access line."""
    found: list[dict[str, Any]] = []

    def is_over() -> bool:
        texts = [path.read_text() for path in sorted((stack.home / "logs").glob("*.log"))]
        said = [line for text in texts for line in text.splitlines() if request in line]
        found[:] = [json.loads(line) for line in said]
        return any(line["logger"] == "access" for line in found)

    stack.wait("an access line", is_over)
    return found


@pytest.mark.parametrize(
    ("max_tokens", "status", "place"),
    [(IN_WORKER, 500, "worker"), (IN_ENGINE, 503, "engine")],
)
def test_a_fault_is_found_by_the_id_of_its_answer(
    stack: Stack, max_tokens: int, status: int, place: str
) -> None:
    answer = ask(stack, max_tokens)
    assert answer.status_code == status, answer.text
    lines = lines_of(stack, answer.headers["x-request-id"])
    broken = [each for each in lines if "exception" in each]
    assert broken and all(each["process"].startswith(place) for each in broken)
    assert broken[0]["exception"].endswith(f"RuntimeError: provoked in the {place}")
    [access] = [each for each in lines if each["logger"] == "access"]
    assert (access["status"], access["model"]) == (status, "penny")
    assert access["key"] and "tokens" not in access


def test_an_answer_is_one_line_with_its_tokens_and_cost(stack: Stack) -> None:
    answer = ask(stack, 3)
    usage = answer.json()["usage"]
    [line] = lines_of(stack, answer.headers["x-request-id"])
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    tokens = line["tokens"]
    assert tokens["output"] == usage["completion_tokens"] == 3
    assert sum(tokens.values()) == usage["total_tokens"]
    assert line["duration_ms"] > 0 and line["queue_ms"] >= 0 and line["cost_pico_usd"] > 0


def test_no_log_has_a_prompt_or_a_key_and_no_access_line_an_address(stack: Stack) -> None:
    lines_of(stack, ask(stack, 3).headers["x-request-id"])
    for path in [*(stack.home / "logs").iterdir(), stack.log]:
        text = path.read_text()
        assert PROMPT not in text and "plumage" not in text, path.name
        if path.name.startswith(("worker", "engine")):
            assert all(key not in text for key in secrets_of(stack)), path.name
    for line in stack.worker_logs().splitlines():
        assert '"logger":"access"' not in line or "127.0.0.1" not in line


def test_stdout_has_the_lines_of_all_processes_in_one_format(stack: Stack) -> None:
    request = ask(stack, 3).headers["x-request-id"]
    stack.wait("its line on stdout", lambda: request in stack.log.read_text())
    *whole, _ = stack.log.read_text().split("\n")
    lines = [json.loads(line) for line in whole]
    processes = {line["process"].partition("-")[0].partition(" ")[0] for line in lines}
    assert {"supervisor", "worker", "engine", "postgres"} <= processes
    assert any("Tollgate is ready" in line["message"] for line in lines)
    own = (stack.home / "logs" / "supervisor.log").read_text().splitlines()
    assert own and {json.loads(line)["process"] for line in own} == {"supervisor"}


def test_metrics_and_health_have_their_own_listener(stack: Stack) -> None:
    own = f"http://127.0.0.1:{METRICS_PORT}"
    assert "tollgate_requests_total" in httpx.get(f"{own}/metrics").raise_for_status().text
    assert httpx.get(f"{own}/health/ready").status_code == 200
    assert httpx.get(f"{own}/v1/models").status_code == 404
    assert httpx.get(f"{stack.base_url}/metrics").status_code == 404
    assert httpx.get(f"{stack.base_url}/health").status_code == 200
    assert f"{own}/metrics" in stack.log.read_text()


def secrets_of(stack: Stack) -> list[str]:
    return [stack.credentials["api_key"], stack.credentials["admin_key"]]
