"""`tollgate top`: what each model does at the moment, once a second."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
import msgspec

from gateway.cli.shared.tables import Column, Output, lay_out, open_console, show, with_output
from gateway.cli.shared.target import (
    GatewayError,
    GatewayTarget,
    examples,
    unreachable,
    with_target,
)
from gateway.net.listener import is_loopback, origin
from gateway.settings.load import Settings

if TYPE_CHECKING:
    from rich.text import Text

TIMEOUT_S = 10.0
MAX_METRICS_BYTES = 64 * 1024 * 1024
COLUMNS = (
    Column("MODEL", "model"),
    Column("REQ/S", "requests_s", "number", show=lambda row: f"{row['requests_s']:.1f}"),
    Column("FAILED/S", "failed_s", "number", show=lambda row: f"{row['failed_s']:.1f}"),
    Column("RUNNING", "running", "number", show=lambda row: f"{row['running']:.0f}"),
    Column("WAITING", "waiting", "number", show=lambda row: f"{row['waiting']:.0f}"),
    Column("IN TOK/S", "input_s", "number", show=lambda row: f"{row['input_s']:.0f}"),
    Column("OUT TOK/S", "output_s", "number", show=lambda row: f"{row['output_s']:.0f}"),
    Column("CACHED", "cached", "number", True, lambda row: percent(row["cached"])),
    Column("TTFT", "ttft_s", "number", True, lambda row: milliseconds(row["ttft_s"])),
    Column("KV USED", "kv_used", "number", True, lambda row: percent(row["kv_used"])),
)
INPUT_KINDS = ("uncached", "cache_read", "cache_write")
RUNNING = ("tollgate_num_requests_running", "tollgate_upstream_requests_running")
WAITING = ("tollgate_num_requests_waiting", "tollgate_upstream_requests_waiting")
KV_USED = "tollgate_kv_cache_usage_perc"
REQUESTS, TOKENS = "tollgate_requests_total", "tollgate_tokens_total"
TTFT = "tollgate_time_to_first_token_seconds"
NO_MODEL = "-"
"""The label of requests that are for none, such as those that `top` itself makes."""
WANTED = frozenset((REQUESTS, TOKENS, f"{TTFT}_sum", f"{TTFT}_count", KV_USED, *RUNNING, *WAITING))


class Sample(msgspec.Struct, frozen=True):
    """The metrics at one moment. `at`: monotonic seconds. `values`: by model and by series, whose
    name has the label behind it that tells it apart: `tollgate_tokens_total output`."""

    at: float
    values: Mapping[str, Mapping[str, float]]


def with_interval(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --once and --interval to a command that measures again and again."""
    for option in (
        click.option(
            "--interval",
            type=click.FloatRange(0.2, 60),
            default=1.0,
            show_default=True,
            help="Seconds between two looks.",
        ),
        click.option("--once", is_flag=True, help="Measure one interval, print it and end."),
    ):
        command = option(command)
    return command


@click.command(epilog=examples("tollgate top", "tollgate top --once --json"))
@with_target
@with_output
@with_interval
@click.option(
    "--metrics",
    "address",
    help="The URL of the metrics. Default: /metrics there, or as [metrics] of the settings says.",
)
async def top(
    settings: Settings,
    target: GatewayTarget,
    once: bool,
    interval: float,
    address: str | None,
    output: Output,
) -> None:
    """Show requests, tokens and queues of each model as they are now. Ctrl-C ends it.

    Off a terminal, and with --json or --csv, it measures once.
    """
    url = address or f"{origin_of_metrics(settings, target)}/metrics"
    before = await look(target, url)
    if once or output.form != "table" or not sys.stdout.isatty():
        await asyncio.sleep(interval)
        rows = rates(before, await look(target, url))
        show(rows, COLUMNS, output, empty="No request was made since the start.")
        return
    await draw(target, url, before, interval)


def origin_of_metrics(settings: Settings, target: GatewayTarget) -> str:
    """Return where the metrics are: on a listener of their own if the settings of this machine's
    gateway say so."""
    own = settings.metrics
    if own.port is None or not is_loopback(urlsplit(target.base).hostname or ""):
        return target.base
    return origin(own.host, own.port)


async def draw(target: GatewayTarget, url: str, before: Sample, interval: float) -> None:
    """Draw anew after each interval until interrupted."""
    from rich.text import Text

    async def measure(width: int) -> Text:
        nonlocal before
        after = await look(target, url)
        rows, before = rates(before, after), after
        lines = [f"{target.base}  {time.strftime('%H:%M:%S', time.gmtime())} UTC"]
        if rows:
            lines += lay_out(rows, COLUMNS, width)[0].lines()
        return Text("\n".join(lines))

    await draw_again(measure, interval)


async def draw_again(measure: Callable[[int], Awaitable[Text]], interval: float) -> None:
    """Draw what `measure` returns for the terminal's width, after each interval until
    interrupted."""
    from rich.live import Live

    console = open_console()
    try:
        with Live("Measuring.", console=console, auto_refresh=False, screen=False) as live:
            while True:
                await asyncio.sleep(interval)
                live.update(await measure(console.width), refresh=True)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return


async def look(target: GatewayTarget, url: str) -> Sample:
    """Raises: GatewayError."""
    import httpx

    try:
        async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as http:
            answer = await http.get(url)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise unreachable(target, error) from None
    if answer.status_code != httpx.codes.OK or len(answer.content) > MAX_METRICS_BYTES:
        line = f"{url}: status {answer.status_code}; --metrics names the address of the metrics"
        raise GatewayError(line, status=1)
    try:
        return sample_of(answer.text, time.monotonic())
    except ValueError:
        raise GatewayError(f"{url}: no metrics of Prometheus", status=1) from None


def sample_of(text: str, at: float) -> Sample:
    """Read Prometheus' text format. Raises: ValueError."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            model = sample.labels.get("model")
            if sample.name not in WANTED or not model or model == NO_MODEL:
                continue
            apart = sample.labels.get("status") or sample.labels.get("kind")
            name = f"{sample.name} {apart}" if apart else sample.name
            if name == KV_USED:  # of the fullest of its replicas
                values[model][name] = max(values[model][name], sample.value)
            else:
                values[model][name] += sample.value
    return Sample(at, values)


def rates(before: Sample, after: Sample) -> list[dict[str, Any]]:
    """Return a row for each model, busiest first."""
    seconds = max(after.at - before.at, 1e-3)
    rows = []
    for model, now in after.values.items():
        old = before.values.get(model, {})
        grown = {name: max(value - old.get(name, 0.0), 0.0) for name, value in now.items()}
        rows.append({"model": model} | row_of(now, grown, seconds))
    return sorted(rows, key=lambda row: (-row["requests_s"], -row["running"], row["model"]))


def row_of(
    now: Mapping[str, float], grown: Mapping[str, float], seconds: float
) -> dict[str, float | None]:
    """Return a model's figures. `now`: its series; `grown`: by how much each grew meanwhile."""
    statuses = {name: n for name, n in grown.items() if name.startswith(f"{REQUESTS} ")}
    failed = sum(n for name, n in statuses.items() if name.rpartition(" ")[2] >= "4")
    read = {kind: grown.get(f"{TOKENS} {kind}", 0.0) for kind in INPUT_KINDS}
    num_input, first = sum(read.values()), grown.get(f"{TTFT}_count", 0.0)
    return {
        "requests_s": sum(statuses.values()) / seconds,
        "failed_s": failed / seconds,
        "running": sum(now.get(name, 0.0) for name in RUNNING),
        "waiting": sum(now.get(name, 0.0) for name in WAITING),
        "input_s": num_input / seconds,
        "output_s": grown.get(f"{TOKENS} output", 0.0) / seconds,
        "cached": read["cache_read"] / num_input if num_input else None,
        "ttft_s": grown.get(f"{TTFT}_sum", 0.0) / first if first else None,
        "kv_used": now.get(KV_USED),
    }


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"
