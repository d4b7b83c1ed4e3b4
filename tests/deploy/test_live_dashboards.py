"""Every query of the dashboards and every recording has data from a live Tollgate under a little
traffic, asked through a Prometheus that scrapes it; exemplars and native histograms arrive.

    SUITE_BUDGET=nightly python -m pytest tests/deploy/test_live_dashboards.py
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai import OpenAIError

from bench.tools.ports import free_port
from tests.budget import NIGHT
from tests.deploy.test_dashboards import DASHBOARDS, RULES, rules
from tests.gateway.routes.openapi.fresh import mcp_client
from tests.mcp_bridge.counting import counting
from tests.scratch import make_scratch
from tests.stack import Stack, running

SETTINGS = """
port = PORT
[metrics]
port = METRICS_PORT
tenants = true
[slo]
interactive = {ttft_s = 60, tpot_s = 10}
agentic = {ttft_s = 0.00001, tpot_s = 0.00001}
[[model]]
name = "penny"
path = "models/penny"
[[model]]
name = "pair"
path = "models/penny"
prefill = 1
decode = 1
[[model]]
name = "ranged"
path = "models/penny"
replicas = "2..3"
slo.agentic = {ttft_s = 0.00001, ttft_per_prefill = 1.0, tpot_s = 10}
[[model]]
name = "far"
upstream = "http://127.0.0.1:9/v1"
max_concurrency = 4
[[mcp.servers]]
name = "shaky"
url = "MCP_URL"
network = "loopback"
trust = "all"
"""
SCRAPES = """
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: [rules.yml]
scrape_configs:
  - {job_name: tollgate, static_configs: [{targets: ["127.0.0.1:PORT"]}]}
"""
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ASKED: Any = (
    ("penny", {}),
    ("penny", {"tools": [TOOL]}),
    ("pair", {}),
    ("ranged", {"tools": [TOOL]}),
    ("far", {}),
)
BUSY: Any = (("ranged", {"max_tokens": 400}), ("pair", {"max_tokens": 60}))
"""Keeps engines busy, so that there are streams to lose, what comes too late, and what is handed
over."""
HAS_PROMETHEUS = shutil.which("prometheus") is not None
DATA_TIMEOUT_S = 240.0


@contextmanager
def prometheus(port: int, *features: str) -> Iterator[str]:
    """Run a Prometheus that scrapes a port; its URL."""
    folder, own = make_scratch(), free_port()
    (folder / "rules.yml").write_text(RULES.read_text().replace("interval: 30s", "interval: 1s"))
    (folder / "prometheus.yml").write_text(SCRAPES.replace("PORT", str(port)))
    process = subprocess.Popen(
        ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/d"]
        + [f"--web.listen-address=127.0.0.1:{own}", f"--enable-feature={','.join(features)}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{own}"
    try:
        wait_ready(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DATA_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "it ended at once"
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/-/ready", timeout=10).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError("Prometheus does not get ready")


class Traffic:
    """Asks a stack until told to stop: chats, tools, what is refused, and calls of MCP servers."""

    def __init__(self, stack: Stack, asked: Any = ASKED) -> None:
        self._stack, self._asked, self._over = stack, asked, threading.Event()
        key = stack.create_key("--scope", "inference", "--scope", "mcp:call")
        self._client, self._key = stack.client(api_key=key, max_retries=0), key
        self._thread = threading.Thread(target=self._go_on)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)

    def _go_on(self) -> None:
        while not self._over.is_set():
            for model, more in self._asked:
                self._chat(model, more)
            asyncio.run(self._call_tools())
            time.sleep(0.2)

    def _chat(self, model: str, more: dict[str, Any]) -> None:
        messages: Any = [{"role": "user", "content": "Tell me of the sea. " * 40}]
        with suppress(OpenAIError):
            stream = self._client.chat.completions.create(
                model=model, messages=messages, stream=True, **{"max_tokens": 12, **more}
            )
            for _ in stream:
                pass

    async def _call_tools(self) -> None:
        worker: Any = SimpleNamespace(url=self._stack.base_url)
        async with mcp_client(worker, self._key) as client:
            for arguments in ({"n": 1}, {"n": "one"}):
                with suppress(Exception):
                    await client.call_tool("shaky__look", arguments)


def data_of(url: str, expression: str) -> list[float]:
    """Return the values of a query that are numbers."""
    for name, value in (
        ("$__rate_interval", "2m"),
        ("$__range", "5m"),
        ("$model", ".*"),
        ("$server", ".*"),
    ):
        expression = expression.replace(name, value)
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=30).json()
    assert answer["status"] == "success", (expression, answer)
    values = (float(each["value"][1]) for each in answer["data"]["result"])
    return [each for each in values if not math.isnan(each)]


def kill_engines(stack: Stack, is_over: threading.Event) -> None:
    """Kill an engine of `ranged` now and then: its streams go on at the other one."""
    while not is_over.wait(15):
        for pid in stack.pids("--served-name", "ranged")[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def dying_engines(stack: Stack) -> Iterator[None]:
    is_over = threading.Event()
    thread = threading.Thread(target=kill_engines, args=(stack, is_over))
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def wait_for_data(url: str, asked: dict[str, str]) -> None:
    deadline = time.monotonic() + DATA_TIMEOUT_S
    while asked := {place: each for place, each in asked.items() if not data_of(url, each)}:
        assert time.monotonic() < deadline, asked
        time.sleep(1)


@NIGHT
@pytest.mark.skipif(not HAS_PROMETHEUS, reason="no prometheus (Debian's package)")
def test_every_panel_has_data_of_a_live_tollgate() -> None:
    asked = {
        f"{path.stem}: {panel['title']} {target['refId']}": target["expr"]
        for path in DASHBOARDS
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    }
    asked |= {rule["record"]: rule["record"] for rule in rules() if "record" in rule}
    with ExitStack() as opened:
        server = opened.enter_context(counting())
        scraped = free_port()
        config = SETTINGS.replace("MCP_URL", server.url).replace("METRICS_PORT", str(scraped))
        stack = opened.enter_context(running(config=config, workers=2))
        url = opened.enter_context(prometheus(scraped, "exemplar-storage"))
        native = opened.enter_context(prometheus(scraped, "native-histograms"))
        with Traffic(stack), Traffic(stack, BUSY), Traffic(stack, BUSY), dying_engines(stack):
            wait_for_data(url, asked)
            wait_for_data(native, {"native": NATIVE})
        exemplars = httpx.get(
            f"{url}/api/v1/query_exemplars",
            params={"query": "tollgate_time_to_first_token_seconds_bucket", "start": 0, "end": 4e9},
        ).json()
        traces = {
            one["labels"]["trace_id"] for each in exemplars["data"] for one in each["exemplars"]
        }
        assert traces and any(f'"trace":"{trace}"' in stack.worker_logs() for trace in traces)


NATIVE = "histogram_quantile(0.5, sum(rate(tollgate_time_to_first_token_seconds[30s])))"
"""Without `_bucket`: of the native histogram."""
