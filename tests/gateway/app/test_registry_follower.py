"""A worker goes by versions and pins as they are in Postgres, and engines are sold by the names of
the models that they are versions of."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gateway.app.registry_follower import note_names_sold
from gateway.fleet.router import Fleet, Route
from gateway.home import Home
from gateway.registry.version_table import RegisteredVersion, VersionTable


def test_a_version_is_sold_by_the_name_of_its_model(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.create()
    replicas: Any = (None,)
    fleet = Fleet(
        [
            Route(model="qwen", kind="engine", replicas=replicas),
            Route(model="next", kind="engine", replicas=replicas),
            Route(model="lora", kind="engine", replicas=replicas, parent="base"),
            Route(model="far", kind="upstream", replicas=replicas),
        ]
    )
    table = VersionTable(
        RegisteredVersion(
            id=f"mver_{name}",
            model="qwen",
            version=1 + at,
            served_by=name,
            digest=name,
            created_at=datetime(2026, 11, 29, tzinfo=UTC),
        )
        for at, name in enumerate(("qwen", "next", "lora", "far", "gone"))
    )
    note_names_sold(home, table, fleet)
    assert home.names_sold("next") == {"next", "qwen"}
    assert home.names_sold("base") == {"base", "qwen"}
    assert home.names_sold("far") == {"far"}
