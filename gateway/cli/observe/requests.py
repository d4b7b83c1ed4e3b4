"""`tollgate requests`: requests by what they were, and one of them whole.

Read from the running gateway: GET /v1/requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from math import ceil
from typing import Any

import click

from foundation.periods import Span
from gateway.cli.shared.tables import (
    ABSENT,
    Column,
    Output,
    Row,
    printable,
    show,
    to_money,
    to_text,
    with_output,
)
from gateway.cli.shared.target import OTHER_ORG, ROWS, Gateway, examples, with_gateway
from gateway.cli.shared.times import period

REQUESTS = "/v1/requests"
LANES = ("interactive", "agentic", "batch")
OUTCOMES = ("ok", "bad", "refused", "limited", "failed", "left", "missed")
NONE_FOUND = "No requests like these. Requests appear about a second after they are answered."


def to_ms(milliseconds: Any) -> str:
    """Show a time as people read it: 21.4 ms, 340 ms, 2.31 s."""
    if milliseconds is None:
        return ABSENT
    number = float(milliseconds)
    if number >= 1000:
        return f"{number / 1000:.2f} s"
    return f"{number:.0f} ms" if number >= 100 else f"{number:.1f} ms"


def timed(name: str) -> Any:
    return lambda row: to_ms(row["timing"][name])


COLUMNS = (
    Column("AT", "created_at", "time", show=lambda row: to_second(row["created_at"])),
    Column("REQUEST", "id", "id"),
    Column("STATUS", "status", "number"),
    Column("ERROR", "error_code", show=lambda row: row["error_code"] or ABSENT),
    Column("MODEL", "model"),
    Column("KEY", "api_key_name", show=lambda row: row["api_key_name"] or row["api_key_id"]),
    Column("LANE", "lane", gives_way=True),
    Column("INPUT", "input", "number", True, lambda row: to_text(input_of(row))),
    Column("CACHED", "cached", "number", True, lambda row: to_text(row["tokens"]["cached"])),
    Column("OUTPUT", "output", "number", True, lambda row: to_text(row["tokens"]["output"])),
    Column("FIRST", "ttft_ms", "number", show=timed("ttft_ms")),
    Column("IN ALL", "duration_ms", "number", show=timed("duration_ms")),
    Column("USD", "amount", "number", show=lambda row: to_money(row["cost"]["amount"])),
)
STAGES = (
    Column("STAGE", "name"),
    Column("WITH", "about"),
    Column("BEGAN", "began_ms", "number", show=lambda row: to_ms(row["began_ms"])),
    Column("TOOK", "took_ms", "number", show=lambda row: to_ms(row["took_ms"])),
    Column("", "bar", show=lambda row: row["bar"]),
    Column("FAILED", "outcome", show=lambda row: row["outcome"] or ABSENT),
)
LINES = (
    Column("COMPONENT", "component"),
    Column("QUANTITY", "quantity", "number"),
    Column("USD", "amount", "number"),
    Column("ATTEMPT", "attempt", "id", gives_way=True),
)
BAR_CELLS = 24


@click.group(epilog=examples("tollgate requests list", "tollgate requests show req_0192..."))
def requests() -> None:
    """Show what was asked: who, which model, how long it took, what it cost."""


@requests.command(
    "list",
    epilog=examples(
        "tollgate requests list last 1h --outcome failed",
        "tollgate requests list today --error-code model_not_found",
        "tollgate requests list yesterday --model penny --min-cost 0.01 --csv",
        "tollgate requests list --batch batch_0192...",
        "tollgate requests list today --project web --tag team=search --org acme",
    ),
)
@with_gateway
@with_output
@period("last 24h")
@click.option("--key-id", "api_key_id", metavar="ID", help="Only by this API key.")
@click.option("--project", metavar="NAME|ID", help="Only of this project.")
@click.option("--model", help="Only for this model.")
@click.option("--lane", type=click.Choice(LANES), help="Only in this lane.")
@click.option("--status", type=click.IntRange(100, 599), help="Only with this HTTP status.")
@click.option("--error-code", metavar="CODE", help="Only those answered with this error.")
@click.option(
    "--outcome",
    type=click.Choice(OUTCOMES),
    help="Only those that ended so; bad: not answered; left: the client left; missed: their SLO.",
)
@click.option("--tag", metavar="KEY=VALUE", help="Only with this tag.")
@click.option("--batch", "batch_id", metavar="ID", help="Only lines of this batch.")
@click.option("--min-cost", metavar="USD", help="Only those that cost as much or more.")
@click.option("--min-ms", "min_duration_ms", type=float, help="Only those that took so long.")
@click.option("--min-ttft-ms", type=float, help="Only those whose first token took so long, in ms.")
@ROWS
@OTHER_ORG
async def list_(
    gateway: Gateway,
    span: Span,
    org: str | None,
    project: str | None,
    rows: int,
    output: Output,
    **asked: Any,
) -> None:
    """List requests, the newest first.

    PERIOD: last 24h (the default), last 15m, today, yesterday, 2026-11-28, 2026-11-01..2026-11-15;
    of UTC.
    """
    org_id = await gateway.org_id(org)
    query = {
        **asked,
        **span.to_query(),
        "end_time": ceil(span.end.timestamp()),
        "org_id": org_id,
        "project_id": await gateway.project_id(project, org_id),
    }
    found = await find(gateway, rows, query)
    columns: tuple[Column, ...] = COLUMNS
    if output.form != "json":
        found = [flat(each) for each in found]
        if output.form == "table" and not any(each["error_code"] for each in found):
            columns = tuple(each for each in COLUMNS if each.key != "error_code")
    show(found, columns, output, empty=NONE_FOUND)


async def find(gateway: Gateway, limit: int, query: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the newest requests, at most so many. A page that has none may be followed by one
    that has: the gateway looks through so many rows at a time."""
    found: list[dict[str, Any]] = []
    after = None
    while True:
        left = limit - len(found)
        page = await gateway.get(REQUESTS, **query, after=after, limit=min(100, left))
        found += page["data"]
        if not page["has_more"]:
            return found
        if len(found) >= limit:
            click.echo(f"There are more than {limit}: --limit lists them.", err=True)
            return found
        after = page["last_id"]


@requests.command(
    "show",
    epilog=examples(
        "tollgate requests show req_0192...", "tollgate requests show req_0192... --json"
    ),
)
@with_gateway
@with_output
@OTHER_ORG
@click.argument("request_id", metavar="ID")
async def show_(gateway: Gateway, request_id: str, org: str | None, output: Output) -> None:
    """Show one request whole, by the id that its client saw as `x-request-id`: where its time
    went, what it used, why no more was cached, and its price lines.

    --csv prints the stages.
    """
    org_id = await gateway.org_id(org)
    found = await gateway.get(f"{REQUESTS}/{request_id}", org_id=org_id)
    if output.form == "json":
        show([found], (), output)
        return
    row, bill = found["log"], found["bill"]
    stages = with_bars(found["stages"], row)
    if output.form == "csv":
        show(stages, [each for each in STAGES if each.key != "bar"], output)
        return
    for line in facts_of(found["id"], row, bill):
        click.echo(line)
    if stages:
        click.echo()
        show(stages, STAGES, output)
    lines = list(price_lines(bill))
    if lines:
        click.echo()
        show(lines, LINES, output)


def facts_of(request_id: str, row: Mapping[str, Any] | None, bill: Any) -> Iterable[str]:
    """Return what is said of a request before its tables, as lines."""
    told: dict[str, str] = {"Request": request_id}
    if row is None:
        told["Log"] = "its row is gone; the books have it for good"
    else:
        timing, tokens = row["timing"], row["tokens"]
        told |= {
            "At": f"{to_second(row['created_at'])} UTC, {row['route']}",
            "Status": " ".join(filter(None, (str(row["status"]), row["error_code"]))),
            "Whose": f"key {row['api_key_name'] or row['api_key_id']}, project "
            f"{row['project_name'] or row['project_id'] or ABSENT}",
            "Model": f"{row['model']}{version_of(row)}, lane {row['lane']}",
            "Tokens": f"{input_of(row)} in ({tokens['cached']} cached, {tokens['uncached']} "
            f"uncached, {tokens['written']} written), {tokens['output']} out",
            "Time": f"{to_ms(timing['duration_ms'])} in all, first token "
            f"{to_ms(timing['ttft_ms'])}, queue {to_ms(timing['queue_ms'])}",
            "Tokens came": f"each {to_ms(timing['tpot_ms'])} (p50 {to_ms(timing['itl_p50_ms'])}, "
            f"p99 {to_ms(timing['itl_p99_ms'])})",
        }
        if row["cache"] is not None:
            position = row["cache"]["position"]
            where = "" if not position else f", from token {position} on"
            told["Cache"] = row["cache"]["cause"].replace("_", " ") + where
        if row["batch_id"] is not None:
            told["Batch"] = row["batch_id"]
        if row["tags"]:
            told["Tags"] = ", ".join(f"{key}={value}" for key, value in row["tags"].items())
        told["Trace"] = row["trace_id"]
    charged = "nothing is booked" if bill is None else f"{bill['cost']} USD, {bill['status']}"
    told["Charged"] = charged
    return (f"{name:<12} {printable(text)}" for name, text in told.items())


def version_of(row: Mapping[str, Any]) -> str:
    version = row["model_version"]
    return "" if version is None else f" version {version}"


def with_bars(stages: list[dict[str, Any]], row: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Add to each stage a bar that shows when it was."""
    if row is None or not stages:
        return stages
    ends = (float(each["began_ms"]) + float(each["took_ms"]) for each in stages)
    whole = max(float(row["timing"]["duration_ms"]), *ends) or 1.0
    return [each | {"bar": bar(each, whole)} for each in stages]


def bar(stage: Mapping[str, Any], whole_ms: float) -> str:
    begin = round(BAR_CELLS * max(0.0, float(stage["began_ms"])) / whole_ms)
    begin = min(begin, BAR_CELLS - 1)
    length = max(1, round(BAR_CELLS * float(stage["took_ms"]) / whole_ms))
    return "·" * begin + "█" * min(length, BAR_CELLS - begin)


def price_lines(bill: Any) -> Iterable[dict[str, Any]]:
    for attempt in () if bill is None else bill["attempts"]:
        for component, line in attempt["components"].items():
            yield {
                "component": component.replace("_", " "),
                "quantity": line["quantity"],
                "amount": line["amount"],
                "attempt": attempt["id"],
            }


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return a request with what its columns show beside its own fields, for CSV."""
    return row | {
        "input": input_of(row),
        "cached": row["tokens"]["cached"],
        "output": row["tokens"]["output"],
        "ttft_ms": row["timing"]["ttft_ms"],
        "duration_ms": row["timing"]["duration_ms"],
        "amount": row["cost"]["amount"],
    }


def input_of(row: Row) -> int:
    tokens = row["tokens"]
    return int(tokens["uncached"] + tokens["cached"] + tokens["written"])


def to_second(seconds: Any) -> str:
    return datetime.fromtimestamp(float(seconds), UTC).strftime("%Y-%m-%d %H:%M:%S")
