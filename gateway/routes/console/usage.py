"""Shows /console/usage: tokens and money by model, project, key, lane or a tag, beside the period
before; each row leads to its parts, and to its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote_plus, urlencode

from litestar import Response

from billing.queries import ask_all
from gateway.console.formats import SPACE
from gateway.console.model_names import model_name, server_of
from gateway.console.tables import Table, TableColumn
from gateway.principal import SCOPE_USAGE_READ
from gateway.request_errors import BadField
from gateway.request_log.search import names_query
from gateway.request_log.summary import (
    Filters,
    Group,
    GroupSums,
    LatencyChoice,
    Summary,
    summarize,
    window_of,
)
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ConsoleRequest
from gateway.routes.console.overview import LANES, change, changes_of, tokens_table

BY: dict[Group, str] = {
    "model": "Model",
    "project": "Project",
    "key": "Key",
    "lane": "Lane",
    "tag": "Tag",
}
NEXT: dict[Group, Group] = {"model": "project", "project": "key", "key": "model", "lane": "model"}
"""The parts that the row of a group leads to."""
MAX_TAG_CHARS = 64
MAX_SHOWN = 100
"""The groups that a page shows; its CSV has all."""
page = ConsolePage(name="usage", title="Usage and spend", letter="u", needs=SCOPE_USAGE_READ)


@page.get()
async def show(request: ConsoleRequest) -> Response[bytes]:
    by, tag, filters = read_query(request)
    window = window_of(request.range.start, request.range.end)
    groups: tuple[Group, ...] = (by,)
    if by == "tag" and not tag:
        groups = ()  # the page asks which
    tag_read = tag if by == "tag" else ""
    async with request.transaction() as conn:
        summary = await summarize(
            conn,
            request.org_id,
            window,
            by=groups,
            filters=filters,
            tag=tag_read,
            latencies=LatencyChoice(names=("ttft",), in_time=False, by=groups),
        )
        ids = {filters.project, filters.key}
        if by in ("project", "key"):
            ids |= group_names(summary.groups)
        found, changes = await ask_all(
            conn, names_query(request.org_id, ids), changes_of(request, window)
        )
    names = dict(found)
    models, servers = apart(summary.groups) if by == "model" else (summary.groups, [])
    if by == "model" or filters.model:
        names |= {each: model_name(each) for each in (*group_names(summary.groups), filters.model)}
    return request.render(
        "usage",
        table=groups_table(
            request, by, summary.groups if request.wants_csv else models[:MAX_SHOWN], names
        ),
        num_hidden=max(0, len(models) - MAX_SHOWN),
        tables={
            "servers": servers_table(
                request, servers if request.wants_csv else servers[:MAX_SHOWN]
            ),
            "chart": tokens_table(summary.series()),
            "spend": spend_table(summary),
        },
        by=by,
        kinds=[(name, title.lower()) for name, title in BY.items()],
        changes=changes,
        now_sums=summary.now,
        before=summary.before,
        is_billed=summary.is_billed,
        narrowed=[
            (BY[name], names.get(value, value), request.address(**{name: None}))
            for name in ("project", "key", "model", "lane")
            if (value := getattr(filters, name))
        ],
        models=sorted(request.services.telemetry.models),
        lanes=LANES,
        tag=tag,
        change=change,
    )


def read_query(request: ConsoleRequest) -> tuple[Group, str, Filters]:
    """Raises: BadField."""
    by: Any = request.value("by", tuple(BY)) or "model"
    tag = request.value("tag")
    if len(tag) > MAX_TAG_CHARS:
        raise BadField(f"has at most {MAX_TAG_CHARS} characters", param="tag")
    filters = Filters(
        project=request.value("project"),
        key=request.value("key"),
        model=request.value("model"),
        lane=request.value("lane", LANES) if by != "tag" else "",
    )
    return by, tag, filters


def group_names(groups: Sequence[GroupSums]) -> set[str]:
    return {name for group in groups for name in group.names}


def apart(groups: Sequence[GroupSums]) -> tuple[list[GroupSums], list[GroupSums]]:
    """Return the models of groups by model, and the servers whose tools were called."""
    found: tuple[list[GroupSums], list[GroupSums]] = ([], [])
    for group in groups:
        is_server = server_of(group.names[0]) is not None and not group.now.tokens
        found[is_server].append(group)
    return found


def servers_table(request: ConsoleRequest, rows: Sequence[GroupSums]) -> Table:
    return Table(
        "Usage by tool server",
        rows,
        TableColumn("Server", lambda row: server_of(row.names[0])),
        TableColumn("Calls", lambda row: row.now.num_calls, kind="count"),
        *spend_columns(),
    )


def groups_table(
    request: ConsoleRequest, by: Group, rows: Sequence[GroupSums], names: Mapping[str, str]
) -> Table:
    def name_of(row: GroupSums) -> str:
        return names.get(row.names[0], row.names[0]) or "none"

    kept = {each: request.value(each) for each in ("project", "key", "model", "lane") if each != by}
    query = request.range.query | {name: value for name, value in kept.items() if value}
    listed = f"/console/requests?{urlencode(query)}"
    parts = request.address(by=NEXT[by], **{by: None}) if by in NEXT else ""

    def parts_of(row: GroupSums) -> str | None:
        name = row.names[0]
        return f"{parts}&{by}={quote_plus(name)}" if parts and name else None

    def requests_of(row: GroupSums) -> str:
        name = row.names[0]
        return f"{listed}&{by}={quote_plus(name)}" if name else listed

    return Table(
        f"Usage by {BY[by].lower()}",
        rows,
        TableColumn(BY[by], name_of, link=parts_of),
        TableColumn(
            "Requests", lambda row: row.now.num_requests, kind="count", link=requests_of
        ) if by != "tag" else None,
        TableColumn("Input", lambda row: row.now.input_tokens, kind="count"),
        TableColumn("Cached", lambda row: row.now.hit_rate, kind="percent"),
        TableColumn("Output", lambda row: row.now.output_tokens, kind="count"),
        *spend_columns(),
        *(
            ()
            if by == "tag"
            else (
                TableColumn("Failed", lambda row: row.now.error_rate, kind="percent"),
                TableColumn("First token", lambda row: row.now.ttft_ms.p50, kind="ms"),
                TableColumn("p99", lambda row: row.now.ttft_ms.p99, kind="ms"),
            )
        ),
    )  # fmt: skip


def spend_columns() -> tuple[TableColumn, ...]:
    def change_of(row: GroupSums) -> str:
        return changed(row.now.cost_pico, row.before.cost_pico)

    return (
        TableColumn("Spend", lambda row: row.now.cost_pico, kind="usd"),
        TableColumn("Period before", lambda row: row.before.cost_pico, kind="usd"),
        TableColumn("Change", change_of, kind="figure"),
    )


def changed(now: int, before: int) -> str:
    if not before:
        return "new" if now else ""
    part = (now / before - 1) * 100
    return f"{part:+.0f}{SPACE}%" if abs(part) >= 0.5 else f"0{SPACE}%"


def spend_table(summary: Summary) -> Table:
    return Table(
        "Spend",
        summary.series(),
        TableColumn("Time", lambda row: row[0], kind="moment"),
        TableColumn("Spend", lambda row: row[1].cost_pico, kind="usd", series="accent"),
    )


routes = page.routes
