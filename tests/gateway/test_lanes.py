"""A turn is given by plan, by tier, by tools, by tenant, and by when the client stops waiting."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from msgspec.structs import replace
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming

from billing.events import TIERS, Tier
from engine.protocol import Lane
from gateway.generate_request import GenerateRequest, ServiceTier
from gateway.lanes import (
    MAX_DEADLINE_MS,
    LaneDeadlines,
    Priority,
    priority_of,
    read_deadline_s,
)
from gateway.principal import UNLIMITED, Plan, Principal
from gateway.request_errors import BadField

NO_DEADLINES = LaneDeadlines(interactive=None, agentic=None)
PLAIN = GenerateRequest(model="m", stream=True, include_usage=False)
TOOLS = replace(PLAIN, has_tools=True)


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
    assert priority_of(principal(), NO_DEADLINES, PLAIN) == Priority(tenant="org_a")
    assert priority_of(principal(org=batch), NO_DEADLINES, PLAIN).lane == "batch"
    assert priority_of(principal(key=agentic, org=batch), NO_DEADLINES, PLAIN).lane == "agentic"
    silent = principal(key=Plan(name="k"), project=agentic)
    assert priority_of(silent, NO_DEADLINES, PLAIN).lane == "agentic"
    client = replace(principal(project=batch), client_plan=agentic)
    assert priority_of(client, NO_DEADLINES, PLAIN).lane == "agentic"


def sold(model: str) -> bool:
    return model == "m"


def asking(tier: ServiceTier | None, **fields: Any) -> GenerateRequest:
    return replace(PLAIN, service_tier=tier, **fields)


def served(who: Principal, request: GenerateRequest) -> tuple[Lane, Tier, float]:
    priority = priority_of(who, NO_DEADLINES, request, sells_priority=sold)
    return priority.lane, priority.tier, priority.weight


def test_the_tier_and_the_tools_say_which_lane() -> None:
    for tier in (None, "auto", "default"):
        assert served(principal(), asking(tier)) == ("interactive", "default", 1.0)
        assert served(principal(), asking(tier, has_tools=True)) == ("agentic", "default", 1.0)
    assert served(principal(), asking("flex")) == ("batch", "flex", 1.0)
    assert served(principal(), asking("flex", has_tools=True)) == ("batch", "flex", 1.0)


def test_a_key_may_be_marked_for_a_lower_lane() -> None:
    agent, nightly = (replace(principal(), key_lane=lane) for lane in ("agentic", "batch"))
    assert served(agent, PLAIN) == served(agent, TOOLS) == ("agentic", "default", 1.0)
    assert served(agent, asking("flex")) == ("batch", "flex", 1.0)
    assert served(agent, asking("priority")) == ("agentic", "priority", 2.0)
    assert served(nightly, TOOLS) == ("batch", "default", 1.0)
    assert served(nightly, asking("priority")) == ("batch", "default", 1.0)
    pinned = replace(nightly, org_plan=Plan(name="c", lane="interactive"))
    assert served(pinned, PLAIN)[0] == "interactive"


@pytest.mark.parametrize("name", ["priority", "fast"])
def test_priority_doubles_the_weight_where_it_has_a_price(name: ServiceTier) -> None:
    heavy = principal(org=Plan(name="h", weight=4.0))
    assert served(principal(), asking(name)) == ("interactive", "priority", 2.0)
    assert served(heavy, asking(name)) == ("interactive", "priority", 8.0)
    assert served(principal(), asking(name, has_tools=True)) == ("agentic", "priority", 2.0)
    assert served(heavy, asking(name, model="unsold")) == ("interactive", "default", 4.0)
    assert priority_of(heavy, NO_DEADLINES, asking(name)).tier == "default"


def test_a_plan_that_pins_a_lane_wins_and_the_tier_is_what_that_lane_serves() -> None:
    batch = principal(org=Plan(name="b", lane="batch"))
    chats = principal(key=Plan(name="c", lane="interactive"))
    assert served(batch, asking("priority")) == ("batch", "default", 1.0)
    assert served(batch, asking(None)) == ("batch", "default", 1.0)
    assert served(batch, asking("flex")) == ("batch", "flex", 1.0)
    assert served(chats, asking("flex")) == ("interactive", "default", 1.0)
    assert served(chats, TOOLS) == ("interactive", "default", 1.0)
    assert served(chats, asking("priority", has_tools=True)) == ("interactive", "priority", 2.0)


def test_an_orgs_plan_says_what_it_weighs_and_a_keys_does_not() -> None:
    heavy = Plan(name="h", weight=4.0)
    assert priority_of(principal(org=heavy), NO_DEADLINES, PLAIN).weight == 4.0
    assert priority_of(principal(key=heavy), NO_DEADLINES, PLAIN).weight == 1.0


def headers(*values: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"accept", b"*/*"), *((b"x-request-timeout-ms", value) for value in values)]


def test_a_deadline_is_read_in_milliseconds() -> None:
    assert read_deadline_s(headers()) is None
    assert read_deadline_s(headers(b"1500")) == 1.5


def test_the_sooner_deadline_counts_the_clients_or_its_lanes() -> None:
    deadlines = LaneDeadlines(interactive=10.0)
    assert priority_of(principal(), deadlines, PLAIN).deadline_s == 10.0
    assert priority_of(principal(), deadlines, PLAIN, deadline_s=1.5).deadline_s == 1.5
    assert priority_of(principal(), deadlines, PLAIN, deadline_s=60.0).deadline_s == 10.0
    batch = principal(org=Plan(name="b", lane="batch"))
    assert priority_of(batch, deadlines, PLAIN).deadline_s is None
    assert priority_of(batch, deadlines, PLAIN, deadline_s=60.0).deadline_s == 60.0


def test_of_a_deadline_is_left_what_was_not_spent() -> None:
    assert Priority(lane="agentic", deadline_s=10.0).after(2.5) == Priority(
        lane="agentic", deadline_s=7.5
    )
    assert Priority().after(2.5) == Priority()


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


def test_the_official_sdk_knows_the_tiers_that_are_asked_for_and_those_that_are_served() -> None:
    asked = get_type_hints(CompletionCreateParamsNonStreaming, include_extras=False)["service_tier"]
    theirs = {name for part in get_args(asked) for name in get_args(part)}
    assert set(get_args(ServiceTier)) == theirs - {"scale"}, "what nobody can buy here is refused"
    for answer in (ChatCompletion, ChatCompletionChunk):
        said = get_args(answer.model_fields["service_tier"].annotation)
        assert set(TIERS) - {"batch"} <= {name for part in said for name in get_args(part)}
