"""Whose turn it is: by plan, by tenant, and by when the client stops waiting."""

from __future__ import annotations

import msgspec
import pytest

from gateway.fleet.errors import BadField
from gateway.lanes import MAX_DEADLINE_MS, LaneDeadlines, Turn, read_deadline_s, turn_of
from gateway.principal import UNLIMITED, Plan, Principal

NO_DEADLINES = LaneDeadlines(interactive=None, agentic=None)


def principal(
    *, key: Plan = UNLIMITED, project: Plan = UNLIMITED, org: Plan = UNLIMITED
) -> Principal:
    return Principal(
        org_id="org_a",
        project_id="proj_a",
        key_id="key_a",
        key_hint="",
        scopes=frozenset(),
        key_plan=key,
        project_plan=project,
        org_plan=org,
    )


def test_the_narrowest_plan_that_pins_a_lane_says_which() -> None:
    agentic, batch = Plan(name="a", lane="agentic"), Plan(name="b", lane="batch")
    assert turn_of(principal(), NO_DEADLINES) == Turn(tenant="org_a")
    assert turn_of(principal(org=batch), NO_DEADLINES).lane == "batch"
    assert turn_of(principal(key=agentic, org=batch), NO_DEADLINES).lane == "agentic"
    assert turn_of(principal(key=Plan(name="k"), project=agentic), NO_DEADLINES).lane == "agentic"
    client = msgspec.structs.replace(principal(project=batch), client_plan=agentic)
    assert turn_of(client, NO_DEADLINES).lane == "agentic"


def test_an_orgs_plan_says_what_it_weighs_and_a_keys_does_not() -> None:
    heavy = Plan(name="h", weight=4.0)
    assert turn_of(principal(org=heavy), NO_DEADLINES).weight == 4.0
    assert turn_of(principal(key=heavy), NO_DEADLINES).weight == 1.0


def headers(*values: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"accept", b"*/*"), *((b"x-request-timeout-ms", value) for value in values)]


def test_a_deadline_is_read_in_milliseconds() -> None:
    assert read_deadline_s(headers()) is None
    assert read_deadline_s(headers(b"1500")) == 1.5


def test_the_sooner_deadline_counts_the_clients_or_its_lanes() -> None:
    deadlines = LaneDeadlines(interactive=10.0)
    assert turn_of(principal(), deadlines).deadline_s == 10.0
    assert turn_of(principal(), deadlines, deadline_s=1.5).deadline_s == 1.5
    assert turn_of(principal(), deadlines, deadline_s=60.0).deadline_s == 10.0
    batch = principal(org=Plan(name="b", lane="batch"))
    assert turn_of(batch, deadlines).deadline_s is None
    assert turn_of(batch, deadlines, deadline_s=60.0).deadline_s == 60.0


@pytest.mark.parametrize(
    "values",
    [
        *([b""], [b"0"], [b"-1"], [b"1.5"], [b"1e3"], [b"soon"], [b"\xb2"], [b"9" * 30]),
        *([b"1", b"1"], [str(MAX_DEADLINE_MS + 1).encode()]),
    ],
)
def test_what_is_no_deadline_is_refused_by_name(values: list[bytes]) -> None:
    with pytest.raises(BadField) as refused:
        read_deadline_s(headers(*values))
    assert refused.value.param == "x-request-timeout-ms"
