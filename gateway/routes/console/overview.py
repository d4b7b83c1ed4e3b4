"""Shows /console/overview: what was asked, used and spent, how well it was served, and what waits
for a person."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import msgspec
from litestar import Response

from billing.queries import Query, ask_all
from engine.fairness import LANE_WEIGHTS
from gateway.console.attention import (
    Attention,
    ProjectBudget,
    TodoItem,
    attention_query,
    changed_server,
    in_order,
)
from gateway.console.budgets import with_held
from gateway.console.changes import NEEDS, Changes, changes_query
from gateway.console.formats import SPACE, count, ms, percent
from gateway.console.model_names import model_name
from gateway.console.rollouts import rollout_needs, version_needs
from gateway.console.tables import Table, TableColumn
from gateway.installation.items import homes_query
from gateway.lanes import Slo
from gateway.mcp.changed_offers import read_changed
from gateway.principal import SCOPE_USAGE_READ
from gateway.registry.rollout_changes import newest_query
from gateway.request_log.summary import (
    NO_SUMS,
    Filters,
    GroupSums,
    LatencyChoice,
    Summary,
    Sums,
    Window,
    add_up,
    summarize,
    window_of,
)
from gateway.routes.console.frame.navigation import PAGES
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ConsoleRequest

if TYPE_CHECKING:
    from mcp_bridge.upstream.upstream import ServerConfig

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
    servers = servers_of(request)
    async with request.system_db.connect() as conn:
        found, changes, homes, rollouts = await ask_all(
            conn,
            attention_query(request.org_id, servers),
            changes_of(request, window),
            homes_query(is_wanted=request.user.is_operator),
            newest_query(is_wanted=request.user.is_operator),
        )
    changed = await changed_servers(request, servers, found)
    budgets = await with_held(request.redis, request.org_id, found.budgets, request.now)
    lane: Any = filters.lane or "interactive"
    slo = request.services.generation.slos.of(filters.model, lane)
    series = summary.series()
    return request.render(
        "overview",
        table=tokens_table(series),
        tables={
            "first_tokens": latencies_table("Time to the first token", series, "ttft_ms"),
            "next_tokens": latencies_table("Time between tokens", series, "itl_ms"),
            "goodputs": goodputs_table(series),
            "projects": projects_table(request, summary, found),
        },
        target=request.services.generation.slos.target,
        changes=changes,
        needs=shown_needs(
            request,
            [
                *down_replicas(request),
                *rollout_needs(homes),
                *version_needs(rollouts),
                *found.needs,
                *changed,
                *troubles(request, summary),
            ],
        ),
        budgets=budgets,
        now_sums=summary.now,
        before=summary.before,
        series=[sums for _, sums in series],
        is_billed=summary.is_billed,
        slo=slo,
        models=known,
        lanes=LANES,
        change=change,
    )


def changes_of(request: ConsoleRequest, window: Window) -> Query[Changes]:
    """Return the query of what was changed in a window; of nothing for who may not read the audit
    log."""
    end = window.end if request.can(NEEDS) else window.start
    return changes_query(request.org_id, window.start, end)


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


def latencies_table(caption: str, series: Sequence[tuple[Any, Sums]], name: str) -> Table:
    """`name`: the latency, of `Sums`."""

    def of(quantile: str) -> Any:
        return lambda row: getattr(getattr(row[1], name), quantile)

    return Table(
        caption,
        series,
        TableColumn("Time", lambda row: row[0], kind="moment"),
        TableColumn("p50", of("p50"), kind="ms", series="p50"),
        TableColumn("p99", of("p99"), kind="ms", series="p99"),
    )


def goodputs_table(series: Sequence[tuple[Any, Sums]]) -> Table:
    return Table(
        "Requests that met their objective",
        series,
        TableColumn("Time", lambda row: row[0], kind="moment"),
        TableColumn("Goodput", lambda row: row[1].goodput, kind="percent", series="good"),
        TableColumn("Rated", lambda row: row[1].num_rated, kind="count"),
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
        TableColumn("Most used model", lambda row: model_name(row.model)),
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


def shown_needs(request: ConsoleRequest, needs: Collection[TodoItem]) -> list[tuple[TodoItem, str]]:
    """Return what waits and where each leads, less what is on pages that are not theirs."""
    return [
        (each, f"{PAGES[each.page].path}{each.place}")
        for each in in_order(needs)
        if PAGES[each.page].is_for(request.user)
    ]


def servers_of(request: ConsoleRequest) -> Mapping[str, ServerConfig]:
    """Return the organization's MCP servers of which something is to be approved, by name."""
    service = request.services.mcp
    known = {} if service is None else service.pins.of_org(request.org_id)
    return {name: each for name, each in known.items() if each.trust != "all"}


async def changed_servers(
    request: ConsoleRequest, servers: Mapping[str, ServerConfig], found: Attention
) -> list[TodoItem]:
    """Tell which MCP servers differ from what was approved of them, as far as any worker knows."""
    if not found.launches:
        return []
    from mcp_bridge.routing.catalog import launch_pin

    numbers = await read_changed(request.redis, request.org_id)
    needs = []
    for name, digest in sorted(found.launches.items()):
        if launch_pin(servers[name]).digest != digest:
            needs.append(changed_server(name, 0))
        elif number := numbers.get(name, 0):
            needs.append(changed_server(name, number))
    return needs


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
        place = f"?{urlencode(request.range.query | {'model': model})}"
        if sums.num_rated >= FEW_REQUESTS and (sums.goodput or 0) < slos.target:
            latencies = summary.latencies.get((model,), NO_SUMS)
            found.append(_slow(model, sums, latencies, slo, f"{place}&outcome=missed"))
        if (sums.error_rate or 0) > MANY_FAILURES:
            text = f"{percent(sums.error_rate)} of {count(sums.num_requests)} requests failed"
            need = TodoItem(
                word="Errors", tone="err", title=model_name(model), text=text, page="requests"
            )
            failed = f"{place}&outcome=failed"
            found.append(msgspec.structs.replace(need, place=failed, action="Which"))
    return found


def _slow(model: str, sums: Sums, latencies: Sums, slo: Slo, place: str) -> TodoItem:
    text = f"{percent(sums.goodput)} of its requests met the SLO"
    p99 = latencies.ttft_ms.p99
    if p99 is not None and p99 > slo.ttft_s * 1000:
        text += f"; first token p99 {ms(p99)} over {ms(slo.ttft_s * 1000)}"
    return TodoItem(
        word="SLO",
        tone="err",
        title=model,
        text=text,
        page="requests",
        place=place,
        action="Which",
    )


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
            page="fleet",
        )
        for each in fleet
        if not each.is_good
    ]


def change(now: int, before: int) -> str:
    """Tell how a figure differs from that of the period before."""
    if not before:
        return "nothing in the period before" if now else ""
    part = now / before - 1
    same = "as in the period before"
    return f"{part * 100:+.0f}{SPACE}% on the period before" if abs(part) >= 0.005 else same


routes = page.routes
