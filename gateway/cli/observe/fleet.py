"""`tollgate fleet`: the replicas of all models, asked over HTTP as any operator would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import click

from foundation.periods import to_minute
from gateway.cli.observe.fleet_explain import explain
from gateway.cli.observe.fleet_top import seconds, top
from gateway.cli.observe.join_tokens import token
from gateway.cli.shared.tables import Column, Output, show, with_output
from gateway.cli.shared.target import ROWS, Gateway, GatewayError, examples, with_gateway

PATH = "/v1/admin/fleet"
PLANNER = "/v1/admin/planner"
SERVING, VACANT = "serving", "vacant"
MOST_NAMED = 32
"""Replicas named where somebody asks for one that is none."""


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def whole(number: float | None) -> str:
    return "-" if number is None else f"{number:.0f}"


COLUMNS = (
    Column("REPLICA", "id"),
    Column("STATE", "state"),
    Column("ROLE", "role", show=lambda row: row.get("role") or "-"),
    Column("RUNNING", "num_running", "number"),
    Column("WAITING", "num_waiting", "number"),
    Column("KV USED", "kv_used", "number", show=lambda row: percent(row["kv_used"])),
    Column("HIT RATE", "hit_rate", "number", show=lambda row: percent(row["hit_rate"])),
    Column("PREFILL TOK/S", "prefill_tokens_per_s", "number",
           show=lambda row: whole(row["prefill_tokens_per_s"])),
    Column("HOST", "host", show=lambda row: row.get("host") or "-", gives_way=True),
    Column("TTFT 1K", "predicted_ttft_s", "number", True,
           lambda row: seconds(row.get("predicted_ttft_s"))),
    Column("MODEL", "model", gives_way=True),
    Column("SINCE", "since", "time", gives_way=True, show=lambda row: to_minute(row["since"])),
    Column("ENGINE", "engine_id", "id", gives_way=True),
)  # fmt: skip


PLANNED = (
    Column("MODEL", "model"),
    Column("RANGE", "range", show=lambda row: f"{row['least']}..{row['most']}"),
    Column("RUNNING", "running", "number"),
    Column("STARTING", "starting", "number"),
    Column("WANTED", "wanted", "number"),
    Column("REQ/S", "rate", "number", show=lambda row: f"{row['rate']:.2f}"),
    Column("FORECAST", "expected_rate", "number", show=lambda row: f"{row['expected_rate']:.2f}"),
    Column("WORK", "work", "number", show=lambda row: f"{row['work']:.2f}"),
    Column("START", "start_s", "number", show=lambda row: start_of(row["start_s"])),
)


PLACED = (
    Column("ENGINE", "engine"),
    Column("DEVICE", "device"),
    Column("GIB", "bytes", "number", show=lambda row: f"{row['bytes'] / 2**30:.2f}"),
    Column("REASON", "reason"),
)


def start_of(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


@click.group(
    epilog=examples("tollgate fleet status", "tollgate fleet plan", "tollgate fleet drain penny/1")
)
def fleet() -> None:
    """Show the replicas of all models and what the planner wants, and drain one."""


for each in (token, explain, top):
    fleet.add_command(each)


@fleet.command(epilog=examples("tollgate fleet status", "tollgate fleet status --wide"))
@with_gateway
@with_output
@ROWS
async def status(gateway: Gateway, rows: int, output: Output) -> None:
    """Show each replica: how full it is, how often its cache has what is asked, how fast it is.

    An engine's figures are its own, since its start; an upstream's are of the worker that answers.
    TTFT 1K: the predicted time to the first token of an interactive prompt of 1,024 tokens, none of
    them cached. HOST: the machine of an engine that joined.
    """
    found = await gateway.rows(PATH, rows)
    columns = told_columns(found) if output.form == "table" else COLUMNS
    show(found, columns, output, empty="No model is served.")
    if output.form == "table":
        for line in (*incomplete(found), *await decisions(gateway)):
            click.echo(line)


async def decisions(gateway: Gateway) -> list[str]:
    """Return what the planner wants of each model, in a line; nothing where an older gateway has
    none. Raises: GatewayError."""
    try:
        planner = await gateway.get(PLANNER)
    except GatewayError as error:
        if not error.is_of_other_version:
            raise
        return []
    return [decision_of(each) for each in planner["models"]]


def decision_of(row: Mapping[str, Any]) -> str:
    """Return what the planner wants of a model, in a line."""
    number, bounds = row["wanted"], f"of {row['least']}..{row['most']}"
    verb = "is" if number == 1 else "are"
    why = row["problem"] or row["reasons"][0]["text"]
    return f"{row['model']}: {row['running']} {bounds} run, {number} {verb} wanted: {why}"


@fleet.command(epilog=examples("tollgate fleet plan", "tollgate fleet plan --json"))
@with_gateway
@with_output
async def plan(gateway: Gateway, output: Output) -> None:
    """Show how many replicas the planner wants of each model, on which device each engine is, and
    why.

    WORK: the replicas that would be busy all the time with what is forecast. The planner is of the
    home whose gateway answers; `mode` of [fleet.planner] is off, dry-run or on.
    """
    found = await gateway.get(PLANNER)
    empty = 'No model has a range of replicas, such as `replicas = "1..4"`.'
    if found["mode"] == "off":
        empty = "The planner is off: see [fleet.planner] of the settings."
    show(found["models"], PLANNED, output, empty=empty)
    if output.form != "table":
        return
    if engines := found.get("engines"):  # an older gateway tells none
        show(engines, PLACED, output, empty="")
    for row in found["models"]:
        for reason in row["reasons"]:
            click.echo(
                f"{row['model']}: {reason['replicas']} by {reason['cause']}: {reason['text']}"
            )
        if row["problem"]:
            click.echo(f"{row['model']}: {row['problem']}")
    for change in found["changes"]:
        done = "" if change["is_done"] else " (not done)"
        moment = f"{to_minute(change['at'])}  {change['model']}"
        click.echo(f"{moment} {change['before']} -> {change['after']}{done}: {change['why']}")


def told_columns(replicas: Sequence[Mapping[str, Any]]) -> Sequence[Column]:
    """Return the columns without those that say nothing: machines where no engine joined, roles
    where each does both. An older gateway tells neither."""
    silent = {
        "host": all(each.get("host") is None for each in replicas),
        "role": all(each.get("role") in ("both", None) for each in replicas),
    }
    return [each for each in COLUMNS if not silent.get(each.key, False)]


def incomplete(replicas: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each model of which some replicas do not serve; places where nobody has
    joined count where there is nothing else."""
    replicas = [*replicas]
    manned = {each["model"] for each in replicas if each["state"] != VACANT}
    replicas = [each for each in replicas if each["state"] != VACANT or each["model"] not in manned]
    all_of = Counter(each["model"] for each in replicas)
    serving = Counter(each["model"] for each in replicas if each["state"] == SERVING)
    return [
        f"{model}: {serving[model]} of {number} replicas serve"
        for model, number in all_of.items()
        if serving[model] < number
    ]


@fleet.command(epilog=examples("tollgate fleet drain penny/1", "tollgate fleet undrain penny/1"))
@with_gateway
@click.argument("replica")
async def drain(gateway: Gateway, replica: str) -> None:
    """Send nothing new to a replica; it ends what it runs.

    What lasts longer than `[fleet] drain_timeout_s` goes on at another one of its model.
    So it stays, also when its engine is started again, until `undrain` or the next `tollgate up`.
    It is of the home whose gateway answers. The last one that takes requests is not drained.
    """
    await change(gateway, replica, drained=True)


@fleet.command(epilog=examples("tollgate fleet undrain penny/1"))
@with_gateway
@click.argument("replica")
async def undrain(gateway: Gateway, replica: str) -> None:
    """Send requests to a replica again."""
    await change(gateway, replica, drained=False)


async def change(gateway: Gateway, replica: str, *, drained: bool) -> None:
    """Raises: GatewayError."""
    try:
        found = await gateway.send("PATCH", f"{PATH}/{quote(replica)}", {"drained": drained})
    except GatewayError as error:
        if error.http_status != HTTPStatus.NOT_FOUND:
            raise
        names = [each["id"] for each in await gateway.rows(PATH, MOST_NAMED)]
        there = f"there are {', '.join(names)}" if names else "no model is served"
        raise GatewayError(f"{replica}: no such replica; {there}", status=2) from None
    click.echo(f"{found['id']} is {found['state']}, {found['num_running']} requests run there.")
