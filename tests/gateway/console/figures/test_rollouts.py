"""The fleet page shows which version of each model runs where, who changed it, and where cached
tokens come from; what failed or is under way is on the operator's overview."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from engine.fake.engine import FakeCore
from gateway.console.hidden import visible
from gateway.console.rollouts import rollout_needs, rollouts_of, version_needs
from gateway.installation.items import HomeState
from gateway.installation.model_versions import ModelVersion, RunningModels
from gateway.routes.console.fleet import engine_tiers, upstream_tier
from gateway.tenancy.audit_pages import AuditEvent
from tests.gateway.console.conftest import Visit
from tests.gateway.console.seeds import FAILING_HOME, HOSTILE
from tests.gateway.console.server import ConsoleServer
from tests.gateway.registry.made import rollout

Sessions = Callable[[str, str], dict[str, str]]
NOON = datetime(2026, 11, 28, 12, tzinfo=UTC)


def version(model: str, state: str, minutes: int = 0, problem: str = "") -> ModelVersion:
    since = int(NOON.timestamp()) + 60 * minutes
    return ModelVersion(
        model=model, version=state, place="engine-0", state=state, since=since, problem=problem
    )


def home(*models: ModelVersion, problem: str = "") -> HomeState:
    running = RunningModels(release="0.1.0", models=models)
    return HomeState(
        home="h:/t", number=1, problem=problem, file_names={}, seen_at=NOON, running=running
    )


def event(minutes: int, action: str, target: str = "settings", *changes: str) -> AuditEvent:
    return AuditEvent(
        org_id="org",
        sequence=100 + minutes,
        id=f"audit_log-{100 + minutes}",
        occurred_at=datetime.fromtimestamp(NOON.timestamp() + 60 * minutes, UTC),
        action=action,
        target=target,
        project_id=None,
        actor_kind="system",
        actor_id="settings",
        on_behalf_of=None,
        ip=None,
        request_id=None,
        before=None,
        after=str({"changes": [*changes]}).replace("'", '"') if changes else None,
        previous=b"",
        hash=b"",
        project_name=None,
        emails={},
        key_name=None,
    )


def test_a_version_was_brought_by_the_last_change_of_its_model_before_it_served() -> None:
    events = [
        event(9, "model.updated", "a"),
        event(-1, "settings.reloaded", "settings", "~ models.a.b.slo: 1 -> 2", "- models.c = {}"),
        event(-2, "model.updated", "a"),
        event(-3, "settings.reloaded", "settings", "+ models.b.path = 1"),
    ]
    serving = [version(each, "serving") for each in ("a", "a.b", "b")]
    found = {
        (each.version.model, each.version.state): each.change and each.change.id
        for each in rollouts_of([home(*serving, version("a", "starting", 9))], events)
    }
    assert found == {
        ("a", "starting"): "audit_log-109",
        ("a", "serving"): "audit_log-98",
        ("a.b", "serving"): "audit_log-99",
        ("b", "serving"): "audit_log-97",
    }


def test_what_failed_is_told_before_what_is_under_way() -> None:
    [failed] = rollout_needs([home(version("a", "failed", problem="no room"), problem="no room")])
    assert (failed.word, failed.tone, failed.title) == ("Rollout", "err", "a")
    assert failed.text == "failed did not start, the version before stays: no room"
    [refused] = rollout_needs([home(version("a", "serving"), problem="no such variable")])
    assert refused.title == "h:/t" and refused.text.endswith("settings: no such variable")
    [waits] = rollout_needs([home(version("a", "serving"), version("a", "warming"))])
    assert (waits.tone, waits.text) == ("wait", "warming warms up at h:/t")
    quiet = [version("a", state) for state in ("serving", "draining", "restarting", "of a later")]
    assert rollout_needs([home(*quiet)]) == []


def test_versions_that_were_taken_back_or_are_on_their_way_are_told() -> None:
    back = rollout(state="taken_back", reason="refused 7% of 300 requests")
    [taken_back, waits] = version_needs([back, rollout(), rollout(state="completed")])
    assert (taken_back.word, taken_back.tone, taken_back.title) == ("Rollout", "err", "qwen")
    assert taken_back.text == "version 2 was taken back: refused 7% of 300 requests"
    assert (waits.tone, waits.text) == ("wait", "version 2 is running at 5% of the organizations")


def test_tiers_are_what_is_known_of_them() -> None:
    status = replace(
        FakeCore().status(),
        num_blocks=100,
        block_size=16,
        num_cached_blocks=25,
        num_leased_blocks=5,
        kv_cache_usage=0.25,
        prefix_cache_hit_tokens=300,
        prefix_cache_query_tokens=400,
    )
    [engine] = engine_tiers("penny", status)
    assert (engine.size, engine.used, engine.cached, engine.leased) == (1600, 0.25, 400, 80)
    assert (engine.hits, engine.hit_rate) == (300, 0.75)
    disk = {"num_tier_blocks": 50, "max_tier_blocks": 1000, "tier_hit_tokens": 100}
    memory, tier = engine_tiers("penny", replace(status, **disk))
    assert (memory.hits, tier.hits, tier.hit_rate) == (200, 100, 0.25)
    assert (tier.size, tier.cached, tier.used, tier.leased) == (16_000, 800, None, None)
    host = {"num_host_blocks": 60, "max_host_blocks": 100, "host_hit_tokens": 50}
    memory, tier, _ = engine_tiers("penny", replace(status, **disk, **host))
    assert (memory.hits, tier.hits, tier.size, tier.cached) == (150, 50, 1600, 960)
    memory, tier = engine_tiers("penny", replace(status, fetched_tokens=40))
    assert (memory.hits, tier.hits, tier.size) == (260, 40, None)
    upstream = upstream_tier("far", {"uncached": 10, "cache_read": 30, "output": 5})
    assert (upstream.size, upstream.hits, upstream.hit_rate) == (None, 30, 0.75)
    assert upstream_tier("far", {}).hit_rate is None


def test_the_fleet_tells_what_failed_and_who_changed_it(
    visit: Visit, console: ConsoleServer, sessions: Sessions
) -> None:
    tab = visit("little", "owner", "/console/overview")
    needs = tab.locator("#needs-you li", has_text="did not start, the version before stays")
    needs.get_by_role("link").click()
    tab.wait_for_url("**/console/fleet")
    rows = tab.get_by_role("region", name="Rollouts").locator("tbody tr")
    told = [row.locator("td").nth(2).inner_text() for row in rows.all()]
    assert told == ["failed", "warms up", "drains", "serves"]
    assert visible(HOSTILE) in rows.first.inner_text()
    rows.last.get_by_role("link", name="the command line").click()
    tab.get_by_role("heading", name="model.created").wait_for()
    with httpx.Client(base_url=console.url, cookies=sessions("little", "owner")) as client:
        for table, number, column in (
            ("rollouts", 4, "Version"),
            ("tiers", 1, "Hit rate"),
            ("replicas", 1, "First token"),
            ("pins", 0, "Pinned for"),
        ):
            told = client.get(f"/console/fleet?format=csv&table={table}").text
            lines = list(csv.DictReader(io.StringIO(told.removeprefix("\ufeff"))))
            assert len(lines) == number and column in told.partition("\r\n")[0]
        homes = client.get("/console/fleet?format=csv&table=homes").text
        assert FAILING_HOME in homes and "refuses them" in homes
        assert client.get("/console/fleet?format=csv&table=none").status_code == 400


@pytest.mark.parametrize("role", ["owner", "reader"])
def test_no_other_organization_is_told_of_rollouts(
    console: ConsoleServer, sessions: Sessions, role: str
) -> None:
    with httpx.Client(base_url=console.url, cookies=sessions("much", role)) as client:
        told: Any = client.get("/console/overview").text
    assert "did not start" not in told and FAILING_HOME not in told
