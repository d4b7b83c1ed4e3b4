"""Dashboards and rules ask for metrics that there are, by labels that these have; each alert has an
entry in the docs, and promtool finds the rules to do what they say."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.fairness import LANE_WEIGHTS
from gateway.lanes import SLO_OUTCOMES
from gateway.telemetry.metrics import COMPONENT_STATES, GUARD_FINDINGS, UPSTREAM_STATES, Telemetry
from gateway.telemetry.tenants import OUTCOMES

ROOT = Path(__file__).resolve().parents[2]
GRAFANA, PROMETHEUS = ROOT / "deploy" / "grafana", ROOT / "deploy" / "prometheus"
RULES = PROMETHEUS / "tollgate-rules.yml"
ALERTS_PAGE = ROOT / "docs" / "how-to" / "alerts.md"
DASHBOARDS = sorted(GRAFANA.glob("*.json"))
SERIES = re.compile(r"\b(tollgate[_:][a-z0-9_:]*)(?:\{([^}]*)\})?")
SELECTOR = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
BY = re.compile(r"\bby \(([^)]*)\)")
RATIO = ("model", "lane")
"""The labels of recordings of shares."""
VALUES: dict[str, set[str]] = {
    "lane": {*LANE_WEIGHTS},
    "outcome": {*SLO_OUTCOMES, "done", "asked", "failed", "left", "delivered", "dead", *OUTCOMES},
    "state": {*UPSTREAM_STATES, *(each for states in COMPONENT_STATES.values() for each in states)},
    "finding": {*GUARD_FINDINGS},
    "kind": {"uncached", "cache_read", "cache_write", "output"},
}
"""The values of labels that queries select by."""


def queries() -> Iterator[tuple[str, str]]:
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.name}: {panel['title']}", target["expr"]
    for rule in rules():
        yield f"{RULES.name}: {rule.get('alert') or rule['record']}", rule["expr"]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def known() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for each in Telemetry(models=["m"]).listed:
        if each.kind == "histogram":
            found[f"{each.name}_bucket"] = (*each.labels, "le")
            found |= {f"{each.name}{end}": each.labels for end in ("_sum", "_count")}
        else:
            found[each.shown_name] = each.labels
    recorded = (rule["record"] for rule in rules() if "record" in rule)
    return found | {name: RATIO if "ratio" in name else () for name in recorded}


def test_queries_ask_for_metrics_by_labels_that_there_are() -> None:
    labels, asked = known(), set[str]()
    for place, expression in queries():
        found = SERIES.findall(expression)
        assert found or "up{" in expression, place
        for name, selected in found:
            assert name in labels, (place, name)
            asked.add(name)
            for label, _, value in SELECTOR.findall(selected):
                assert label in labels[name], (place, name, label)
                if label in VALUES and not value.startswith("$"):
                    assert {*value.split("|")} <= VALUES[label], (place, value)
        grouped = {each.strip() for by in BY.findall(expression) for each in by.split(",")}
        of_any = {label for name, _ in found for label in labels[name]}
        assert grouped <= of_any, (place, grouped)
    listed = {each.name for each in Telemetry(models=["m"]).listed}
    shown = {name for name in listed if any(each.startswith(name) for each in asked)}
    assert listed - shown == set(), "metrics without a panel"


def test_the_dashboards_are_made_by_their_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GRAFANA))  # as Python does for a script
    made = runpy.run_path(str(GRAFANA / "dashboards.py"))
    expected = {f"{each.uid}.json": made["to_json"](each) + "\n" for each in made["DASHBOARDS"]}
    assert {path.name: path.read_text() for path in DASHBOARDS} == expected, "make fields"
    uids = [each.uid for each in made["DASHBOARDS"]]
    assert len({*uids}) == len(uids) >= 5


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_have_the_fields_of_grafanas_schema_and_no_others(path: Path) -> None:
    """Grafana's own types read a dashboard and write it: a field that they do not know is lost."""
    pytest.importorskip("grafana_foundation_sdk", reason="no grafana-foundation-sdk")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    written = json.loads(path.read_text())
    understood = json.loads(JSONEncoder().encode(Dashboard.from_json(written)))
    assert [*lost(written, understood)] == []
    written["panels"][0]["targets"][0]["exprr"] = "misspelt"
    understood = json.loads(JSONEncoder().encode(Dashboard.from_json(written)))
    assert [*lost(written, understood)] == [".panels[0].targets[0].exprr"]


def lost(written: Any, understood: Any, place: str = "") -> Iterator[str]:
    """Yield where something was written that was not understood."""
    if isinstance(written, dict) and isinstance(understood, dict):
        for name, value in written.items():
            if name not in understood:
                yield f"{place}.{name}"
            else:
                yield from lost(value, understood[name], f"{place}.{name}")
    elif isinstance(written, list) and isinstance(understood, list):
        for at, (left, right) in enumerate(zip_longest(written, understood)):
            yield from lost(left, right, f"{place}[{at}]")
    elif written != understood:
        yield place


def test_each_alert_says_what_to_do() -> None:
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    entries = re.findall(
        r"^\| `(\w+)` \| (page|ticket) \| .{20,} \| .{20,} \|$", ALERTS_PAGE.read_text(), re.M
    )
    assert dict(entries) == {name: rule["labels"]["severity"] for name, rule in alerts.items()}
    assert all("summary" in rule["annotations"] for rule in alerts.values())


def test_kubernetes_has_the_same_rules_and_dashboards() -> None:
    rule = yaml.safe_load((PROMETHEUS / "prometheus-rule.yaml").read_text())
    assert (rule["kind"], rule["spec"]) == ("PrometheusRule", yaml.safe_load(RULES.read_text()))
    dashboards = yaml.safe_load((GRAFANA / "kustomization.yaml").read_text())
    [config] = dashboards["configMapGenerator"]
    assert config["files"] == [path.name for path in DASHBOARDS]
    monitoring = ROOT / "deploy" / "kubernetes" / "monitoring" / "kustomization.yaml"
    for each in yaml.safe_load(monitoring.read_text())["resources"]:
        assert (monitoring.parent / each / "kustomization.yaml").is_file()


def test_each_alert_is_shown_to_fire_and_to_be_silent() -> None:
    fires, silent = set[str](), set[str]()
    written = yaml.safe_load((PROMETHEUS / "tollgate-rules.test.yml").read_text())
    groups = yaml.safe_load(RULES.read_text())["groups"]
    assert written["group_eval_order"] == [each["name"] for each in groups]
    for test in written["tests"]:
        for each in test["alert_rule_test"]:
            (fires if each["exp_alerts"] else silent).add(each["alertname"])
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert (fires, silent) == (alerts, alerts)


def test_a_count_that_an_alert_watches_is_there_before_its_first_event() -> None:
    """`increase()` is nothing for a series that begins with the event."""
    telemetry = Telemetry(models=["m"])
    telemetry.mcp_health(["docs"], [])
    telemetry.components([("upstream", "far/0", "ok")])
    shown = telemetry.render().content.decode()
    watched = re.compile(r"increase\((tollgate_\w+)(?:\{([^}]*)\})?\[")
    found = 0
    for rule in rules():
        for name, selected in watched.findall(rule["expr"]) if "alert" in rule else ():
            by = [value for *_, either in SELECTOR.findall(selected) for value in either.split("|")]
            for value in by or [""]:
                assert re.search(rf"^{name}{{?.*{value}.*}}? 0\.0$", shown, re.M), (name, value)
                found += 1
    assert found >= 7


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: prometheus)")
def test_promtool_finds_that_the_rules_do_what_they_say() -> None:
    for command in (["check", "rules", RULES.name], ["test", "rules", "tollgate-rules.test.yml"]):
        done = subprocess.run(
            ["promtool", *command], cwd=PROMETHEUS, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
