"""`tollgate fleet top`: the replicas of all models as they are now, drawn anew after each interval.

Rates are by the difference of two looks at GET /v1/admin/fleet.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click
import msgspec

from gateway.cli.observe.top import draw_again, percent, with_interval
from gateway.cli.shared.tables import (
    ABSENT,
    Column,
    Output,
    lay_out,
    show,
    styled_lines,
    with_output,
)
from gateway.cli.shared.target import Gateway, GatewayError, examples, with_gateway

FLEET = "/v1/admin/fleet"
MOST_REPLICAS = 1000
LANES = ("interactive", "agentic", "batch")
EMPTY = "No model is served."


class FleetLook(msgspec.Struct, frozen=True):
    """The replicas at one moment. `at`: monotonic seconds."""

    at: float
    replicas: Sequence[Mapping[str, Any]]


def per_second(rate: float | None) -> str:
    return ABSENT if rate is None else f"{rate:.0f}"


def seconds(value: float | None) -> str:
    if value is None:
        return ABSENT
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def queues(row: Mapping[str, Any]) -> str:
    """Return how many wait in each lane, the highest first."""
    lanes = row.get("lanes")
    return "/".join(str(lanes[each]["num_waiting"]) for each in LANES) if lanes else ABSENT


COLUMNS = (
    Column("REPLICA", "id"),
    Column("STATE", "state"),
    Column("RUN", "num_running", "number"),
    Column("WAIT I/A/B", "waiting", "number", show=queues),
    Column("KV", "kv_used", "number", show=lambda row: percent(row["kv_used"])),
    Column("HITS", "hit_rate", "number", show=lambda row: percent(row["hit_rate"])),
    Column("IN TOK/S", "input_s", "number", True, lambda row: per_second(row["input_s"])),
    Column("OUT TOK/S", "output_s", "number", show=lambda row: per_second(row["output_s"])),
    Column("TTFT 1K", "predicted_ttft_s", "number", True,
           lambda row: seconds(row.get("predicted_ttft_s"))),
)  # fmt: skip


@click.command(epilog=examples("tollgate fleet top", "tollgate fleet top --once --json"))
@with_gateway
@with_output
@with_interval
async def top(gateway: Gateway, once: bool, interval: float, output: Output) -> None:
    """Show each replica as it is now, until Ctrl-C.

    WAIT: requests that wait in the lanes interactive, agentic and batch. HITS: the part of the
    interval's prompts that was cached. TTFT 1K: the predicted time to the first token of an
    interactive prompt of 1,024 tokens, none of them cached.

    Off a terminal, and with --json or --csv, it measures once.
    """
    before = await look(gateway)
    if once or output.form != "table" or not sys.stdout.isatty():
        await asyncio.sleep(interval)
        show(rows_of(before, await look(gateway)), COLUMNS, output, empty=EMPTY)
        return
    await draw(gateway, before, interval)


async def look(gateway: Gateway) -> FleetLook:
    """Raises: GatewayError."""
    return FleetLook(time.monotonic(), await gateway.rows(FLEET, MOST_REPLICAS))


async def draw(gateway: Gateway, before: FleetLook, interval: float) -> None:
    """Draw anew after each interval until interrupted. A gateway that is away meanwhile is looked
    for again: who watches a fleet watches it start again, too."""
    from rich.text import Text

    rows = rows_of(before, before)

    async def measure(width: int) -> Text:
        nonlocal rows, before
        problem = ""
        try:
            after = await look(gateway)
        except GatewayError as error:
            if not error.is_unreachable:
                raise
            problem = "  (unreachable: the last that was seen)"
        else:
            rows, before = rows_of(before, after), after
        at = time.strftime("%H:%M:%S", time.gmtime())
        lines = [Text(f"{at} UTC  {summary_of(rows)}{problem}")]
        if rows:
            lines += styled_lines(lay_out(rows, COLUMNS, width)[0])
        return Text("\n").join(lines)

    await draw_again(measure, interval)


def summary_of(rows: Iterable[Mapping[str, Any]]) -> str:
    rows = [*rows]
    if not rows:
        return EMPTY
    serving = sum(each["state"] == "serving" for each in rows)
    running, waiting = (sum(each[name] for each in rows) for name in ("num_running", "num_waiting"))
    output_s = sum(each["output_s"] or 0.0 for each in rows)
    return (
        f"{serving} of {len(rows)} replicas serve, {running} run, {waiting} wait, "
        f"{output_s:.0f} tokens/s"
    )


def rows_of(before: FleetLook, after: FleetLook) -> list[dict[str, Any]]:
    """Return the replicas with their rates; None: nobody knows, or another process answers."""
    old = {(each["id"], each["engine_id"]): each for each in before.replicas}
    elapsed_s = max(after.at - before.at, 1e-3)
    return [
        {**now, **rates_of(old.get((now["id"], now["engine_id"])), now, elapsed_s)}
        for now in after.replicas
    ]


def rates_of(
    old: Mapping[str, Any] | None, now: Mapping[str, Any], elapsed_s: float
) -> dict[str, float | None]:
    unknown: dict[str, float | None] = {"hit_rate": None, "input_s": None, "output_s": None}
    then, tokens = (old or {}).get("prompt_tokens"), now.get("prompt_tokens")
    if old is None or then is None or tokens is None:  # an older gateway tells none
        return unknown
    grown = {name: number - then[name] for name, number in tokens.items()}
    asked = sum(grown.values())
    return {
        "hit_rate": (asked - grown["computed"]) / asked if asked > 0 else None,
        "input_s": max(asked, 0) / elapsed_s,
        "output_s": max(now["generated_tokens"] - old["generated_tokens"], 0) / elapsed_s,
    }
