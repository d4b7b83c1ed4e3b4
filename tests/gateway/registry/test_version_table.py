"""The most specific pin decides which version of a model a caller gets."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from gateway.fleet.router import Fleet, Route
from gateway.principal import Principal
from gateway.registry.version_table import (
    NO_VERSIONS,
    ModelPin,
    PinScope,
    RegisteredVersion,
    VersionTable,
)
from gateway.request_errors import UnknownModel, VersionNotServed

NOW = datetime(2026, 11, 29, tzinfo=UTC)
REPLICAS: Any = (None,)


def version(number: int, served_by: str, model: str = "qwen") -> RegisteredVersion:
    return RegisteredVersion(
        id=f"mver_{served_by}",
        model=model,
        version=number,
        served_by=served_by,
        digest=served_by,
        created_at=NOW,
    )


def pin(scope: PinScope, scope_id: str, number: int, model: str = "qwen") -> ModelPin:
    return ModelPin(
        id=f"mpin_{scope_id}",
        model=model,
        scope=scope,
        scope_id=scope_id,
        version=number,
        created_at=NOW,
    )


def caller(**fields: Any) -> Principal:
    given = {"org_id": "org_a", "project_id": "proj_a", "key_id": "key_a", "key_hint": "a"}
    return Principal(**{**given, "scopes": frozenset[str](), **fields})


VERSIONS = tuple(version(1 + at, name) for at, name in enumerate(("qwen", "b", "c", "d")))
PINS = (
    pin("installation", "", 4),
    pin("org", "org_a", 3),
    pin("project", "proj_a", 2),
    pin("key", "key_a", 1),
)


def fleet(table: VersionTable, *models: str, kind: Any = "engine") -> Fleet:
    made = Fleet([Route(model=each, kind=kind, replicas=REPLICAS) for each in models])
    made.versions = table
    return made


@pytest.mark.parametrize("left_out, served_by", [*enumerate(("qwen", "b", "c", "d"))])
def test_the_nearest_pin_counts(left_out: int, served_by: str) -> None:
    table = VersionTable(VERSIONS, PINS[: len(PINS) - left_out])
    found = fleet(table, "qwen", "b", "c", "d")
    assert found.resolve("qwen", caller()).model == served_by
    everybody_else = caller(org_id="org_b", project_id="proj_b", key_id="key_b")
    assert found.resolve("qwen", everybody_else).model == "d"


def test_without_a_pin_the_model_is_as_its_settings_have_it() -> None:
    for table in (NO_VERSIONS, VersionTable(VERSIONS)):
        found = fleet(table, "qwen", "b")
        route = found.resolve("qwen", caller())
        assert route.model == "qwen"
        assert found.version_of("qwen", route) == (None if table is NO_VERSIONS else 1)


def test_a_pin_of_another_model_says_nothing() -> None:
    table = VersionTable([*VERSIONS, version(1, "other", "other")], PINS)
    found = fleet(table, "qwen", "other", "plain")
    assert found.resolve("other", caller()).model == "other"
    assert found.resolve("plain", caller()).model == "plain"
    assert found.version_of("plain", found.resolve("plain", caller())) is None


def test_a_version_that_is_gone_is_refused_by_name() -> None:
    table = VersionTable(VERSIONS, [pin("project", "proj_a", 2)])
    with pytest.raises(VersionNotServed, match="version 2 of the model `qwen`.*this project"):
        fleet(table, "qwen", "c").resolve("qwen", caller())


def test_a_version_is_of_the_kind_of_its_model() -> None:
    table = VersionTable(VERSIONS, [pin("org", "org_a", 2)])
    found = fleet(table, "qwen")
    found.replace([*found.routes, Route(model="b", kind="upstream", replicas=REPLICAS)])
    with pytest.raises(VersionNotServed):
        found.resolve("qwen", caller())


def test_who_may_not_use_the_model_gets_no_version_of_it() -> None:
    table = VersionTable(VERSIONS, [pin("org", "org_a", 2)])
    with pytest.raises(UnknownModel, match="does not exist"):
        fleet(table, "qwen", "b").resolve("qwen", caller(denied_models=frozenset({"qwen"})))
    found = fleet(table, "qwen", "b").resolve("qwen", caller(denied_models=frozenset({"b"})))
    assert found.model == "b"
