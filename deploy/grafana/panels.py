"""Writes one Grafana dashboard as JSON: its panels, and the Prometheus queries that they share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

WIDTH, HEIGHT = 12, 8
"""The size of a panel in Grafana's grid of 24 columns."""
SOURCE = {"type": "prometheus", "uid": "${source}"}


class Panel(NamedTuple):
    """A graph, or one number (`is_stat`). `queries`: legend and expression of each."""

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    text: str = ""
    is_stat: bool = False


class Dashboard(NamedTuple):
    """A page of panels. `choices`: the variables above it, and the label and metric of each."""

    uid: str
    title: str
    panels: Sequence[Panel]
    choices: Sequence[tuple[str, str]] = ()


def rate(metric: str, by: str, *, where: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{{{where}}}[$__rate_interval]))"


def quantile(share: float, metric: str, by: str, *, where: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', labels, where=where)})"


def p50_p99(metric: str, by: str, *, where: str = "") -> list[tuple[str, str]]:
    legend = f"{{{{{by}}}}}" if by else ""
    return [
        (f"{legend} p{round(share * 100)}".strip(), quantile(share, metric, by, where=where))
        for share in (0.5, 0.99)
    ]


def to_json(dashboard: Dashboard) -> str:
    """Return the dashboard as Grafana 9 or later imports it."""
    return json.dumps(
        {
            "uid": dashboard.uid,
            "title": dashboard.title,
            "tags": ["tollgate"],
            "editable": True,
            "refresh": "30s",
            "schemaVersion": 38,
            "time": {"from": "now-6h", "to": "now"},
            "timezone": "browser",
            "graphTooltip": 1,
            "templating": {"list": [_source(), *(_choice(*each) for each in dashboard.choices)]},
            "panels": [_panel(at, each) for at, each in enumerate(dashboard.panels)],
        },
        indent=1,
    )


def _source() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _choice(label: str, metric: str) -> dict[str, Any]:
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": f"label_values({metric}, {label})",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(at: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": at + 1,
        "title": panel.title,
        "description": panel.text,
        "type": "stat" if panel.is_stat else "timeseries",
        "datasource": SOURCE,
        "gridPos": {
            "x": at % 2 * WIDTH,
            "y": at // 2 * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "expr": expression,
                "legendFormat": legend,
                "datasource": SOURCE,
                "exemplar": "_bucket" in expression,
            }
            for place, (legend, expression) in enumerate(panel.queries)
        ],
    }
