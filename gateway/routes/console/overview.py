"""Shows /console/overview: what was asked, used and spent, how well it was served, and what waits
for a person."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import msgspec
from litestar import Response

from engine.fairness import LANE_WEIGHTS
from gateway.console.attention import Attention, ProjectBudget, TodoItem, find_attention
from gateway.console.formats import count, ms, percent
from gateway.console.tables import Table, TableColumn
from gateway.lanes import Slo
from gateway.principal import SCOPE_USAGE_READ
from gateway.request_log.summary import (
    NO_SUMS,
    Filters,
    GroupSums,
    LatencyChoice,
    Summary,
    Sums,
    add_up,
    summarize,
    window_of,
)
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ConsoleRequest

LANES = tuple(LANE_WEIGHTS)
MAX_SHOWN_PROJECTS = 8
MANY_FAILURES = 0.01
FEW_REQUESTS = 20
"""A share of fewer requests says nothing that a person should act upon."""
page = ConsolePage(name="overview", title="Overview", letter="o", needs=SCOPE_USAGE_READ)


class ProjectSpend(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table of projects."""

    id: str
    name: str
    model: str
    """The one that was used most."""
    sums: Sums
    share: float | None


@page.get()
async def show(request: ConsoleRequest) -> Response[bytes]:
    known = sorted(request.services.telemetry.models)
    filters = Filters(model=request.value("model"), lane=request.value("lane", LANES))
    window = window_of(request.range.start, request.range.end)
    async with request.transaction() as conn:
        summary = await summarize(
            conn,
            request.org_id,
            window,
            by=("project", "model"),
            filters=filters,
            latencies=LatencyChoice(by=("model",)),
            compares_groups=False,
        )
        found = await find_attention(conn, request.org_id)
    lane: Any = filters.lane or "interactive"
    slo = request.services.generation.slos.of(filters.model, lane)
    series = summary.series()
    return request.render(
        "overview",
        table=tokens_table(series),
        latencies=latencies_table(series),
        projects=projects_table(request, summary, found),
        needs=[*down_replicas(request), *found.needs, *troubles(request, summary)],
        now_sums=summary.now,
        before=summary.before,
        series=[sums for _, sums in series],
        is_billed=summary.is_billed,
        slo=slo,
        models=known,
        lanes=LANES,
        change=change,
    )


def tokens_table(series: Sequence[tuple[Any, Sums]]) -> Table:
    def of(name: str) -> Any:
        return lambda row: getattr(row[1], name)

    return Table(
        "Tokens by kind",
        series,
        TableColumn("Time", lambda row: row[0], kind="moment"),
        TableColumn("Uncached", of("uncached_tokens"), kind="count", series="uncached"),
        TableColumn("Cached", of("cached_tokens"), kind="count", series="cached"),
        TableColumn("Written", of("written_tokens"), kind="count", series="written"),
        TableColumn("Output", of("output_tokens"), kind="count", series="output"),
        TableColumn("Requests", of("num_requests"), kind="count"),
        TableColumn("Spend", of("cost_pico"), kind="usd"),
    )


def latencies_table(series: Sequence[tuple[Any, Sums]]) -> Table:
    return Table(
        "Time to the first token",
        series,
        TableColumn("Time", lambda row: row[0], kind="moment"),
        TableColumn("p50", lambda row: row[1].ttft_ms.p50, kind="ms", series="p50"),
        TableColumn("p99", lambda row: row[1].ttft_ms.p99, kind="ms", series="p99"),
    )


def projects_table(request: ConsoleRequest, summary: Summary, found: Attention) -> Table:
    rows = spend_by_project(summary.groups, found.projects)[:MAX_SHOWN_PROJECTS]
    return Table(
        "Spend by project",
        rows,
        TableColumn(
            "Project",
            "name",
            link=lambda row: usage_address(request, project=row.id, by="model"),
        ),
        TableColumn("Most used model", "model"),
        TableColumn("Tokens", lambda row: row.sums.tokens, kind="count"),
        TableColumn("Spend", lambda row: row.sums.cost_pico, kind="usd"),
        TableColumn("Budget", "share", kind="bar"),
    )


def usage_address(request: ConsoleRequest, **wanted: str) -> str:
    query = request.range.query | {name: value for name, value in wanted.items() if value}
    return f"/console/usage?{urlencode(query)}"


def spend_by_project(
    groups: Sequence[GroupSums], known: Mapping[str, ProjectBudget]
) -> list[ProjectSpend]:
    """Add up the models of each project; `groups`: by project and model."""
    by_project: defaultdict[str, list[GroupSums]] = defaultdict(list)
    for group in groups:
        if group.now is not NO_SUMS:
            by_project[group.names[0]].append(group)
    rows = []
    for project, models in by_project.items():
        line = known.get(project)
        most = max(models, key=lambda each: (each.now.tokens, each.now.num_requests))
        rows.append(
            ProjectSpend(
                id=project,
                name=line.name if line else project or "no project",
                model=most.names[1],
                sums=add_up(each.now for each in models),
                share=None if line is None else line.share,
            )
        )
    return sorted(rows, key=lambda row: (-row.sums.cost_pico, -row.sums.tokens, row.name))


def troubles(request: ConsoleRequest, summary: Summary) -> list[TodoItem]:
    """Tell which models are slower than their SLO, or fail often."""
    by_model: defaultdict[str, list[Sums]] = defaultdict(list)
    for group in summary.groups:
        by_model[group.names[1]].append(group.now)
    lane: Any = request.value("lane") or "interactive"
    slos, found = request.services.generation.slos, []
    for model, parts in by_model.items():
        sums = add_up(parts)
        if sums.num_requests < FEW_REQUESTS:
            continue
        slo = slos.of(model, lane)
        to = f"/console/requests?{urlencode(request.range.query | {'model': model})}"
        if sums.num_rated >= FEW_REQUESTS and (sums.goodput or 0) < slos.target:
            latencies = summary.latencies.get((model,), NO_SUMS)
            found.append(_slow(model, sums, latencies, slo, f"{to}&outcome=missed"))
        if (sums.error_rate or 0) > MANY_FAILURES:
            text = f"{percent(sums.error_rate)} of {count(sums.num_requests)} requests failed"
            need = TodoItem(word="Errors", tone="err", title=model, text=text)
            found.append(msgspec.structs.replace(need, to=f"{to}&outcome=failed"))
    return found


def _slow(model: str, sums: Sums, latencies: Sums, slo: Slo, to: str) -> TodoItem:
    text = f"{percent(sums.goodput)} of its requests met the SLO"
    p99 = latencies.ttft_ms.p99
    if p99 is not None and p99 > slo.ttft_s * 1000:
        text += f"; first token p99 {ms(p99)} over {ms(slo.ttft_s * 1000)}"
    return TodoItem(word="SLO", tone="err", title=model, text=text, to=to, action="Which")


def down_replicas(request: ConsoleRequest) -> list[TodoItem]:
    """Tell which replicas serve nothing now; for operators, whose they are."""
    if not request.user.is_operator:
        return []
    fleet = request.services.readiness.components()
    return [
        TodoItem(
            word="Down",
            tone="err",
            title=each.name,
            text=f"is {each.state.replace('_', ' ')}",
            to="/console/fleet",
        )
        for each in fleet
        if not each.is_good
    ]


def change(now: int, before: int) -> str:
    """Tell how a figure differs from that of the period before."""
    if not before:
        return "nothing in the period before" if now else ""
    part = now / before - 1
    return f"{part:+.0%} on the period before" if abs(part) >= 0.005 else "as in the period before"


routes = page.routes
